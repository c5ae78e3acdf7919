"""A run's progress: one bar line on a terminal, a plain line every few seconds otherwise."""

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.terminal import HANGING, displayable, print_line, steady
from smolcluster.runs.evaluated import metrics_in, told
from smolcluster.utils.units import format_rate

BAR_WIDTH = 16
TICK_S = 0.1
CLOSE_TIMEOUT_S = 2.0


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
        self._measured = ""
        self._shown = ""
        self._bar: tuple[Progress, TaskID] | None = None
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

    def close(self, *, show_last: bool = True) -> None:
        """Show the last state, unless it is of no interest any more; nothing is shown after that."""
        if self._closed:
            return
        if show_last:
            self._show()
        self._closed = True
        if self._bar is not None:
            with steady(self._console):
                self._bar[0].stop()

    def _show(self) -> None:
        self._shown_at = self._clock()
        if self._step is None or self._closed:
            return
        parts = status_parts(self._step, self._num_epochs, self._measured)
        if self._has_bar:
            self._show_bar(self._step, fit(parts, self._console.width - BAR_WIDTH - 7))
        elif (line := " · ".join([*share_done(self._step), *parts])) != self._shown:
            self._shown = line
            print_line(self._console, line)

    def _show_bar(self, step: MetricRecord, status: str) -> None:
        if self._bar is None:
            self._bar = self._start_bar()
        progress, task = self._bar
        progress.update(
            task,
            total=step.values.get("total_samples"),
            completed=step.values.get("samples_applied", 0),
            status=displayable(self._console, status),
        )
        with steady(self._console):
            progress.refresh()

    def _start_bar(self) -> tuple[Progress, TaskID]:
        progress = Progress(
            BarColumn(BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task = progress.add_task("", total=None, status="")
        with steady(self._console):
            progress.start()
        return progress, task


class ShownBeside:
    """A view that a thread of its own shows: nobody waits for a terminal that hangs."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
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
            self._view.tick()
        self._view.close()


def measured(evaluation: MetricRecord) -> str:
    """What an evaluation says of the model besides its loss."""
    return " · ".join(told(metrics_in(evaluation.values)))


def share_done(step: MetricRecord) -> list[str]:
    """How much of the run is done, in percent, if that is known."""
    done, total = (step.values.get(name) for name in ("samples_applied", "total_samples"))
    return [f"{done / total:.0%}"] if done is not None and total else []


def status_parts(step: MetricRecord, num_epochs: int | None, measured: str) -> list[str]:
    """What there is to say about a step, the most important first."""
    values = step.values
    epochs = "" if num_epochs is None else f"/{num_epochs}"
    steps = f"/{values['total_steps']:,.0f}" if "total_steps" in values else ""
    parts = [f"epoch {step.epoch + 1}{epochs}", f"step {step.step:,}{steps}"]
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
    if measured:
        parts.append(measured)
    if "tokens_per_s" in values:
        parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
    elif "samples_per_s" in values:
        parts.append(f"{values['samples_per_s']:,.0f} samples/s")
    if "staleness" in values:
        parts.append(f"staleness {values['staleness']:.1f}")
    if values.get("mb_per_s"):
        parts.append(format_rate(1e6 * values["mb_per_s"]))
    return parts


def fit(parts: list[str], width: int) -> str:
    """As many parts as fit in `width` columns, joined by dots."""
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if Text(longer).cell_len > width:
            break
        line = longer
    return line
