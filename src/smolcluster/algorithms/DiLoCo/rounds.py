"""How many local steps a round has, and when they are handed out and exchanged, by measured times.

A round of DiLoCo (Douillard et al., 2311.08105) is H local steps on every worker and one exchange.
Departures: H is the mean over the workers, each of which takes as many steps as lets all arrive together,
and the first rounds are short.

Everything here depends on the times that are passed in, in seconds of any one clock: the server decides by
it, and what a run will cost is predicted by it.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import harmonic_mean, median

from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.shares import Cost, shared_out
from smolcluster.training.optimizer import CLASSES

COMPUTING = 0.95
"""The least share of a round that workers should compute, where exchanging is not behind computation."""
HEADROOM = 1.5
"""Where it is, a round lasts so many times as long as the exchanges that it hides: they do not always take
the same time."""
LEAST_ROUNDS = 25
"""So many a run has at least: momentum takes some rounds to come to its speed.

A GPT of 0.1 million parameters on four unlike workers, 340,000 bytes, streaming in one process: the
validation loss after 33 rounds was 2.530, after 133 rounds 2.540 (one seed).
"""

SYNCHRONOUS_ROUNDS = 4
"""With which an asynchronous run begins: early on the workers' ways part fastest, and their speeds are not
known yet."""
MOST_WAITING = 0.15
"""So large a share of the time that all computing takes workers may wait in what is left of the beginning.

In a simulator a tenth of the steps was worth 0.02 to 0.03 nats after 1,500 steps, about as much as a fifth
more steps. Where links are slow it costs more than that (`benchmarks/results/time_to_loss-muon.md`).
"""
NUM_TRIED = 3
"""Steps after which it is known how long workers wait."""


FIRST_RETRY = 16
"""After 16, 32, 64, … rounds without a batch a worker gets one: should it still be slow, all wait for it."""
AHEAD_S, LEAST_AHEAD, MOST_AHEAD = 0.25, 2, 16
"""A worker holds batches for so many seconds, and so many, so that it never waits for the next."""
MOST_BEHIND = 256
"""So many at most where messages wait behind a fragment on its link."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
NUM_RECENT = 3
"""A step counts as long as the median of so many: a machine may be held up once."""


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

    def cost(self, now: float, *, is_streaming: bool) -> Cost:
        """What more batches cost it; who is silent with batches in hand is as slow as it has been silent.

        In streaming nobody waits for an upload.
        """
        silent_s = now - max(self.stepped_at, self.began_at) if self.unanswered else 0.0
        step_s = max(self.step_s, silent_s)
        upload_s = 0.0 if is_streaming else self.upload_s
        return Cost(now + len(self.unanswered) * step_s - silent_s + upload_s, step_s)

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
        num_idle = self.num_idle_rounds - 1  # the round of now may still give it one
        return num_idle >= FIRST_RETRY and num_idle.bit_count() == 1


class Round:
    """A round of a run, which begins anew with `begin`; `num_fragments` are exchanged in it, one by one.

    A round has `local_steps` batches for each worker. Fragment i of F is asked for when all but
    (F - 1 - i) / F of them have been handed out.
    """

    def __init__(self, num_fragments: int) -> None:
        self.numbers = range(num_fragments)
        """Of the fragments."""
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
        num_after = 0 if self.is_whole else max(0, len(self.numbers) - 1 - number)
        return self.local_steps * num_workers * num_after // len(self.numbers)

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
        for number in self.numbers:
            if number not in self.asked and number not in self.gathering:
                yield number

    def given(self, id_: int) -> None:
        """This worker has been given a batch."""
        self.num_handed += 1
        self.plan[id_] -= 1

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
        return len(self.asked) == len(self.numbers)


