"""`smolcluster status`: how a run and each of its processes stand.

Machines that cannot be reached are a row that says so. `--json` prints one document, a `RunReport`.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from smolcluster.errors import ConfigError
from smolcluster.launch.find import find
from smolcluster.launch.watch.probe import Ask, look
from smolcluster.observability.terminal import SteadyConsole, displayable, steady
from smolcluster.observability.view.report import RunReport, report_of, was_stopped
from smolcluster.observability.view.snapshot import LAST_STEP, ProcessReport, State
from smolcluster.runs.evaluated import metrics_in, told
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import OLD_S
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.utils.words import as_command, write_json

WATCH_S = 2.0
STYLES = {
    "running": "green",
    "ended": "",
    "gone": "red",
    "unreachable": "yellow",
    "unknown": "",
    "training": "green",
    "failed": "red",
    "broken off": "red",
}


def status(run: str, *, as_json: bool, watch: bool, ask: Ask | None = None) -> int:
    """Print how a run stands; with `watch` again and again, until Ctrl-C or nobody reads it.

    `ask` runs a script on a machine; only tests say another one.

    Raises:
        ConfigError: there is no such run, or both are asked for.
        DataError: its list of processes is damaged.
    """
    if as_json and watch:
        raise ConfigError("--json prints one document: leave --watch out")
    paths = find(run)
    if as_json:
        write_json(json.loads(look_at(paths, ask).model_dump_json()))
        return 0
    console = SteadyConsole()
    if watch:
        _watch(console, lambda: shown(console, look_at(paths, ask)))
    else:
        console.print(shown(console, look_at(paths, ask)))
    return 0


def look_at(paths: RunPaths, ask: Ask | None = None) -> RunReport:
    """How a run stands.

    Raises:
        DataError: its list of processes is damaged.
    """
    return report_of(look(paths, ask))


def _watch(console: Console, draw: Callable[[], RenderableType]) -> None:
    with suppress(KeyboardInterrupt), steady(console):
        first = draw()
        with Live(first, console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while not console.quiet:  # nobody reads it any more
                live.update(draw(), refresh=True)
                time.sleep(WATCH_S)


def shown(console: Console, report: RunReport) -> RenderableType:
    """The head, the table of the processes, and what to do about machines that cannot be reached."""
    table = Table()
    table.add_column("process")
    table.add_column("state", max_width=44)
    has_gpu = any(each.gpu for each in report.processes)
    for name in ("step", "loss", "samples/s", "last heartbeat", *(["gpu"] if has_gpu else [])):
        table.add_column(name, justify="right", no_wrap=name != "gpu")
    for each in report.processes:
        cells = [*row(each, report.state), *([gpu_cell(each.gpu)] if has_gpu else [])]
        is_bad = each.exit_code not in (None, 0) and not was_stopped(each, report.state)
        style = "red" if is_bad else STYLES[each.process]
        texts = [Text(displayable(console, cell)) for cell in cells]
        texts[1].stylize(style)
        table.add_row(*texts)
    fixes = (each.fix for each in report.processes if each.fix)
    below = (*stage_lines(report), *peak_lines(report), *fixes)
    return Group(
        _head(console, report),
        *(Text(displayable(console, line)) for line in notes(report)),
        *([table] if report.processes else []),
        *(Text(displayable(console, line)) for line in below),
    )


def _head(console: Console, report: RunReport) -> Text:
    parts = [Text(displayable(console, part)) for part in head(report)]
    parts[2 if report.algorithm else 1].stylize(STYLES.get(report.state, ""))
    return Text(" · ").join(parts)


def head(report: RunReport) -> list[str]:
    """The run in a line: id, algorithm, state, step, epoch, losses."""
    return [*title(report), *progress(report), *measured(report)]


def title(report: RunReport) -> list[str]:
    return [report.run_id, *([report.algorithm] if report.algorithm else []), report.state]


def progress(report: RunReport) -> list[str]:
    """How far it is; nothing of a run that has ended before it began."""
    parts = []
    if report.step is not None and report.total_steps != 0:
        parts.append(f"step {_of(report.step, report.total_steps)}")
        if report.epoch is not None:
            done = report.epoch + 1
            parts.append(f"epoch {_of(min(done, report.num_epochs or done), report.num_epochs)}")
    return parts


def measured(report: RunReport) -> list[str]:
    parts = []
    if report.loss is not None:
        parts.append(f"training loss {report.loss:.4g} ({report.loss_is or LAST_STEP})")
    if report.val_loss is not None:
        parts.append(f"validation loss {report.val_loss:.4g}")
    parts += told(metrics_in(dict(report)))
    if report.samples_per_s and report.state == "training":
        parts.append(f"{report.samples_per_s:,.0f} samples/s now")
    return parts


def notes(report: RunReport) -> list[str]:
    lines = [each for each in (report.reason, report.trouble) if each]
    if report.state == "broken off" and report.reason is None:
        owner = next((each.title for each in report.processes), "the server")
        lines.append(
            f"{owner} is no more, and has not said why: {as_command('logs', report.run_id)}"
        )
    if report.age_s is not None and report.age_s > OLD_S:
        lines.append(f"what the server said {format_duration(report.age_s)} ago")
    if report.state in ("broken off", "stopped") and report.total_steps:
        lines.append(f"{as_command('resume', report.run_id)} goes on with it")
    if report.state in ("waiting", "training"):
        lines += [
            f"{as_command('join', report.run_id, '--name', each.node)} brings {each.title} back"
            for each in report.processes
            if each.role == "worker" and each.process in ("ended", "gone")
        ]
    return lines


def row(process: ProcessReport, state: State) -> list[str]:
    """A process's cells: its title, state, step, loss, samples/s, last heartbeat; `state` is the run's."""
    age = process.heartbeat_age_s
    return [
        process.title,
        "stopped" if was_stopped(process, state) else _liveness(process),
        "" if process.step is None else f"{process.step:,}",
        "" if process.loss is None else f"{process.loss:.4g}",
        "" if process.samples_per_s is None else f"{process.samples_per_s:,.0f}",
        "" if age is None else f"{format_duration(age)} ago",
    ]


def stage_lines(report: RunReport) -> list[str]:
    """What each stage of a pipeline has done in the newest step."""
    return [
        f"{each.title} has layers {stage.ranges}; a step: {stage.times}, waits {stage.bubble:.0%}"
        + (f"; sends {stage.rates}" if stage.sends else "")
        for each in report.processes
        if (stage := each.stage)
    ]


def peak_lines(report: RunReport) -> list[str]:
    """The most memory of each process by phase, where that is measured."""
    return [
        f"peak memory of {each.title}: "
        + ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in each.peak_bytes.items())
        for each in report.processes
        if each.peak_bytes
    ]


def gpu_cell(gpu: Mapping[str, float]) -> str:
    """What a GPU does, as far as it tells: `87%, 12.4 GB of 80.0 GB, 61 °C, 240 W`."""
    parts = []
    if "utilization" in gpu:
        parts.append(f"{gpu['utilization']:.0%}")
    if "memory_bytes" in gpu:
        size = gpu.get("memory_size_bytes")
        used = format_bytes(gpu["memory_bytes"])
        parts.append(used if size is None else f"{used} of {format_bytes(size)}")
    if "temperature_c" in gpu:
        parts.append(f"{gpu['temperature_c']:.0f} °C")
    if "power_w" in gpu:
        parts.append(f"{gpu['power_w']:.0f} W")
    return ", ".join(parts)


def _liveness(process: ProcessReport) -> str:
    match process.process:
        case "unreachable":
            return f"lost contact: {process.why or 'nobody knows why'}"
        case "unknown":
            return process.presence or "unknown"
        case "ended":
            return "ended" if process.exit_code is None else f"ended with code {process.exit_code}"
        case "gone":
            return "gone, without an exit code"
    if process.presence == "lost":
        return "running; the server has lost it"
    return "running; has left" if process.presence == "left" else "running"


def _of(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
