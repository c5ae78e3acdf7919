"""A cluster in fast motion: machines that compute, and flows that share links, at each instant fairly.

A process is a generator that yields what it waits for: `Sleep` for seconds, a `Flow` of bytes, or a `Done`.
Nothing is random: processes that ought not to march in step begin at different times.
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from smolcluster.algorithms.planning.costs import Site

MOST_EVENTS = 20_000
"""After so many the simulation ends before its time: machines may differ a thousandfold."""
AT_ONCE_S = 1e-9


@dataclass
class Done:
    """Whether something has come to its end, and who waits for it."""

    is_done: bool = False
    waiting: "list[Process]" = field(default_factory=list)


@dataclass(frozen=True)
class Sleep:
    """Nothing but time."""

    seconds: float


@dataclass(eq=False)
class Flow:
    """Bytes that travel between the server and the worker at that place of the site."""

    worker: int
    way: Literal["up", "down"]
    left: float
    done: Done = field(default_factory=Done)


Process = Generator[Sleep | Flow | Done, None, None]


class Simulation:
    """The machines and links of a site; `now` is in seconds."""

    def __init__(self, site: Site) -> None:
        self.now = 0.0
        self._site = site
        self._asleep: list[tuple[float, int, Process]] = []
        self._order = itertools.count()
        self._flows: list[Flow] = []
        self._rates: list[tuple[Flow, float]] | None = None
        """What each flow gets; None: flows have begun or ended since that was known."""
        self._server_free_at = 0.0

    def start(self, process: Process) -> None:
        """Let a process run until it waits."""
        for wanted in process:
            match wanted:
                case Sleep(seconds):
                    entry = (self.now + seconds, next(self._order), process)
                    heapq.heappush(self._asleep, entry)
                    return
                case Flow(done=done):
                    self._flows.append(wanted)
                    self._rates = None
                    done.waiting.append(process)
                    return
                case Done(is_done=False):
                    wanted.waiting.append(process)
                    return

    def finish(self, done: Done) -> None:
        """Let those go on who wait for it."""
        done.is_done = True
        waiting, done.waiting = done.waiting, []
        for process in waiting:
            self.start(process)

    def serve(self, seconds: float) -> Sleep:
        """The time until the server's main thread, which does one thing after the other, has done this
        too."""
        self._server_free_at = max(self.now, self._server_free_at) + seconds
        return Sleep(self._server_free_at - self.now)

    def run(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Go on until that time, or until it is over, or until much has happened, or nothing can any more."""
        for _ in range(MOST_EVENTS):
            if is_over():
                return
            if self._rates is None:
                self._rates = [*self._shared("up"), *self._shared("down")]
            flows = self._rates
            ends = [flow.left / rate for flow, rate in flows if rate]
            passed = min([*ends, self._asleep[0][0] - self.now if self._asleep else inf])
            if self.now + passed > until_s or passed == inf:
                return
            self.now += max(0.0, passed)
            for flow, rate in flows:
                flow.left = 0.0 if rate == inf else flow.left - rate * passed
            ended = [flow for flow, rate in flows if flow.left <= AT_ONCE_S * rate]
            if ended:
                self._flows = [flow for flow in self._flows if flow not in ended]
                self._rates = None
            for flow in ended:
                self.finish(flow.done)
            while self._asleep and self._asleep[0][0] <= self.now:
                self.start(heapq.heappop(self._asleep)[2])

    def _shared(self, way: str) -> Iterator[tuple[Flow, float]]:
        """What each flow of a direction gets: of a shared interface all the same, unless its own link gives
        less."""
        by_via: dict[str, list[tuple[float, Flow]]] = {}
        for flow in self._flows:
            if flow.way == way:
                worker = self._site.workers[flow.worker]
                own = worker.up_bytes_s if way == "up" else worker.down_bytes_s
                by_via.setdefault(worker.via, []).append((own, flow))
        for flows in by_via.values():
            shared = self._site.interface(self._site.workers[flows[0][1].worker])
            left = shared.in_bytes_s if way == "up" else shared.out_bytes_s
            for number, (own, flow) in enumerate(sorted(flows, key=lambda each: each[0])):
                rate = min(own, left / (len(flows) - number))
                left -= rate if rate < inf else 0.0
                yield flow, rate
