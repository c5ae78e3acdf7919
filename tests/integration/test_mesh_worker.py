"""Meshes of real processes as workers of DiLoCo, alone, beside others, and when their ranks die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import mesh_group
from harness import Cluster, free_port, local_settings
from mesh_group import CASES, WORLD_SIZE
from own_workloads import alone
from processes import Child, Processes, is_alive
from smolcluster.configs.resolve import load_settings
from smolcluster.runs.events import BeginningEnded, parse_event
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import Summary, read_summary
from waiting import eventually

pytestmark = pytest.mark.nightly

PLAIN = "outer_lr=1", "outer_momentum=0", "codec_up=fp32", "codec_down=fp32"


def test_a_mesh_reads_and_writes_any_part_of_the_weights(processes: Processes) -> None:
    """Of every kind of cut: what a worker is told is what the mesh has, and what it tells is what it gets."""
    program = (sys.executable, mesh_group.__file__)
    ranks = [
        processes.start(*program, str(rank), str(WORLD_SIZE), str(processes.folder), *CASES)
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    for name in CASES:
        said = torch.load(processes.folder / f"{name}.pt", weights_only=False)
        places = said["places"]

        def part(flat: torch.Tensor, places: tuple[slice, ...] = places) -> torch.Tensor:
            return torch.cat([flat[place] for place in places])

        given, loaded = said["loaded"]
        assert torch.equal(given, loaded), name
        stepped, before = said["stepped"], said["before"]
        assert not torch.equal(given, stepped), name
        torch.testing.assert_close(said["change"], part(given - stepped), rtol=0, atol=0)
        new, followed = said["followed"]
        learnt = part(before - stepped)
        torch.testing.assert_close(part(followed), new + learnt)
        taken, after = said["taken"]
        torch.testing.assert_close(part(after), new + learnt - taken, rtol=1e-5, atol=1e-5)
        others = torch.ones(len(given), dtype=torch.bool)
        for place in places:
            others[place] = False
        assert torch.equal(after[others], before[others]), name
        assert torch.equal(part(said["held"]), part(after)), name
        assert not torch.equal(said["held"][others], after[others]), name
        single = mesh_group.alone(CASES[name])
        single.replica.load(given)
        single.compute(torch.arange(16, dtype=torch.int32))
        gradient, change = said["gradient"]
        expected = 2 * part(single.replica.grads)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        assert not change.any()


def started(
    processes: Processes,
    worker_id: int,
    node: str,
    *overrides: str,
    told: Sequence[str] = (),
    restarts: int = 0,
) -> Child:
    flags = "--local", "--workers", "3", "--restarts", str(restarts), *told
    return processes.worker(worker_id, node, *flags, "--override", *overrides, algorithm="diloco")


def test_a_mesh_alone_trains_as_one_process_does(processes: Processes) -> None:
    """In the synchronous beginning, and in rounds."""
    port = free_port()
    own = ["num_epochs=1", "batch_size=96", "mode=sync", "local_steps=4", *PLAIN]
    flags = ["--local", "--workers", "1", "--override", f"port={port}", *own]
    server = processes.server(*flags, algorithm="diloco")
    worker = started(processes, 1, "pi5", f"port={port}", "ranks.dp=2")
    assert server.wait() == 0, server.output
    assert worker.wait() == 0, worker.output
    assert "this worker has 2 ranks" in worker.output
    lines = find_run(processes.runs).events.read_text().splitlines()
    records = (parse_event(json.loads(line)) for line in lines)
    [over] = [each.event for each in records if each and isinstance(each.event, BeginningEnded)]
    assert not over.reason.startswith("0 steps"), over.reason
    settings = load_settings("diloco", "digits", None, own, environ={}, local=True)
    expected, _ = alone(settings, algorithm="diloco")
    assert losses_of(processes) == pytest.approx(expected, rel=1e-5)


def losses_of(processes: Processes) -> list[float]:
    lines = find_run(processes.runs).metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [each["loss"] for each in records if each.get("kind") == "step"]


def test_two_meshes_and_a_single_machine_train_while_meshes_die_and_are_back(
    processes: Processes, tmp_path: Path
) -> None:
    """A mesh that loses a rank, and one that is killed whole: every sample counts once, and all learn."""
    hurry = processes.folder / "hurry"
    port, workload = free_port(), f"{mesh_group.__file__}:paced"
    place, told = f"port={port}", ("--workload", workload)
    args = "workload_args.hurry", str(hurry)
    server = processes.server(
        *("--local", "--workers", "3", *told, "--override", place, *STORY, "=".join(args)),
        algorithm="diloco",
    )
    first = started(processes, 1, "pi5", place, "ranks.fsdp=2", told=told, restarts=2)
    second = started(processes, 2, "win", place, "ranks.dp=2", told=told)
    single = started(processes, 3, "macbook", place, told=told)
    server.wait_for("training starts")
    [rank] = ranks_below(first)
    os.kill(rank, signal.SIGKILL)
    first.wait_for("rank 1 on pi5 failed first: it was ended by SIGKILL")
    first.wait_for("this worker lost a rank; it is started again")
    eventually(lambda: first.output.count("joined run") == 2)
    [rank] = ranks_below(second)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    eventually(lambda: not is_alive(rank))
    again = started(processes, 2, "win", place, "ranks.dp=2", told=told)
    again.wait_for("joined run")
    hurry.touch()
    assert server.wait() == 0, server.output
    for worker in (first, again, single):
        assert worker.wait() == 0, worker.output
    summary = read_summary(find_run(processes.runs).summary)
    assert summary.samples_applied == summary.epochs * mesh_group.NUM_SAMPLES
    assert all(each.samples > 0 for each in summary.workers)
    apart = of_three_single_machines(tmp_path)
    assert summary.final.val_loss == pytest.approx(apart.final.val_loss, abs=0.1)


STORY = "num_epochs=30", "batch_size=8", "local_steps=4", "learning_rate=0.01", "min_workers=3"


def of_three_single_machines(folder: Path) -> Summary:
    settings = local_settings(*STORY, algorithm="diloco")
    cluster = Cluster(settings, folder, algorithm="diloco", workload=mesh_group.paced())
    return cluster.finish(*(cluster.worker(number + 1) for number in range(3)))


def ranks_below(worker: Child) -> list[int]:
    """The processes of a worker's other ranks, with a supervisor between or not."""
    listed = subprocess.run(
        ["ps", "-Aww", "-o", "pgid=", "-o", "pid=", "-o", "args="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    group = str(worker.process.pid)  # each child of a test leads a process group
    return [int(pid) for pgid, pid, args in rows if pgid == group and "spawn_main" in args]
