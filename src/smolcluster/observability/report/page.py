"""`report.html`: a run on one page, which needs neither network nor scripts to be read.

`page_of` says what is on it, as texts and charts; the template says how it looks.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

import smolcluster
from smolcluster.configs.spec import STALENESS, shows
from smolcluster.errors import SmolclusterError
from smolcluster.observability.curves import svg_of
from smolcluster.observability.report.render import write_page
from smolcluster.observability.report.settings import changed_settings
from smolcluster.observability.view import snapshot as view
from smolcluster.observability.view.curves import Curves
from smolcluster.observability.view.facts import ReportData, Worker, read_facts, workers_of
from smolcluster.observability.view.first_error import FirstError, LogLine
from smolcluster.observability.view.process_stats import SHARES, shares_of, step_s_of, title_of
from smolcluster.observability.view.story import Happening, told
from smolcluster.runs.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    RunEnded,
    RunResumed,
    WorkerJoined,
    WorkerLost,
    WorkerRejected,
    WorkerStalled,
)
from smolcluster.runs.files import seconds_of
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import ProcessSeries, Total
from smolcluster.runs.status import STALENESS_EDGES
from smolcluster.runs.summary import SMALL
from smolcluster.utils.units import format_bytes, format_duration, format_megabytes
from smolcluster.utils.words import as_command

MAX_ROWS = 200
"""Of a table: the first and the last ones are shown of more."""
SKEW_S = 0.05
"""A clock that is off by less is right."""
UNKNOWN = "–"
LARGE = 1e4
TAUS = (
    "0",
    *(str(b) if b == a + 1 else f"{a + 1}–{b}" for a, b in pairwise(STALENESS_EDGES)),
    "more",
)
"""What the numbers of `WorkerStatus.staleness` count."""


@dataclass(frozen=True)
class State:
    """How a run stands: a word, why, and the look of the word."""

    word: str
    reason: str
    look: str


@dataclass(frozen=True)
class Tile:
    """A number that matters."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Table:
    """Texts in rows; `numeric` are the columns of numbers, from 0."""

    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True)
class MessageReceived:
    """A line of a log."""

    when: str
    source: str
    message: str
    exception: str
    look: str


@dataclass(frozen=True)
class Told:
    """An event: when since the run began, and when in UTC."""

    when: str
    at: str
    text: str
    look: str


@dataclass(frozen=True)
class PhaseShare:
    """A phase's part of a process's time."""

    phase: str
    percent: float
    text: str


@dataclass(frozen=True)
class Split:
    """Where one process's time went."""

    title: str
    parts: Sequence[PhaseShare]


@dataclass(frozen=True)
class FirstTrouble:
    """What went wrong first, and what was said around it."""

    what: str
    lines: Sequence[MessageReceived]


@dataclass(frozen=True)
class Page:
    """What is on the page."""

    run_id: str
    subtitle: str
    state: State
    tiles: Sequence[Tile]
    trouble: FirstTrouble | None
    no_trouble: str
    log_notes: Sequence[str]
    curves: Markup
    workers: Table
    staleness: Table
    phases: Sequence[str]
    splits: Sequence[Split]
    links: Table
    events: Sequence[Told]
    routine: str
    changed: Table
    config: str
    machines: Table
    problems: Sequence[str]
    folder: str
    began: str
    written: str
    version: str


def write_report(paths: RunPaths, ended_by: BaseException | None = None) -> Path:
    """Write a run's report, whether it has ended or not; returns where it is.

    Args:
        paths: the run's folder.
        ended_by: what is just ending it, for its owner, whose log does not tell yet.

    Raises:
        SmolclusterError: the run cannot be read or the page written; an older page is still there.
    """
    page = page_of(read_facts(paths, ended_by), time.time())
    write_page(paths.report, "report.html.jinja", page=page)
    return paths.report


