"""A picture of a run as lines of text, for a terminal of any size.

    head      run and state; progress; losses and speed; what is wrong
    curves    loss and samples a second over the steps so far
    table     a row a process: the columns that fit, the most important ones first
    news      the newest events and warnings

A line is never wider than the terminal, and there are never more lines than it has.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from smolcluster.launch.watch.status import STYLES, measured, notes, progress, title
from smolcluster.launch.watch.top import bars
from smolcluster.launch.watch.top.source import AT_END, EventLine, Picture
from smolcluster.observability.sinks.console import fit, time_left
from smolcluster.observability.view.report import RunReport, was_stopped
from smolcluster.observability.view.snapshot import ProcessReport, State
from smolcluster.observability.view.stages import StageView
from smolcluster.runs.status import RunStatus
from smolcluster.utils.units import format_duration, format_megabytes

MIN_SPLIT, MAX_SPLIT = 8, 32
"""Columns of the bar that splits a step's time."""
MAX_NAME = 16
MIN_NEWS = 3
WIDE = 110
"""From so many columns on there is more space between those of the table, and curves lie side by side."""
NEWS_STYLES = {
    "worker_joined": "green",
    "worker_left": "yellow",
    "worker_lost": "red",
    "worker_stalled": "yellow",
    "worker_rejected": "yellow",
    "lease_returned": "dim",
    "push_dropped": "dim",
    "step_overdue": "yellow",
    "worker_parked": "yellow",
    "checkpoint_saved": "cyan",
    "run_resumed": "cyan",
    "run_started": "cyan",
    "run_ended": "bold",
    "WARNING": "yellow",
    "ERROR": "red",
    "CRITICAL": "bold red",
}
LEVELS = {"WARNING": "WARN ", "ERROR": "ERROR ", "CRITICAL": "FATAL "}

PLAIN = str.maketrans("·…", "-~")
"""What stands for our signs where there is ASCII only."""


@dataclass(frozen=True)
class Canvas:
    """The terminal.

    Attributes:
        show: makes text of peers fit for it.
        is_plain: it knows ASCII only.
        has_colour: styles are seen.
    """

    width: int
    height: int
    show: Callable[[str], str]
    is_plain: bool = False
    has_colour: bool = True


@dataclass(frozen=True)
class Column:
    """A column of the table: its least width, and what it says of a row; empty where nothing is known."""

    title: str
    width: int
    cell: Callable[[ProcessReport], str]


def frame(picture: Picture, canvas: Canvas) -> list[Text]:
    head = _head(picture, canvas)
    table = _table(picture.report, canvas)
    room = canvas.height - len(head)
    if len(table) > room:
        table = _cut(table, room)
    room -= len(table)
    news = _news(picture.news, canvas)
    room -= (least := min(MIN_NEWS, len(news), max(0, room)))
    curves = _curves(picture, canvas)
    if len(curves) > room:
        curves = []
    room -= len(curves)
    legend = []
    if room >= 3 and any(process.process_stats for process in picture.report.processes):
        legend = [bars.legend(letters=not canvas.has_colour)]
    room -= len(legend)
    gap = [Text()] if room >= 2 else []
    room -= 2 * len(gap)
    news = news[len(news) - min(len(news), least + room) :]
    lines = [*head, *curves, *gap, *table, *legend, *(gap if news else []), *news]
    return [_fitted(line, canvas) for line in lines[: canvas.height]]


# --- head


def _head(picture: Picture, canvas: Canvas) -> list[Text]:
    report, status = picture.report, picture.status
    lines = [_title(picture, canvas)]
    if status is not None:
        lines.append(_progress(picture, status, canvas))
        lines.append(Text(canvas.show(fit(_measured(picture, status), canvas.width))))
    style = "" if report.state in AT_END else "yellow"
    return [*lines, *(Text(canvas.show(note), style=style) for note in notes(report))]


def _title(picture: Picture, canvas: Canvas) -> Text:
    """The run and its state; where there is little room without the algorithm."""
    report, status = picture.report, picture.status
    run_id, *algorithm, state = [Text(canvas.show(part)) for part in title(report)]
    run_id.stylize("bold")
    state.stylize(STYLES.get(report.state, ""))
    names = [run_id, *algorithm, state]
    if status is not None and report.state in ("waiting", "training"):
        lasted = status.wall_s + status.age_s(picture.now)
        names.append(Text(f"for {format_duration(max(1.0, lasted))}", style="dim"))
    line = Text(" · ").join(names)
    return line if line.cell_len <= canvas.width else Text(" · ").join([run_id, state])


