"""The house's rules: imports run down, names hide no standard library, algorithms are named at home alone."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from smolcluster.configs.spec import algorithms
from trees import nodes_of

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "smolcluster"

FLOORS = (
    ("version", "errors", "utils"),
    ("configs", "models", "codec", "wire", "runs", "observability"),
    ("data", "training"),
    ("server",),
    ("algorithms",),
    ("launch", "commands"),
    ("cli", "train", "distributed_training", "api"),
)
PLACES = {
    room: (floor, place) for floor, rooms in enumerate(FLOORS) for place, room in enumerate(rooms)
}
NEWER_STDLIB_NAMES = {"annotationlib", "compression"}


pytestmark = pytest.mark.xdist_group("layout")  # one process reads all files, once


def arrows(package: Path) -> Iterator[tuple[str, int, str]]:
    """Each import of the package's own modules: file, line, imported module."""
    for path in sorted(package.rglob("*.py")):
        module = (package.name, *path.relative_to(package).with_suffix("").parts)
        nodes: Iterable[ast.AST] = nodes_of(path)
        if path == package / "__init__.py":
            body = ast.parse(path.read_bytes()).body
            nodes = chain.from_iterable(ast.walk(each) for each in body if not is_for_types(each))
        for node in nodes:
            for target in imported(node, module):
                if target.split(".")[0] == package.name:
                    yield str(path.relative_to(package)), getattr(node, "lineno", 0), target


