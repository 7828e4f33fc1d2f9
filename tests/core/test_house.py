"""What keeps a file readable: short files, short functions, types. Ruff checks the length of a line, mypy the types."""

import ast

from tests.support.layers import ROOT

FOLDERS = ("nexus_sglang", "kernels", "patches", "examples", "benchmarks", "tests")
FILE_LINES = 450
FUNCTION_LINES = 60
LONGER: dict[str, str] = {
    "kernels/block_attention.py: _rows_kernel": "parameters of a Triton kernel, one a line, are half of it",
    "kernels/log_sum_exp.py: _lse_kernel": "the same",
}
"""``path: function`` of functions that may be longer -> why."""


def too_large(path: str, source: str) -> list[str]:
    """Faults of one file; a function's lines are those from its ``def`` to its end, docstring included."""
    lines = len(source.splitlines())
    faults = [f"{path}: {lines} lines"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                faults.append(f"{path}: {node.name} has {length} lines")
    return faults


def untyped(path: str, source: str) -> list[str]:
    """Functions without a type on every parameter and result. Triton's kernels have none: Triton reads annotations."""
    faults = []
    tree = ast.parse(source)
    methods = {child for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or any("triton" in ast.unparse(one) for one in node.decorator_list):
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        bound = node in methods and "staticmethod" not in map(ast.unparse, node.decorator_list)
        typed = all(one.annotation for one in given[bound:] if one is not None)
        if not typed or (node.returns is None and node.name != "__init__"):
            faults.append(f"{path}: {node.name}")
    return faults


def sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_files_and_functions_are_short():
    faults = [fault for path, source in sources().items() for fault in too_large(path, source)]
    assert [fault for fault in faults if fault.partition(" has ")[0] not in LONGER] == []
    assert len(LONGER) == len([fault for fault in faults if " has " in fault]), "an exception that is no longer needed"


def test_a_long_file_and_a_long_function_are_found():
    long = "def f():\n" + "    pass\n" * FUNCTION_LINES
    assert too_large("a.py", long) == [f"a.py: f has {FUNCTION_LINES + 1} lines"]
    assert too_large("a.py", "x = 1\n" * (FILE_LINES + 1)) == [f"a.py: {FILE_LINES + 1} lines"]
    assert too_large("a.py", long[: -len("    pass\n")]) == []


def test_kernels_are_typed_but_for_tritons():
    """mypy demands it of the other rooms; of this one it cannot, for it knows nothing of Triton's functions."""
    assert [
        fault for path, source in sources().items() if path.startswith("kernels/") for fault in untyped(path, source)
    ] == []


def test_a_missing_type_is_found():
    source = """
class A:
    def __init__(self, x: int):
        self.x = x

    def good(self, y: int) -> int:
        return y

    def bad(self, y) -> int:
        return y

def none(y: int):
    pass

@triton.jit
def kernel(pointer):
    pass
"""
    assert untyped("a.py", source) == ["a.py: none", "a.py: bad"]