def page_of(facts: ReportData, now: float) -> Page:
    """What is on the page that is written `now`, in seconds since 1970."""
    began = _began(facts)
    workers = workers_of(facts)
    curves, problems = drawn([facts.curves])
    splits = list(_splits(facts))
    shown = {part.phase for split in splits for part in split.parts}
    return Page(
        run_id=facts.paths.run_id,
        subtitle=_subtitle(facts),
        state=state_of(facts),
        tiles=list(_tiles(facts)),
        trouble=_trouble(facts.logs.trouble),
        no_trouble=_no_trouble(facts),
        log_notes=list(_log_notes(facts)),
        curves=curves,
        workers=_workers(facts, workers),
        staleness=_staleness(workers),
        phases=[phase for phase in (*SHARES, "other") if phase in shown],
        splits=splits,
        links=_links(facts, workers),
        events=_events(facts, began),
        routine=_routine(facts),
        changed=_changed(facts),
        config=facts.config,
        machines=_machines(facts),
        problems=[*facts.problems, *problems],
        folder=str(facts.paths.root),
        began=moment_of(began) if began else "",
        written=moment_of(now),
        version=smolcluster.__version__,
    )


def drawn(runs: Sequence[Curves]) -> tuple[Markup, list[str]]:
    """The curves of runs on the same axes, and why there are none."""
    try:
        return Markup(svg_of(runs)), []  # noqa: S704 - matplotlib escapes what is in it
    except SmolclusterError as error:
        return Markup(), [str(error)]


def _began(facts: ReportData) -> float:
    """Seconds since 1970; 0 when it is not known."""
    if facts.story.events:
        return seconds_of(facts.story.events[0].ts, 0.0)
    return facts.status.started_at.timestamp() if facts.status else 0.0


