"""What joining changes in a run's files, and whom a word means."""

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from harness import local_settings
from reading import status_of
from smolcluster.configs.begun import WORKLOAD_FOLDER, code_note, folder_digest, remember
from smolcluster.configs.load import dump_yaml
from smolcluster.configs.resolve import save_resolved
from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch import flow
from smolcluster.launch import join as joining
from smolcluster.launch import take_in as taking_in
from smolcluster.launch.host import Host
from smolcluster.launch.join import address_of, own_name
from smolcluster.launch.kept import StoredOptions, check_launched_here, keep
from smolcluster.launch.project import Project
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.take_in import JoinOptions, with_worker
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RUNS_DIR, RunPaths, create_run
from smolcluster.runs.status import write_status
from smolcluster.wire.dialling import Address
from smolcluster.wire.security import ensure_secret
from waiting import DEADLINE_S

RAW: dict[str, Any] = {
    "host_ip": {"mini1": "10.0.0.1", "pi5": "10.0.1.1"},
    "num_workers": 1,
    "workers": ["pi5"],
    "server": "mini1",
    "nodes": {"pi5": {"threads": 3}},
}


@pytest.mark.parametrize(
    ("word", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 65432),
        ("10.0.0.1:6000", "10.0.0.1", 6000),
        ("mini1.local", "mini1.local", 65432),
        ("mini1:6000", "mini1", 6000),
        ("localhost", "localhost", 65432),
        ("fd00::1", "fd00::1", 65432),
        ("[fd00::1]:6000", "fd00::1", 6000),
    ],
)
def test_an_address_is_known_by_its_dots_and_colons(word: str, host: str, port: int) -> None:
    assert address_of(word) == Address(host, port)


@pytest.mark.parametrize("word", ["10.0.0.1:99999", "10.0.0.1:0", "mini1:abc", "mini1:"])
def test_what_is_no_port_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address, must be HOST:PORT such as"):
        address_of(word)


@pytest.mark.parametrize("word", ["latest", "edp-20261120-1350-3f9c", "./runs/edp-1", "/runs/a.b"])
def test_all_else_is_a_run(word: str) -> None:
    assert address_of(word) is None


def test_a_run_that_is_there_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))
    create_run(tmp_path, "lr-0.1", newest=False)
    assert address_of("lr-0.1") is None
    assert address_of("lr-0.2") == Address("lr-0.2", 65432)


def test_a_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="--name"):
        own_name("../mini9")


def test_the_cluster_file_learns_of_a_new_machine() -> None:
    content = with_worker(RAW, "mini9", "10.0.0.1", {"ssh": "me@10.0.0.9"})
    cluster = ClusterConfig.model_validate(content)
    assert (cluster.workers, cluster.num_workers) == (("pi5", "mini9"), 2)
    assert cluster.host_ip["mini9"] == "10.0.0.1"
    assert (cluster.nodes["mini9"].ssh, cluster.nodes["pi5"].threads) == ("me@10.0.0.9", 3)


def test_a_returned_machine_keeps_its_place_and_its_settings() -> None:
    stated = {"threads": 3, "env": {"A": "1"}, "dataset": {"download": False}}
    own = {"device": "cpu", "env": {"B": "2"}, "dataset": {"root": "/data"}}
    content = with_worker(RAW | {"nodes": {"pi5": stated}}, "pi5", "10.0.1.1", own)
    cluster = ClusterConfig.model_validate(content)
    assert cluster.workers == ("pi5",)
    pi5 = cluster.nodes["pi5"]
    assert (pi5.threads, pi5.device, pi5.env) == (3, "cpu", {"A": "1", "B": "2"})
    assert (pi5.dataset.download, pi5.dataset.root) == (False, Path("/data"))


def test_with_fixed_shares_a_new_machine_stands_in_for_others() -> None:
    content = with_worker({**RAW, "batch_share": {"pi5": 1.0}}, "mini9", "10.0.0.1", {})
    assert content["batch_share"] == {"pi5": 1.0, "mini9": 0.0}


def process(node: str, rank: int | None) -> LaunchedProcess:
    role = "server" if rank is None else "worker"
    return LaunchedProcess(node=node, role=role, rank=rank, ssh=node, run_dir="~/r", session="s")


