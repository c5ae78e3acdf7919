"""What a run of DiLoCo will cost: its own rule in fast motion, or in closed form where rounds are long.

Where the whole is exchanged at the end of such a round, worker w computes n_w batches and is then away for
e_w seconds, to send what it has changed and to get new weights: a round takes the T with Σ (T - e_w) / step_w
batches in it. Where exchanges are behind computation nothing is lost, but what a link cannot carry.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import harmonic_mean
from typing import Any, Literal, NamedTuple

from smolcluster.algorithms.DiLoCo.config import (
    DEFAULT_FRAGMENTS,
    DiLoCoConfig,
    Mode,
    gradient_codec,
)
from smolcluster.algorithms.DiLoCo.rounds import (
    MOST_WAITING,
    Pacing,
    SyncBeginning,
    Timing,
    choose_local_steps,
    hiding_round_s,
    most_local_steps,
    waiting_round_s,
    why_none,
)
from smolcluster.algorithms.planning.costs import (
    HANDLING_S,
    Forecast,
    Job,
    Site,
    codec_of,
    down_rates,
    lost_share,
    most_steps_s,
    samples_alone,
    seconds_of,
    up_rates,
)
from smolcluster.algorithms.planning.simulation import Done, Flow, Process, Simulation, Sleep
from smolcluster.algorithms.planning.stores import Traffic, as_spread, with_stores
from smolcluster.configs.schema import Settings

UNKNOWN_EPOCH = 100_000
"""Samples, where it is not known how many there are."""
STEADY = 0.1
"""A round is like the one before if it is longer by less than this share."""
FIRST_ROUNDS, COUNTED_ROUNDS = 4, 6
"""Before which none is counted, for times are not known yet; and how many are."""
LEAST_COUNTED = 2
"""So many beginnings of rounds must have been seen."""
Row = tuple[float, int, int, int]
"""Of a round that begins, or of one more exchange of each worker: when, H then, and how many batches and
exchanges of all workers had been before."""


@dataclass(frozen=True)
class Run:
    """What the rule must know of a run; bytes are of all weights."""

    mode: Mode
    num_fragments: int
    local_steps: int | None
    total_batches: int
    up_nbytes: int
    down_nbytes: int
    gradient_nbytes: int
    """To the server, in the synchronous beginning."""


class Found(NamedTuple):
    """Of a run in its steady state: batches a second of all workers, exchanges of the whole by each a second,
    and H."""

    batches_s: float
    exchanges_s: float
    local_steps: int


class Line:
    """What travels between the server and a worker in one direction, in order."""

    def __init__(
        self, simulation: Simulation, worker: int, way: Literal["up", "down"], latency_s: float
    ) -> None:
        """`latency_s`: of one direction."""
        self._simulation = simulation
        self._worker, self._way, self._latency_s = worker, way, latency_s
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._wake = Done()
        simulation.start(self._carry())

    def put(self, nbytes: float, arrive: Callable[[], None]) -> None:
        """Send so many bytes behind all before them."""
        self._waiting.append((nbytes, arrive))
        self._simulation.finish(self._wake)

    def _carry(self) -> Process:
        while True:
            yield self._wake
            while self._waiting:
                nbytes, arrive = self._waiting.popleft()
                if nbytes:
                    yield Flow(self._worker, self._way, nbytes)
                self._simulation.start(_later(self._latency_s, arrive))
            self._wake = Done()


def _later(seconds: float, do: Callable[[], None]) -> Process:
    yield Sleep(seconds)
    do()


@dataclass
class Machine:
    """A worker, and what the server knows of it."""

    timing: Timing
    up: Line
    down: Line
    todo: deque[int | None] = field(default_factory=deque)
    """Fragments whose changes are wanted, between batches, which are None."""
    wake: Done = field(default_factory=Done)
    weights: Done = field(default_factory=Done)
    """It has them, and may go on."""
    uncovered: list[int] = field(default_factory=list)
    """By fragment: batches that it was given since its change was asked for."""
    num_given: int = 0
    """Batches, which are numbered."""
    num_stepped: int = 0
    num_exchanges: int = 0
    """Since workers no longer wait for each other."""
    owed: set[int] = field(default_factory=set)
    """Fragments whose changes are on their way."""


class FastMotion:
    """A run in fast motion: the server's own `Pacing` over machines and links that are known.

    Messages to a worker, and from it, come in order: a step is heard of behind the fragment that is on its
    way. Samples do not run out, and all begin with the same weights.
    """

    def __init__(self, site: Site, run: Run) -> None:
        self._site, self._run = site, run
        self._simulation = Simulation(site)
        self._pacing = Pacing(
            run.mode,
            run.num_fragments,
            local_steps=run.local_steps,
            total_batches=run.total_batches,
            num_workers=len(site.workers),
            beginning=SyncBeginning(0, run.total_batches),
        )
        self._round = self._pacing.round
        self._machines = [self._machine(place) for place in range(len(site.workers))]
        self._timings = {place: each.timing for place, each in enumerate(self._machines)}
        self._num_outer_steps = self._num_batches = 0
        self._rows: list[Row] = []
        """Of rounds, or once workers do not wait for each other of exchanges: see `Row`."""

    def find(self) -> Found | None:
        """Go on until rounds are alike, then count; None: rounds are too long for a simulation."""
        for place in range(len(self._machines)):
            self._simulation.start(self._work(place))
        self._begin_round()
        self._decide()
        self._simulation.run(math.inf, lambda: self._is_over)
        counted = self._counted
        if len(counted) < LEAST_COUNTED:
            return None
        (began_s, _, before, first), (ended_s, _, after, last) = counted[0], counted[-1]
        seconds = ended_s - began_s
        exchanges_s = (last - first) / seconds / len(self._machines)
        return Found((after - before) / seconds, exchanges_s, self._round.local_steps)

    @property
    def _counted(self) -> list[Row]:
        """The rows from the one on whose H is like that before it, and from which on times are known."""
        for number in range(1 if self._pacing.is_async else FIRST_ROUNDS, len(self._rows)):
            if self._rows[number][1] <= (1 + STEADY) * self._rows[number - 1][1]:
                return self._rows[number:]
        return []

    @property
    def _is_over(self) -> bool:
        return len(self._counted) > COUNTED_ROUNDS

    def _machine(self, place: int) -> Machine:
        worker = self._site.workers[place]
        one_way_s = (worker.latency_s + HANDLING_S) / 2
        return Machine(
            Timing(worker.step_s, progressed_at=0.0, stepped_at=0.0),
            Line(self._simulation, place, "up", one_way_s),
            Line(self._simulation, place, "down", one_way_s),
            uncovered=[0] * self._run.num_fragments,
        )

    # a worker, as `worker.py` has it

    def _work(self, place: int) -> Process:
        machine, step_s = self._machines[place], self._site.workers[place].step_s
        while True:
            while not machine.todo:
                machine.wake = Done()
                yield machine.wake
            wanted = machine.todo.popleft()
            if wanted is None:
                yield Sleep(step_s)
                machine.up.put(0, lambda: self._on_stepped(place))
                continue
            machine.weights = Done()
            waits = self._pacing.waits
            machine.up.put(
                self._run.up_nbytes / self._run.num_fragments,
                partial(self._on_change, place, wanted),
            )
            if waits:
                yield machine.weights

    def _wants(self, machine: Machine, wanted: int | None) -> None:
        machine.todo.append(wanted)
        self._simulation.finish(machine.wake)

    # the server, as `server.py` has it

    def _on_stepped(self, place: int) -> None:
        machine = self._machines[place]
        machine.timing.unanswered.discard(machine.num_stepped)
        machine.num_stepped += 1
        machine.timing.stepped(self._site.workers[place].step_s, self._simulation.now)
        self._num_batches += 1
        self._decide()

    def _on_change(self, place: int, number: int) -> None:
        self._simulation.start(self._take(place, number))

    def _take(self, place: int, number: int) -> Process:
        """Take a change in, which is the server's work."""
        machine = self._machines[place]
        machine.timing.answered(number, self._simulation.now)
        yield self._simulation.serve(self._site.apply_s / self._run.num_fragments)
        machine.owed.discard(number)
        if self._pacing.is_async:
            self._send_weights(machine)
            machine.num_exchanges += 1
            self._num_outer_steps += 1
            self._pacing.choose_steps(self._timings.values(), self._num_outer_steps)
            done = [each.num_exchanges for each in self._machines]
            if min(done) > len(self._rows):
                self._note_row(self._num_batches, sum(done))
        self._decide()

    def _send_weights(self, machine: Machine) -> None:
        def arrive() -> None:
            self._simulation.finish(machine.weights)

        machine.down.put(self._run.down_nbytes / self._run.num_fragments, arrive)

    def _begin_round(self) -> None:
        self._pacing.begin_round(self._timings.values(), self._num_outer_steps)
        if self._pacing.is_async:
            self._rows.clear()  # those of the rounds before
        else:
            num_given = sum(each.num_given for each in self._machines)
            self._note_row(num_given, len(self._rows) * len(self._machines))

    def _note_row(self, num_batches: int, num_exchanges: int) -> None:
        row = self._simulation.now, self._round.local_steps, num_batches, num_exchanges
        self._rows.append(row)

    def _decide(self) -> None:
        """What the server's main thread does whenever it has heard of something."""
        if not self._pacing.is_async:
            self._step()
        for _ in self._round.numbers:
            self._hand_out()
            self._collect()

    def _step(self) -> None:
        now = self._simulation.now
        for number in list(self._round.gathering):
            if not any(number in each.owed for each in self._machines):
                self._round.gathered(number, now)
                self._num_outer_steps += 1
                for machine in self._machines:
                    self._send_weights(machine)
        if self._pacing.is_round_over:
            self._begin_round()

    def _hand_out(self) -> None:
        takers = {place: each for place, each in self._timings.items() if not each.is_asked}
        at_once = self._pacing.batches(takers, len(self._machines), self._simulation.now)
        for place, number in at_once.items():
            for _ in range(number):
                self._give(place)

    def _give(self, place: int) -> None:
        machine = self._machines[place]
        machine.timing.gets(machine.num_given, self._simulation.now)
        machine.num_given += 1
        machine.uncovered = [each + 1 for each in machine.uncovered]
        self._round.given(place)
        machine.down.put(0, lambda: self._wants(machine, None))

    def _collect(self) -> None:
        asked = self._pacing.requests(
            self._timings,
            self._simulation.now,
            owes_change=lambda place: bool(self._machines[place].owed),
        )
        for place, number in asked:
            self._ask(self._machines[place], number)

    def _ask(self, machine: Machine, number: int) -> None:
        if not machine.uncovered[number]:
            return
        machine.timing.asked(number, self._simulation.now, waits=self._pacing.waits)
        machine.uncovered[number] = 0
        machine.owed.add(number)
        machine.down.put(0, lambda: self._wants(machine, number))


