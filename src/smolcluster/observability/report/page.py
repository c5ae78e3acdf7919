"""`report.html`: a run on one page, which needs neither network nor scripts to be read.

The template takes from a `View` what is there as it is; here are the texts and tables made of it.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from smolcluster.configs.spec import STALENESS, spec_of
from smolcluster.observability.report.outcome import outcome_of, state_of
from smolcluster.observability.report.render import UNKNOWN, drawn, loss, or_unknown, write_page
from smolcluster.observability.report.settings import changed_settings
from smolcluster.observability.view.first_error import Logs
from smolcluster.observability.view.stages import WORDS, StageView
from smolcluster.observability.view.story import Happening, told
from smolcluster.observability.view.view import View, read_view
from smolcluster.observability.view.workers import Worker
from smolcluster.runs.advice import Prediction
from smolcluster.runs.evaluated import cell, metrics_in
from smolcluster.runs.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    RunEnded,
    RunResumed,
    StepsUndone,
    WorkerJoined,
    WorkerLost,
    WorkerRejected,
    WorkerStalled,
    kind_of,
)
from smolcluster.runs.files import seconds_of
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.runs.series import ProcessSeries, Total
from smolcluster.runs.status import STALENESS_EDGES, STOPPED
from smolcluster.utils.meter import PEAK, PHASES
from smolcluster.utils.units import format_bytes, format_count, format_duration, format_megabytes
from smolcluster.utils.words import a_few, as_command
from smolcluster.version import __version__

MAX_NAMES = 20
SKEW_S = 0.05
"""A clock that is off by less is right."""
TAUS = (
    "0",
    *(str(b) if b == a + 1 else f"{a + 1}–{b}" for a, b in pairwise(STALENESS_EDGES)),
    "more",
)
"""What the numbers of `WorkerStatus.staleness` count."""


class Table(NamedTuple):
    """Texts in rows; `numeric` are the columns of numbers, from 0."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: range = range(0)


def write_report(paths: RunPaths, ended_by: BaseException | None = None) -> Path:
    """Write a run's report, whether it has ended or not; returns where it is.

    Args:
        paths: the run's folder.
        ended_by: what is just ending it, for its owner, whose log does not tell yet.

    Raises:
        SmolclusterError: the run cannot be read or the page written; an older page is still there.
    """
    view = read_view(paths)
    logs = view.logs(ended_by)
    workers = view.workers
    curves, undrawn = drawn([view.curves])
    began = _began(view)
    splits = list(_splits(view))
    write_page(
        paths.report,
        "report.html.jinja",
        view=view,
        logs=logs,
        subtitle=_subtitle(view),
        state=state_of(view),
        tiles=_tiles(view),
        log_notes=_log_notes(view, logs, workers),
        curves=curves,
        workers=_workers(view, workers),
        ranks=_ranks(view),
        staleness=_staleness(workers),
        stages=_stages(view),
        phases=[each for each in (*PHASES, "other") if any(each in parts for _, parts in splits)],
        splits=splits,
        peaks=_peaks(view),
        links=_links(view, workers),
        events=[_event(each, began) for each in view.story.happenings],
        routine=_routine(view),
        changed=Table(
            ["setting", "value", "default"],
            changed_settings(view.settings) if view.settings else [],
        ),
        machines=_machines(logs),
        problems=[*view.problems, *undrawn],
        began=began,
        now=time.time(),
        version=__version__,
    )
    return paths.report


def _began(view: View) -> float:
    """Seconds since 1970; 0 when it is not known."""
    if view.story.events:
        return seconds_of(view.story.events[0].ts, 0.0)
    return view.status.started_at.timestamp() if view.status else 0.0


def _subtitle(view: View) -> str:
    started = view.started
    if started is None:
        return view.algorithm or "Nothing is known of how it began."
    parts = [
        started.shown_algorithm,
        f"{started.model} ({started.num_params:,} parameters)",
        f"on {started.dataset}",
    ]
    if view.num_workers > 1:
        parts.append(f"{view.num_workers} workers")
    if started.mesh is not None:
        parts.append(f"{format_count(started.num_ranks or 0, 'rank')}: {started.mesh}")
    if started.codec != "none":
        parts.append(f"codec {started.codec}")
    parts.append(format_count(started.num_epochs, "epoch"))
    return " · ".join(parts)


