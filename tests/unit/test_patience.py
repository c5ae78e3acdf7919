"""No unit test depends on how fast the machine is: nothing is bound to come within less than a minute."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = [*TESTS.glob("unit/**/*.py"), *TESTS.glob("conformance/*.py"), *TESTS.glob("*.py")]
WAITING = {"wait", "result", "communicate", "settimeout", "Deadline"}
CLOCKS = {"monotonic", "perf_counter", "time"}
DEADLINES = {"DEADLINE_S", "TIMEOUT_S"}


def name_of(call: ast.AST) -> str:
    function = call.func if isinstance(call, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def is_short(node: ast.AST, limit_s: float = 60.0) -> bool:
    seconds = node.value if isinstance(node, ast.Constant) else None
    return isinstance(seconds, int | float) and 0 < seconds < limit_s


def is_elapsed(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and name_of(node.left) in CLOCKS
    )


def may_be_in_vain(call: ast.Call, parents: tuple[ast.AST, ...]) -> bool:
    """Whether nothing need come: it is a pause, one look of a loop, or a test that nothing does."""
    parent = parents[-1]
    is_pause = isinstance(parent, ast.Expr) and any(is_short(each, 1.0) for each in call.args)
    blocks = [each for each in parents if isinstance(each, ast.With)]
    is_expected = any("raises" in ast.unparse(item) for block in blocks for item in block.items)
    return is_pause or is_expected or isinstance(parent, ast.UnaryOp | ast.While | ast.If)


def hurried(node: ast.AST, parents: tuple[ast.AST, ...] = ()) -> Iterator[int]:
    """The lines in which something has to happen soon."""
    match node:
        case ast.Compare():
            operands = pairwise([node.left, *node.comparators])
            for (left, right), operator in zip(operands, node.ops, strict=True):
                less = right if isinstance(operator, ast.Gt | ast.GtE) else left
                if is_elapsed(less):
                    yield node.lineno
        case ast.BinOp(op=ast.Add()) if name_of(node.left) in CLOCKS and is_short(node.right):
            yield node.lineno
        case ast.Assign(targets=[ast.Name(id=name)]) if name in DEADLINES and is_short(node.value):
            yield node.lineno
        case ast.Call() if name_of(node) in WAITING and not may_be_in_vain(node, parents):
            named = [each.value for each in node.keywords if each.arg == "timeout"]
            if any(map(is_short, named or node.args)) and len(node.args) < 2:
                yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from hurried(child, (*parents, node))


@pytest.mark.parametrize(
    ("line", "is_hurried"),
    [
        ("assert time.monotonic() - began < 5.0", True),
        ("assert 0.3 < time.monotonic() - began < limit_s", True),
        ("assert time.monotonic() - began > 0.3", False),
        ("end = time.monotonic() + 20", True),
        ("assert came.wait(0.5)", True),
        ("assert not came.wait(0.5)", False),
        ("came.wait(0.5)", False),
        ("process.wait(10)", True),
        ("process.communicate(timeout=30)", True),
        ("with pytest.raises(TimeoutError): coming.result(0.1)", False),
        ("while not came.wait(0.01): pass", False),
    ],
)
def test_what_has_to_be_fast_is_found(line: str, is_hurried: bool) -> None:
    assert bool(list(hurried(ast.parse(line)))) is is_hurried


def test_nothing_has_to_be_fast() -> None:
    found = {file: list(hurried(ast.parse(file.read_text()))) for file in FILES}
    assert {str(file): lines for file, lines in found.items() if lines} == {}
