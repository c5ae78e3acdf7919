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


def is_joined(call: ast.Call, parent: ast.AST) -> bool:
    """Whether it waits for a thread: what else joins has a result."""
    return name_of(call) == "join" and isinstance(parent, ast.Expr)


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
        case ast.Call():
            named = [each.value for each in node.keywords if each.arg == "timeout"]
            is_wait = name_of(node) in WAITING or is_joined(node, parents[-1])
            alone = node.args if is_wait and len(node.args) < 2 else []
            if any(map(is_short, named or alone)) and not may_be_in_vain(node, parents):
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
        ("thread.join(10)", True),
        ("one = pool.join(1)", False),
        ("assert found.get(timeout=0.5)", True),
        ("subprocess.run(words, timeout=20)", True),
        ("with pytest.raises(queue.Empty): found.get(timeout=0.5)", False),
        ("with pytest.raises(TimeoutError): coming.result(0.1)", False),
        ("while not came.wait(0.01): pass", False),
    ],
)
def test_what_has_to_be_fast_is_found(line: str, is_hurried: bool) -> None:
    assert bool(list(hurried(ast.parse(line)))) is is_hurried


def slept(node: ast.AST) -> Iterator[int]:
    """The lines in which a test sleeps for long enough, it hopes: it needs an event, or a clock of its own.

    What looks again and again may sleep meanwhile, and so may what stands for something slow.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and name_of(child.value) == "sleep":
            yield child.lineno
        elif not isinstance(
            child, ast.While | ast.For | ast.FunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from slept(child)


def each_test(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


@pytest.mark.parametrize(
    ("line", "is_slept"),
    [
        ("time.sleep(0.2)", True),
        ("if a:\n        sleep(0.2)", True),
        ("while a: time.sleep(0.2)", False),
        ("def slow(): time.sleep(0.2)", False),
    ],
)
def test_a_test_that_sleeps_is_found(line: str, is_slept: bool) -> None:
    (test,) = each_test(ast.parse(f"def test_a():\n    {line}"))
    assert bool(list(slept(test))) is is_slept


def test_nothing_has_to_be_fast_and_no_test_sleeps() -> None:
    found = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        asleep = [line for test in each_test(tree) for line in slept(test)]
        found[str(file.relative_to(TESTS))] = [*hurried(tree), *asleep]
    assert {file: lines for file, lines in found.items() if lines} == {}
