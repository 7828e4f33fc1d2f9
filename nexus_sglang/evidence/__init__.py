"""What policies judge by: the recent queries of each request, and their attention over resident blocks."""
