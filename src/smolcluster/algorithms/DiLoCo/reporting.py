"""What a DiLoCo server reports of the batches that an outer step has applied."""

from smolcluster.algorithms.DiLoCo.ledger import Applied
from smolcluster.data.permutation import Range
from smolcluster.server.worker import Worker
from smolcluster.training.loop import StepTaken


def local_step(
    applied: Applied, worker: Worker, version: int, outer_step: int, drift: float | None
) -> StepTaken:
    """A batch that outer step number `outer_step` has applied, as step `version` of the run."""
    stepped = applied.stepped
    rate = stepped.learning_rate
    return StepTaken(
        version=version,
        samples=Range.of(applied.key),
        loss=stepped.mean_loss,
        learning_rate=applied.learning_rate if rate is None else rate,
        grad_norm=stepped.grad_norm,
        layer_norms={},
        num_terms=stepped.num_terms,
        **worker.who,
        outer_step=outer_step,
        drift=drift,
        is_skipped=stepped.overflow is not None,
    )
