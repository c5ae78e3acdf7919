"""A run's progress: one bar line on a terminal, a plain line every few seconds otherwise."""

import threading
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.terminal import HANGING, displayable, print_line, steady
from smolcluster.runs.evaluated import metrics_in, told
from smolcluster.utils.units import format_duration, format_loss, format_rate

BAR_WIDTH = 16
ERASE_BELOW = "\r\x1b[K\n\x1b[J\x1b[A"
"""Erase the cursor's line and all lines below it.

In two steps: what `ESC [J` erases from the top of a pane on, tmux keeps in the pane's history.
"""
TO_BEHIND_BAR = f"\x1b[{BAR_WIDTH + 1}G"
TO_LINE_ABOVE = "\r\x1b[A"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
"""Between them the terminal cuts a line that is longer than it is wide."""
SHOW_CURSOR = "\x1b[?25h"
TICK_S = 0.1
CLOSE_TIMEOUT_S = 2.0
SPEED_WINDOW_S, LEAST_WINDOW_S = 30.0, 3.0
"""Over how long the speed is taken that tells the time left: that of a second jumps up and down."""


class ProgressView:
    """A sink that shows how far a run is: epoch, step, loss, metrics, samples/s, staleness, MB/s.

    Any thread may `log`; the view changes in `tick` and `close` only, which one thread calls at a time. Lines
    that others print to the same console, from any thread, appear above the bar.
    """

    def __init__(
        self,
        console: Console,
        *,
        num_epochs: int | None = None,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_epochs = num_epochs
        self._has_bar = console.is_interactive
        self._interval_s = 0.1 if self._has_bar else interval_s
        self._clock = clock
        self._shown_at = clock()
        self._step: MetricRecord | None = None
        self._seen = deque[tuple[float, float]]()
        """When so many samples were done, at most `SPEED_WINDOW_S` ago."""
        self._measured = ""
        self._shown = ""
        self._bar: BarLine | None = None
        self._closed = False

    def log(self, record: MetricRecord) -> None:
        """Take a step's or an evaluation's values."""
        if record.kind == "step":
            self._step = record
        elif record.kind == "eval":
            self._measured = measured(record) or self._measured

    def tick(self) -> None:
        """Show what is new, if the last time was long enough ago."""
        if self._clock() - self._shown_at >= self._interval_s:
            self._show()

    def print(self, line: str | Text) -> None:
        """Print a line above the bar."""
        print_line(self._console, line)

    def close(self) -> None:
        """Show the last state; nothing is shown after that."""
        if self._closed:
            return
        self._show()
        self._closed = True
        if self._bar is not None:
            with steady(self._console):
                self._bar.stop()

    def _show(self) -> None:
        self._shown_at = self._clock()
        if self._step is None or self._closed:
            return
        speed = self._speed(self._step)
        parts = status_parts(self._step, self._num_epochs, self._measured, speed)
        if self._has_bar:
            status = displayable(self._console, fit(parts, self._console.width - BAR_WIDTH - 7))
            values = self._step.values
            with steady(self._console):
                self._bar = self._bar or BarLine(self._console)
                self._bar.show(
                    values.get("samples_applied", 0), values.get("total_samples"), status
                )
        elif (line := " · ".join([*share_done(self._step), *parts])) != self._shown:
            self._shown = line
            print_line(self._console, line)

    def _speed(self, step: MetricRecord) -> float | None:
        """Samples a second, by what was shown last; at first what the step says."""
        done, seen = step.values.get("samples_applied", 0.0), self._seen
        if not seen or done > seen[-1][1]:
            seen.append((self._clock(), done))
        while seen[-1][0] - seen[0][0] > SPEED_WINDOW_S:
            seen.popleft()
        (since, before), (until, now) = seen[0], seen[-1]
        if until - since < LEAST_WINDOW_S:
            return step.values.get("samples_per_s")
        return (now - before) / (until - since)


class BarLine(RenderHook):
    """A bar on the last line of a terminal; what is printed to the console appears above it.

    It stays whole when the terminal changes its size. `rich.live` erases as many lines as it has drawn; a
    terminal that becomes narrower wraps the bar into several lines, and all but one of them would stay. Here
    the cursor rests on an empty line above the bar, and every line below the cursor is erased. What other
    code writes to the terminal lands on the empty line.
    """

    def __init__(self, console: Console) -> None:
        """Take the console's last line; nothing is drawn before `show`."""
        self._console = console
        self._shown: tuple[ConsoleRenderable, ...] = ()
        console.show_cursor(False)
        console.push_render_hook(self)

    def show(self, completed: float, total: float | None, status: str) -> None:
        """Draw it anew; a bar without a `total` only shows that work goes on."""
        bar = ProgressBar(total or None, completed, width=BAR_WIDTH)
        text = Text(f" {bar.percentage_completed or 0.0:>3.0f}% {status}", end="")
        self._shown = codes(NO_WRAP), bar, codes(TO_BEHIND_BAR), text, codes(WRAP)
        self._console.print(codes(""))

    def stop(self) -> None:
        """Leave the bar where it is, and draw nothing more."""
        self._console.pop_render_hook()
        self._console.print(codes(ERASE_BELOW), *self._shown, codes("\n" + SHOW_CURSOR))

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """What is printed, with the bar erased before and drawn after it: rich writes all that at once."""
        return [
            codes(ERASE_BELOW),
            *renderables,
            codes("\n"),
            *self._shown,
            codes(TO_LINE_ABOVE),
        ]


def codes(text: str) -> Segments:
    """Codes for a terminal, as something that rich prints."""
    kind = ControlType.CLEAR  # rich looks at the kind on Windows only
    return Segments([Segment(text, None, [(kind,)])])


class ShownBeside:
    """A view that a thread of its own shows: nobody waits for a terminal that hangs."""

    def __init__(
        self, view: ProgressView, newest: Callable[[], MetricRecord | None] = lambda: None
    ) -> None:
        """`newest`: asked for a record each time before the view is shown; None: there is no new one."""
        self._view = view
        self._newest = newest
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._thread.start()

    def log(self, record: MetricRecord) -> None:
        """Take a step's or an evaluation's values."""
        self._view.log(record)

    def close(self) -> None:
        """Show the last state; a terminal that hangs is left alone."""
        self._done.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._thread.name = HANGING

    def _show(self) -> None:
        while not self._done.wait(TICK_S):
            self._look()
            self._view.tick()
        self._look()
        self._view.close()

    def _look(self) -> None:
        if (record := self._newest()) is not None:
            self._view.log(record)


def measured(evaluation: MetricRecord) -> str:
    """What an evaluation says of the model besides its loss."""
    return " · ".join(told(metrics_in(evaluation.values)))


def share_done(step: MetricRecord) -> list[str]:
    """How much of the run is done, in percent, if that is known."""
    done, total = (step.values.get(name) for name in ("samples_applied", "total_samples"))
    return [f"{done / total:.0%}"] if done is not None and total else []


def time_left(done: float | None, total: float | None, speed: float | None) -> list[str]:
    """How long the rest of a run takes: samples that are done, all, and applied a second; [] : unknown."""
    if done is None or not total or not speed or done >= total:
        return []
    return [f"{format_duration(max(1.0, (total - done) / speed))} left"]


def status_parts(
    step: MetricRecord, num_epochs: int | None, measured: str, speed: float | None
) -> list[str]:
    """What there is to say about a step, the most important first; `speed`: samples a second."""
    values = step.values
    epochs = "" if num_epochs is None else f"/{num_epochs}"
    steps = f"/{values['total_steps']:,.0f}" if "total_steps" in values else ""
    unit = "tokens" if "tokens_per_s" in values else "samples"
    rate = values.get(f"{unit}_per_s")
    parts = (
        f"epoch {step.epoch + 1}{epochs}",
        f"step {step.step:,}{steps}",
        f"loss {format_loss(values['loss'], 3)}" if "loss" in values else "",
        measured,
        *time_left(values.get("samples_applied"), values.get("total_samples"), speed),
        "" if rate is None else f"{rate:,.0f} {unit}/s now",
        f"staleness {values['staleness']:.1f}" if "staleness" in values else "",
        format_rate(1e6 * values["mb_per_s"]) if values.get("mb_per_s") else "",
    )
    return [part for part in parts if part]


def fit(parts: list[str], width: int) -> str:
    """As many parts as fit in `width` columns, joined by dots."""
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if Text(longer).cell_len > width:
            break
        line = longer
    return line
