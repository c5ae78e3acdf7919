"""Who gets how many batches of a round, from measured times: what the server decides, and what is predicted.

Everything here depends on the times that are passed in, in seconds of any one clock.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import harmonic_mean, median

from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.DiLoCo.rounds import (
    Pace,
    Round,
    choose_local_steps,
    hiding_round_s,
    is_retried,
    most_local_steps,
    own_steps,
    plan_round,
    waiting_round_s,
)

AHEAD_S, LEAST_AHEAD, MOST_AHEAD = 0.25, 2, 16
"""A worker holds batches for so many seconds, and so many, so that it never waits for the next."""
MOST_BEHIND = 256
"""So many at most where messages wait behind a fragment on its link."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
NUM_RECENT = 3
"""A step counts as long as the median of so many: a machine may be held up once."""
SYNCHRONOUS_ROUNDS = 4
"""With which an asynchronous run begins: early on the workers' ways part fastest, and their speeds are not
known yet."""


@dataclass
class Timing:
    """How fast a worker is, and what it holds. Its defaults are of the monotonic clock."""

    step_s: float
    """How long a batch takes it."""
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    """How long its newest steps took."""
    num_idle_rounds: int = 0
    """Rounds that have begun since it was given a batch last."""
    is_measured_anew: bool = False
    """Whether its next step alone says how fast it is."""
    unanswered: set[Hashable] = field(default_factory=set)
    """Batches that it was given, and has not yet taken a step with."""
    is_asked: bool = False
    """Whether it was asked for its change, and gets nothing to compute before its new weights."""
    progressed_at: float = field(default_factory=time.monotonic)
    """When it was last seen to go on with what it is to do, or to be sent something, or had nothing to do."""
    began_at: float = 0.0
    """When it was given a batch after it had had none."""
    stepped_at: float = field(default_factory=time.monotonic)
    """When it joined, or was heard to have taken its last step."""
    upload_s: float = 0.0
    """How long after its last step its change is here."""
    num_before: dict[int, int] = field(default_factory=dict)
    """By fragment whose change it owes: batches that it has to take a step with before it sends it."""
    ready_at: dict[int, float] = field(default_factory=dict)
    """By fragment whose change it owes: since when it has been on its way."""
    on_way_s: dict[int, float] = field(default_factory=dict)
    """By fragment: how long its newest change was on its way."""
    num_since_asked: int = 0
    """Batches that it was given since it was asked for its change last."""
    waited_s: float | None = None
    """How long it had nothing to compute before this round's first step; None: that is to come."""

    @property
    def link_busy_s(self) -> float:
        """How long at most its change is on its way, and then new weights are."""
        return 2 * max(self.on_way_s.values(), default=0.0)

    def num_wanted(self, busy_s: float) -> int:
        """How many more batches it should hold, while its link may be busy with other things for so long."""
        ahead = min(MOST_AHEAD, math.ceil(AHEAD_S / self.step_s))
        behind = min(MOST_BEHIND, math.ceil(busy_s / self.step_s))
        return max(LEAST_AHEAD, ahead, 1 + behind) - len(self.unanswered)

    def pace(self, now: float, *, is_streaming: bool) -> Pace:
        """How fast it is; who is silent with batches in hand is as slow as it has been silent.

        In streaming nobody waits for an upload.
        """
        silent_s = now - max(self.stepped_at, self.began_at) if self.unanswered else 0.0
        step_s = max(self.step_s, silent_s)
        upload_s = 0.0 if is_streaming else self.upload_s
        return Pace(step_s, upload_s, now + len(self.unanswered) * step_s - silent_s)

    def gets(self, lease: Hashable, now: float) -> None:
        """It is given a batch."""
        if not self.unanswered:
            self.began_at = now
        self.unanswered.add(lease)
        self.num_since_asked += 1
        self.is_measured_anew = self.is_measured_anew or self.is_tried_again
        self.num_idle_rounds = 0

    def stepped(self, compute_s: float, now: float) -> None:
        """Learn from a step how fast it is: as it says, or as its steps come, if that is slower."""
        if self.waited_s is None:
            self.waited_s = max(0.0, now - self.stepped_at - compute_s)
        went_on = self.began_at < self.stepped_at  # it held more batches at its last step
        took_s = max(compute_s, now - self.stepped_at if went_on else 0.0)
        if self.is_measured_anew:
            self.is_measured_anew, self.step_s = False, took_s
            self.recent_s.clear()
        self.recent_s.append(took_s)
        smoothed_s = 0.7 * self.step_s + 0.3 * median(self.recent_s)
        self.step_s = min(MOST_STEP_S, max(LEAST_STEP_S, smoothed_s))
        self.stepped_at = self.progressed_at = now
        for fragment in self.num_before:
            self.num_before[fragment] -= 1
            if self.num_before[fragment] == 0:
                self.ready_at[fragment] = now

    def asked(self, fragment: int, now: float) -> None:
        """It is asked for its change in a fragment."""
        self.num_before[fragment] = len(self.unanswered)
        if not self.unanswered:
            self.ready_at[fragment] = now

    def answered(self, fragment: int, now: float) -> None:
        """Its change in a fragment has come."""
        self.progressed_at = now
        self.num_before.pop(fragment, None)
        upload_s = max(0.0, now - self.stepped_at)
        self.upload_s = 0.5 * self.upload_s + 0.5 * upload_s if self.on_way_s else upload_s
        if (ready_at := self.ready_at.pop(fragment, None)) is not None:
            self.on_way_s[fragment] = now - ready_at

    def begin(self) -> None:
        """A round begins with new weights, or it is to begin again."""
        self.is_asked, self.waited_s, self.num_since_asked = False, None, 0
        self.num_idle_rounds += 1

    @property
    def is_tried_again(self) -> bool:
        """Whether it should be given a batch because it was too slow for so long: it may not be any more."""
        return is_retried(self.num_idle_rounds - 1)  # the round of now may still give it one


