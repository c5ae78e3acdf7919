"""Ranks of a mesh that are killed, stopped, or raise an error; and torchrun, which forms the group again."""

import platform
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

import mesh_group
from harness import free_port
from processes import Child, Processes
from smolcluster.observability.report.page import title_of
from smolcluster.observability.view.view import read_view
from smolcluster.runs.paths import find_run
from waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.nightly

FLAGS = ("--config", "digits", "--run-id", "spread", "--batch-size", "64")
MODULE = ("-m", "smolcluster.distributed_training")
SPAWNED = "--multiprocessing-fork"
HANG_TIMEOUT_S = "20"
"""After which a rank is given up; on a busy machine one that lives may be silent for some seconds."""


def ranks_below(child: Child) -> dict[int, psutil.Process]:
    """The processes of a launcher that are ranks, by rank."""
    found = {}
    for process in psutil.Process(child.process.pid).children(recursive=True):
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        command = " ".join(process.cmdline())
        if rank is not None and ("distributed_training" in command or SPAWNED in command):
            found[int(rank)] = process
    return found


def is_training(folder: Path) -> bool:
    return newest_step(folder) > 0


def newest_step(folder: Path) -> int:
    """Of all checkpoints of all runs; 0: there are none."""
    steps = [int(each.name.partition("-")[2]) for each in folder.glob("*/checkpoints/step-*")]
    return max(steps, default=0)


def where_time_went(folder: Path) -> dict[str, dict[str, float]]:
    """What each process reported, by its title without its host."""
    processes = read_view(find_run(folder)).processes
    return {title_of(each).partition(" (")[0]: each.newest() for each in processes}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_mesh_by_its_name(processes: Processes, how: int) -> None:
    child = processes.start(
        *(sys.executable, *MODULE, *FLAGS, "--world-size", "2", "--tp", "2"),
        *("--epochs", "100000", "--save-interval", "5", "--hang-timeout", HANG_TIMEOUT_S),
        forked=False,
    )
    eventually(lambda: is_training(processes.runs), lambda: child.output)
    names = "steps_per_s", "share/forward", "share/backward", "cpu"

    def has_told() -> bool:
        told = where_time_went(processes.runs).get("rank 1", {})
        return all(told.get(name, 0) > 0 for name in names)

    eventually(has_told, lambda: child.output)  # of its first second nothing may be known yet
    ranks = ranks_below(child)
    assert ranks.keys() == {0, 1}
    ranks[1].send_signal(how)
    assert child.wait() != 0
    assert re.search(r"^error: rank 1 on .* failed first", child.output, re.MULTILINE), child.output
    assert not any(each.is_running() for each in ranks.values())
    paths = find_run(processes.runs)
    logs = "".join(each.read_text() for each in paths.logs.glob(f"rank-{platform.node()}*"))
    assert "rank 1 on" in logs and "this is a bug" not in logs + child.output


def test_no_rank_outlives_its_launcher(processes: Processes) -> None:
    child = processes.start(
        *(sys.executable, *MODULE, *FLAGS, "--world-size", "2", "--dp", "2"),
        *("--epochs", "100000", "--save-interval", "5"),
        forked=False,
    )
    eventually(lambda: is_training(processes.runs), lambda: child.output)
    ranks = ranks_below(child)
    assert len(ranks) == 2
    child.kill(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks.values(), DEADLINE_S)
    assert not alive


@pytest.mark.parametrize("loading", ["01", "1"])
def test_ctrl_c_while_ranks_load_ends_all_of_them_without_a_word(
    processes: Processes, loading: str
) -> None:
    args = f"workload_args.folder={processes.folder}", f"workload_args.ranks='{loading}'"
    child = processes.start(
        *(sys.executable, *MODULE, *FLAGS, "--world-size", "2", "--dp", "2"),
        *("--workload", f"{mesh_group.__file__}:slow_to_load", "--override", *args),
        forked=False,
    )
    eventually(
        lambda: all((processes.folder / rank).exists() for rank in loading), lambda: child.output
    )
    if "0" not in loading:
        child.wait_for("files in")
    ranks = ranks_below(child)
    assert ranks.keys() == {0, 1}
    child.kill(signal.SIGINT)
    assert child.wait() == 130, child.output
    assert not any(each.is_running() for each in ranks.values())
    for word in ("waits still", "failed first", "Traceback"):
        assert word not in child.output, child.output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_torchrun_forms_the_group_again_from_the_last_checkpoint(
    processes: Processes, how: int
) -> None:
    """Of a stopped rank torchrun itself takes half a minute to be rid."""
    child = processes.start(
        *(sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"),
        *("--master-port", str(free_port()), "--nproc-per-node", "2", "--max-restarts", "1"),
        *(*MODULE, *FLAGS, "--fsdp", "2", "--epochs", "100000", "--save-interval", "5"),
        *("--resume", "auto", "--hang-timeout", HANG_TIMEOUT_S),
        forked=False,
    )
    eventually(lambda: is_training(processes.runs), lambda: child.output)
    before = ranks_below(child)
    before[1].send_signal(how)
    _, alive = psutil.wait_procs(before.values(), DEADLINE_S)
    assert not alive, child.output
    reached = newest_step(processes.runs)
    eventually(lambda: newest_step(processes.runs) > reached, lambda: child.output)
    assert ranks_below(child).keys() == {0, 1}
    assert "resuming run spread" in child.output, child.output
    child.kill(signal.SIGTERM)
    child.wait()