def _tiles(view: View) -> Iterator[tuple[str, str, str]]:
    """The numbers that matter: a name, a value, and what is said beside it."""
    summary, status, outcome = view.summary, view.status, outcome_of(view)
    if summary is None and status is None:
        return
    train, val = loss(outcome.train_loss), loss(outcome.val_loss)
    yield "Training loss", train, "last step" if outcome.is_last_step else "mean of the last epoch"
    lowest = loss(summary.lowest_val_loss) if summary else UNKNOWN
    yield "Validation loss", val, "" if lowest in (UNKNOWN, val) else f"lowest {lowest}"
    for name, value in metrics_in(outcome.model_dump()).items():
        yield name[:1].upper() + name[1:], cell(name, value), "validation"
    steps = outcome.steps or 0
    of_steps = f"of {status.total_steps:,}" if status and status.total_steps > steps else ""
    yield "Steps", f"{steps:,}", of_steps
    yield "Samples", f"{outcome.samples:,}", _epochs(view)
    tokens = summary.tokens_per_sample if summary else None
    rate = (outcome.samples_per_s or 0.0) * (tokens or 1)
    speed = (
        f"{rate:,.0f} {'tokens' if tokens else 'samples'}/s on average" if outcome.wall_s else ""
    )
    yield "Time", format_duration(outcome.wall_s or 0.0), speed
    if view.snapshot.prediction is not None and outcome.samples_per_s:
        yield _predicted(view.snapshot.prediction, outcome.samples_per_s, tokens)
    if summary is not None and summary.workers:
        sent = f"and {format_bytes(summary.bytes.sent)} sent by it"
        yield "Received by the server", format_bytes(summary.bytes.received), sent
    pushes = summary.pushes.model_dump() if summary else status.pushes if status else {}
    dropped = {name: count for name, count in pushes.items() if name != "applied" and count}
    if spec_of(view.algorithm).has_pushes and (pushes.get("applied") or dropped):
        more = ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in dropped.items())
        yield "Pushes", f"{pushes.get('applied', 0):,}", more or "all applied"


def _predicted(
    prediction: Prediction, samples_per_s: float, tokens: int | None
) -> tuple[str, str, str]:
    """What was predicted, and how far off what was measured is."""
    unit, each = ("tokens", tokens) if tokens else ("samples", 1)
    off = samples_per_s / prediction.samples_per_s - 1
    alone = f"{prediction.alone_samples_per_s * each:,.0f} {unit}/s on {prediction.alone} alone"
    told = f"measured {samples_per_s * each:,.0f}, {abs(off):.0%} {'more' if off > 0 else 'less'}; {alone}"
    return "Predicted", f"{prediction.samples_per_s * each:,.0f} {unit}/s", told


def _epochs(view: View) -> str:
    epochs = view.summary.epochs if view.summary else None
    if epochs is None and view.status is not None:
        num_epochs = view.status.num_epochs
        return f"epoch {min(view.status.epoch + 1, num_epochs)} of {num_epochs}"
    return "" if epochs is None else format_count(epochs, "epoch")


def _log_notes(view: View, logs: Logs, workers: Sequence[Worker]) -> Iterator[str]:
    for kind, by_title in (("Errors", logs.num_errors), ("Warnings", logs.num_warnings)):
        if by_title:
            counts = ", ".join(f"{title} {count:,}" for title, count in by_title.most_common(20))
            yield f"{kind} in the logs: {counts}."
    launched = {each.node for each in view.snapshot.processes}
    by_themselves = {each.name for each in workers if launched and each.node not in launched}
    if far := [each for each in logs.missing if each not in by_themselves]:
        yield (
            f"Logs that are not here: {a_few(far, MAX_NAMES)}. {as_command('fetch')} brings those of other "
            f"machines, and {as_command('report')} then writes this page anew."
        )
    if own := [each for each in logs.missing if each in by_themselves]:
        yield (
            f"Logs on the machines of workers that have joined by themselves: {a_few(own, MAX_NAMES)}. "
            f"{as_command('logs', view.paths.run_id)} there shows them."
        )
    for process in view.processes:
        offset = process.totals.get("clock_offset_s")
        if process.rank is not None and offset is not None and abs(offset.newest) >= SKEW_S:
            side = "ahead of" if offset.newest > 0 else "behind"
            off = format_duration(abs(offset.newest))
            yield f"The clock of {process.node} is {off} {side} the server's; its lines are moved by it."


def _process_of(view: View, worker: Worker) -> ProcessSeries | None:
    of_rank = [each for each in view.processes if each.rank == worker.rank]
    return next((each for each in of_rank if each.node == worker.node), next(iter(of_rank), None))


def _workers(view: View, workers: Sequence[Worker]) -> Table:
    is_stale = STALENESS in spec_of(view.algorithm).columns
    stale = ["mean staleness"] if is_stale else []
    numbers = ["samples", "share", *stale, "mean step", "joined", "lost"]
    head = ["worker", "at the end", *numbers, "device", "address"]
    rows = [_worker_row(view, worker, is_stale=is_stale) for worker in workers]
    return Table(head, rows, range(2, 2 + len(numbers)))


