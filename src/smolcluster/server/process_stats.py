"""What a process reports of itself: a worker once a second to the server, and what the server makes of it.

    Meter, psutil, connection -> Telemetry -> rates -> status.json, metrics.jsonl, Weights & Biases

A report holds sums, so one that is lost costs nothing; two of them make rates.
"""

import time
from collections.abc import Callable

import psutil

from smolcluster.utils.cadence import Cadence
from smolcluster.utils.meter import MAX_SPANS, PEAK, PHASES, Meter
from smolcluster.wire.messages import Telemetry

NUM_KEPT_FIRST, KEPT_EVERY_S = 600, 20.0
"""Of the first ten minutes every report is kept, later one in 20 s: a week of 4 processes takes 70 MB."""
MIN_INTERVAL_S = 0.2
"""Rates over less say little."""


class ProcessStats:
    """Takes one process's reports. Never raises for want of a number."""

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.meter = meter
        self._clock = clock
        self._started = clock()
        self._process = psutil.Process()

    def report(
        self, moved: tuple[int, int] = (0, 0), queued: int = 0, *, with_spans: bool = True
    ) -> Telemetry:
        """What it has counted by now; `moved`: bytes (sent, received), `queued`: frames that wait."""
        meter = self.meter
        cpu_s, memory_bytes = self._cost()
        spans = meter.take_spans() if with_spans else []
        at = spans[0].start if spans else 0.0
        return Telemetry(
            uptime_s=self._clock() - self._started,
            steps=meter.steps,
            samples=meter.samples,
            phase_s=tuple(meter.seconds_now()),
            raw_bytes=meter.raw_bytes,
            encoded_bytes=meter.encoded_bytes,
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            sent_bytes=moved[0],
            received_bytes=moved[1],
            queued=max(0, queued),
            peak_bytes=tuple(meter.peak_bytes) if meter.peaks else (),
            gpu=dict(meter.gpu()),
            spans_at=time.time() - (time.perf_counter() - at) if spans else 0.0,
            spans=tuple(
                (span.what, round(1e6 * (span.start - at)), round(1e6 * span.seconds))
                for span in spans[:MAX_SPANS]
            ),
        )

    def _cost(self) -> tuple[float, int]:
        """Seconds of processor time, and bytes of resident memory."""
        try:
            with self._process.oneshot():
                times = self._process.cpu_times()
                return times.user + times.system, self._process.memory_info().rss
        except (psutil.Error, OSError):  # such as no file descriptor left
            return 0.0, 0


def follows(before: Telemetry, now: Telemetry) -> bool:
    """Whether both are of the same process and the same connection, in this order."""
    sums = ("uptime_s", "steps", "samples", "sent_bytes", "received_bytes", "cpu_s")
    return all(getattr(before, name) <= getattr(now, name) for name in sums)


def rates(before: Telemetry, now: Telemetry) -> dict[str, float]:
    """What a process did between two reports, which follow each other, by the names of `metrics.jsonl`.

    `share/…` are parts of the time that went by, the rest went elsewhere; `step_s` is the mean time of a
    step; `cpu` counts busy cores; `gpu/…` is as it was at the later one; `peak_bytes/…` is the most memory
    that a phase has had since the process started, where that is measured.
    """
    elapsed_s = now.uptime_s - before.uptime_s
    steps = now.steps - before.steps
    spent = zip(PHASES, before.phase_s, now.phase_s, strict=True)
    values = {
        "steps_per_s": steps / elapsed_s,
        "samples_per_s": (now.samples - before.samples) / elapsed_s,
        # Clocks were not read at quite the same moment.
        **{f"share/{phase}": min(1.0, max(0.0, (b - a) / elapsed_s)) for phase, a, b in spent},
        "cpu": (now.cpu_s - before.cpu_s) / elapsed_s,
        "memory_bytes": float(now.memory_bytes),
        **{f"gpu/{name}": value for name, value in now.gpu.items()},
        **{f"{PEAK}{phase}": peak for phase, peak in zip(PHASES, now.peak_bytes) if peak},  # noqa: B905
    }
    if now.sent_bytes or now.received_bytes:  # or it has no connection of its own
        values |= {
            "sent_bytes_per_s": (now.sent_bytes - before.sent_bytes) / elapsed_s,
            "received_bytes_per_s": (now.received_bytes - before.received_bytes) / elapsed_s,
            "queue": float(now.queued),
        }
    if steps:
        values["step_s"] = elapsed_s / steps
    if now.encoded_bytes:
        values["codec_ratio"] = now.raw_bytes / now.encoded_bytes
    return {name: float(f"{value:.6g}") for name, value in values.items()}


class Gauge:
    """Makes rates of one process's reports as they come: the newest, and now and then some to be kept."""

    def __init__(self, cadence: Cadence | None = None) -> None:
        self.values: dict[str, float] = {}
        """The newest rates; empty before there are any."""
        self._cadence = cadence or Cadence(NUM_KEPT_FIRST, KEPT_EVERY_S)
        self.received_bytes = 0
        """As the newest report says."""
        self._last: Telemetry | None = None
        self._last_kept: Telemetry | None = None

    def take(self, report: Telemetry) -> dict[str, float] | None:
        """Take the next report; returns rates that are to be kept, since those before, if it is time."""
        last, self.received_bytes = self._last, report.received_bytes
        if last is None or self._last_kept is None or not follows(last, report):
            self._last = self._last_kept = report
            return None
        if report.uptime_s - last.uptime_s < MIN_INTERVAL_S:
            return None
        self.values, self._last = rates(last, report), report
        if not self._cadence.take():
            return None
        kept, self._last_kept = rates(self._last_kept, report), report
        return kept
