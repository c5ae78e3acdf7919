"""How long a run begins synchronously: its first share of samples, or hardly where that would take too long.

Early on the workers' ways part fastest. So in the beginning each exchange is one step of the inner optimizer
along the mean gradient of all workers, as in synchronous training. A worker's own step updates the moments of
its optimizer and leaves its weights; it keeps these moments for the rounds. After post-local SGD (Lin et al.,
1808.07217). Debts of the codec are paid as those of changes are, not by a batch's share.
"""

from collections.abc import Collection
from statistics import harmonic_mean

from smolcluster.algorithms.DiLoCo.pacing import Timing
from smolcluster.training.optimizer import CLASSES

MOST_WAITING = 0.15
"""So large a share of the time that all computing takes workers may wait in what is left of the beginning.

In a simulator a tenth of the steps was worth 0.02 to 0.03 nats after 1,500 steps, about as much as a fifth
more steps. Where links are slow it costs more than that (`benchmarks/results/time_to_loss-muon.md`).
"""
NUM_TRIED = 3
"""Steps after which it is known how long workers wait."""


def why_none(num_hosts: int, optimizer: str | None) -> str:
    """Why a run with this optimizer has no synchronous beginning on so many hosts; empty: it may have one."""
    if num_hosts > 1 and optimizer not in CLASSES:
        return f"the weights lie on several hosts, and {optimizer} steps them in one place only"
    return ""


class SyncBeginning:
    """Whether a run is still in its synchronous beginning."""

    def __init__(self, num_samples: int, total_batches: int) -> None:
        """`num_samples`: the most that it takes; `total_batches`: batches of the whole run."""
        self._num_samples, self._total_batches = num_samples, total_batches
        self.num_steps = 0
        self.waited_s = 0.0
        """How long workers have waited between their steps, a mean weighted by their speeds."""
        self.is_over = not num_samples
        self.reason = ""
        """Why it ends before its time."""
        self._has_stepped = self._is_measured = False
        """Whether this process has taken a step, and one more."""

    def stepped(self) -> None:
        self.num_steps += 1
        self._is_measured, self._has_stepped = self._has_stepped, True

    def begin_step(self, samples_applied: int, workers: Collection[Timing]) -> None:
        """Decide whether another step is taken, by what was applied and by measured times.

        Before the first step workers have waited for each other to come, which says nothing of exchanges.
        """
        waits = [(each.waited_s, 1 / each.step_s) for each in workers if each.waited_s is not None]
        if self._is_measured and waits:
            speed = sum(speed for _, speed in waits)
            self.waited_s += sum(waited_s * speed for waited_s, speed in waits) / speed
        if workers and self.num_steps >= NUM_TRIED and samples_applied:
            left_s = self.waited_s * (self._num_samples / samples_applied - 1)
            if left_s > MOST_WAITING * self.computing_s(workers):
                self.end(f"workers would wait {left_s:.3g} s for each other and its exchanges")
        self.is_over = bool(self.reason) or samples_applied >= self._num_samples

    def computing_s(self, workers: Collection[Timing]) -> float:
        """Seconds that these workers compute in the whole run."""
        step_s = harmonic_mean([each.step_s for each in workers])
        return self._total_batches * step_s / len(workers)

    def end(self, reason: str) -> None:
        """End it after the step of now, for `reason`."""
        self.reason = self.reason or reason

    def disturb(self) -> None:
        """A worker was lost or late: how long others have waited for it says nothing of exchanges."""
        self._is_measured = False