def step_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    """Bytes of a worker's step to the server and from it: a round's, spread over its steps."""
    run = _run_of(job, settings)
    most_steps = most_local_steps(run.total_batches, settings.cluster.num_workers)
    local_steps = run.local_steps or most_steps
    return run.up_nbytes // local_steps, run.down_nbytes // local_steps


def predict(site: Site, job: Job, settings: Settings) -> Forecast:
    """What a run will be like once its rounds are as long as they get, with its synchronous beginning."""
    run = _run_of(job, settings)
    site = as_spread(site, settings, Traffic(run.up_nbytes, run.down_nbytes))
    found = FastMotion(site, run).find() or _of_long_rounds(site, run)
    has_none = why_none(len(settings.cluster.store_nodes), settings.train.optimizer)
    fraction = 0.0 if has_none else settings.of(DiLoCoConfig).sync_fraction
    in_steps = replace(
        run, mode="sync", num_fragments=1, local_steps=1, up_nbytes=run.gradient_nbytes
    )
    batches_s = _with_beginning(site, in_steps, found.batches_s, fraction)
    samples_per_s = settings.train.samples_per_push * min(batches_s, most_steps_s(site))
    exchanges_s = len(site.workers) * found.exchanges_s
    return Forecast(
        samples_per_s=samples_per_s,
        received_bytes_s=run.up_nbytes * exchanges_s,
        sent_bytes_s=run.down_nbytes * exchanges_s,
        lost=lost_share(samples_per_s, samples_alone(site, settings)),
        chosen=f"local_steps of about {found.local_steps}" if run.local_steps is None else "",
    )