def batches_of(
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
    costs = {id_: each.cost(now, is_streaming=streaming) for id_, each in takers.items()}
    budget = round_.budget(num_workers)
    plan = shared_out(budget, costs)
    if streaming and budget > 0:
        # a slow worker's batch lasts longer than a fragment's share of the round, not than all of it
        whole = shared_out(round_.local_steps * num_workers, costs)
        slow = [
            id_
            for id_, each in takers.items()
            if whole[id_] and not plan[id_] and not each.unanswered
        ][:budget]
        others = {id_: cost for id_, cost in costs.items() if id_ not in slow}
        plan = shared_out(budget - len(slow), others) | dict.fromkeys(slow, 1)
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


def why_none(num_hosts: int, optimizer: str | None) -> str:
    """Why a run with this optimizer has no synchronous beginning on so many hosts; empty: it may have one."""
    if num_hosts > 1 and optimizer not in CLASSES:
        return f"the weights lie on several hosts, and {optimizer} steps them in one place only"
    return ""


class SyncBeginning:
    """How long a run begins synchronously: its first share of samples, or hardly where that takes too long.

    Early on the workers' ways part fastest. So in the beginning each exchange is one step of the inner
    optimizer along the mean gradient of all workers, as in synchronous training. A worker's own step updates
    the moments of its optimizer and leaves its weights; it keeps these moments for the rounds. After
    post-local SGD (Lin et al., 1808.07217). Debts of the codec are paid as those of changes are, not by a
    batch's share.
    """

    def __init__(self, num_samples: int, total_batches: int) -> None:
        """`num_samples`: the most that it takes; `total_batches`: batches of the whole run."""
        self._num_samples, self._total_batches = num_samples, total_batches
        self.num_steps = 0
        self.waited_s = 0.0
        """How long workers have waited between their steps, a mean weighted by their speeds."""
        self.is_over = not num_samples
        self.reason = ""
        """Why it ends before its time."""
        self._num_undisturbed = 0
        """Steps of this process since its first one, or since a worker was lost or late."""

    def stepped(self) -> None:
        self.num_steps += 1
        self._num_undisturbed += 1

    def begin_step(self, samples_applied: int, workers: Collection[Timing]) -> None:
        """Decide whether another step is taken, by what was applied and by measured times.

        Before the first step workers have waited for each other to come, which says nothing of exchanges.
        """
        waits = [(each.waited_s, 1 / each.step_s) for each in workers if each.waited_s is not None]
        if self._num_undisturbed > 1 and waits:
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
        self._num_undisturbed = min(1, self._num_undisturbed)


class Pacing:
    """Who is given a batch, and whose change is asked for, by measured times: what a server decides.

    A run is predicted by the same decisions (`costs.py`). Workers are known by a number, such as a session's.
    """

    def __init__(
        self,
        mode: Mode,
        num_fragments: int,
        *,
        local_steps: int | None,
        total_batches: int,
        num_workers: int,
        beginning: SyncBeginning,
    ) -> None:
        """Begin before the first round.

        Args:
            local_steps: H, as the user has set it; None: it follows from what is measured.
            total_batches: of the whole run.
            num_workers: that the run is meant for.
        """
        self.mode = mode
        self.local_steps, self.total_batches = local_steps, total_batches
        self.num_workers, self.beginning = num_workers, beginning
        self.round = Round(num_fragments)
        self.is_async = False
        """Whether workers no longer wait for each other, nor have rounds."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the run is in its synchronous beginning."""
        return not self.beginning.is_over

    @property
    def waits(self) -> bool:
        """Whether a worker that was asked for its change waits for new weights."""
        return self.is_synchronous or not (self.mode == "streaming" or self.is_async)

    @property
    def is_round_over(self) -> bool:
        """Whether all was asked for, and has come where workers wait for it."""
        return self.round.is_asked and not (self.waits and self.round.gathering)

    def num_rounds(self, num_outer_steps: int) -> int:
        """How many times all has been exchanged with everybody, after so many outer steps.

        When workers no longer wait for each other, an outer step is one worker's.
        """
        if self.mode != "async":
            return num_outer_steps // len(self.round.numbers)
        num_own = max(0, num_outer_steps - SYNCHRONOUS_ROUNDS)
        return min(num_outer_steps, SYNCHRONOUS_ROUNDS) + num_own // self.num_workers

    def choose_steps(self, workers: Collection[Timing], num_outer_steps: int) -> None:
        """Choose how many batches each of `workers` takes on average until its next exchange."""
        if self.is_synchronous:
            self.round.begin(1, is_whole=True)
        elif self.local_steps is not None:
            self.round.begin(self.local_steps)
        else:
            steps = measured_steps(self.round, workers, self.total_batches, self.mode)
            most_steps = most_local_steps(self.total_batches, len(workers))
            self.round.begin(warmed_up(self.num_rounds(num_outer_steps), steps), most_steps)

    def begin_round(self, workers: Collection[Timing], num_outer_steps: int) -> None:
        self.choose_steps(workers, num_outer_steps)
        for each in workers:
            each.begin()
        is_past = num_outer_steps >= SYNCHRONOUS_ROUNDS and not self.is_synchronous
        self.is_async = self.mode == "async" and is_past

    def batches(
        self, takers: Mapping[int, Timing], num_workers: int, now: float
    ) -> Mapping[int, int]:
        """How many batches each of `takers` is to be given at once, in a round that `num_workers` share."""
        if self.round.asked and self.waits:
            return {}
        mode: Mode = "sync" if self.waits else self.mode
        self.round.plan, at_once = batches_of(self.round, takers, num_workers, now, mode)
        return at_once

    def requests(
        self,
        workers: Mapping[int, Timing],
        now: float,
        *,
        owes_change: Callable[[int], bool],
        has_more: bool = True,
        has_open: bool = True,
    ) -> Iterator[tuple[int, int]]:
        """Whose change is to be asked for in which fragment; each is asked before the next is decided on.

        At the end of a round that exchanges the whole, who gets no more batches is asked before the others.

        Args:
            owes_change: whether a worker was asked for a change that has not come.
            has_more: whether there are batches to hand out.
            has_open: whether any that were handed out have not been applied.
        """
        if self.is_async:
            for id_, each in workers.items():
                is_due = not has_more or self._has_enough(each, workers.values())
                if is_due and not owes_change(id_):
                    yield id_, 0
            return
        for number in list(self.round.unasked):
            if not has_more or all(each.is_asked for each in workers.values()):
                is_due = has_open
            else:
                is_due = self.round.is_due(number, len(workers))
            if is_due:
                self.round.ask(number, now)
                yield from ((id_, number) for id_ in workers)
        if self.waits and not self.round.asked:
            for id_ in workers:
                if self.round.plan.get(id_, 1) <= 0:
                    yield from ((id_, number) for number in self.round.numbers)

    def _has_enough(self, worker: Timing, workers: Collection[Timing]) -> bool:
        """Whether one of those that do not wait for each other has been given what is its own in a round."""
        steps_s = [each.step_s for each in workers]
        return worker.num_since_asked >= own_steps(self.round.local_steps, worker.step_s, steps_s)
