"""What came of a run, in numbers and in a word: for its page, and for runs side by side."""

from collections.abc import Sequence

from pydantic import Field

from smolcluster.configs.spec import STALENESS, spec_of
from smolcluster.observability.view.snapshot import LAST_STEP, numbers_of
from smolcluster.observability.view.view import View
from smolcluster.observability.view.workers import Worker
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.model_file import WithMetrics


class Outcome(WithMetrics):
    """What came of a run so far; null is what is not known, or does not apply."""

    run_id: str
    algorithm: str | None
    state: str
    train_loss: float | None = None
    is_last_step: bool = Field(
        False, description="Whether train_loss is the last step's, not the last epoch's mean."
    )
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_perplexity: float | None = None
    steps: int | None = None
    samples: int | None = None
    wall_s: float | None = None
    samples_per_s: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None
    mean_staleness: float | None = None
    num_workers: int | None = None
    num_workers_lost: int | None = None


def outcome_of(view: View) -> Outcome:
    """What came of a run so far; what its summary says goes before its status."""
    summary = view.summary
    told = numbers_of(None if summary else view.status, summary)
    values: dict[str, object] = {
        "run_id": view.paths.run_id,
        "algorithm": view.algorithm or None,
        "state": state_of(view)[0],
    }
    if told:
        samples, wall_s = told["samples_applied"], told["wall_s"]
        values |= {name: value for name, value in told.items() if name.startswith(PREFIX)}
        values |= {
            "train_loss": told["loss"],
            "is_last_step": told["loss_is"] == LAST_STEP,
            "steps": told["step"],
            "samples": samples,
            "wall_s": wall_s,
            "samples_per_s": samples / wall_s if wall_s else None,
        }
        if workers := view.workers:
            values |= _of_cluster(view, workers)
    return Outcome.model_validate(values)


def _of_cluster(view: View, workers: Sequence[Worker]) -> dict[str, object]:
    values: dict[str, object] = {
        "num_workers": len(workers),
        "num_workers_lost": sum(worker.num_losses for worker in workers),
    }
    if view.summary is not None:
        traffic = view.summary.bytes
        values |= {"received_bytes": traffic.received, "sent_bytes": traffic.sent}
    if STALENESS in spec_of(view.algorithm).columns:
        stale = [(w.samples or 0, w.mean_staleness) for w in workers]
        known = [(samples, tau) for samples, tau in stale if tau is not None]
        total = sum(samples for samples, _ in known)
        mean = sum(samples * tau for samples, tau in known) / total if total else None
        values |= {"mean_staleness": mean}
    return values


def state_of(view: View) -> tuple[str, str, str]:
    """How the run stands: a word, why, and the look of the word."""
    read, status, word = view.snapshot, view.status, view.snapshot.heard
    if word == "stopped":
        return word, "", "live"
    if word in ("ended", "failed"):
        return word, read.reason or "", "bad" if word == "failed" else "good"
    if status is None:
        told = "its owner has written nothing here"
        return (word, f"{told} yet", "live") if read.is_alive else (word, told, "bad")
    if read.is_alive:
        return word, "it goes on; this is how it stood", "live"
    at = f"{status.updated_at:%Y-%m-%d %H:%M:%S} UTC"
    if read.is_alive is None:
        return word, f"as its server wrote on another machine at {at}", "live"
    reason = f"nothing has been heard of its owner since {at}, when it was {status.state}"
    return word, reason, "bad"
