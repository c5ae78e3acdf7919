"""Reports of a process, and the rates that two of them make."""

import errno
import math
import time
from mmap import mmap

import psutil
import pytest
import torch
from pydantic import ValidationError

from connection_pairs import telemetry
from exporting import GPU
from smolcluster.server.process_stats import Gauge, ProcessStats, follows, rates
from smolcluster.utils.cadence import Cadence
from smolcluster.utils.meter import PHASES, Meter
from smolcluster.utils.peak_memory import PeakMemory
from smolcluster.wire.messages import NUM_PHASES, Telemetry, decode, encode


def test_a_report_says_what_was_counted() -> None:
    now = [0.0]
    meter = Meter()
    process_stats = ProcessStats(meter, lambda: now[0])
    now[0] = 2.5
    meter.seconds[1] = 0.75
    meter.raw_bytes, meter.encoded_bytes = 4000, 1000
    with meter("data"):
        pass
    meter.step_done(32)
    report = process_stats.report(queued=3)
    assert (report.uptime_s, report.steps, report.samples, report.queued) == (2.5, 1, 32, 3)
    assert report.phase_s[1] == 0.75
    assert (report.raw_bytes, report.encoded_bytes) == (4000, 1000)
    assert report.memory_bytes > 10_000_000
    assert report.cpu_s > 0
    assert [what for what, _, _ in report.spans] == [0, NUM_PHASES]
    assert report.spans_at > 1.7e9
    assert process_stats.report().spans == ()


def test_a_process_that_can_open_no_file_reports_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_stats = ProcessStats(Meter())

    def oneshot(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "oneshot", oneshot)
    report = process_stats.report()
    assert (report.cpu_s, report.memory_bytes) == (0.0, 0)


def test_what_a_gpu_does_is_reported_and_kept() -> None:
    meter = Meter()
    process_stats = ProcessStats(meter)
    first = process_stats.report()
    meter.gpu = lambda: GPU
    report = decode(Telemetry.KIND, encode(process_stats.report()))
    assert isinstance(report, Telemetry)
    assert report.gpu == GPU
    told = {name: value for name, value in rates(first, report).items() if "gpu" in name}
    assert told == {f"gpu/{name}": value for name, value in GPU.items()}
    assert not any(
        "gpu" in name for name in rates(first, first.model_copy(update={"uptime_s": 99}))
    )


def test_the_most_memory_of_each_phase_is_reported_where_that_is_measured() -> None:
    meter = Meter()
    stats = ProcessStats(meter)
    assert stats.report().peak_bytes == ()

    class Memory(PeakMemory):
        peaks = iter((500, 300, 700))

        def __init__(self) -> None:
            """It measures nothing."""

        def begin(self) -> None:
            """It measures nothing."""

        def end(self) -> int:
            return next(self.peaks)

    meter.memory = Memory()
    for phase in ("forward", "forward", "backward"):
        with meter(phase):
            pass
    assert meter.peaks == {"forward": 500, "backward": 700}
    first = stats.report()
    told = rates(first, first.model_copy(update={"uptime_s": first.uptime_s + 1}))
    assert {name: value for name, value in told.items() if "peak" in name} == {
        "peak_bytes/forward": 500,
        "peak_bytes/backward": 700,
    }


def test_on_a_processor_the_peak_is_what_is_resident() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.begin()
    before = memory.end()
    with mmap(
        -1, 1 << 26
    ) as new:  # of the heap it might be memory that was freed, and resident before
        torch.frombuffer(new, dtype=torch.uint8).fill_(1)
        assert memory.end() - before > len(new) / 2


@pytest.mark.parametrize(
    "gpu", [{"brand": 1.0}, {"power_w": -1.0}, {"power_w": 1e99}, {"power_w": "1"}]
)
def test_a_report_of_a_gpu_holds_known_quantities_only(gpu: object) -> None:
    with pytest.raises(ValidationError):
        telemetry(gpu=gpu)


def test_two_reports_make_rates() -> None:
    phase_s = tuple(float(place) for place in range(NUM_PHASES))
    before = telemetry(10.0, 100, samples=3200, cpu_s=5.0, sent_bytes=1000)
    now = telemetry(
        20.0,
        120,
        samples=3840,
        cpu_s=9.0,
        sent_bytes=3000,
        received_bytes=500,
        phase_s=phase_s,
        raw_bytes=800,
        encoded_bytes=200,
        memory_bytes=7_000_000,
        queued=2,
    )
    assert rates(before, now) == {
        "steps_per_s": 2.0,
        "samples_per_s": 64.0,
        **{f"share/{phase}": seconds / 10 for phase, seconds in zip(PHASES, phase_s, strict=True)},
        "cpu": 0.4,
        "memory_bytes": 7e6,
        "sent_bytes_per_s": 200.0,
        "received_bytes_per_s": 50.0,
        "queue": 2.0,
        "step_s": 0.5,
        "codec_ratio": 4.0,
    }


def test_a_step_that_lasts_longer_than_a_report_is_told_all_the_same() -> None:
    now = [0.0]
    meter, gauge = Meter(), Gauge()
    process_stats = ProcessStats(meter, lambda: now[0])
    gauge.take(process_stats.report())
    meter.running = (1, time.perf_counter() - 0.05)
    now[0] = 0.5
    gauge.take(process_stats.report())
    assert 0.1 <= gauge.values["share/forward"] <= 1.0


def test_who_takes_no_step_has_no_time_of_a_step() -> None:
    values = rates(telemetry(1.0), telemetry(3.0, phase_s=(0, 0, 0, 0, 0, 2.5, 0)))
    assert "step_s" not in values
    assert "codec_ratio" not in values
    assert values["share/wait"] == 1.0, "what overlaps two reports is no more than all"
    assert all(map(math.isfinite, values.values()))


@pytest.mark.parametrize(
    "later",
    [telemetry(1.0), telemetry(9.0, 3), telemetry(9.0, 7, sent_bytes=10)],
    ids=["another process", "fewer steps", "another connection"],
)
def test_what_does_not_follow_makes_no_rates(later: object) -> None:
    before = telemetry(5.0, 7, sent_bytes=1000)
    assert not follows(before, later)  # type: ignore[arg-type]
    gauge = Gauge()
    gauge.take(before)
    assert gauge.take(later) is None  # type: ignore[arg-type]
    assert gauge.values == {}


def test_what_is_kept_covers_the_time_since_what_was_kept_before() -> None:
    now = [0.0]
    gauge = Gauge(Cadence(1, 10.0, lambda: now[0]))
    kept = []
    for second in range(22):
        now[0] = float(second)
        kept.append(gauge.take(telemetry(second, second * second)))
        if second:
            assert gauge.values["steps_per_s"] == 2 * second - 1
    assert [second for second, values in enumerate(kept) if values] == [1, 11, 21]
    told = [values["steps_per_s"] for values in kept if values]
    assert told == [1, (121 - 1) / 10, (441 - 121) / 10]


def test_reports_that_come_at_once_are_one() -> None:
    gauge = Gauge()
    gauge.take(telemetry(1.0, 10))
    assert gauge.take(telemetry(1.05, 11)) is None
    assert gauge.take(telemetry(2.0, 30)) is not None
    assert gauge.values["steps_per_s"] == 20