def test_a_worker_takes_the_place_of_the_one_that_it_was() -> None:
    server, first = process("pi5", None), process("mini2", 0)
    launched = Launched(run_id="edp-1", algorithm="edp", processes=(server, first))
    joined = launched.with_worker(process("pi5", 1)).with_worker(process("mini2", 0))
    assert joined.server == server
    assert [(each.node, each.rank) for each in joined.workers] == [("mini2", 0), ("pi5", 1)]


STAGED = RAW | {
    "host_ip": {"mini1": "10.0.0.1", "pi5": "10.0.1.1", "win": "10.0.1.1"},
    "nodes": {"pi5": {"stages": {"host_ip": {"pi5": "127.0.0.1", "win": "10.0.2.1"}}}},
}
"""Worker pi5 has stages here and on win."""


def test_a_stage_that_comes_back_is_no_worker() -> None:
    content = with_worker(STAGED | {"batch_share": {"pi5": 1.0}}, "win", "10.0.1.1", {"threads": 2})
    assert (content["workers"], content["num_workers"]) == (["pi5"], 1)
    assert content["nodes"]["win"] == {"threads": 2}
    assert content["batch_share"] == {"pi5": 1.0}


@pytest.mark.parametrize(
    ("name", "dead", "missing"),
    [
        ("win", {"stage win"}, [("stage", "win")]),
        ("win", set(), []),
        ("pi5", {"worker pi5", "stage win"}, [("stage", "win"), ("worker", "pi5")]),
        (
            "pi5",
            {"worker pi5", "stage pi5", "stage win"},
            [("stage", "pi5"), ("stage", "win"), ("worker", "pi5")],
        ),
        ("pi5", {"stage pi5"}, [("stage", "pi5")]),
        ("pi5", {"stage win"}, []),
        ("mini1", set(), []),
    ],
)
def test_a_machine_that_joins_starts_what_is_not_alive_of_it(
    name: str, dead: set[str], missing: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = process("pi5", 0)
    stages = [
        process(node, 0).model_copy(update={"role": "stage", "rank": None})
        for node in ("pi5", "win")
    ]
    processes = (process("mini1", None), worker, *stages)
    launched = Launched(run_id="diloco-1", algorithm="diloco", processes=processes)

    def exit_code(one: LaunchedProcess) -> int | None:
        return 1 if f"{one.role} {one.node}" in dead else None

    monkeypatch.setattr(taking_in, "exit_code", exit_code)
    cluster = ClusterConfig.model_validate(STAGED)
    assert taking_in.missing_of(name, launched, cluster) == missing


def test_a_stage_takes_its_own_place_alone() -> None:
    stages = [
        process(node, 0).model_copy(update={"role": "stage", "rank": None})
        for node in ("pi5", "win")
    ]
    launched = Launched(
        run_id="diloco-1",
        algorithm="diloco",
        processes=(process("mini1", None), process("pi5", 0), *stages),
    )
    again = stages[1].model_copy(update={"session": "again"})
    joined = launched.with_worker(again)
    assert [(each.node, each.session) for each in joined.helpers] == [
        ("pi5", "s"),
        ("win", "again"),
    ]
    assert joined.workers == launched.workers


def test_a_run_of_one_machine_refuses_what_belongs_to_a_pipeline() -> None:
    cluster = ClusterConfig.model_validate(STAGED)
    with pytest.raises(ConfigError, match="pi5 has its layers in stages"):
        joining._check_is_one_process("pi5", cluster)
    with pytest.raises(ConfigError, match="win is a stage of a worker"):
        joining._check_is_one_process("win", cluster)
    joining._check_is_one_process("mini9", cluster)


@pytest.mark.parametrize("is_local", [True, False])
def test_nothing_joins_a_group_whose_machines_begin_together(
    tmp_path: Path, *, is_local: bool
) -> None:
    paths = create_run(tmp_path, "mesh-1")
    first = process("mini1", 0)
    processes = (first.model_copy(update={"ssh": None}) if is_local else first,)
    write_launched(paths.launched, Launched(run_id="mesh-1", algorithm="mesh", processes=processes))
    with pytest.raises(ConfigError, match="all machines of a mesh begin together"):
        joining.join(str(paths.root), JoinOptions(name="pi5"))


def test_two_machines_are_brought_in_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create_run(tmp_path, "edp-1")
    processes = (process("pi5", None), process("mini2", 0))
    write_launched(paths.launched, Launched(run_id="edp-1", algorithm="edp", processes=processes))
    order: list[str] = []
    second: list[Future[int]] = []
    waits = Event()

    def bring_in(_paths: object, _launched: object, wanted: JoinOptions) -> int:
        if wanted.name == "a":
            second.append(pool.submit(joining.join, str(paths.root), JoinOptions(name="b")))
            assert waits.wait(DEADLINE_S), "the second one did not say that it waits"
        order.append(str(wanted.name))
        return 0

    monkeypatch.setattr(joining, "join_cluster", bring_in)
    monkeypatch.setattr(joining, "print_line", lambda *_: waits.set())
    with ThreadPoolExecutor(1) as pool:
        assert joining.join(str(paths.root), JoinOptions(name="a")) == 0
        assert second[0].result(DEADLINE_S) == 0
    assert order == ["a", "b"]


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> tuple[RunPaths, Launched]:
    """A run on other machines that goes on, into which machines are brought without a word to them."""
    for name, value in {"SECRET_FILE": str(tmp_path / "secret"), "PORT": "1"}.items():
        monkeypatch.setenv(f"SMOLCLUSTER_{name}", value)
    monkeypatch.delenv("SMOLCLUSTER_PORT")  # what a run brings back of it goes with the test
    ensure_secret(tmp_path / "secret")
    paths = create_run(tmp_path / "runs", "edp-1")
    told = StoredOptions(
        environ={"SMOLCLUSTER_PORT": "6001"},
        overrides=("nodes.mini9.env.KEY=theirs", "workload=os:system"),
    )
    cluster = dump_yaml({**RAW, "nodes": {"pi5": {"env": {"KEY": "its"}}}}).encode()
    keep(paths, cluster, b"dataset: {name: digits}\n", told)
    processes = (process("mini1", None), process("pi5", 0))
    launched = Launched(run_id="edp-1", algorithm="edp", processes=processes)
    write_launched(paths.launched, launched)
    monkeypatch.setattr(taking_in, "status_of", lambda _: status_of())
    monkeypatch.setattr(taking_in, "exit_code", lambda _: None)
    monkeypatch.setattr(taking_in, "read_project", lambda _: Project({}))
    monkeypatch.setattr(taking_in, "SteadyConsole", lambda: console)
    for name in ("examine", "make_ready"):
        monkeypatch.setattr(taking_in, name, Mock())
    return paths, launched


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("place", ["local", "me@mini9"])
def test_who_joins_is_told_what_the_launch_was_and_is_kept_only_if_it_comes(
    launched: tuple[RunPaths, Launched], monkeypatch: pytest.MonkeyPatch, place: str, comes: bool
) -> None:
    paths, _ = launched
    kept, brought = paths.root / "launch/cluster.yaml", dict[str, bytes]()
    before, begun = kept.read_bytes(), dict[str, str]()

    def put(host: Host, _path: str, content: bytes) -> None:
        brought[host.node] = content

    def add(run: RunInSessions, worker: LaunchedProcess) -> None:
        begun.update(run._env[worker.node])
        read = kept.read_bytes() if place == "local" else brought["mini9"]
        assert b"mini9" in read
        assert (b"its" in read) is (place == "local")
        if not comes:
            raise LaunchError("it does not come")

    monkeypatch.setattr(taking_in, "put", put)
    monkeypatch.setattr(RunInSessions, "add", add)
    wanted = JoinOptions("mini9", address="10.0.0.1", overrides=(f"ssh={place}",))
    with nullcontext() if comes else pytest.raises(LaunchError, match="does not come"):
        taking_in.join_cluster(*launched, wanted)
    assert {("SMOLCLUSTER_PORT", "6001"), ("KEY", "theirs")} < {*begun.items()}
    assert (kept.read_bytes() == before) is not comes
    assert brought.keys() == ({"mini9"} if place != "local" else set())
    check_launched_here(paths)


def test_a_run_that_was_resumed_while_a_machine_was_made_ready_stays_as_it_is(
    launched: tuple[RunPaths, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, before = launched
    kept, resumed = (paths.root / "launch/cluster.yaml").read_bytes(), before.resumed()

    def resume(*_: object, **__: object) -> None:
        write_launched(paths.launched, resumed)

    put = Mock()
    monkeypatch.setattr(taking_in, "make_ready", resume)
    monkeypatch.setattr(taking_in, "put", put)
    monkeypatch.setattr(RunInSessions, "add", Mock())
    with pytest.raises(LaunchError, match="started again"):
        taking_in.join_cluster(paths, before, JoinOptions("mini9", address="10.0.0.1"))
    assert not put.called, "it has what the resume has brought"
    assert (paths.root / "launch/cluster.yaml").read_bytes() == kept
    assert read_launched(paths.launched) == resumed


def test_on_this_machine_a_launch_leaves_what_it_keeps_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = process("mini1", None).model_copy(update={"ssh": None, "run_dir": str(tmp_path)})
    processes = (here, process("pi5", 0))
    put = Mock()
    monkeypatch.setattr(flow, "put", put)
    launched = Launched(run_id="edp-1", algorithm="edp", processes=processes)
    flow.put_configuration(launched, b"cluster", b"train", None)
    assert [each.args[0].node for each in put.call_args_list] == ["pi5"]


WRITES_ITS_LOG = """
import json, pathlib, sys, time
root = pathlib.Path(json.loads(sys.argv[-1].removeprefix("runs_dir=")))
log = root / "edp-1" / "logs" / "worker-rank1-mini9.log"
log.parent.mkdir(parents=True, exist_ok=True)
log.write_text("{}")
end = time.monotonic() + 300
while time.monotonic() < end and not (root / "over").exists():
    time.sleep(0.05)
"""


def test_a_worker_that_is_left_alone_logs_where_its_log_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    paths = create_run(tmp_path / "runs", "edp-1")
    elsewhere = f'runs_dir="{tmp_path / "elsewhere"}"'
    argv = (sys.executable, "-c", WRITES_ITS_LOG, "--override", elsewhere)
    worker = process("mini9", 1).model_copy(update={"argv": argv})
    try:
        assert joining._detached(paths, worker) == 0
    finally:
        for root in (tmp_path / "runs", tmp_path / "elsewhere"):
            root.mkdir(exist_ok=True)
            (root / "over").touch()
        assert started[0].wait(DEADLINE_S) == 0


def test_a_run_that_says_that_it_lives_brings_no_code_to_who_joins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create_run(tmp_path, "edp-1")
    save_resolved(local_settings("workload=os:system", train="workload"), paths.config)
    write_status(paths.status, status_of())
    monkeypatch.setattr(joining, "_ask", lambda *_: pytest.fail("it is not asked"))
    with pytest.raises(ConfigError, match=r"os:system, which no run .*--workload os:system"):
        joining.join(str(paths.root), JoinOptions(name="mini9"))


def test_by_itself_a_machine_joins_with_the_code_that_was_brought_there_or_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(workload="train.workload", algorithm="edp")
    welcome = SimpleNamespace(run_id="edp-1", worker_id=2, run=run)
    monkeypatch.setattr(joining, "_ask", lambda *_: welcome)
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))
    address = Address("10.0.0.1", 6000)

    def told(*options: str) -> tuple[str, ...]:
        return joining._asked_for(address, JoinOptions(name="pi5"), options, None).argv

    with pytest.raises(ConfigError, match=r"train\.workload.*--workload FILE"):
        told("--override", "threads=1")
    assert told("--workload", "/me/a.py:b")[-2:] == ("--workload", "/me/a.py:b")
    brought = tmp_path / "edp-1/launch"
    (brought / "workload").mkdir(parents=True)

    def note_code(name: str) -> None:
        note = code_note(name, folder_digest(brought / "workload"))
        remember("edp-1", WORKLOAD_FOLDER, note)

    (brought / "workload.name").write_text("ours/train.py:workload")
    with pytest.raises(ConfigError, match=f"not here as a launcher brought it .{brought}/workload"):
        told()
    note_code("ours/train.py:workload")
    expected = f"{brought}/workload/ours/train.py:workload"
    assert told("--override", "a=1")[-4:] == ("--workload", expected, "--override", "a=1")
    for outside in ("/etc/train.py:workload", "../../train.py:workload"):
        (brought / "workload.name").write_text(outside)
        note_code(outside)
        with pytest.raises(ConfigError, match="whose code is not here"):
            told()
    (brought / "workload.name").write_text("other.py:workload")
    note_code("other.py:workload")
    with pytest.raises(
        ConfigError, match=r"train\.workload, but .*other\.py:workload: name it with"
    ):
        told()
    run.workload = None
    assert "--workload" not in told("--override", "a=1")
    welcome.run_id = "../../elsewhere"
    with pytest.raises(ConfigError, match="cannot name a folder"):
        told()
