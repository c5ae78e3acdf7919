import io
import os

import pytest
from rich.console import Console

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.console import NO_WRAP, WRAP, ProgressView
from smolcluster.observability.terminal import SteadyConsole
from waiting import Clock

EVAL = MetricRecord("eval", 500, 2, {"val_loss": 0.3, "val_accuracy": 0.94})
LINE = (
    "epoch 3/30 · step {step} · loss 0.213 · acc 0.940 · {left} left · 3,200 samples/s now · staleness 1.8"
    " · 4.1 MB/s"
)


def step(number: int) -> MetricRecord:
    values = {"loss": 0.2134, "samples_per_s": 3200.4, "staleness": 1.8, "mb_per_s": 4.1}
    return MetricRecord(
        "step", number, 2, values | {"samples_applied": 32.0 * number, "total_samples": 43110.0}
    )


def show(view: ProgressView, record: MetricRecord) -> None:
    """What a run does with a record, and soon after it."""
    view.log(record)
    view.tick()


def plain() -> Console:
    return SteadyConsole(file=io.StringIO(), width=200)


def terminal(width: int = 140) -> Console:
    return SteadyConsole(
        file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None
    )


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def bar(console: Console) -> str:
    """The bar as it was drawn last."""
    return text(console).rpartition(NO_WRAP)[2].partition(WRAP)[0]


def test_without_a_terminal_there_is_a_plain_line_every_two_seconds() -> None:
    console, clock = plain(), Clock()
    view = ProgressView(console, num_epochs=30, clock=clock)
    show(view, EVAL)
    for number in range(1, 101):
        clock.now = number * 0.1
        show(view, step(number))
    view.close()
    lines = text(console).splitlines()
    assert [line.split(" · ")[2] for line in lines] == [
        f"step {number}" for number in (20, 40, 60, 80, 100)
    ]
    assert lines[-1] == "7% · " + LINE.format(step=100, left="2 min 05 s")
    assert "\x1b" not in text(console)


def test_the_last_state_is_shown_once_at_the_end() -> None:
    console = plain()
    view = ProgressView(console, num_epochs=30, clock=Clock())
    show(view, EVAL)
    show(view, step(7))
    assert text(console) == ""
    view.close()
    view.close()
    show(view, step(8))
    assert text(console).splitlines() == ["1% · " + LINE.format(step=7, left="13 s")]


def test_the_time_left_is_told_by_the_speed_of_the_last_half_minute() -> None:
    """100 samples a second, then 200; each step says another speed."""
    console, clock = plain(), Clock()
    view = ProgressView(console, clock=clock, interval_s=0.0)
    done = 0.0
    for second in range(1, 101):
        clock.now = float(second)
        done += 100.0 if second <= 60 else 200.0
        values = {"samples_applied": done, "total_samples": 20_000.0}
        show(
            view, MetricRecord("step", second, 0, values | {"samples_per_s": 10.0 ** (second % 4)})
        )
    lines = text(console).splitlines()
    assert " · 2 min 20 s left · " in lines[59]
    assert " · 30 s left · " in lines[99]


def test_a_quiet_time_repeats_nothing() -> None:
    console, clock = plain(), Clock()
    view = ProgressView(console, clock=clock)
    show(view, step(1))
    for second in range(20):
        clock.now = float(second)
        view.tick()
    view.close()
    assert len(text(console).splitlines()) == 1


def test_values_that_are_missing_are_left_out() -> None:
    console = plain()
    view = ProgressView(console)
    show(view, MetricRecord("step", 1234, 0, {"loss": float("nan")}))
    view.close()
    assert text(console) == "epoch 1 · step 1,234 · loss nan\n"


def test_lines_are_printed_above_the_bar() -> None:
    console, clock = terminal(), Clock()
    view = ProgressView(console, clock=clock)
    clock.now = 1.0
    show(view, step(1))
    view.print("mini2 | joined [bold]")
    after = text(console).split("mini2 | joined [bold]\n")
    assert len(after) == 2
    assert "epoch 3 · step 1" in after[1]
    view.close()
    assert "\x1b[?25h" in text(console)


def test_a_narrow_terminal_keeps_one_line_and_what_matters_most() -> None:
    console, clock = terminal(width=60), Clock()
    view = ProgressView(console, num_epochs=30, clock=clock)
    clock.now = 1.0
    show(view, step(512))
    assert "epoch 3/30 · step 512" in bar(console)
    assert "MB/s" not in bar(console)
    assert "…" not in bar(console)
    view.close()


@pytest.mark.parametrize("num_seen", [0, 3])
def test_a_terminal_that_goes_away_does_not_end_the_run(num_seen: int) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as file:
        clock = Clock()
        console = SteadyConsole(file=file, force_terminal=True, width=100)
        view = ProgressView(console, clock=clock)
        for number in range(num_seen):
            clock.now += 1.0
            show(view, step(number))
            assert not console.quiet, "somebody reads"
        os.close(read)
        clock.now += 1.0
        show(view, step(num_seen))
        assert console.quiet
        view.print("line")
        view.close()


def test_a_plain_line_says_how_much_is_done_of_how_much() -> None:
    console = plain()
    values = {"samples_applied": 320.0, "total_samples": 1280.0, "total_steps": 4096.0}
    view = ProgressView(console, num_epochs=3)
    view.log(MetricRecord("step", 1024, 0, values))
    view.close()
    assert text(console).splitlines() == ["25% · epoch 1/3 · step 1,024/4,096"]


def test_what_is_closed_shows_no_progress_any_more() -> None:
    console = plain()
    view = ProgressView(console, interval_s=0.0)
    view.log(MetricRecord("step", 1, 0, {}))
    view.tick()
    view.close()
    view.log(MetricRecord("step", 2, 0, {}))
    view.tick()
    view.print("stopping")
    view.close()
    assert text(console).splitlines() == ["epoch 1 · step 1", "stopping"]
