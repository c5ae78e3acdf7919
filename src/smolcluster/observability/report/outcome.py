"""What came of a run, in numbers and in a word: for its page, and for runs side by side."""

from collections.abc import Sequence

from pydantic import Field

from smolcluster.configs.spec import STALENESS, spec_of
from smolcluster.observability.view import snapshot as view
from smolcluster.observability.view.facts import ReportData, Worker, workers_of
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.events import RunEnded
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


def outcome_of(facts: ReportData) -> Outcome:
    """What came of a run so far."""
    summary, status = facts.summary, facts.status
    values: dict[str, object] = {
        "run_id": facts.paths.run_id,
        "algorithm": facts.algorithm or None,
        "state": state_of(facts)[0],
    }
    if summary is not None:
        values |= {**summary.final.model_dump(), "steps": summary.steps}
    elif status is not None:
        values |= {name: value for name, value in status if name.startswith(PREFIX)}
        values |= {"train_loss": status.loss, "is_last_step": True, "steps": status.step}
    if (known := summary or status) is not None:
        rate = known.samples_applied / known.wall_s if known.wall_s else None
        values |= {"samples": known.samples_applied, "wall_s": known.wall_s, "samples_per_s": rate}
        if workers := workers_of(facts):
            values |= _of_cluster(facts, workers)
    return Outcome.model_validate(values)


def _of_cluster(facts: ReportData, workers: Sequence[Worker]) -> dict[str, object]:
    values: dict[str, object] = {
        "num_workers": len(workers),
        "num_workers_lost": sum(worker.num_losses for worker in workers),
    }
    if facts.summary is not None:
        traffic = facts.summary.bytes
        values |= {"received_bytes": traffic.received, "sent_bytes": traffic.sent}
    if STALENESS in spec_of(facts.algorithm).columns:
        stale = [(w.samples or 0, w.mean_staleness) for w in workers]
        known = [(samples, tau) for samples, tau in stale if tau is not None]
        total = sum(samples for samples, _ in known)
        mean = sum(samples * tau for samples, tau in known) / total if total else None
        values |= {"mean_staleness": mean}
    return values


def state_of(facts: ReportData) -> tuple[str, str, str]:
    """How the run stands: a word, why, and the look of the word."""
    status = facts.status
    ends = [record.event for record in facts.story.of(RunEnded)]
    if status is None and not facts.is_alive and ends and isinstance(end := ends[-1], RunEnded):
        return ("ended", end.reason, "good") if end.ok else ("failed", end.reason, "bad")
    word = view.state_of(status, facts.summary, facts.is_alive)
    if word == "stopped":
        return word, "", "live"
    if word in ("ended", "failed"):
        reason = status.reason or "" if status else ""
        return word, reason, "bad" if word == "failed" else "good"
    if facts.is_alive:
        return word, "it goes on; this is how it stood", "live"
    if status is None:
        return "unknown", "its owner has written nothing here", "bad"
    at = f"{status.updated_at:%Y-%m-%d %H:%M:%S}"
    reason = f"nothing has been heard of its owner since {at}, when it was {status.state}"
    return word, reason, "bad"
