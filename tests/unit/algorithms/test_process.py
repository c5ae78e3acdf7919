"""What every server and worker process has in common: how it begins, what it leaves, and how it ends."""

import argparse
import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from pydantic_core import SchemaError

from connection_pairs import RUN
from harness import SECRET, free_port, local_settings
from made_runs import summary_of
from smolcluster.algorithms import process
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import main, server_parser, worker_parser
from smolcluster.algorithms.process import spread_over_others
from smolcluster.configs.load import find_config
from smolcluster.configs.schema import MeshSizes, NodeConfig, StagesConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import (
    ClusterEmpty,
    ConfigError,
    NonFiniteLoss,
    PortBusy,
    RunFailed,
    SmolclusterError,
)
from smolcluster.runs.events import EpochFinished, read_events
from smolcluster.runs.paths import RunPaths, create_run, latest_of
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import Final, Summary, read_summary
from smolcluster.server.link import Participant, WorkerSetup
from smolcluster.server.store_host import StoreSetup
from smolcluster.wire.dialling import Address
from smolcluster.wire.security import default_secret_path, ensure_secret
from waiting import DEADLINE_S

SUMMARY = summary_of(steps=0, final=Final(train_loss=0.25))


@pytest.fixture(autouse=True)
def a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_a_process: None
) -> None:
    """What a process sets for itself is put back, and its files are the test's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a server process whose algorithm is the test's."""

    def run(body: Callable[[ServerContext], Summary], *arguments: str) -> int:
        argv = ["server.py", "--local", "--run-id", "mine", "--override", f"port={free_port()}"]
        monkeypatch.setattr(sys, "argv", [*argv, *arguments])
        monkeypatch.setattr("smolcluster.algorithms.EDP.server.serve", body)
        return main("edp", "server")

    return run


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a worker process that never gets as far as taking part."""

    def never(*_: object) -> Participant:
        raise AssertionError("it took part")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["worker.py", *arguments])
        monkeypatch.setattr("smolcluster.algorithms.EDP.worker.Worker", never)
        return main("edp", "worker")

    return run


@pytest.fixture
def run_files(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "mine")


def server_log(run_files: RunPaths) -> list[dict[str, object]]:
    (file,) = run_files.logs.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the console shows of an error: one line, and no traceback."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    marks = (" ERROR ", " FATAL ")
    lines = [
        line
        for line in captured.err.splitlines()
        if line.startswith("error: ") or any(mark in line for mark in marks)
    ]
    assert len(lines) == 1, captured.err
    return lines[0]


def test_a_server_leaves_its_files_and_a_table(
    serve: Callable[..., int],
    run_files: RunPaths,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contexts: list[ServerContext] = []

    def body(context: ServerContext) -> Summary:
        contexts.append(context)
        return SUMMARY

    assert serve(body) == 0
    assert read_summary(run_files.summary) == SUMMARY
    assert "num_epochs" in run_files.config.read_text()
    assert latest_of(run_files.root.parent) == "mine", "there is no other"
    assert "0.2500" in capsys.readouterr().err
    (context,) = contexts
    assert (context.run.run_id, context.run.algorithm) == ("mine", "edp")
    assert {line["run"] for line in server_log(run_files)} == {"mine"}


def test_the_newest_run_is_one_that_has_begun_to_listen(
    serve: Callable[..., int], run_files: RunPaths
) -> None:
    create_run(run_files.root.parent, "before")
    newest: list[str | None] = []

    def body(context: ServerContext) -> Summary:
        newest.append(latest_of(run_files.root.parent))
        context.new_report("fp32", lambda: (0, 0))
        newest.append(latest_of(run_files.root.parent))
        raise PortBusy("somebody else listens there")

    assert serve(body) == 75
    assert newest == ["before", "mine"]


def test_without_progress_there_is_no_table(
    serve: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(lambda _: SUMMARY, "--no-progress") == 0
    assert "0.2500" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ClusterEmpty("no worker came"), 75),
        (NonFiniteLoss("worker 1 (pi5): step 3: loss is nan"), 1),
        (ConfigError("host_ip is wrong"), 2),
    ],
)
def test_a_known_error_is_one_line_its_exit_code_and_a_traceback_in_the_file(
    serve: Callable[..., int],
    run_files: RunPaths,
    capsys: pytest.CaptureFixture[str],
    error: SmolclusterError,
    code: int,
) -> None:
    def body(context: ServerContext) -> Summary:
        context.records.events.write(EpochFinished(epoch=0, step=1, samples_applied=32))
        raise error

    assert serve(body) == code
    assert str(error) in only_line(capsys)
    assert "Traceback" in str(server_log(run_files)[-1]["exception"])
    assert not run_files.summary.exists()
    assert len(read_events(run_files.events)) == 1, "what happened before is on disk"


def test_a_bug_is_one_line_and_70(
    serve: Callable[..., int], run_files: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(lambda _: 1 / 0) == 70
    line = only_line(capsys)
    assert "ZeroDivisionError" in line
    assert "; see /" in line
    assert "Traceback" in str(server_log(run_files)[-1]["exception"])


def test_a_bug_in_a_thread_is_written_down(
    serve: Callable[..., int], run_files: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(_: ServerContext) -> Summary:
        thread = threading.Thread(target=lambda: 1 / 0, name="greet")
        thread.start()
        thread.join(DEADLINE_S)
        return SUMMARY

    assert serve(body) == 0
    assert "internal error in thread greet" in only_line(capsys)
    assert any("Traceback" in str(line.get("exception")) for line in server_log(run_files))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_in_order(
    serve: Callable[..., int],
    run_files: RunPaths,
    capsys: pytest.CaptureFixture[str],
    signum: signal.Signals,
    code: int,
) -> None:
    seen: list[BaseException] = []

    def body(context: ServerContext) -> Summary:
        os.kill(os.getpid(), signum)
        try:
            context.check_stop()
        except BaseException as interrupt:
            seen.append(interrupt)
            raise
        return SUMMARY

    assert serve(body) == code
    assert len(seen) == 1, "the algorithm can say goodbye"
    assert signum.name in str(server_log(run_files)[-1]["message"])
    assert "Traceback" not in capsys.readouterr().err


def test_a_signal_that_pydantic_has_made_text_of_ends_the_process_in_order(
    serve: Callable[..., int], run_files: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(_: ServerContext) -> Summary:
        raise SchemaError("Error building a validator:\n  Interrupted: stopped by SIGTERM")

    assert serve(body) == 143
    assert "bug" not in capsys.readouterr().err
    assert server_log(run_files)[-1]["message"] == "stopped by SIGTERM"
    assert read_status(run_files.status).word == "stopped"


def test_a_server_makes_the_secret_that_is_not_there(
    serve: Callable[..., int], tmp_path: Path
) -> None:
    assert serve(lambda _: SUMMARY) == 0
    secret = tmp_path / "config" / "smolcluster" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("num_epoch=3", "num_epochs"),
        ("batch_size=0", "batch_size"),
        ("global_batch_size=96", "launch syncps"),
    ],
)
def test_a_wrong_override_is_one_line_and_2(
    serve: Callable[..., int], capsys: pytest.CaptureFixture[str], argument: str, words: str
) -> None:
    assert serve(lambda _: SUMMARY, "--override", argument) == 2
    assert words in only_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1", "macbook", "--local", "--server", "10.0.0.1"], "HOST:PORT"),
        (["1", "macbook", "--local", "--server", ":65432"], "HOST:PORT"),
        (["1", "macbook", "--local", "--server", "10.0.0.1:70000"], "port"),
        (["0", "macbook", "--local"], "worker_id is 0"),
        (["1", "toaster", "--local"], "toaster"),
        (["1", "macbook", "--local", "--override", "num_epochs=3"], "num_epochs"),
    ],
)
def test_a_worker_that_is_told_something_wrong_is_one_line_and_2(
    work: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert work(*arguments) == 2
    assert words in only_line(capsys)


def test_a_worker_without_a_secret_does_not_make_one(
    work: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work("1", "macbook", "--server", f"127.0.0.1:{free_port()}") == 77
    assert str(tmp_path / "config") in only_line(capsys)
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize("server", ["127.0.0.1", "[::1]", "localhost"])
def test_a_worker_without_a_server_says_where_it_looked(
    work: Callable[..., int], capsys: pytest.CaptureFixture[str], server: str
) -> None:
    address = f"{server}:{free_port()}"
    arguments = ("--local", "--server", address, "--override", "start_timeout_s=0.1")
    assert work("1", "macbook", *arguments) == 75
    assert address in only_line(capsys)


@pytest.mark.parametrize(
    ("told", "file", "run"),
    [
        (("--run-id", "mine"), "mine/logs/worker-rank0-macbook.log", "mine"),
        ((), "worker-rank0-macbook.log", ""),
    ],
)
def test_a_worker_that_never_joined_has_its_error_in_a_file(
    work: Callable[..., int], tmp_path: Path, told: tuple[str, ...], file: str, run: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--local", "--server", address, "--override", "start_timeout_s=0.1")
    assert work("1", "macbook", *told, *arguments) == 75
    lines = [json.loads(line) for line in (tmp_path / "runs" / file).read_text().splitlines()]
    [error] = [line for line in lines if line["level"] == "ERROR"]
    assert address in error["message"]
    assert (error["rank"], error["run"]) == (0, run)
    assert "ConnectTimeout" in error["exception"]


def test_a_worker_that_is_started_again_joins_no_other_run() -> None:
    """Its server may have gone for good, and another run be served where it was."""
    args = worker_parser(get_algorithm("edp")).parse_args(
        ["1", "pi5", "--local", "--run-id", "mine"]
    )
    settings = process.worker_settings("edp", args)
    with process._following(settings, args, "worker", 0) as (_log, _own, setup):
        with pytest.raises(RunFailed, match=f"of run {RUN.run_id} now, .* started for mine"):
            setup.on_run_known(RUN)
        setup.on_run_known(RUN.model_copy(update={"run_id": "mine"}))


@pytest.mark.parametrize(
    ("role", "own", "server"),
    [
        ("worker", ("1", "pi5"), "mini1"),
        ("worker", ("1", "pi5", "--override", "server=macbook"), "macbook"),
        ("worker", ("1", "pi5", "--server", "127.0.0.1:7000"), None),
        ("store", ("pi5",), "mini1"),
        ("store", ("pi5", "--override", "server=macbook"), "macbook"),
        ("store", ("pi5", "--server", "127.0.0.1:7000"), None),
        ("stage", ("mini2", "--override", "host_ip.mini2=127.0.0.1"), "win"),
        ("stage", ("mini2", "--server", "127.0.0.1:7000"), None),
    ],
)
def test_a_process_knows_whom_it_dials_unless_it_was_told_an_address_alone(
    role: Literal["worker", "store", "stage"],
    own: tuple[str, ...],
    server: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[Address] = []

    def meet(place: WorkerSetup | StoreSetup, *_: object) -> None:
        met.append(place.address)

    for name in ("follow", "hold"):
        monkeypatch.setattr(process, name, meet)
    file = tmp_path / "cluster.yaml"
    nodes = "nodes: {win: {stages: {host_ip: {mini2: 127.0.0.1}, port: 7000}}}"
    shipped = find_config("diloco", "cluster").read_text()
    more = "servers: [mini1, pi5]" if role == "store" else nodes if role == "stage" else ""
    file.write_text(f"{shipped}\n{more}\n")
    monkeypatch.setattr(sys, "argv", [f"{role}.py", *own, "--config", str(file)])
    ensure_secret(default_secret_path())
    assert main("diloco", role) == 0
    assert [each.node for each in met] == [server]


def test_the_command_for_a_worker_names_the_server_that_its_own_was_told() -> None:
    words = ["--override", "seed=1", "server=macbook"]
    args = server_parser(get_algorithm("edp")).parse_args(words)
    cluster = process.server_settings("edp", args).cluster
    command = process.worker_command("edp", args, cluster)
    assert command is not None
    asked = shlex.split(command)
    own = worker_parser(get_algorithm("edp")).parse_args(asked[asked.index("1") :])
    assert process.worker_settings("edp", own).cluster.server == cluster.server == "macbook"


@pytest.fixture
def shares(tmp_path: Path) -> Path:
    """A cluster file that says how much of a batch each of its three workers gets."""
    file = tmp_path / "cluster.yaml"
    shipped = find_config("edp", "cluster").read_text()
    file.write_text(f"{shipped}\nbatch_share: {{pi5: 0.2, win: 0.4, macbook: 0.4}}\n")
    return file


def test_shares_are_the_servers_affair_whatever_a_worker_is_told(
    work: Callable[..., int], shares: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--local", "--server", address, "--config", str(shares), "--workers", "4")
    assert work("1", "pi5", *arguments, "--override", "start_timeout_s=0.1") == 75
    assert address in only_line(capsys)


@pytest.mark.parametrize("name", ["macbook", "worker3", "mini2.local"])
def test_a_local_worker_is_told_where_its_server_is_by_any_name(
    work: Callable[..., int], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's list is what counts: a worker needs an address and the secret."""
    address = f"127.0.0.2:{free_port()}"
    arguments = ("--local", "--server", address, "--override", "start_timeout_s=0.1")
    assert work("1", name, *arguments) == 75
    assert address in only_line(capsys)