def _progress(picture: Picture, status: RunStatus, canvas: Canvas) -> Text:
    done = status.samples_applied / max(1, status.total_samples)
    parts = progress(picture.report)
    if picture.report.state == "training":
        counts = (status.samples_applied, status.total_samples, status.samples_per_s)
        parts = [*time_left(*counts), *parts]
    bar = bars.progress_bar(done, max(8, min(30, canvas.width // 4)), plain=canvas.is_plain)
    said = fit(parts, canvas.width - len(bar) - 6)
    return Text.assemble(bar, f" {done:.0%}  ", canvas.show(said))


def _measured(picture: Picture, status: RunStatus) -> list[str]:
    parts, goes_on = measured(picture.report), picture.report.state == "training"
    if status.learning_rate is not None and goes_on:
        parts.append(f"lr {status.learning_rate:.3g}")
    if status.grad_norm is not None and goes_on:
        parts.append(f"gradient {status.grad_norm:.3g}")
    dropped = [
        f"{n:,} {kind.replace('_', '-')}"
        for kind, n in status.pushes.items()
        if n and kind != "applied"
    ]
    return [*parts, *([f"pushes dropped: {', '.join(dropped)}"] if dropped else [])]


# --- curves


def _curves(picture: Picture, canvas: Canvas) -> list[Text]:
    if len(picture.points) < 2:
        return []
    steps, losses, speeds = zip(*picture.points, strict=True)
    is_wide = canvas.width >= WIDE
    width = (canvas.width - 4) // 2 if is_wide else canvas.width
    lines = []
    for name, values, form in (
        ("loss", losses, "{:.4g}"),
        ("samples/s", speeds, "{:,.0f}"),
    ):
        shown = bars.spread(steps, values, max(4, width - 19))
        heights = [bars.logarithm(value) for value in shown] if name == "loss" else shown
        line = Text.assemble(
            (f"{name:<9} ", "dim"),
            (bars.sparkline(heights, plain=canvas.is_plain), "cyan"),
            f" {form.format(values[-1] if name == 'loss' else shown[-1])}",
        )
        lines.append(line)
    if not is_wide:
        return lines
    lines[0].pad_right(max(0, width + 4 - lines[0].cell_len))
    return [Text.assemble(*lines)]


# --- table


def _number_of(role: str, *, first: int) -> Callable[[ProcessReport], str]:
    """A cell of the number of a process of that role, which its users count from `first`."""

    def cell(process: ProcessReport) -> str:
        rank = process.rank
        return "" if rank is None or process.role != role else str(rank + first)

    return cell


def _vital(name: str, form: Callable[[float], str]) -> Callable[[ProcessReport], str]:
    return lambda process: (
        form(process.process_stats[name]) if name in process.process_stats else ""
    )


def _staged(form: Callable[[StageView], str]) -> Callable[[ProcessReport], str]:
    """A cell of what a stage of a pipeline did in the newest step."""

    def cell(process: ProcessReport) -> str:
        stage = StageView.of(process.process_stats)
        return "" if stage is None else form(stage)

    return cell


def _sends(stage: StageView) -> str:
    """`2: 1.6, 3: 0.2`: to whom, and how much."""
    return ", ".join(f"{rank + 1}: {format_megabytes(each)}" for rank, each in stage.sends.items())


OPS = {
    "forward": "forward",
    "backw.": "backward",
    "inputs": "backward_input",
    "weights": "backward_weight",
}
"""Columns of seconds of a step, by what a stage computes: their titles, and what they are called."""


def state_of(process: ProcessReport, state: State) -> str:
    """What a process does, in a word; `state` is the run's."""
    match process.process:
        case "unreachable":
            return "no answer"
        case "gone":
            return "gone"
        case "ended":
            if was_stopped(process, state):
                return "stopped"
            return f"exit {process.exit_code}" if process.exit_code else "ended"
    if process.rank is None or process.role == "rank":
        return "running" if process.process == "running" else process.process
    return process.presence or ("starting" if process.process == "running" else process.process)


SPLIT = Column("time", MIN_SPLIT, lambda _: "")


def columns_of(state: State) -> tuple[Column, ...]:
    """The most important first, in which order they are shown; `state` is the run's."""
    return (
        Column("node", 6, lambda process: process.node),
        Column("#", 2, _number_of("worker", first=1)),
        Column("rank", 4, _number_of("rank", first=0)),
        Column("state", 9, lambda process: state_of(process, state)),
        Column(
            "samples/s",
            9,
            lambda process: (
                ""
                if process.samples_per_s is None or state != "training"
                else f"{process.samples_per_s:,.0f}"
            ),
        ),
        SPLIT,
        Column(
            "seen",
            4,
            lambda process: (
                "" if process.heartbeat_age_s is None else bars.short_age(process.heartbeat_age_s)
            ),
        ),
        Column(
            "stale",
            5,
            lambda process: (
                "" if process.mean_staleness is None else f"{process.mean_staleness:.1f}"
            ),
        ),
        Column("local", 5, _vital("local_steps", lambda steps: f"{steps:.0f}")),
        Column("drift", 6, _vital("drift", lambda share: f"{share:.2%}")),
        Column("layers", 6, _staged(lambda stage: stage.ranges)),
        Column("waits", 5, _staged(lambda stage: f"{stage.bubble:.0%}")),
        *(
            Column(title, 7, _vital(f"op_s/{name}", bars.short_delay))
            for title, name in OPS.items()
        ),
        Column("MB/s to", 7, _staged(_sends)),
        Column("cpu", 5, _vital("cpu", lambda cores: f"{100 * cores:.0f}%")),
        Column("gpu", 4, _vital("gpu/utilization", lambda share: f"{share:.0%}")),
        Column("gpu mem", 7, _vital("gpu/memory_bytes", bars.short_bytes)),
        Column("temp", 4, _vital("gpu/temperature_c", lambda degrees: f"{degrees:.0f}C")),
        Column("power", 5, _vital("gpu/power_w", lambda watts: f"{watts:.0f}W")),
        Column("rtt", 6, _vital("rtt_s", bars.short_delay)),
        Column("MB/s up", 7, _vital("sent_bytes_per_s", format_megabytes)),
        Column("down", 6, _vital("received_bytes_per_s", format_megabytes)),
        Column("memory", 6, _vital("memory_bytes", bars.short_bytes)),
        Column("step", 7, lambda process: "" if process.step is None else f"{process.step:,}"),
        Column(
            "samples", 9, lambda process: "" if process.samples is None else f"{process.samples:,}"
        ),
        Column("queue", 5, _vital("queue", lambda frames: f"{frames:.0f}")),
    )


LEFT = ("node", "state")


def _style(word: str) -> str:
    """Of the word for a process's state."""
    if word in ("joined", "running"):
        return "green"
    if word in ("gone", "lost") or word.startswith("exit"):
        return "red"
    return "yellow" if word in ("no answer", "left", "starting") else "dim"


def _table(report: RunReport, canvas: Canvas) -> list[Text]:
    gap = 2 if canvas.width >= WIDE else 1
    columns, processes = columns_of(report.state), report.processes
    cells = {
        each.title: [canvas.show(each.cell(process)) for process in processes] for each in columns
    }
    has_split = any(process.process_stats for process in processes)
    known = [each for each in columns if any(cells[each.title]) or (each is SPLIT and has_split)]
    widths = {column.title: _width(column, cells[column.title]) for column in known}
    kept: list[Column] = []
    used = -gap
    for column in known:
        if used + gap + widths[column.title] <= canvas.width or not kept:
            kept.append(column)
            used += gap + widths[column.title]
    if SPLIT in kept:
        widths["time"] += min(MAX_SPLIT - MIN_SPLIT, max(0, canvas.width - used))
    lines = [Text((" " * gap).join(_aligned(each, each.title, widths) for each in kept), "dim")]
    for place, process in enumerate(processes):
        line = Text(" " * gap).join(
            _cell(column, cells[column.title][place], process, widths, canvas) for column in kept
        )
        lines.append(line)
    return lines


def _width(column: Column, cells: Sequence[str]) -> int:
    longest = max((Text(cell).cell_len for cell in cells), default=0)
    return max(column.width, len(column.title), min(longest, MAX_NAME))


def _aligned(column: Column, cell: str, widths: Mapping[str, int]) -> str:
    text = Text(cell)
    width = widths[column.title]
    text.truncate(width, overflow="ellipsis")
    fill = " " * (width - text.cell_len)
    is_left = column.title in LEFT or column is SPLIT
    return f"{text.plain}{fill}" if is_left else f"{fill}{text.plain}"


def _cell(
    column: Column, cell: str, process: ProcessReport, widths: Mapping[str, int], canvas: Canvas
) -> Text:
    if column is SPLIT:
        return bars.split_bar(process.process_stats, widths["time"], letters=not canvas.has_colour)
    style = _style(cell) if column.title == "state" else ""
    return Text(_aligned(column, cell, widths), style)


def _cut(table: list[Text], room: int) -> list[Text]:
    """As much of the table as there is room for, and how much is missing."""
    if room < 2:
        return table[1 : 1 + max(0, room)]
    kept = table[: room - 1]
    return [*kept, Text(f"and {len(table) - len(kept)} more", "dim")]


# --- news


def _news(news: Sequence[EventLine], canvas: Canvas) -> list[Text]:
    """A line for each; of those that repeat themselves the last."""
    told: list[list[EventLine]] = []
    for each in news:
        if told and _repeats(told[-1][-1], each):
            told[-1].append(each)
        else:
            told.append([each])
    return [_news_line(each, canvas) for each in told]


def _repeats(before: EventLine, now: EventLine) -> bool:
    is_frequent = now.kind in ("push_dropped", "lease_returned", "checkpoint_saved")
    return now.kind == before.kind and (is_frequent or before.text == now.text)


def _news_line(alike: Sequence[EventLine], canvas: Canvas) -> Text:
    news = alike[-1]
    moment = time.strftime("%H:%M:%S ", time.localtime(news.seconds))
    style, level = NEWS_STYLES.get(news.kind, ""), LEVELS.get(news.kind, "")
    again = f" (the last of {len(alike)} lately)" if len(alike) > 1 else ""
    said = canvas.show(news.text[: 4 * canvas.width]) + again
    return Text.assemble((moment, "dim"), (level, style), (said, "" if level else style))


def _fitted(line: Text, canvas: Canvas) -> Text:
    line.truncate(canvas.width, overflow="ellipsis")
    if canvas.is_plain:
        line.plain = line.plain.translate(PLAIN)
    return line