def shared_out(
    round_: Round, takers: Mapping[int, Timing], num_workers: int, now: float, mode: Mode
) -> tuple[dict[int, int], dict[int, int]]:
    """How many more batches each of `takers` should get in a round, and how many of them at once.

    Args:
        round_: that is shared by `num_workers`, of whom the takers are those that may be given a batch.
        takers: by session.
        now: on the clock of all times.
        mode: `async` where workers no longer wait for each other.
    """
    wanted = {
        id_: each.num_wanted(0.0 if mode == "sync" else each.link_busy_s)
        for id_, each in takers.items()
    }
    if mode == "async":
        return dict(wanted), wanted
    streaming = mode == "streaming"
    paces = {id_: each.pace(now, is_streaming=streaming) for id_, each in takers.items()}
    budget = round_.budget(num_workers)
    plan = plan_round(budget, paces)
    if streaming and budget > 0:
        # a slow worker's batch lasts longer than a fragment's share of the round, not than all of it
        whole = plan_round(round_.local_steps * num_workers, paces)
        slow = [
            id_
            for id_, each in takers.items()
            if whole[id_] and not plan[id_] and not each.unanswered
        ][:budget]
        others = {id_: pace for id_, pace in paces.items() if id_ not in slow}
        plan = plan_round(budget - len(slow), others) | dict.fromkeys(slow, 1)
    plan |= {id_: 1 for id_, each in takers.items() if each.is_tried_again}
    return plan, {id_: min(plan[id_], wanted[id_]) for id_ in takers}


def measured_steps(
    round_: Round, workers: Collection[Timing], total_batches: int, mode: Mode
) -> int:
    """H by measured times: the least that keeps workers computing; before there are any, what it was.

    Streaming exchanges behind computation: a round need only be as long as that takes.
    """
    exchanges_s = round_.exchange_s.values()
    waits = [each.waited_s for each in workers if each.waited_s is not None]
    away_s = [2 * each.upload_s + each.step_s for each in workers if each.on_way_s]
    measured: Mapping[Mode, Collection[float]] = {
        "sync": waits,
        "streaming": exchanges_s,
        "async": away_s,
    }
    if not (workers and measured[mode]):
        return min(round_.local_steps, most_local_steps(total_batches, len(workers)))
    if mode == "streaming":
        round_s = hiding_round_s(exchanges_s, [each.upload_s for each in workers])
    elif mode == "async":
        round_s = hiding_round_s(away_s, [])
    else:
        round_s = waiting_round_s(min(waits))
    step_s = harmonic_mean([each.step_s for each in workers])
    return choose_local_steps(step_s, round_s, total_batches, len(workers))


def num_exchanges(num_outer_steps: int, num_fragments: int, mode: Mode, num_workers: int) -> int:
    """How many times all has been exchanged with everybody, after so many outer steps.

    When workers no longer wait for each other, an outer step is one worker's.
    """
    if mode != "async":
        return num_outer_steps // num_fragments
    num_own = max(0, num_outer_steps - SYNCHRONOUS_ROUNDS)
    return min(num_outer_steps, SYNCHRONOUS_ROUNDS) + num_own // num_workers


def has_enough(round_: Round, worker: Timing, workers: Collection[Timing]) -> bool:
    """Whether one of those that do not wait for each other has been given what is its own in a round."""
    steps_s = [each.step_s for each in workers]
    return worker.num_since_asked >= own_steps(round_.local_steps, worker.step_s, steps_s)