def _worker_row(view: View, worker: Worker, *, is_stale: bool) -> list[str]:
    process = _process_of(view, worker)
    return [
        worker.name,
        worker.state or UNKNOWN,
        or_unknown("{:,}".format, worker.samples),
        or_unknown("{:.1%}".format, worker.share),
        *([or_unknown("{:.2f}".format, worker.mean_staleness)] if is_stale else []),
        or_unknown(_short_time, step_s_of(process) if process else None),
        f"{worker.num_joins}×",
        f"{worker.num_losses}×" if worker.num_losses else UNKNOWN,
        worker.device or UNKNOWN,
        worker.address or UNKNOWN,
    ]


def _ranks(view: View) -> Table:
    """What each rank of a mesh has reported; none of other runs."""
    ranks = [each for each in view.processes if each.role == "rank"]
    rows = [
        [
            title_of(rank),
            or_unknown(_short_time, step_s_of(rank)),
            or_unknown("{0.mean:.2f}".format, rank.totals.get("cpu")),
            or_unknown(lambda total: format_bytes(total.most), rank.totals.get("memory_bytes")),
        ]
        for rank in ranks
    ]
    head = ["rank", "mean step", "CPU cores", "most memory"]
    return Table(head, rows, range(1, len(head)))


def _staleness(workers: Sequence[Worker]) -> Table:
    """How stale each worker's pushes were; none where nothing is stale."""
    is_stale = any(sum(worker.staleness[1:]) for worker in workers)
    rows = [
        [worker.name, *(_part(count, total) for count in counts)]
        for worker in workers
        if is_stale and (total := sum(counts := list(worker.staleness)[: len(TAUS)]))
    ]
    return Table(["worker", *TAUS], rows, range(1, 1 + len(TAUS)))


def _stages(view: View) -> Table:
    """What each stage of a pipeline did in the newest step; none of other runs."""
    seen = [
        (process_title("worker", each.node, each.rank), stage)
        for each in (view.status.workers if view.status else ())
        if (stage := StageView.of(each.process_stats))
    ]
    ops = [name for name in WORDS if any(name in stage.op_s for _, stage in seen)]
    rows = [
        [
            title,
            stage.ranges,
            *(or_unknown(_short_time, stage.op_s.get(name)) for name in ops),
            f"{stage.bubble:.0%}",
            stage.rates or UNKNOWN,
        ]
        for title, stage in seen
    ]
    head = ["worker", "layers", *(WORDS[name] for name in ops), "waits", "sends"]
    return Table(head, rows, range(2, 3 + len(ops)))


def _part(count: int, total: int) -> str:
    share = count / total
    return UNKNOWN if not count else f"{share:.0%}" if share >= 0.005 else "<1%"


def _short_time(seconds: float) -> str:
    """A length of time, to the millisecond below a second."""
    return f"{1000 * seconds:.0f} ms" if 0.0995 <= seconds < 0.9995 else format_duration(seconds)


def _splits(view: View) -> Iterator[tuple[str, dict[str, float]]]:
    """Where each process's time went: its parts by phase, 0 to 1."""
    for process in view.processes:
        if parts := {name: part for name, part in shares_of(process).items() if part >= 0.0005}:
            yield title_of(process), parts


def _peaks(view: View) -> Table:
    """The most memory of each process by phase; none where it was not measured."""
    measured = {
        title_of(process): {phase: process.totals.get(f"{PEAK}{phase}") for phase in PHASES}
        for process in view.processes
    }
    phases = [phase for phase in PHASES if any(peaks[phase] for peaks in measured.values())]
    rows = [
        [title, *(or_unknown(lambda total: format_bytes(total.most), peaks[p]) for p in phases)]
        for title, peaks in measured.items()
        if any(peaks.values())
    ]
    return Table(["process", *phases], rows, range(1, 1 + len(phases)))


def _links(view: View, workers: Sequence[Worker]) -> Table:
    """Each worker's link: what it carried and, where that was measured, what it could carry."""
    links = view.snapshot.prediction.links if view.snapshot.prediction else {}
    has_capacity = any(worker.node in links for worker in workers)
    of = ["link carries"] if has_capacity else []
    head = [
        *("worker", "sent", "sent MB/s", "most", *of, "received", "received MB/s", "most", *of),
        *("round trip", "waiting frames", "codec ratio"),
    ]
    rows = [
        row for worker in workers if (row := _link_row(view, worker, has_capacity=has_capacity))
    ]
    return Table(head, rows, range(1, len(head)))