def moment_of(seconds: float) -> str:
    """Seconds since 1970 as a date and a time, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _subtitle(facts: ReportData) -> str:
    started = facts.started
    if started is None:
        return facts.algorithm or "Nothing is known of how it began."
    parts = [started.algorithm, f"{started.model} ({started.num_params:,} parameters)"]
    parts.append(f"on {started.dataset}")
    if started.num_workers > 1:
        parts.append(f"{started.num_workers} workers")
    return " · ".join([*parts, f"codec {started.codec}", f"{started.num_epochs} epochs"])


def state_of(facts: ReportData) -> State:
    """How the run stands, and why."""
    status = facts.status
    ends = [record.event for record in facts.story.of(RunEnded)]
    if status is None and not facts.is_alive and ends and isinstance(end := ends[-1], RunEnded):
        return _ended("ended" if end.ok else "failed", end.reason)
    word = view.state_of(status, facts.summary, facts.is_alive)
    if word in ("ended", "stopped", "failed"):
        return _ended(word, status.reason or "" if status else "")
    if facts.is_alive:
        return State(word, "it goes on; this is how it stood", "live")
    if status is None:
        return State("unknown", "its owner has written nothing here", "bad")
    at = f"{status.updated_at:%Y-%m-%d %H:%M:%S}"
    reason = f"nothing has been heard of its owner since {at}, when it was {status.state}"
    return State(word, reason, "bad")


def _ended(word: str, reason: str) -> State:
    if word == "stopped":
        return State("stopped", "", "live")
    return State(word, reason, "bad" if word == "failed" else "good")


def _tiles(facts: ReportData) -> Iterator[Tile]:
    summary, status = facts.summary, facts.status
    if summary is not None:
        final = summary.final
        train, val = final.train_loss, final.val_loss
        accuracy, perplexity = final.val_accuracy, final.val_perplexity
        steps, samples, wall_s = summary.steps, summary.samples_applied, summary.wall_s
    elif status is not None:
        train, val = status.loss, status.val_loss
        accuracy, perplexity = status.val_accuracy, status.val_perplexity
        steps, samples, wall_s = status.step, status.samples_applied, status.wall_s
    else:
        return
    yield Tile("Training loss", number(train), "mean of the last epoch" if summary else "last step")
    lowest = summary.lowest_val_loss if summary is not None else None
    differs = lowest is not None and number(lowest) != number(val)
    yield Tile("Validation loss", number(val), f"lowest {number(lowest)}" if differs else "")
    if perplexity is not None:
        yield Tile("Perplexity", f"{perplexity:.4g}", "validation")
    elif accuracy is not None:
        yield Tile("Accuracy", f"{accuracy:.1%}", "validation")
    of_steps = f"of {status.total_steps:,}" if status and status.total_steps > steps else ""
    yield Tile("Steps", f"{steps:,}", of_steps)
    yield Tile("Samples", f"{samples:,}", _epochs(facts))
    yield Tile("Time", format_duration(wall_s), _rate(facts, samples, wall_s))
    if summary is not None and summary.workers:
        sent = f"and {format_bytes(summary.bytes.sent)} sent by it"
        yield Tile("Received by the server", format_bytes(summary.bytes.received), sent)
    pushes = summary.pushes.model_dump() if summary else status.pushes if status else {}
    dropped = {name: count for name, count in pushes.items() if name != "applied" and count}
    if pushes.get("applied") or dropped:
        more = ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in dropped.items())
        yield Tile("Pushes", f"{pushes.get('applied', 0):,}", more or "all applied")


def number(value: float | None) -> str:
    """A loss."""
    if value is None:
        return UNKNOWN
    is_plain = value == 0 or SMALL <= abs(value) < LARGE
    return f"{value:.4f}" if is_plain else f"{value:.4g}"


def _epochs(facts: ReportData) -> str:
    epochs = facts.summary.epochs if facts.summary else None
    if epochs is None and facts.status is not None:
        return f"epoch {facts.status.epoch + 1} of {facts.status.num_epochs}"
    return f"{epochs} epoch{'s'[: epochs != 1]}" if epochs is not None else ""


def _rate(facts: ReportData, samples: int, wall_s: float) -> str:
    if not wall_s:
        return ""
    tokens = facts.summary.tokens_per_sample if facts.summary else None
    rate = samples * (tokens or 1) / wall_s
    return f"{rate:,.0f} {'tokens' if tokens else 'samples'}/s"


def _trouble(trouble: FirstError | None) -> FirstTrouble | None:
    if trouble is None:
        return None
    at = f"{datetime.fromtimestamp(trouble.seconds, UTC):%H:%M:%S}"
    return FirstTrouble(f"{at} · {trouble.what}", [_said(line) for line in trouble.lines])


def _said(line: LogLine) -> MessageReceived:
    when = f"{datetime.fromtimestamp(line.seconds, UTC):%H:%M:%S.%f}"[:-3] if line.seconds else ""
    looks = [line.level.lower() if line.level.isalpha() else "", "it" if line.is_it else ""]
    return MessageReceived(
        when, line.source, line.message, line.exception, " ".join(filter(None, looks))
    )


def _no_trouble(facts: ReportData) -> str:
    if not facts.logs.read:
        return "No logs are here, and no worker was lost."
    return "Nothing: no worker was lost, and no log that is here has an error or a warning."


def _log_notes(facts: ReportData) -> Iterator[str]:
    logs = facts.logs
    for kind, by_title in (("Errors", logs.num_errors), ("Warnings", logs.num_warnings)):
        if by_title:
            counts = ", ".join(f"{title} {count:,}" for title, count in by_title.most_common(20))
            yield f"{kind} in the logs: {counts}."
    if logs.missing:
        shown, more = logs.missing[:20], len(logs.missing) - 20
        names = ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")
        yield (
            f"Logs that are not here: {names}. {as_command('fetch')} brings those of other machines, and "
            f"{as_command('report')} then writes this page anew."
        )
    for process in facts.processes:
        offset = process.totals.get("clock_offset_s")
        if process.rank is not None and offset is not None and abs(offset.newest) >= SKEW_S:
            side = "ahead of" if offset.newest > 0 else "behind"
            off = format_duration(abs(offset.newest))
            yield f"The clock of {process.node} is {off} {side} the server's; its lines are moved by it."


def _process_of(facts: ReportData, worker: Worker) -> ProcessSeries | None:
    by_rank = (each for each in facts.processes if each.rank == worker.rank)
    own = (each for each in facts.processes if (each.rank, each.node) == (worker.rank, worker.node))
    return next(own, None) or next(by_rank, None)


def _workers(facts: ReportData, workers: Sequence[Worker]) -> Table:
    is_stale = shows(facts.algorithm, STALENESS)
    stale = ["mean staleness"] if is_stale else []
    numbers = ["samples", "share", *stale, "mean step", "joined", "lost"]
    head = ["worker", "at the end", *numbers, "device", "address"]
    rows = [_worker_row(facts, worker, is_stale=is_stale) for worker in workers]
    return Table(head, cut(rows), frozenset(range(2, 2 + len(numbers))))


def _worker_row(facts: ReportData, worker: Worker, *, is_stale: bool) -> list[str]:
    process = _process_of(facts, worker)
    step_s = step_s_of(process) if process else None
    tau = worker.mean_staleness
    stale = [UNKNOWN if tau is None else f"{tau:.2f}"] if is_stale else []
    return [
        worker.name,
        worker.state or UNKNOWN,
        UNKNOWN if worker.samples is None else f"{worker.samples:,}",
        UNKNOWN if worker.share is None else f"{worker.share:.1%}",
        *stale,
        UNKNOWN if step_s is None else _short_time(step_s),
        f"{worker.num_joins}×",
        f"{worker.num_losses}×" if worker.num_losses else UNKNOWN,
        worker.device or UNKNOWN,
        worker.address or UNKNOWN,
    ]


def _staleness(workers: Sequence[Worker]) -> Table:
    """How stale each worker's pushes were; none where nothing is stale."""
    rows = [
        [worker.name, *(_part(count, total) for count in counts)]
        for worker in workers
        if (total := sum(counts := list(worker.staleness)[: len(TAUS)]))
    ]
    is_stale = any(sum(worker.staleness[1:]) for worker in workers)
    head = ["worker", *TAUS]
    return Table(head, cut(rows) if is_stale else [], frozenset(range(1, len(head))))