def is_for_types(node: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:`, as by which the package names what it loads when asked."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(node: ast.AST, module: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = module[: len(module) - node.level] if node.level else ()
        base = ".".join([*above, *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def upward_arrows(package: Path) -> list[str]:
    """The imports that break the rule, as sentences."""
    wrong = []
    for file, line, target in arrows(package):
        own = file.removesuffix(".py").split("/")[0]
        _, room, *_ = target.split(".") if "." in target else (target, "")
        if own == "__init__":
            allowed = room not in PLACES or room == "version"
        else:
            allowed = room not in PLACES or room == own or PLACES[room] < PLACES[own]
        if not allowed:
            wrong.append(f"{file}:{line} imports {target}")
    return wrong


def write(package: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_no_import_runs_up() -> None:
    assert list(arrows(PACKAGE)), "the imports were not found at all"
    assert upward_arrows(PACKAGE) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and for type checking alone count as well; the package's face does not."""
    found = [(file.removesuffix(".py").replace("/", "."), to) for file, _, to in arrows(PACKAGE)]
    above: dict[str, set[str]] = {own: set() for own, _ in found if own != "__init__"}
    for own, target in found:
        name = target.removeprefix("smolcluster.")
        named = name if name in above else name.rpartition(".")[0]
        if own in above and named in above and named != own:
            above[own].add(named)
    assert above
    list(TopologicalSorter(above).static_order())  # CycleError: these modules import each other


def test_every_room_has_its_floor() -> None:
    names = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert names ^ set(PLACES) == {"__init__"}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("codec/int8.py", "from smolcluster.algorithms.EDP import rule"),
        ("training/loop.py", "import smolcluster.launch.plan"),
        ("wire/frames.py", "from smolcluster import runs"),
        ("configs/load.py", "from smolcluster.observability.logs import NodeLog"),
        ("errors.py", "def f():\n    from smolcluster.utils import seed"),
        ("data/mnist.py", "from ..training import build"),
        ("__init__.py", "from smolcluster.cli import main"),
    ],
)
def test_an_arrow_that_runs_up_is_found(tmp_path: Path, file: str, line: str) -> None:
    package = write(tmp_path / "smolcluster", {file: line})
    [sentence] = upward_arrows(package)
    assert sentence.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("wire/frames.py", "from smolcluster.codec.base import Codec"),
        ("training/loop.py", "from smolcluster.training.build import build"),
        ("training/loop.py", "from .build import build"),
        ("train.py", "from smolcluster.cli import main"),
        ("cli.py", "import smolcluster"),
        ("cli.py", "from smolcluster.version import __version__"),
        ("__init__.py", "from smolcluster.version import __version__"),
        ("__init__.py", "if TYPE_CHECKING:\n    from smolcluster.cli import main as main"),
        ("data/mnist.py", "import torchvision"),
    ],
)
def test_an_arrow_that_runs_down_is_fine(tmp_path: Path, file: str, line: str) -> None:
    assert upward_arrows(write(tmp_path / "smolcluster", {file: line})) == []


def test_algorithms_know_nothing_of_each_other() -> None:
    folders = {path.name for path in algorithm_folders()}
    for file, line, target in arrows(PACKAGE):
        parts = target.split(".")
        if file.startswith("algorithms/") and folders.intersection(parts[2:3]):
            assert file.split("/")[1] == parts[2], f"{file}:{line} imports {target}"


def calls(node: ast.AST, *names: str) -> bool:
    """Whether it calls a function, class or method of one of these names."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in names


def imports(node: ast.AST, module: str, *names: str) -> bool:
    """Whether it imports one of these names of a module that ends so; without names, anything of it."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").endswith(module):
        return False
    return not names or bool({alias.name for alias in node.names}.intersection(names))


def defines(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in names


def overrides(node: ast.AST, base: str, *methods: str) -> bool:
    """Whether it is a subclass of `base` with a method of its own of one of these names."""
    if not isinstance(node, ast.ClassDef):
        return False
    bases = {ast.unparse(each).partition("[")[0] for each in node.bases}
    return base in bases and any(defines(each, *methods) for each in node.body)


def extends(node: ast.AST, base: str) -> bool:
    return overrides(node, base, *(each.name for each in methods_of(node)))


def methods_of(node: ast.AST) -> Iterator[ast.FunctionDef]:
    if isinstance(node, ast.ClassDef):
        yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def lets_in(node: ast.AST) -> bool:
    is_listener = calls(node, "bind", "create_server") and bool(node.args)  # type: ignore[attr-defined]
    is_accepting = calls(node, "accept") and not node.args  # type: ignore[attr-defined]
    is_server = imports(node, "socketserver") or imports(node, "http.server")
    return imports(node, "connection", "accept_next") or is_listener or is_accepting or is_server


def dials(node: ast.AST) -> bool:
    return imports(node, "connection", "connect") or calls(node, "create_connection")


def does_orders(node: ast.AST) -> bool:
    """Whether it is an `Executor.order`: the name of an order, and whatever belongs to it."""
    is_order = defines(node, "order") and node.args.kwarg is not None  # type: ignore[attr-defined]
    return is_order and node.args.vararg is not None  # type: ignore[attr-defined]


def simulates(node: ast.AST) -> bool:
    is_named = isinstance(node, ast.FunctionDef | ast.ClassDef)
    return is_named and "simulat" in node.name.lower()  # type: ignore[attr-defined]


def asks_for_facts(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and re.search(r"\$\(uname |\bdf -P", node.value) is not None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Mechanism:
    """How a file that builds it is recognised, and the only files that may, each with its reason."""

    is_built_by: Callable[[ast.AST], bool]
    files: Mapping[str, str]
    second: str
    """Lines of another one, which must be found."""
    rooms: tuple[str, ...] = ("",)


COORDINATION = (
    *("admit", "check_patience", "gather", "handle", "introduce", "worker_gone"),
    *("are_silent", "collect", "take"),
)
SLICE_PROTOCOL = ("listen", "close", "handle", "_obey", "_on_worker", "_send")

MECHANISMS = {
    "letting peers in": Mechanism(
        lets_in,
        {
            "wire/connection.py": "makes every listening socket of the wire",
            "wire/local.py": "the same listener once more, for processes of its machine",
            "wire/acceptor.py": "the door",
            "observability/exporter.py": "serves /metrics to Prometheus",
            "observability/dashboard/serve.py": "serves pages to browsers",
            "launch/link_probe.py": "runs as one file on nodes that have no smolcluster",
            "utils/addresses.py": "looks for a free port",
        },
        "listener.bind((host, port))",
    ),
    "dialling": Mechanism(
        dials,
        {
            "wire/node.py": "dials, proves, and is let in",
            "wire/connection.py": "makes every connection of the wire",
            "launch/invite/coming.py": "by a code, before there is a secret",
            "algorithms/Mesh/meeting.py": "asks whether anybody is at torch's own store",
            "launch/link_probe.py": "runs as one file on nodes that have no smolcluster",
            "launch/observe/targets.py": "asks whether a port answers",
            "observability/sinks/wandb_child.py": "asks whether W&B answers",
        },
        "from smolcluster.wire.connection import connect",
    ),
    "tensors in several frames": Mechanism(
        lambda node: isinstance(node, ast.Attribute) and node.attr == "frombuffer",
        {
            "wire/streams.py": "all that comes in several frames",
            "server/assignment.py": "indices, of one frame",
            "server/slices.py": "norms, of one frame",
            "algorithms/SynchronousPS/reduction.py": "buckets that are added up without memory of their own",
            "algorithms/Mesh/groups.py": "nothing that comes in frames",
            "algorithms/Mesh/profiling.py": "nothing that comes in frames",
        },
        "torch.frombuffer(payload)",
        rooms=("wire", "server", "algorithms"),
    ),
    "a slice of the weights on a host": Mechanism(
        lambda node: extends(node, "HeldSlice"),
        {
            "server/hosted_stores.py": "its rule: a step of the run's optimizer",
            "algorithms/DiLoCo/outer_links.py": "its rule: an outer step",
            "algorithms/SynchronousPS/reduction.py": "its rule: the mean of a sum",
        },
        "class Rule(HeldSlice):\n    def norms(self): ...",
    ),
    "a slice on a host of its own": Mechanism(
        lambda node: extends(node, "SliceHost"),
        {
            "algorithms/EDP/store.py": "makes its slice, and takes pushes",
            "algorithms/DiLoCo/store.py": "makes its slice, and takes changes",
            "algorithms/SynchronousPS/store.py": "makes its slice, and takes parts that it adds up",
        },
        "class Held(SliceHost):\n    def _new_slice(self): ...",
    ),
    "the protocol of a slice, on its host": Mechanism(
        lambda node: overrides(node, "SliceHost", *SLICE_PROTOCOL),
        {},  # an algorithm has none
        "class Held(SliceHost):\n    def _obey(self, message): ...",
    ),
    "the coordinator's links to slices": Mechanism(
        lambda node: extends(node, "StoreLinks"),
        {
            "server/hosted_stores.py": "slices that step by the run's optimizer",
            "algorithms/DiLoCo/outer_links.py": "slices that take outer steps",
            "algorithms/SynchronousPS/store.py": "slices that add up",
        },
        "class Links(StoreLinks[None]):\n    def _contents(self): ...",
    ),
    "the protocol of slices, at the coordinator": Mechanism(
        lambda node: overrides(node, "StoreLinks", *COORDINATION),
        {},  # a subclass has none
        "class Links(StoreLinks[None]):\n    def gather(self): ...",
    ),
    "a worker's local copy": Mechanism(
        lambda node: calls(node, "LocalCopy") or defines(node, "mark_sent"),
        {
            "training/local_copy.py": "the one copy, and what a process has of it",
            "algorithms/DiLoCo/worker.py": "trains it",
        },
        "class Copy:\n    def mark_sent(self, fragment): ...",
    ),
    "who does a local copy's work": Mechanism(
        does_orders,
        {
            "training/local_copy.py": "this process",
            "algorithms/Mesh/group_worker.py": "ranks",
            "algorithms/PipelineParallel/head.py": "stages",
        },
        "class Other:\n    def order(self, name, *given, **told): ...",
    ),
    "executing an instruction list": Mechanism(
        lambda node: calls(node, "backward_weight"),
        {"training/stages/execution.py": "over any transport"},
        "stage.backward_weight(number)",
    ),
    "who executes instruction lists": Mechanism(
        lambda node: imports(node, "stages.execution", "execute"),
        {
            "algorithms/PipelineParallel/execution.py": "over links between machines",
            "algorithms/Mesh/trainer.py": "over a process group",
        },
        "from smolcluster.training.stages.execution import execute",
    ),
    "a simulation": Mechanism(
        simulates,
        {
            "training/schedules/simulation.py": "a step of a schedule, by its instructions",
            "algorithms/planning/simulation.py": "a run: machines, and flows that share links",
        },
        "def simulate_again(schedule): ...",
    ),
    "asking a machine what it is": Mechanism(
        asks_for_facts,
        {
            "launch/node_facts.py": "whoever asks",
            "launch/host.py": "whether its python3 is one, before anything else is run",
            "launch/sessions.py": "whether a run's disk is full, while it is looked at",
        },
        "host.run('echo $(uname -s)')",
    ),
    "what a launch starts": Mechanism(
        lambda node: calls(node, "Launched"),
        {
            "launch/plan.py": "of any algorithm, anywhere",
            "runs/launched.py": "reads what an earlier version has launched",
        },
        "Launched(run_id=run_id, processes=())",
    ),
    "processes that run a function": Mechanism(
        lambda node: calls(node, "get_context"),
        {
            "algorithms/children.py": "of this program's own",
            "data/processes.py": "those of a user's DataLoader, as that starts them",
        },
        "multiprocessing.get_context('spawn').Process(target=body).start()",
    ),
    "a process that is launched": Mechanism(
        lambda node: calls(node, "LaunchedProcess"),
        {
            "launch/plan.py": "of any algorithm, anywhere",
            "launch/invite/start.py": "invites machines into a run",
            "launch/watch/logs.py": "starts nothing: names a log's process",
            "runs/launched.py": "reads what an earlier version has launched",
        },
        "LaunchedProcess(node=node, role='worker')",
    ),
    "how a run stands": Mechanism(
        lambda node: calls(node, "Snapshot"),
        {
            "observability/view/snapshot.py": "what its folder says",
            "observability/view/view.py": "before anything was read",
            "launch/watch/probe.py": "what was seen on its machines",
        },
        "Snapshot(paths)",
    ),
    "who took part in a run": Mechanism(
        lambda node: calls(node, "workers_of"),
        {"observability/view/view.py": "of which everything that draws asks"},
        "workers_of(snapshot, story)",
    ),
    "following a file of another machine": Mechanism(
        lambda node: calls(node, "RemoteTail"),
        {
            "launch/watch/logs.py": "lines for a terminal, all of them",
            "launch/watch/mirror.py": "copies of what a view reads",
        },
        "RemoteTail(host, file, on_lines=take)",
    ),
}
"""Each mechanism that `src` holds once. A file more here needs a reason that no file in the table covers."""


def built_in(package: Path, mechanism: Mechanism) -> set[str]:
    """The files that build a mechanism."""
    files = [path for room in mechanism.rooms for path in (package / room).rglob("*.py")]
    return {
        str(path.relative_to(package))
        for path in files
        if any(map(mechanism.is_built_by, nodes_of(path)))
    }


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_mechanism_is_there_twice(name: str) -> None:
    """Also: no file stays in the table that has it no more."""
    mechanism = MECHANISMS[name]
    assert built_in(PACKAGE, mechanism) == mechanism.files.keys()


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("file", ["server/second.py", "algorithms/EDP/second.py"])
def test_a_second_one_is_found(tmp_path: Path, name: str, file: str) -> None:
    mechanism = MECHANISMS[name]
    package = write(tmp_path / "smolcluster", {file: mechanism.second, "server/other.py": "x = 1"})
    assert built_in(package, mechanism) == {file}


def algorithm_folders() -> list[Path]:
    return [path.parent for path in (PACKAGE / "algorithms").glob("*/server.py")]


def test_no_file_hides_a_module_of_the_standard_library() -> None:
    """`python src/smolcluster/train.py` and `uv run server.py` look into their own folder first."""
    hidden = sys.stdlib_module_names | NEWER_STDLIB_NAMES
    folders = algorithm_folders()
    assert [folder.name for folder in folders if folder.name == "EDP"] == ["EDP"]
    for folder in (PACKAGE, *folders):
        names = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
        assert names & hidden == set(), f"in {folder}"


RUNS_WHAT_IT_READS = re.compile(
    r"(_?pickle|cloudpickle|dill|marshal|joblib|shelve)\.(load|loads|open|Unpickler|DbfilenameShelf)"
    r"|torch\.(load|save)|(torch\.distributed\.checkpoint|dcp)\.load|numpy\.load|(.*\.)?read_pickle|eval|exec"
    r"|(.*\.)?(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?|os\.(system|popen)|(.*\.)?create_subprocess_shell"
    r"|yaml\.\w*load(_all)?|subprocess\.get(status)?output"
)
"""Calls by which code of whoever wrote a file or a message is run, by their whole names."""


def whole_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What the names that a module imports stand for."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            names |= whole
    return names


def calls_that_run_what_they_read(nodes: Sequence[ast.AST]) -> Iterator[str]:
    imported = whole_names(nodes)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        name = f"{imported.get(first, first)}{dot}{rest}"
        if first == "yaml" and "yaml" not in imported:
            continue  # a variable: `YAML` is looked at where one is made
        words = {each.arg: ast.unparse(each.value) for each in node.keywords}
        is_safe = name == "torch.load" and words.get("weights_only") == "True"
        is_unsafe = (
            words.get("shell", "False") != "False"
            or "allow_pickle" in words
            or (name.endswith("YAML") and words.get("typ") != "'safe'")
        )
        if is_unsafe or (RUNS_WHAT_IT_READS.fullmatch(name) and not is_safe):
            yield name


def test_nothing_runs_what_it_reads() -> None:
    """Pickles are read of a process's own children only."""
    found = {
        (str(path.relative_to(PACKAGE)), call)
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in calls_that_run_what_they_read(nodes_of(path))
    }
    assert found == {("data/processes.py", "pickle.loads")}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(file)",
        "pickle.load(file)",
        "dist.broadcast_object_list(things)",
        "torch.distributed.gather_object(thing)",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=is_shell)",
        "np.load(file, allow_pickle=True)",
        "os.system(words)",
        "torch.save(things, file)",
        "torch.load(file, weights_only=False)",
        "from torch import load\nload(file)",
        "from pickle import loads as read\nread(things)",
        "import pickle as p\np.Unpickler(file).load()",
        "from torch.distributed import recv_object_list as hear\nhear(things)",
        "import yaml\nyaml.load(file)",
        "from yaml import full_load\nfull_load(file)",
        "YAML(typ='unsafe')",
    ],
)
def test_what_would_run_it_is_found(line: str) -> None:
    assert list(calls_that_run_what_they_read(list(ast.walk(ast.parse(line)))))


def test_the_logging_stack_is_no_package() -> None:
    assert not (PROJECT / "logging" / "__init__.py").exists()
    assert not (PROJECT / "logging.py").exists()


def test_git_ignores_no_source() -> None:
    """A folder's name in .gitignore without a slash before it also leaves out rooms of that name."""
    git = shutil.which("git")
    if git is None or not (PROJECT / ".git").exists():
        pytest.skip("not a git checkout")
    sources = [
        str(path.relative_to(PROJECT))
        for folder in (PACKAGE, PROJECT / "tests", PROJECT / "benchmarks")
        for path in folder.rglob("*.py")
    ]
    ignored = subprocess.run(
        [git, "check-ignore", "--no-index", "--stdin"],
        cwd=PROJECT,
        check=False,
        input="\n".join(sources),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ignored.stdout.splitlines() == []


OURS = [spec for spec in algorithms().values() if spec.package.startswith("smolcluster.")]
NAMES = {spec.name for spec in OURS} | {spec.package for spec in OURS}
QUOTED = re.compile(rf"""(["'`])({"|".join(sorted(re.escape(name) for name in NAMES))})\1""")
TYPED = ("distributed_training.py", "cli/__init__.py", "cli/machines.py")
"""A command of its own, and the file that is one, by names that users type."""


def names_one(node: ast.AST) -> bool:
    """Whether it imports an algorithm, or is a text that is its name.

    Docstrings and examples hold a name among other words, and are none of these.
    """
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    packages = tuple(f"{spec.package}." for spec in OURS)
    return any(f"{module}.".startswith(packages) for module in imported(node, ()))


def named(package: Path) -> list[str]:
    """Where a file outside the algorithms' folders imports one, or has its name as a text of its own."""
    folders = {package / "algorithms" / spec.folder.name for spec in OURS}
    found = [
        (path, getattr(node, "lineno", 0))
        for path in sorted(package.rglob("*.py"))
        for node in nodes_of(path)
        if names_one(node)
    ]
    for path in sorted(package.rglob("*.js")):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        found += [(path, number) for number, line in lines if QUOTED.search(line)]
    return [
        f"{path.relative_to(package)}:{line}"
        for path, line in found
        if folders.isdisjoint(path.parents) and path.relative_to(package).as_posix() not in TYPED
    ]


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
    assert named(write(tmp_path / "smolcluster", {file: line})) == [f"{file}:1"]


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
    assert named(write(tmp_path / "smolcluster", {file: line})) == []