def candidates(site: Site, job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
    """Stores, and codecs for both ways; how many steps a round has is best left to what is measured."""
    codecs = ("fp32", "int8", "int4")
    choices: Iterator[dict[str, Any]] = (
        {"codec_up": codec, "codec_down": codec, "local_steps": None} for codec in codecs
    )
    run = _run_of(job, settings)
    return with_stores(site, settings, choices, Traffic(run.up_nbytes, run.down_nbytes))


def _with_beginning(site: Site, in_steps: Run, batches_s: float, sync_fraction: float) -> float:
    """Batches a second of a run that begins `in_steps`, and has so many a second afterwards.

    There is none where workers would wait in it for more than their share of the computing time.
    """
    if not sync_fraction:
        return batches_s
    computing_batches_s = sum(1 / worker.step_s for worker in site.workers)
    synchronous = FastMotion(site, in_steps).find() or _of_long_rounds(site, in_steps)
    waited = computing_batches_s / synchronous.batches_s - 1
    share = sync_fraction if sync_fraction * waited <= MOST_WAITING else 0.0
    return 1 / (share / synchronous.batches_s + (1 - share) / batches_s)


def _of_long_rounds(site: Site, run: Run) -> Found:
    """The same in closed form: what happens at the ends of rounds is a small part of them."""
    steps_s = [worker.step_s for worker in site.workers]
    ups_s = [seconds_of(run.up_nbytes, rate) for rate in up_rates(site, lambda _, rate: rate)]
    downs_s = [seconds_of(run.down_nbytes, rate) for rate in down_rates(site)]
    away_s = [
        up_s + down_s + site.apply_s + worker.latency_s + HANDLING_S
        for worker, up_s, down_s in zip(site.workers, ups_s, downs_s, strict=True)
    ]
    waits, step_s = run.mode == "sync", harmonic_mean(steps_s)
    least_s = waiting_round_s(min(away_s)) if waits else hiding_round_s(away_s, [])
    local_steps = run.local_steps or choose_local_steps(
        step_s, least_s, run.total_batches, len(steps_s)
    )
    num_batches = local_steps * len(steps_s)
    round_s = local_steps * step_s
    if waits:
        round_s = _round_s(num_batches, steps_s, away_s)
    elif run.mode == "streaming":
        round_s = max(round_s, *ups_s, *downs_s)
    return Found(num_batches / round_s, 1 / round_s, local_steps)


def _round_s(num_batches: int, steps_s: list[float], away_s: list[float]) -> float:
    """The T by which so many batches have arrived; who is away for longer computes none."""
    speed = done = 0.0
    round_s = math.inf
    for away, step in sorted(zip(away_s, steps_s, strict=True)):
        if round_s <= away:
            break
        speed += 1 / step
        done += away / step
        round_s = (num_batches + done) / speed
    return round_s


def _run_of(job: Job, settings: Settings) -> Run:
    config = settings.of(DiLoCoConfig)
    codec_up = config.codec_up or codec_of(settings)
    return Run(
        mode=config.mode,
        num_fragments=config.num_fragments(DEFAULT_FRAGMENTS),
        local_steps=config.local_steps,
        total_batches=settings.train.num_batches(job.num_samples or UNKNOWN_EPOCH),
        up_nbytes=job.encoded_nbytes(codec_up),
        down_nbytes=job.encoded_nbytes(config.codec_down or "fp32"),
        gradient_nbytes=job.encoded_nbytes(gradient_codec(codec_up)),
    )
