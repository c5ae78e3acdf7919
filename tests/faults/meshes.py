"""A case of the fault matrix on a mesh: two ranks, of which one reaches the other through the proxy.

Ranks are processes. Where the fault ends them they are started again without it, and go on by themselves.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import Tensor

from faults import held_rank
from faults.cases import (
    BATCH,
    EPOCHS,
    HOLD_AT,
    KEPT_STEPS,
    NUM_STEPS,
    UNHURRIED_S,
    Case,
    Ending,
    check_same_training,
)
from faults.proxy import POINTS, SILENT, FaultProxy
from harness import assert_applied_once, free_port, steps_in
from processes import Child, Processes
from smolcluster.observability.metrics import MetricRecord
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.checkpoint import MODEL_FILE
from smolcluster.utils.retry import Deadline
from waiting import DEADLINE_S

WORLD_SIZE = 2
QUICK_S = 8.0
"""How long a rank is silent, or all ranks hang, before they are given up where a case is about silence."""
BUG = "this is a bug"


@dataclass
class PlayedMesh:
    """A case that has been played."""

    summary: Summary
    steps: list[MetricRecord]
    weights: Tensor
    ended_with: list[list[int]]
    """Exit codes of the ranks of each attempt."""
    said: str
    """By all ranks."""
    struck: bool
    noticed_after_s: float | None
    """Seconds from the strike until a rank had ended, or tried again to be let in."""
    connections: int

    @property
    def losses(self) -> list[float]:
        """By step, of one that was taken again the last one; and of the validation samples."""
        losses = {each.step: each.values["loss"] for each in self.steps}
        last = self.summary.final.val_loss
        assert last is not None
        return [*(losses[step] for step in sorted(losses)), last]


def play(processes: Processes, case: Case | None = None) -> PlayedMesh:
    """Play a case, or without one a run without any fault."""
    point = POINTS["mesh"][case.point] if case else None
    ending = case.ending if case else Ending.UNNOTICED
    fault = case.fault if case else None
    may_go_on = processes.folder / held_rank.GO_ON
    port, group = free_port(), point.group if point else 0
    target = processes.folder / held_rank.TARGET
    noticed_at: float | None = None
    proxy = FaultProxy((lambda: int(target.read_text())) if group else port, point, fault)
    with closing(proxy):
        hang_timeout_s = QUICK_S if fault in SILENT else UNHURRIED_S
        ports = (port, port if group else proxy.port)
        ranks = _started(processes, ports, proxy.port, group, hang_timeout_s)
        if case is None or case.point == "end":
            may_go_on.touch()
        for _ in _until_all_have_ended(ranks):
            if proxy.struck.is_set() and ending is not Ending.ENDED:
                may_go_on.touch()
            has_ended = any(rank.process.poll() is not None for rank in ranks)
            is_noticed = has_ended if ending is Ending.ENDED else proxy.connections > 1
            if noticed_at is None and proxy.struck.is_set() and is_noticed:
                noticed_at = time.monotonic()
    attempts = [ranks]
    if ending is Ending.ENDED:
        may_go_on.touch()
        port = free_port()
        attempts.append(_started(processes, (port, port), 0, 0, UNHURRIED_S))
    ended_with = [[rank.wait() for rank in each] for each in attempts]
    paths = find_run(processes.runs)
    newest = paths.checkpoints / f"step-{NUM_STEPS['mesh']:08}" / MODEL_FILE
    return PlayedMesh(
        summary=read_summary(paths.summary),
        steps=[each.record for each in steps_in(paths.metrics)],
        weights=torch.cat([each.flatten() for _, each in sorted(load_file(newest).items())]),
        ended_with=ended_with,
        said="\n".join(rank.output for each in attempts for rank in each),
        struck=proxy.struck.is_set(),
        noticed_after_s=None if noticed_at is None else noticed_at - proxy.struck_at,
        connections=proxy.connections,
    )


def _started(
    processes: Processes, ports: tuple[int, ...], proxy_port: int, group: int, hang_timeout_s: float
) -> list[Child]:
    """Start rank 0, and rank 1, which looks for rank 0 at the second of the ports."""
    batch_size = str(BATCH["mesh"] // WORLD_SIZE)
    return [
        processes.start(
            *(sys.executable, held_rank.__file__, str(processes.folder)),
            *(str(HOLD_AT), str(proxy_port), str(group if rank else 0)),
            *("--config", "digits", "--epochs", str(EPOCHS), "--batch-size", batch_size),
            *("--save-interval", str(KEPT_STEPS), "--run-id", "faulty", "--resume", "auto"),
            *("--world-size", str(WORLD_SIZE), "--fsdp", str(WORLD_SIZE), "--no-progress"),
            *("--hang-timeout", str(hang_timeout_s), "--rank", str(rank)),
            *("--master-port", str(port)),
        )
        for rank, port in enumerate(ports)
    ]


def _until_all_have_ended(ranks: list[Child]) -> Iterator[None]:
    deadline = Deadline(DEADLINE_S)
    while any(rank.process.poll() is None for rank in ranks):
        assert not deadline.expired, "\n".join(rank.output for rank in ranks)
        yield
        time.sleep(0.02)
    yield  # all may have ended since


def check_whole(played: PlayedMesh) -> None:
    """The last attempt ended well, and every sample of every epoch was applied once."""
    assert played.ended_with[-1] == [0] * WORLD_SIZE, played.said
    assert BUG not in played.said
    summary = played.summary
    total = EPOCHS * summary.train_samples
    assert (summary.steps, summary.samples_applied) == (NUM_STEPS["mesh"], total)
    assert_applied_once(played.steps, summary.train_samples, EPOCHS)


def check(case: Case, played: PlayedMesh, reference: PlayedMesh) -> None:
    """It ended, and went on, as it must; and what was trained is what a run without a fault trains."""
    assert played.struck, f"the point was never reached: {played.said}"
    check_whole(played)
    if case.ending is Ending.ENDED:
        first, _ = played.ended_with
        assert 0 not in first, "a rank has ended well"
        assert "failed first: " in played.said
        assert case.fault in SILENT or "no rank has got on" not in played.said
        num_again = len(played.steps) - NUM_STEPS["mesh"]
        assert num_again <= 2 * KEPT_STEPS, "steps that were kept are taken again"
    else:
        assert len(played.ended_with) == 1
        assert len(played.steps) == NUM_STEPS["mesh"]
        assert played.connections == (2 if case.ending is Ending.TURNED_AWAY else 1)
    assert (played.noticed_after_s is None) == (case.ending is Ending.UNNOTICED)
    check_same_training(played.losses, reference.losses, played.weights, reference.weights)
