"""An algorithm is named in its own folder and nowhere else in the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import smolcluster
from smolcluster.configs.spec import algorithms
from trees import nodes_of

PACKAGE = Path(smolcluster.__file__).parent
OURS = [spec for spec in algorithms().values() if spec.package.startswith("smolcluster.")]
NAMES = {spec.name for spec in OURS} | {spec.package for spec in OURS}
QUOTED = re.compile(rf"""(["'`])({"|".join(sorted(re.escape(name) for name in NAMES))})\1""")


OWN = ("distributed_training.py", "cli/__init__.py", "cli/machines.py")
"""A command of its own, and the file that is one, by names that users type."""


def named(package: Path) -> list[str]:
    """Where a file outside the algorithms' folders imports one, or has its name as a text of its own."""
    folders = {package / "algorithms" / spec.folder.name for spec in OURS}
    return [
        f"{path.relative_to(package)}:{line}"
        for path, line in (*modules(package), *scripts(package))
        if folders.isdisjoint(path.parents) and path.relative_to(package).as_posix() not in OWN
    ]


def modules(package: Path) -> Iterator[tuple[Path, int]]:
    """Docstrings and examples hold a name among other words, and are none of these."""
    for path in sorted(package.rglob("*.py")):
        for node in nodes_of(path):
            if names_one(node):
                yield path, getattr(node, "lineno", 0)


def names_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any(map(is_ours, targets(node)))
    return isinstance(node, ast.Constant) and node.value in NAMES


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What is imported; relative imports are banned."""
    names = [alias.name for alias in node.names]
    return names if isinstance(node, ast.Import) else [f"{node.module}.{name}" for name in names]


def is_ours(module: str) -> bool:
    return any(f"{module}.".startswith(f"{spec.package}.") for spec in OURS)


def scripts(package: Path) -> Iterator[tuple[Path, int]]:
    for path in sorted(package.rglob("*.js")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if QUOTED.search(line):
                yield path, number


def write(package: Path, file: str, line: str) -> Path:
    (package / file).parent.mkdir(parents=True)
    (package / file).write_text(line)
    return package


@pytest.mark.xdist_group("layout")  # whose process has read all files
def test_no_file_outside_an_algorithms_folder_names_it() -> None:
    assert {spec.name for spec in OURS} >= {"edp", "syncps"}
    assert named(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("launch/plan.py", 'if algorithm == "edp":\n    pass'),
        ("configs/load.py", "DEFAULT = {'syncps': 1}"),
        ("server/store.py", "from smolcluster.algorithms.EDP import rule"),
        ("launch/single.py", "import smolcluster.algorithms.SynchronousPS.server"),
        ("launch/find.py", 'load("smolcluster.algorithms.EDP")'),
        ("observability/page.js", 'const stale = run.algorithm === "edp";'),
    ],
)
def test_a_name_is_found(tmp_path: Path, file: str, line: str) -> None:
    [place] = named(write(tmp_path / "smolcluster", file, line))
    assert place == f"{file}:1"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("algorithms/EDP/server.py", 'main("edp", "server")'),
        ("algorithms/EDP/worker.py", "from smolcluster.algorithms.EDP import rule"),
        ("configs/resolve.py", '"""Of a cluster file, such as "edp"."""'),
        ("launch/plan.py", "from smolcluster.algorithms.context import ServerContext"),
    ],
)
def test_what_names_none_is_fine(tmp_path: Path, file: str, line: str) -> None:
    assert named(write(tmp_path / "smolcluster", file, line)) == []
