"""A run of DiLoCo in fast motion: the server's own rule over machines and links that are known.

What each worker is given, when its changes are asked for and how long a round is are said by `rounds.py` and
`pacing.py`, as in a run. Messages to a worker, and from it, come in order: a step is heard of behind the
fragment that is on its way. Samples do not run out, and all begin with the same weights.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.DiLoCo.pacing import (
    SYNCHRONOUS_ROUNDS,
    Timing,
    has_enough,
    measured_steps,
    num_exchanges,
    shared_out,
)
from smolcluster.algorithms.DiLoCo.rounds import Round, most_local_steps, warmed_up
from smolcluster.algorithms.planning.costs import HANDLING_S, Site
from smolcluster.algorithms.planning.simulation import Done, Flow, Process, Simulation, Sleep

STEADY = 0.1
"""A round is like the one before if it is longer by less than this share."""
FIRST_ROUNDS, COUNTED_ROUNDS = 4, 6
"""Before which none is counted, for times are not known yet; and how many are."""
LEAST_COUNTED = 2
"""So many beginnings of rounds must have been seen."""
Row = TypeVar("Row", bound=tuple[float, int, *tuple[int, ...]])
"""A time, H, and counts."""


@dataclass(frozen=True)
class Run:
    """What the rule must know of a run; bytes are of all weights."""

    mode: Mode
    num_fragments: int
    local_steps: int | None
    total_batches: int
    up_nbytes: int
    down_nbytes: int


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


def _counted(rows: list[Row], first: int) -> list[Row]:
    """Rounds or exchanges, at the earliest from `first` on, from the one whose H is like that before it."""
    for number in range(first, len(rows)):
        if rows[number][1] <= (1 + STEADY) * rows[number - 1][1]:
            return rows[number:]
    return []


class FastMotion:
    """A server and its workers."""

    def __init__(self, site: Site, run: Run) -> None:
        self._site, self._run = site, run
        self._simulation = Simulation(site)
        self._round = Round(run.num_fragments)
        self._numbers = range(run.num_fragments)
        self._machines = [self._machine(place) for place in range(len(site.workers))]
        self._timings = [each.timing for each in self._machines]
        self._num_outer_steps = self._num_batches = 0
        self._is_async = False
        """Whether workers no longer wait for each other."""
        self._rounds: list[tuple[float, int, int]] = []
        """When each began, its H, and how many batches had been handed out before."""
        self._exchanges: list[tuple[float, int, int, int]] = []
        """Of those that do not wait: when each had had one more exchange; H then; by then, steps that were
        heard of and exchanges of all."""

    def find(self) -> Found | None:
        """Go on until rounds are alike, then count; None: rounds are too long for a simulation."""
        for place in range(len(self._machines)):
            self._simulation.start(self._work(place))
        self._begin_round()
        self._decide()
        self._simulation.run(math.inf, lambda: self._is_over)
        if self._is_async:
            return self._found_of_exchanges()
        counted = _counted(self._rounds, FIRST_ROUNDS)
        if len(counted) < LEAST_COUNTED:
            return None
        (began_s, _, before), (ended_s, local_steps, after) = counted[0], counted[-1]
        seconds = ended_s - began_s
        return Found((after - before) / seconds, (len(counted) - 1) / seconds, local_steps)

    def _found_of_exchanges(self) -> Found | None:
        counted = _counted(self._exchanges, 1)
        if len(counted) < LEAST_COUNTED:
            return None
        (began_s, _, before, first), (ended_s, _, after, last) = counted[0], counted[-1]
        seconds = ended_s - began_s
        exchanges_s = (last - first) / seconds / len(self._machines)
        return Found((after - before) / seconds, exchanges_s, self._round.local_steps)

    @property
    def _is_over(self) -> bool:
        if self._is_async:
            return len(_counted(self._exchanges, 1)) > COUNTED_ROUNDS
        return len(_counted(self._rounds, FIRST_ROUNDS)) > COUNTED_ROUNDS

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
            waits = self._waits
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

    @property
    def _waits(self) -> bool:
        return self._run.mode == "sync" or (self._run.mode == "async" and not self._is_async)

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
        if self._is_async:
            self._send_weights(machine)
            machine.num_exchanges += 1
            self._num_outer_steps += 1
            self._choose_steps()
            done = [each.num_exchanges for each in self._machines]
            if min(done) > len(self._exchanges):
                local_steps, num_batches = self._round.local_steps, self._num_batches
                self._exchanges.append((self._simulation.now, local_steps, num_batches, sum(done)))
        self._decide()

    def _send_weights(self, machine: Machine) -> None:
        def arrive() -> None:
            self._simulation.finish(machine.weights)

        machine.down.put(self._run.down_nbytes / self._run.num_fragments, arrive)

    def _choose_steps(self) -> None:
        run, num_workers = self._run, len(self._machines)
        if run.local_steps is not None:
            self._round.begin(run.local_steps)
            return
        steps = measured_steps(self._round, self._timings, run.total_batches, run.mode)
        num_rounds = num_exchanges(self._num_outer_steps, run.num_fragments, run.mode, num_workers)
        most_steps = most_local_steps(run.total_batches, num_workers)
        self._round.begin(warmed_up(num_rounds, steps), most_steps)

    def _begin_round(self) -> None:
        self._choose_steps()
        for timing in self._timings:
            timing.begin()
        num_given = sum(each.num_given for each in self._machines)
        self._rounds.append((self._simulation.now, self._round.local_steps, num_given))
        self._is_async = self._run.mode == "async" and self._num_outer_steps >= SYNCHRONOUS_ROUNDS

    def _decide(self) -> None:
        """What the server's main thread does whenever it has heard of something."""
        if not self._is_async:
            self._step()
        for _ in self._numbers:
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
        if self._round.is_asked and (not self._waits or not self._round.gathering):
            self._begin_round()

    def _hand_out(self) -> None:
        if self._round.asked and self._waits:
            return
        takers = {
            place: timing for place, timing in enumerate(self._timings) if not timing.is_asked
        }
        mode: Mode = "sync" if self._waits else self._run.mode
        now, num_workers = self._simulation.now, len(self._machines)
        self._round.plan, at_once = shared_out(self._round, takers, num_workers, now, mode)
        for place, number in at_once.items():
            for _ in range(number):
                self._give(place)

    def _give(self, place: int) -> None:
        machine = self._machines[place]
        machine.timing.gets(machine.num_given, self._simulation.now)
        machine.num_given += 1
        machine.uncovered = [each + 1 for each in machine.uncovered]
        self._round.num_handed += 1
        self._round.plan[place] -= 1
        machine.down.put(0, lambda: self._wants(machine, None))

    def _collect(self) -> None:
        if self._is_async:
            for machine in self._machines:
                if not machine.owed and has_enough(self._round, machine.timing, self._timings):
                    self._ask(machine, 0)
            return
        num_workers = len(self._machines)
        for number in list(self._round.unasked):
            everybody = all(each.is_asked for each in self._timings)
            if everybody or self._round.is_due(number, num_workers):
                self._round.ask(number, self._simulation.now)
                for machine in self._machines:
                    self._ask(machine, number)
        if self._waits and not self._round.asked:
            for place, machine in enumerate(self._machines):
                if self._round.plan.get(place, 1) <= 0:
                    self._ask(machine, 0)

    def _ask(self, machine: Machine, number: int) -> None:
        if not machine.uncovered[number]:
            return
        machine.timing.is_asked, machine.timing.num_since_asked = self._waits, 0
        machine.timing.asked(number, self._simulation.now)
        machine.uncovered[number] = 0
        machine.owed.add(number)
        machine.down.put(0, lambda: self._wants(machine, number))
