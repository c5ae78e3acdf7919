import fcntl
import inspect
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from connection_pairs import RUN
from harness import free_port
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks import wandb as wandb_module
from smolcluster.observability.sinks.wandb import (
    MAX_WAITING,
    WandbSink,
    wandb_for,
    wandb_mode,
)
from smolcluster.runs.events import CheckpointSaved, EpochFinished, Event, WorkerLost
from smolcluster.runs.paths import RunPaths
from waiting import eventually

CHILD = Path(inspect.getfile(WandbSink)).with_name("wandb_child.py")
FAKE = """
import fcntl, json, os, subprocess, sys

class Settings(dict):
    pass

class errors:
    class CommError(Exception):
        pass

class Run:
    def __init__(self, out):
        self.out = out
    def define_metric(self, name, **what):
        if name == "*":
            assert what == {"step_metric": os.environ["STEP"]}
    def log(self, values):
        self.out.write(json.dumps(values) + "\\n")
        self.out.flush()
        if os.environ.get("FAKE") == "breaks":
            raise RuntimeError("quota exceeded")
        if os.environ.get("FAKE") == "dies":
            os.kill(os.getpid(), 9)
    def finish(self):
        if os.environ.get("FAKE") == "hangs":
            lock = open(os.path.join(os.path.dirname(__file__), "lock"), "w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            print("locked", file=self.out, flush=True)
            subprocess.run(["sleep", "6000"], pass_fds=[lock.fileno()])
        self.out.write("finished\\n")
        self.out.close()

def init(settings, **start):
    print("noise on standard output", flush=True)
    print("noise on standard error", file=sys.stderr, flush=True)
    if os.environ.get("FAKE") == "fails":
        raise RuntimeError("no such entity")
    if os.environ.get("FAKE") == "reads":
        input("API key: ")
    out = open(os.path.join(start["dir"], "seen.txt"), "w")
    out.write(json.dumps({**start, **settings, "group_id": os.getpgrp()}) + "\\n")
    out.flush()
    return Run(out)
"""


class Warnings(list[str]):
    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def append(self, sentence: str) -> None:
        super().append(sentence)
        self.came.set()


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """A user's environment without a key or a login, with its home in tmp_path."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"HOME": str(home)} | more


def with_fake(tmp_path: Path, behaviour: str = "works", step: str = "step") -> dict[str, str]:
    place = tmp_path / "fake"
    place.mkdir()
    (place / "wandb.py").write_text(FAKE)
    return environment(
        tmp_path, PYTHONPATH=str(place), FAKE=behaviour, STEP=step, WANDB_MODE="offline"
    )


def wandb_sink(
    tmp_path: Path, environ: dict[str, str], warnings: list[str], timeout_s: float = 60.0
) -> WandbSink:
    (tmp_path / "run").mkdir(exist_ok=True)
    return WandbSink(
        tmp_path / "run",
        {
            "project": "digits",
            "group": "edp-1",
            "name": "EDP-server-mini1_lr0.001_bs32",
            "job_type": "server",
            "config": {"model": {"hidden": 128}},
        },
        warn=warnings.append,
        environ=environ,
        finish_timeout_s=timeout_s,
    )


def seen(tmp_path: Path) -> list[str]:
    return (tmp_path / "run" / "seen.txt").read_text().splitlines()


def written(folder: Path) -> list[Any]:
    """The records of wandb's own file of the run in this folder: LevelDB's log, of protocol buffers."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    [file] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, held, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part
            records.append(protocol.Record.FromString(held))
            held = b""
    return records


