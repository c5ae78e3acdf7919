"""What a process counts of its own work: seconds by phase, steps, samples, bytes before and after encoding.

    with meter("forward"):
        loss = model(inputs)

One thread does the work and times it, for a microsecond or two a phase; any thread may read the sums, which
only grow. On an accelerator the work is only begun in the phase that asks for it, and waited for where its
result is needed. In every window of `WINDOW_S` seconds the first steps are also kept span by span, for a
trace; processes that agree on the time record the same moments.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from smolcluster.utils.gpu import Read, no_gpu
from smolcluster.utils.peak_memory import PeakMemory

Phase = Literal["data", "forward", "backward", "encode", "send", "wait", "apply"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PEAK = "peak_bytes/"
"""What the most memory of a phase is called by in the numbers of a process, before the phase."""
STEP = len(PHASES)
"""In a span: a whole step, whose phases lie within it."""
WINDOW_S = 10.0
STEPS_KEPT = 32
"""Steps of a window that are kept span by span."""
MAX_SPANS = 1000


class Span(NamedTuple):
    """A stretch of time: a place in `PHASES` or `STEP`, its start (`time.perf_counter`), and its seconds."""

    what: int
    start: float
    seconds: float


class Computed(NamedTuple):
    """The samples that a process has computed last.

    Attributes:
        epoch: counted from 0.
        stop: how many samples of the epoch stand before the end of these in its order.
        epoch_size: samples of an epoch.
        loss: the mean loss of these samples; NaN where this process does not know it.
    """

    epoch: int
    stop: int
    epoch_size: int
    loss: float


class _Timer:
    """Times one phase, again and again."""

    __slots__ = ("_meter", "_place", "_started")

    def __init__(self, meter: "Meter", place: int) -> None:
        self._meter, self._place, self._started = meter, place, 0.0

    def __enter__(self) -> None:
        if self._meter.memory is not None:
            self._meter.memory.begin()
        self._started = time.perf_counter()
        self._meter.running = (self._place, self._started)

    def __exit__(self, *_: object) -> None:
        with self._meter.lock:  # for the clock too, or a reader would see the sum shrink
            seconds = time.perf_counter() - self._started
            self._meter.seconds[self._place] += seconds
            self._meter.running = None
        if self._meter.is_keeping:
            self._meter.spans.append(Span(self._place, self._started, seconds))
        if self._meter.memory is not None:
            peaks, place = self._meter.peak_bytes, self._place
            peaks[place] = max(peaks[place], self._meter.memory.end())


@dataclass
class Meter:
    """The sums of one process.

    Attributes:
        seconds: spent in each of `PHASES`, which do not overlap, without the one that goes on.
        running: the phase that goes on, and when it began.
        steps: steps that it has taken.
        samples: samples that it has computed.
        newest: the samples that it has computed last; None before the first ones.
        raw_bytes: what was to be sent of gradients, at full precision.
        encoded_bytes: what was sent in their place.
        clock_offset_s: this machine's clock minus that of the run's owner.
        spans: of the newest steps that are kept, until somebody takes them.
        gpu: tells what its GPU does, for any thread.
        memory: measures the most memory of each phase; None: that is not wanted.
        peak_bytes: the most memory that each of `PHASES` has had.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    steps: int = 0
    samples: int = 0
    newest: Computed | None = None
    raw_bytes: int = 0
    encoded_bytes: int = 0
    clock_offset_s: float = 0.0
    running: tuple[int, float] | None = None
    spans: list[Span] = field(default_factory=list)
    is_keeping: bool = True
    gpu: Read = no_gpu
    memory: PeakMemory | None = None
    peak_bytes: list[int] = field(default_factory=lambda: [0] * len(PHASES))

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._timers = {phase: _Timer(self, place) for place, phase in enumerate(PHASES)}
        self._window = -1.0
        self._kept = 0
        self._step_began = time.perf_counter()

    def __call__(self, phase: Phase) -> _Timer:
        """Times a block; a phase within a phase would count twice."""
        return self._timers[phase]

    def step_done(self, num_samples: int) -> None:
        """A step of so many samples is complete; the next one begins."""
        self.steps += 1
        self.samples += num_samples
        now = time.perf_counter()
        if self.is_keeping:
            self.spans.append(Span(STEP, self._step_began, now - self._step_began))
        self._step_began = now
        window = (time.time() - self.clock_offset_s) // WINDOW_S
        if window != self._window:
            self._window, self._kept = window, 0
        self._kept += 1
        self.is_keeping = self._kept <= STEPS_KEPT and len(self.spans) < MAX_SPANS

    def take_spans(self) -> list[Span]:
        spans, self.spans = self.spans, []
        return spans[:MAX_SPANS]

    def seconds_now(self) -> list[float]:
        """Seconds by phase, with those of the phase that goes on: a step may take longer than a report."""
        with self.lock:
            seconds = self.seconds.copy()
            if self.running is not None:
                place, started = self.running
                seconds[place] += time.perf_counter() - started
        return seconds

    @property
    def peaks(self) -> Mapping[Phase, int]:
        """The most memory by phase, bytes; empty where it is not measured."""
        found = zip(PHASES, self.peak_bytes, strict=True)
        return {phase: peak for phase, peak in found if peak}

    @property
    def by_phase(self) -> Mapping[Phase, float]:
        return MappingProxyType(dict(zip(PHASES, self.seconds_now(), strict=True)))