@pytest.mark.parametrize("algorithm", ["edp", "syncps", "pipeline"])
def test_only_workers_that_take_local_steps_are_several_processes(algorithm: str) -> None:
    mesh = NodeConfig(ranks=MeshSizes(dp=2))
    with pytest.raises(ConfigError, match=r"nodes\.gpubox\.ranks is dp 2 .* launch diloco"):
        spread(algorithm, mesh)
    pipeline = NodeConfig(stages=StagesConfig(host_ip={"pi5": "127.0.0.1"}))
    with pytest.raises(ConfigError, match=r"nodes\.gpubox\.stages is pi5, .* launch diloco"):
        spread(algorithm, pipeline)
    assert spread(algorithm, NodeConfig()) is None
    assert spread("diloco", mesh) is not None
    assert spread("diloco", pipeline) is not None
    with pytest.raises(ConfigError, match=r"nodes\.gpubox has ranks and stages"):
        spread("diloco", mesh.model_copy(update={"stages": pipeline.stages}))


def spread(algorithm: str, node: NodeConfig) -> object:
    args = argparse.Namespace(node="gpubox", workload=None)
    settings = replace(local_settings(), node=node)
    return spread_over_others(algorithm, args, settings, SECRET, logging.getLogger("test"))


def test_a_stage_of_no_worker_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stage.py", "pi5", "--local"])
    assert main("diloco", "stage") == 2
    assert "pi5 is a stage of no worker" in only_line(capsys)