def history(records: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of values, without what wandb adds."""
    return [
        {
            name: json.loads(item.value_json)
            for item in record.history.item
            if not (name := item.key or "/".join(item.nested_key)).startswith("_")
        }
        for record in records
        if record.HasField("history")
    ]


def step(number: int, **values: float) -> MetricRecord:
    return MetricRecord("step", number, 0, {"loss": 0.5} | values, rank=1)


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_the_mode_follows_the_environment(tmp_path: Path, more: dict[str, str], mode: str) -> None:
    assert wandb_mode(environment(tmp_path, **more)) == mode


def test_a_login_for_the_right_host_turns_it_on(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    login = tmp_path / "home" / ".netrc"
    login.write_text("machine example.org login user password secret\n")
    login.chmod(0o600)
    assert wandb_mode(environ) == "offline"
    assert wandb_mode(environ | {"WANDB_BASE_URL": "https://example.org"}) == "online"
    login.write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode(environ) == "online"
    login.write_text("not a netrc file at all")
    assert wandb_mode(environ) == "offline"


def test_records_reach_wandb_in_order_and_the_run_is_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    sink = wandb_sink(tmp_path, with_fake(tmp_path), warnings)
    sink.log(step(1, grad_norm=float("nan")))
    sink.log(MetricRecord("worker", 2, 1, {"samples_per_s": 10.0}, rank=1, node="pi"))
    sink.close()
    sink.log(step(3))
    first, *lines, end = seen(tmp_path)
    start = json.loads(first)
    assert start.pop("group_id") != os.getpgrp()
    assert start == {
        "mode": "offline",
        "project": "digits",
        "group": "edp-1",
        "name": "EDP-server-mini1_lr0.001_bs32",
        "job_type": "server",
        "dir": str(tmp_path / "run"),
        "config": {"model": {"hidden": 128}},
        "console": "off",
        "silent": True,
        "x_save_requirements": False,
        "init_timeout": 20.0,
    }
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "epoch": 0, "loss": 0.5},
        {"step": 2, "epoch": 1, "rank1/samples_per_s": 10.0},
    ]
    assert end == "finished"
    assert warnings == []
    assert capfd.readouterr() == ("", "")


def test_the_child_is_written_to_now_and_then_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Mock(wraps=wandb_module._write)
    monkeypatch.setattr(wandb_module, "WRITE_EVERY_S", 60.0)
    monkeypatch.setattr(wandb_module, "_write", write)
    sink = wandb_sink(tmp_path, with_fake(tmp_path), [])
    eventually(lambda: write.called)
    for number in range(100):
        sink.log(step(number))
        time.sleep(0.002)
    sink.close()
    assert write.call_count == 2, "how it starts, and all steps"


def test_what_wandb_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_module, "MAX_NBYTES", 100)
    warnings = Warnings()
    sink = wandb_sink(tmp_path, with_fake(tmp_path), warnings)
    for number in range(20):
        sink.log(step(number))
    assert warnings.came.wait(60), "it is said while the run goes on"
    sink.log(step(20))
    sink.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("Weights & Biases gets no more values")
    [_start, end] = seen(tmp_path)
    assert end == "finished"


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fails", "RuntimeError: no such entity"),
        ("breaks", "RuntimeError: quota exceeded"),
        ("reads", "EOFError"),
        ("dies", "noise on standard"),
    ],
)
def test_a_failure_is_one_warning_and_no_noise(
    tmp_path: Path, behaviour: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings = Warnings()
    sink = wandb_sink(tmp_path, with_fake(tmp_path, behaviour), warnings)
    for number in range(20):
        sink.log(step(number))
    assert warnings.came.wait(60), "it is said while the run goes on"
    sink.close()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"Weights & Biases is off: {reason}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(180)
def test_a_finish_that_hangs_is_cut_with_all_that_it_started(tmp_path: Path) -> None:
    warnings: list[str] = []
    sink = wandb_sink(tmp_path, with_fake(tmp_path, "hangs"), warnings, timeout_s=3.0)
    sink.log(step(1))
    sink.close()
    assert seen(tmp_path)[-1] == "locked"
    with (tmp_path / "fake" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert warnings == [
        "Weights & Biases did not finish in 3 s; upload what is left with: "
        f"wandb sync {tmp_path / 'run' / 'wandb'}"
    ]


def test_where_it_is_disabled_nothing_is_started(tmp_path: Path) -> None:
    sink = wandb_sink(tmp_path, environment(tmp_path, WANDB_MODE="disabled"), [])
    sink.log(step(1))
    sink.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("in the way")
    sink = wandb_sink(tmp_path, with_fake(tmp_path), warnings)
    sink.log(step(1))
    sink.close()
    assert len(warnings) == 1
    assert "Weights & Biases is off" in warnings[0]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("asked", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "k"}, {}])
def test_training_never_waits_for_a_wandb_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]
) -> None:
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\nexec sleep 6000\n")
    idle.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(idle))
    warnings: list[str] = []
    sink = wandb_sink(tmp_path, environment(tmp_path, **asked), warnings, timeout_s=0.5)
    for number in range(2 * MAX_WAITING + 5000):
        sink.log(step(number))
    sink.close()
    if not asked:
        assert warnings == [], "who has no account misses nothing"
        return
    assert len(warnings) == 2
    assert warnings[0] == "Weights & Biases is too slow: it misses some records"
    assert warnings[1].startswith("Weights & Biases did not finish in 0.5 s")


def test_the_end_of_the_parent_ends_the_run_in_wandb(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    start = {"mode": "offline", "dir": str(tmp_path / "run"), "finish_timeout_s": 60.0}
    lines = json.dumps(start) + '\n{"step": 1}\n{"step": 2, "lo'
    subprocess.run(
        [sys.executable, "-P", str(CHILD)],
        input=lines.encode(),
        env=with_fake(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=True,
    )
    assert seen(tmp_path)[1:] == ['{"step": 1}', "finished"]


@pytest.mark.timeout(180)
def test_an_orphan_whose_wandb_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    environ = with_fake(tmp_path)
    (tmp_path / "fake" / "wandb.py").write_text("import time; time.sleep(600)")
    done = subprocess.run(
        [sys.executable, "-P", str(CHILD)],
        input=b'{"finish_timeout_s": 0.1}\n',
        env=environ,
        timeout=60,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL


def test_the_real_wandb_keeps_every_step_offline_in_the_runs_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    environ = environment(tmp_path, TMPDIR=str(tmp_path / "tmp"))
    warnings: list[str] = []
    sink = wandb_sink(tmp_path, environ, warnings)
    for number in range(100):
        sink.log(step(number, **{"grad_norm/fc1.weight": 0.125}))
        if number % 50 == 0:
            sink.log(MetricRecord("eval", number, 0, {"val_loss": 0.5 + number}))
    sink.happened(WorkerLost(rank=1, node="pi5", reason="it fell silent"))
    sink.close()
    assert warnings == []
    assert capfd.readouterr() == ("", "")
    outside = [path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "run")]
    assert [path for path in outside if not path.is_dir()] == []

    records = written(tmp_path / "run")
    rows = history(records)
    assert [row["step"] for row in rows if "loss" in row] == list(range(100))
    assert rows[0] == {"step": 0, "epoch": 0, "loss": 0.5, "grad_norm/fc1.weight": 0.125}
    assert [row["val_loss"] for row in rows if "val_loss" in row] == [0.5, 50.5]
    assert rows[-1] == {"step": 99, "epoch": 0, "events/worker_lost": 1}
    [run] = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.run_group, run.job_type) == ("digits", "edp-1", "server")
    metrics = {metric.name or metric.glob_name: metric for metric in defined(records)}
    assert metrics["*"].step_metric == "step"
    assert metrics["val_loss"].step_metric == "step"
    summary = metrics["val_loss"].summary
    assert (summary.min, summary.max, summary.last) == (True, False, True)
    assert metrics["val_accuracy"].summary.max


@pytest.mark.slow
def test_a_run_that_finds_no_wandb_is_kept_for_later(tmp_path: Path) -> None:
    warnings: list[str] = []
    environ = environment(
        tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=f"http://127.0.0.1:{free_port()}"
    )
    sink = wandb_sink(tmp_path, environ, warnings)
    sink.log(step(1))
    sink.close()
    assert [row["step"] for row in history(written(tmp_path / "run"))] == [1]
    assert warnings == [
        "Weights & Biases could not be reached; upload the run later with: "
        f"wandb sync {tmp_path / 'run' / 'wandb'}"
    ]


def defined(records: Sequence[Any]) -> list[Any]:
    return [record.metric for record in records if record.HasField("metric")]


def test_a_worker_is_a_run_of_its_own_beside_the_servers(tmp_path: Path) -> None:
    warnings: list[str] = []
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    of_three = RUN.train.model_copy(update={"global_batch_size": 3 * RUN.train.batch_size})
    sink = wandb_for(
        RUN.model_copy(update={"train": of_three}),
        "SyncPS",
        role="worker",
        node="mini2",
        rank=0,
        paths=paths,
        warn=warnings.append,
        environ=with_fake(tmp_path, step="worker/step"),
    )
    values = {"samples_per_s": 10.0, "share/forward": 0.25}
    sink.log(MetricRecord("worker", 7, 1, values, rank=0, node="mini2"))
    sink.close()
    first, line, end = seen(tmp_path)
    start = json.loads(first)
    train = RUN.train
    rates = f"lr{train.learning_rate:g}_bs{train.batch_size}"
    assert start["name"] == f"SyncPS-worker-mini2_rank0_{rates}", "with a worker's batch"
    assert (start["group"], start["job_type"]) == (RUN.run_id, "worker")
    own = {name: start["config"][name] for name in ("run_id", "role", "node", "rank")}
    assert own == {"run_id": RUN.run_id, "role": "worker", "node": "mini2", "rank": 0}
    assert json.loads(line) == {
        "worker/step": 7,
        "worker/samples_per_s": 10.0,
        "worker/share/forward": 0.25,
    }
    assert end == "finished"
    assert warnings == []


def test_events_are_counted_in_the_servers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_module, "NUM_STEPS_FIRST", 2)
    sink = wandb_sink(tmp_path, with_fake(tmp_path), [])
    lost = WorkerLost(rank=0, node="pi5", reason="it fell silent")
    events: list[Event] = [lost, EpochFinished(epoch=0, step=4, samples_applied=9), lost]
    sink.log(step(4))
    for event in events:
        sink.happened(event)
    await_row(tmp_path, {"step": 4, "epoch": 0, "events/worker_lost": 2})
    for number in range(5, 10):
        sink.log(step(number))
    sink.happened(CheckpointSaved(step=9))
    sink.close()
    rows = [json.loads(line) for line in seen(tmp_path)[1:-1]]
    assert [row["step"] for row in rows if "loss" in row] == [4, 5], "later steps are rarer"
    assert [row for row in rows if "loss" not in row] == [
        {"step": 4, "epoch": 0, "events/worker_lost": 2},
        {"step": 5, "epoch": 0, "events/worker_lost": 2, "events/checkpoint_saved": 1},
    ]


def await_row(tmp_path: Path, row: dict[str, Any]) -> None:
    """Wait until W&B has these values."""
    file = tmp_path / "run" / "seen.txt"
    eventually(lambda: file.exists() and json.dumps(row) in seen(tmp_path))