def _link_row(view: View, worker: Worker, *, has_capacity: bool) -> list[str] | None:
    """A worker's link, with rates as it measured them; None: nothing is known of it."""
    process = _process_of(view, worker)
    values = process.totals if process else {}
    if not (worker.sent_bytes or worker.received_bytes or "sent_bytes_per_s" in values):
        return None
    link = view.snapshot.prediction.links.get(worker.node) if view.snapshot.prediction else None
    up = [or_unknown(format_megabytes, link and link.up_bytes_s)] * has_capacity
    down = [or_unknown(format_megabytes, link and link.down_bytes_s)] * has_capacity
    return [
        worker.name,
        format_bytes(worker.sent_bytes) if worker.sent_bytes else UNKNOWN,
        *_megabytes(values.get("sent_bytes_per_s")),
        *up,
        format_bytes(worker.received_bytes) if worker.received_bytes else UNKNOWN,
        *_megabytes(values.get("received_bytes_per_s")),
        *down,
        or_unknown(lambda total: format_duration(total.mean), values.get("rtt_s")),
        or_unknown("{0.mean:.1f} (most {0.most:.0f})".format, values.get("queue")),
        or_unknown("{0.mean:.2f}×".format, values.get("codec_ratio")),
    ]


def _megabytes(rate: Total | None) -> list[str]:
    if rate is None:
        return [UNKNOWN, UNKNOWN]
    return [format_megabytes(rate.mean), format_megabytes(rate.most)]


def _event(happening: Happening, began: float) -> tuple[str, str, str, str]:
    """When since the run began, what, when in UTC, and the look of the text."""
    moment = seconds_of(happening.first.ts, began)
    event, text = happening.first.event, told(happening.first.event)
    if happening.count > 1:
        took = seconds_of(happening.last_ts, moment) - moment
        within = f" within {format_duration(took)}" if took >= 1 else ""
        text = f"{text} ({happening.count:,} times{within})"
    match event:
        case RunEnded(reason=reason) if reason == STOPPED:
            look = ""
        case WorkerLost() | WorkerStalled() | WorkerRejected() | StepsUndone() | RunEnded(ok=False):
            look = "lost"
        case WorkerJoined():
            look = "joined"
        case RunResumed():
            look = "resumed"
        case _:
            look = ""
    when = f"+{format_duration(max(0.0, moment - began))}"
    return when, text, happening.first.ts, look


def _routine(view: View) -> str:
    nouns = (
        (EpochFinished, "finished epoch"),
        (Evaluated, "evaluation"),
        (CheckpointSaved, "checkpoint"),
    )
    counts = [(view.story.counts[kind_of(kind)], noun) for kind, noun in nouns]
    said = [format_count(count, noun) for count, noun in counts if count]
    return f"Besides: {', '.join(said)}." if said else ""


def _machines(logs: Logs) -> Table:
    head = ["process", "system", "processor", "cores", "memory", "Python", "PyTorch", "smolcluster"]
    rows = [_machine_row(title, said) for title, said in sorted(logs.machines.items())]
    return Table(head, rows, range(3, 5))


def _machine_row(title: str, said: Any) -> list[str]:
    memory = said.get("memory_bytes")
    texts = [str(said.get(name, UNKNOWN))[:100] for name in ("system", "processor", "cores")]
    versions = [str(said.get(name, UNKNOWN))[:40] for name in ("python", "torch", "smolcluster")]
    shown = format_bytes(memory) if isinstance(memory, int | float) else UNKNOWN
    return [title, *texts, shown, *versions]


def title_of(process: ProcessSeries) -> str:
    return process_title(process.role, process.node, process.rank).strip()


def step_s_of(process: ProcessSeries) -> float | None:
    """Mean time of a step: a report of a second cannot tell it, where a step takes longer than that."""
    steps_per_s, step_s = process.totals.get("steps_per_s"), process.totals.get("step_s")
    if steps_per_s is not None and steps_per_s.mean:
        return 1.0 / steps_per_s.mean
    return step_s.mean if step_s else None


def shares_of(process: ProcessSeries) -> Mapping[str, float]:
    """Parts of its time by phase, which make a whole; none when it reported none."""
    known = {name: process.totals.get(f"share/{name}") for name in PHASES}
    shares = {name: max(0.0, share.mean) for name, share in known.items() if share is not None}
    if not shares:
        return {}
    total = max(1.0, math.fsum(shares.values()))
    shares = {name: share / total for name, share in shares.items()}
    return shares | {"other": max(0.0, 1.0 - math.fsum(shares.values()))}
