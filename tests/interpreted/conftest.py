"""Tests that need Triton's interpreter. ``test_in_the_interpreter.py`` starts the others, a process for each file.

Triton decides between compiler and interpreter when it is imported. Setting the variable here would decide it for
every other test of the run and for the servers they start, so the interpreter gets processes of its own.
"""

import os
from pathlib import Path

from hypothesis import settings

LAUNCHER = "test_in_the_interpreter.py"

if os.environ.get("TRITON_INTERPRET") == "1":
    # The same examples on every run, and no deadline on a busy machine.
    settings.register_profile("interpreted", deadline=None, derandomize=True, database=None)
    settings.load_profile("interpreted")
else:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != LAUNCHER]
