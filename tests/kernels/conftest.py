"""Kernel tests. Those in ``interpreted/`` need Triton's interpreter, so test_kernels_interpreted.py starts them.

Triton decides between compiler and interpreter when it is imported. Setting the variable here would decide it for
every other test of the run and for the servers they start, so the interpreter gets processes of its own.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
