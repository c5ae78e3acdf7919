"""How fast a worker is by measured times, and how batches are shared out so that all arrive together.

Times are passed in, in seconds of any one clock: the server decides by them, and what a run will cost is
predicted by them.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

WorkerId = TypeVar("WorkerId", bound=Hashable)

FIRST_RETRY = 16
"""After 16, 32, 64, … rounds without a batch a worker gets one: should it still be slow, all wait for it."""
AHEAD_S, LEAST_AHEAD, MOST_AHEAD = 0.25, 2, 16
"""A worker holds batches for so many seconds, and so many, so that it never waits for the next."""
MOST_BEHIND = 256
"""So many at most where messages wait behind a fragment on its link."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
NUM_RECENT = 3
"""A step counts as long as the median of so many: a machine may be held up once."""


@dataclass(frozen=True)
class Pace:
    """How fast a worker is, as measured.

    Attributes:
        step_s: seconds a local step takes, above 0; infinity: it takes none.
        upload_s: seconds from its last step until all that it changed has arrived.
        busy_until: when it is done with the batches that it holds, in seconds of any one clock.
    """

    step_s: float
    upload_s: float = 0.0
    busy_until: float = 0.0

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.upload_s >= 0 and math.isfinite(self.busy_until)):
            raise ValueError(f"no pace can be {self}")

    def arrival(self, num_steps: float) -> float:
        """When its change has arrived if it takes so many more steps."""
        return self.busy_until + self.upload_s + num_steps * self.step_s

    def steps_until(self, arrival: float) -> int:
        """How many more steps it can take to have arrived by then."""
        if not math.isfinite(self.step_s + self.upload_s):
            return 0
        return max(0, math.floor((arrival - self.arrival(0)) / self.step_s))


def is_retried(num_idle_rounds: int) -> bool:
    """Whether who had nothing to do in so many rounds is given a batch, which measures its speed anew."""
    return num_idle_rounds >= FIRST_RETRY and num_idle_rounds.bit_count() == 1


def plan_round(budget: int, workers: Mapping[WorkerId, Pace]) -> dict[WorkerId, int]:
    """Share out `budget` more steps so that the last worker arrives as early as it can.

    Water-filling: all workers are filled up to a common time of arrival, what remains goes to who arrives
    first with one step more. Who would arrive later without a step of its own gets none. It can be asked
    anew at any time in a round: what workers hold then is in their `busy_until`.

    Returns:
        Steps for each worker, Σ = budget; all 0 if nobody can take any.
    """
    able = {worker: pace for worker, pace in workers.items() if math.isfinite(pace.arrival(1))}
    plan = dict.fromkeys(workers, 0)
    if not able or budget <= 0:
        return plan
    level = _water_level(budget, list(able.values()))
    plan |= {worker: pace.steps_until(level) for worker, pace in able.items()}
    order = {worker: number for number, worker in enumerate(able)}
    queue = [
        (pace.arrival(plan[worker] + 1), order[worker], worker) for worker, pace in able.items()
    ]
    heapq.heapify(queue)
    for _ in range(budget - sum(plan.values())):
        _, number, worker = queue[0]
        plan[worker] += 1
        heapq.heapreplace(queue, (able[worker].arrival(plan[worker] + 1), number, worker))
    return plan


def _water_level(budget: int, paces: list[Pace]) -> float:
    """The arrival by which steps, if they could be broken, come to `budget`; a hair less, for rounding.

    That of the workers which begin before it: n(T) = Σ (T - arrival_i(0)) / step_i = budget.
    """
    speed = started = level = 0.0
    by_start = sorted(paces, key=lambda pace: pace.arrival(0))
    for number, pace in enumerate(by_start):
        speed += 1 / pace.step_s
        started += pace.arrival(0) / pace.step_s
        level = (budget + started) / speed
        if number + 1 < len(by_start) and level <= by_start[number + 1].arrival(0):
            break
    return level - 1e-9 * max(1.0, abs(level))


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

    def asked(self, fragment: int, now: float, *, waits: bool) -> None:
        """It is asked for its change in a fragment; `waits`: and for no other before it has new weights."""
        self.is_asked, self.num_since_asked = waits, 0
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
