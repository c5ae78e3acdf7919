"""How many local steps a round has, and whose they are, by measured times; and where the present one stands.

A round of DiLoCo (Douillard et al., 2311.08105) is H local steps on every worker and one exchange.
Departures: H is the mean over the workers, each of which takes as many steps as lets all arrive together,
and the first rounds are short.

Everything here depends on the times that are passed in, in seconds of any one clock: the server decides by
it, and what a run will cost is predicted by it.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import harmonic_mean, median
from typing import TypeVar

from smolcluster.algorithms.DiLoCo.config import Mode

WorkerId = TypeVar("WorkerId", bound=Hashable)

COMPUTING = 0.95
"""The least share of a round that workers should compute, where exchanging is not behind computation."""
HEADROOM = 1.5
"""Where it is, a round lasts so many times as long as the exchanges that it hides: they do not always take
the same time."""
FIRST_RETRY = 16
"""After 16, 32, 64, … rounds without a batch a worker gets one: should it still be slow, all wait for it."""
LEAST_ROUNDS = 25
"""So many a run has at least: momentum takes some rounds to come to its speed.

A GPT of 0.1 million parameters on four unlike workers, 340,000 bytes, streaming in one process: the
validation loss after 33 rounds was 2.530, after 133 rounds 2.540 (one seed).
"""


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


def warmed_up(round_index: int, local_steps: int) -> int:
    """H of a round: 1, 2, 4, … up to `local_steps`.

    Early on the workers' ways part fastest, and the rate of learning is at its highest.
    """
    return min(local_steps, 1 << min(round_index, local_steps.bit_length()))


def waiting_round_s(exchange_s: float) -> float:
    """Seconds that workers should compute in a round that ends with waiting for so many."""
    return exchange_s * COMPUTING / (1 - COMPUTING)


def hiding_round_s(exchanges_s: Iterable[float], uploads_s: Iterable[float]) -> float:
    """Seconds that workers should compute in a round to hide its exchanges.

    Args:
        exchanges_s: by fragment, from asking for it to the outer step: it must be over before the fragment's
            next turn.
        uploads_s: by worker, how long a fragment's change takes to arrive: its link must carry all of them.
    """
    by_fragment = list(exchanges_s)
    longest_s = max(by_fragment, default=0.0)
    link_s = len(by_fragment) * max(uploads_s, default=0.0)
    return HEADROOM * max(longest_s, link_s)


def own_steps(local_steps: int, step_s: float, steps_s: Collection[float]) -> int:
    """Local steps H_w of a worker of `step_s` in the time in which all, of `steps_s`, take `local_steps` each
    on average."""
    return max(1, round(local_steps * harmonic_mean(steps_s) / step_s))


def most_local_steps(total_batches: int, num_workers: int) -> int:
    """The largest mean H with which a run of so many batches has `LEAST_ROUNDS` rounds."""
    return max(1, total_batches // (LEAST_ROUNDS * max(1, num_workers)))


def choose_local_steps(step_s: float, round_s: float, total_batches: int, num_workers: int) -> int:
    """The smallest mean H whose rounds are so long, within what the run allows.

    Args:
        step_s: seconds of a local step; of unlike workers the harmonic mean.
        round_s: seconds that a worker should compute in a round; the number of rounds goes before it.
        total_batches: of the whole run; it has at least `LEAST_ROUNDS` rounds, of at least one step each.
        num_workers: that share a round.

    Raises:
        ValueError: `step_s` is not above 0.
    """
    if not step_s > 0:
        raise ValueError(f"a step of {step_s} s")
    most = most_local_steps(total_batches, num_workers)
    wanted = round_s / step_s
    return most if wanted >= most else max(1, math.ceil(wanted))


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


class Round:
    """A round of a run, which begins anew with `begin`; `num_fragments` are exchanged in it, one by one.

    A round has `local_steps` batches for each worker. Fragment i of F is asked for when all but
    (F - 1 - i) / F of them have been handed out.
    """

    def __init__(self, num_fragments: int) -> None:
        self._numbers = range(num_fragments)
        self.local_steps = 1
        """H: how many batches it has for each worker."""
        self.most_steps: int | None = None
        """So many it may come to while slow links hold it up; None: the user has said how long rounds are."""
        self.is_whole = False
        """Whether all fragments are exchanged together at its end."""
        self.num_handed = 0
        """Batches that were handed out, and not taken back."""
        self.plan: dict[int, int] = {}
        """How many more batches each worker should get, by its number."""
        self.asked: set[int] = set()
        """Fragments whose changes were asked for."""
        self.gathering: dict[int, float] = {}
        """Since when those are awaited that have not all come, also of the round before."""
        self.exchange_s: dict[int, float] = {}
        """By fragment: how long it took the last time from asking to the outer step."""

    def begin(
        self, local_steps: int, most_steps: int | None = None, *, is_whole: bool = False
    ) -> None:
        """`most_steps`: so many it may come to while slow links hold it up; None: it waits for them."""
        self.local_steps, self.most_steps, self.is_whole = local_steps, most_steps, is_whole
        self.num_handed = 0
        self.asked.clear()

    def num_left(self, num_workers: int) -> int:
        """Batches that are to be handed out."""
        return self.local_steps * num_workers - self.num_handed

    def num_later(self, number: int, num_workers: int) -> int:
        """How many batches are handed out after a fragment's exchange has begun."""
        num_after = 0 if self.is_whole else max(0, len(self._numbers) - 1 - number)
        return self.local_steps * num_workers * num_after // len(self._numbers)

    def budget(self, num_workers: int) -> int:
        """Batches that may be handed out before the next fragment is asked for.

        That is the one whose turn it is, where the user has said how long rounds are; else the first that
        may be asked for. While there is none, because their last exchanges are not over, the round becomes
        longer.
        """
        num_left = self.num_left(num_workers)
        planned = num_left - self.num_later(len(self.asked), num_workers)
        if self.most_steps is None or self.is_asked:
            return planned
        if (free := next(self.unasked, None)) is not None:
            return num_left - self.num_later(free, num_workers)
        longest = self.most_steps * num_workers - self.num_handed
        return max(planned, min(num_workers, longest))

    def is_due(self, number: int, num_workers: int) -> bool:
        """Whether all that belongs before a fragment's exchange has been handed out."""
        return self.num_handed > 0 and self.num_left(num_workers) <= self.num_later(
            number, num_workers
        )

    @property
    def unasked(self) -> Iterator[int]:
        """Fragments that may be asked for: none of their changes of the round before is awaited."""
        for number in self._numbers:
            if number not in self.asked and number not in self.gathering:
                yield number

    def ask(self, number: int, now: float) -> None:
        """A fragment's changes are asked for; `now` is of any one clock, in seconds."""
        self.asked.add(number)
        self.gathering[number] = now

    def gathered(self, number: int, now: float) -> None:
        """All of a fragment's changes have come."""
        self.exchange_s[number] = now - self.gathering.pop(number)

    @property
    def is_asked(self) -> bool:
        """Whether all fragments have been asked for."""
        return len(self.asked) == len(self._numbers)


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