def _part(count: int, total: int) -> str:
    share = count / total
    return UNKNOWN if not count else f"{share:.0%}" if share >= 0.005 else "<1%"


def _short_time(seconds: float) -> str:
    """A length of time, to the millisecond below a second."""
    return f"{1000 * seconds:.0f} ms" if 0.0995 <= seconds < 0.9995 else format_duration(seconds)


def cut(rows: list[Any], at_most: int = MAX_ROWS) -> list[Any]:
    """The first and the last rows of a table, and in place of the others how many they are."""
    left_out = len(rows) - at_most
    if left_out <= 0:
        return rows
    between = ["…", f"{left_out:,} more"]
    row = between + [""] * (len(rows[0]) - len(between))
    return [*rows[: at_most // 2], row, *rows[-(at_most // 2) :]]


def _splits(facts: ReportData) -> Iterator[Split]:
    for process in facts.processes:
        parts = [
            PhaseShare(phase, 100 * share, f"{share:.0%}")
            for phase, share in shares_of(process).items()
            if share >= 0.0005
        ]
        if parts:
            yield Split(title_of(process), parts)


def _links(facts: ReportData, workers: Sequence[Worker]) -> Table:
    head = [
        *("worker", "sent", "MB/s", "most", "received", "MB/s", "most"),
        *("round trip", "waiting frames", "codec ratio"),
    ]
    rows = [row for worker in workers if (row := _link_row(facts, worker))]
    return Table(head, cut(rows), frozenset(range(1, len(head))))


def _link_row(facts: ReportData, worker: Worker) -> list[str] | None:
    """A worker's link, with rates as it measured them; None: nothing is known of it."""
    process = _process_of(facts, worker)
    values = process.totals if process else {}
    if not (worker.sent_bytes or worker.received_bytes or "sent_bytes_per_s" in values):
        return None
    queue = values.get("queue")
    return [
        worker.name,
        format_bytes(worker.sent_bytes) if worker.sent_bytes else UNKNOWN,
        *_megabytes(values.get("sent_bytes_per_s")),
        format_bytes(worker.received_bytes) if worker.received_bytes else UNKNOWN,
        *_megabytes(values.get("received_bytes_per_s")),
        format_duration(values["rtt_s"].mean) if "rtt_s" in values else UNKNOWN,
        UNKNOWN if queue is None else f"{queue.mean:.1f} (most {queue.most:.0f})",
        f"{values['codec_ratio'].mean:.2f}×" if "codec_ratio" in values else UNKNOWN,
    ]


def _megabytes(rate: Total | None) -> list[str]:
    if rate is None:
        return [UNKNOWN, UNKNOWN]
    return [format_megabytes(rate.mean), format_megabytes(rate.most)]


def _events(facts: ReportData, began: float) -> list[Told]:
    happenings = facts.story.happenings
    left_out = len(happenings) - MAX_ROWS
    if left_out <= 0:
        return [_told(each, began) for each in happenings]
    half = MAX_ROWS // 2
    gap = Told("", "", f"… {left_out:,} more …", "muted")
    first, last = happenings[:half], happenings[-half:]
    return [*(_told(e, began) for e in first), gap, *(_told(e, began) for e in last)]


def _told(happening: Happening, began: float) -> Told:
    moment = seconds_of(happening.first.ts, began)
    event, text = happening.first.event, told(happening.first.event)
    if happening.count > 1:
        took = seconds_of(happening.last_ts, moment) - moment
        within = f" within {format_duration(took)}" if took >= 1 else ""
        text = f"{text} ({happening.count:,} times{within})"
    match event:
        case WorkerLost() | WorkerStalled() | WorkerRejected() | RunEnded(ok=False):
            look = "lost"
        case WorkerJoined():
            look = "joined"
        case RunResumed():
            look = "resumed"
        case _:
            look = ""
    when = f"+{format_duration(max(0.0, moment - began))}"
    return Told(when, happening.first.ts, text, look)


def _routine(facts: ReportData) -> str:
    names = (
        (EpochFinished, "epoch finished", "epochs finished"),
        (Evaluated, "evaluation", "evaluations"),
        (CheckpointSaved, "checkpoint", "checkpoints"),
    )
    counts = [(facts.story.routine[kind], one, many) for kind, one, many in names]
    said = [f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count]
    return f"Besides: {', '.join(said)}." if said else ""


def _changed(facts: ReportData) -> Table:
    changed = changed_settings(facts.settings) if facts.settings else []
    rows = [[each.key, each.value, each.default] for each in changed]
    return Table(["setting", "value", "default"], cut(rows))


def _machines(facts: ReportData) -> Table:
    head = ["process", "system", "processor", "cores", "memory", "Python", "PyTorch", "smolcluster"]
    rows = [_machine_row(title, said) for title, said in sorted(facts.logs.machines.items())]
    return Table(head, cut(rows), frozenset({3, 4}))


def _machine_row(title: str, said: Any) -> list[str]:
    memory = said.get("memory_bytes")
    texts = [str(said.get(name, UNKNOWN))[:100] for name in ("system", "processor", "cores")]
    versions = [str(said.get(name, UNKNOWN))[:40] for name in ("python", "torch", "smolcluster")]
    shown = format_bytes(memory) if isinstance(memory, int | float) else UNKNOWN
    return [title, *texts, shown, *versions]
