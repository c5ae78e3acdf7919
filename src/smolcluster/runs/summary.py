"""`summary.json`: what came of a run. Only the server writes it."""

from pydantic import (
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
)
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smolcluster.configs.schema import TrainConfig
from smolcluster.configs.spec import STALENESS, spec_of
from smolcluster.errors import CheckpointError
from smolcluster.runs.evaluated import metrics_in
from smolcluster.runs.model_file import Measured, ModelFile, Strict, WithMetrics
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.utils.units import format_bytes, format_duration, format_loss


class Pushes(Strict):
    """How many pushes had which outcome."""

    applied: NonNegativeInt = 0
    stale: NonNegativeInt = 0
    late: NonNegativeInt = 0
    duplicate: NonNegativeInt = 0
    non_finite: NonNegativeInt = 0
    lost: NonNegativeInt = 0


class Final(WithMetrics):
    """What the model is worth at the end; null where there was no such measurement."""

    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: Measured = None
    val_perplexity: Measured = None


class Traffic(Strict):
    """Bytes that the server's sockets sent and received, with headers and sums."""

    sent: NonNegativeInt = 0
    received: NonNegativeInt = 0


class WorkerShare(Strict):
    """What one worker did: `share` is its part of all samples applied, 0 to 1."""

    rank: NonNegativeInt
    node: str
    samples: NonNegativeInt
    mean_staleness: NonNegativeFloat
    share: float


class Summary(Strict):
    """The run in numbers; `train_samples` is an epoch's, all others are the whole run's.

    `steps_undone`: steps that lost stores had taken on their slices, each times the slice's share of the
    weights; their samples count as applied. `tokens_per_sample` is null where a sample is no text.
    `num_bad_evals`: of a run that `patience` has ended, how many in a row had not lowered the validation
    loss.
    """

    algorithm: str
    run_id: str
    wall_s: NonNegativeFloat
    epochs: NonNegativeInt
    num_bad_evals: NonNegativeInt | None = Field(
        None, validation_alias=AliasChoices("num_bad_evals", "evaluations_in_vain")
    )
    steps: NonNegativeInt
    train_samples: NonNegativeInt
    samples_applied: NonNegativeInt
    tokens_per_sample: NonNegativeInt | None = None
    codec: str
    pushes: Pushes
    leases_returned: NonNegativeInt
    steps_undone: NonNegativeFloat = 0.0
    final: Final
    lowest_val_loss: float | None = None
    bytes: Traffic
    workers: list[WorkerShare]


SUMMARY = ModelFile[Summary](Summary, "is not a run's summary", "has the run ended?")
read_summary, write_summary = SUMMARY.read, SUMMARY.write


def table(summary: Summary) -> RenderableType:
    """The closing table: the run's facts, and a row for each worker."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(summary):
        facts.add_row(name, Text(value))
    is_stale = STALENESS in spec_of(summary.algorithm).columns
    workers = Table("worker", "samples", "share", *(["mean staleness"] if is_stale else []))
    for worker in summary.workers:
        staleness = [f"{worker.mean_staleness:.2f}"] if is_stale else []
        share = f"{worker.share:.1%}"
        title = process_title("worker", worker.node, worker.rank)
        workers.add_row(Text(title), f"{worker.samples:,}", share, *staleness)
    return Group(facts, workers) if summary.workers else facts


def sample_shown(paths: RunPaths) -> str:
    """The sample that a run has left, for the console."""
    text = paths.sample.read_text(encoding="utf-8").rstrip()
    return f"a sample of what the model writes:\n\n{text}\n"


def _facts(summary: Summary) -> list[tuple[str, str]]:
    final, pushes, traffic = summary.final, summary.pushes, summary.bytes
    tokens = summary.tokens_per_sample
    rate = summary.samples_applied / summary.wall_s if summary.wall_s else 0.0
    outcomes = [
        f"{count:,} {name.replace('_', '-')}"
        for name, count in pushes
        if count or name == "applied"
    ]
    undone = f"{summary.steps_undone:,.1f}, in slices whose stores were lost"
    own = [
        ("run", summary.run_id),
        ("time", format_duration(summary.wall_s)),
        ("speed", f"{rate * (tokens or 1):,.0f} {'tokens' if tokens else 'samples'}/s on average"),
        ("epochs", f"{summary.epochs:,}"),
        ("steps", f"{summary.steps:,}"),
        ("samples", f"{summary.samples_applied:,}"),
        ("loss", _losses(final, summary.lowest_val_loss)),
        *_measured(final),
        *([("steps undone", undone)] if summary.steps_undone else []),
    ]
    if not summary.workers:
        return own
    return [
        *own,
        *([("pushes", ", ".join(outcomes))] if spec_of(summary.algorithm).has_pushes else []),
        ("leases returned", f"{summary.leases_returned:,}"),
        ("codec", summary.codec),
        ("received", format_bytes(traffic.received)),
        ("sent", format_bytes(traffic.sent)),
    ]


def _losses(final: Final, lowest: float | None) -> str:
    said = f"train {_number(final.train_loss)}, validation {_number(final.val_loss)}"
    if lowest is None or final.val_loss is None or _number(lowest) == _number(final.val_loss):
        return said
    return f"{said}, lowest {_number(lowest)}"


def _measured(final: Final) -> list[tuple[str, str]]:
    return [
        (f"validation {name}", _number(value) if name == "accuracy" else f"{value:.4g}")
        for name, value in metrics_in(dict(final)).items()
    ]


def _number(value: float | None) -> str:
    return "not measured" if value is None else format_loss(value)


def check_unfinished(paths: RunPaths, train: TrainConfig) -> None:
    """A run that has ended may only go on with more epochs or steps, or more patience.

    Raises:
        CheckpointError: it has ended, and `train` does not ask for more than it had.
        DataError: its summary cannot be read.
    """
    if not paths.summary.is_file():
        return
    summary, why, or_by = read_summary(paths.summary), "", " or set it to null"
    if summary.num_bad_evals is not None:
        key, asked, had = "patience", train.patience, summary.num_bad_evals
        why = " because its validation loss fell no more"
    elif train.num_steps is not None:
        key, asked, had = "num_steps", train.num_steps, summary.steps
    else:
        had = summary.samples_applied // summary.train_samples
        key, asked = "num_epochs", train.num_epochs
        or_by = f", such as by --override num_epochs={2 * had}"
    if asked is not None and asked <= had:
        raise CheckpointError(
            f"run {paths.run_id} has ended{why}; to train on, raise {key} above {had}{or_by}"
        )
