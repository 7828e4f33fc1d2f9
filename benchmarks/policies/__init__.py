"""Which policy keeps what a question needs: recall tasks, graded offline."""
