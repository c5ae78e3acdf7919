"""Training in a single process: the baseline that the distributed algorithms are compared with.

EDP with one worker and an update interval of 1 takes exactly these steps.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from smolcluster.configs.schema import TrainConfig
from smolcluster.data.permutation import EpochOrders, Range, global_batches
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.build import TrainingContext
from smolcluster.training.schedule import learning_rate


@dataclass(frozen=True)
class StepTaken:
    """One optimizer step of a run, which made the weights of `version`."""

    version: int
    samples: Range
    loss: float
    """Their mean before the step, over `num_terms` loss terms; NaN where nobody has told it."""
    learning_rate: float
    """With EDP's staleness factor."""
    grad_norm: float
    """L2 norm of the whole gradient before it was clipped."""
    layer_norms: Mapping[str, float]
    """The same by parameter, where it was measured."""
    num_terms: float
    is_skipped: bool = False
    """Whether a gradient overflowed in float16: the samples count, the weights are as before."""
    rank: int | None = None
    """The worker whose push this was; None: the step is all workers', or there are none."""
    node: str | None = None
    """That worker's machine."""
    staleness: int | None = None
    """τ; None where nothing is stale."""
    outer_step: int | None = None
    """DiLoCo: the number of the outer step that has applied it."""
    drift: float | None = None
    """DiLoCo: how far the worker's change went that it came with, as a share of the weights' norm."""


def training_steps(
    training: TrainingContext,
    train: TrainConfig,
    *,
    samples_applied: int = 0,
    step: int = 0,
    before_step: Callable[[], None] = lambda: None,
    layer_norms: Callable[[], Mapping[str, float]] = dict,
) -> Iterator[StepTaken]:
    """Train on every sample of every epoch that is not yet applied, yielding after each step.

    A step takes `train.samples_per_step` samples. `samples_applied` and `step` are what was done before.

    Args:
        before_step: called when the weights are about to change.
        layer_norms: measures the gradient of a step before it is clipped, by parameter.

    Raises:
        NonFiniteLoss: naming step and layer; the weights are those before the step.
    """
    replica, num_samples = training.replica, training.num_samples
    train = training.recipe.applied_to(train)
    orders = EpochOrders(training.order)
    total_samples = train.total_samples(num_samples)
    batches = global_batches(num_samples, total_samples, train.samples_per_step, samples_applied)
    following = next(batches, None)
    while (batch := following) is not None:
        following = next(batches, None)
        epoch, start = batch.epoch, batch.start
        indices = orders[epoch][start : batch.stop]
        training.want(indices, epoch, start)  # first: a stream is read in order
        if following is not None:
            wanted = orders[following.epoch][following.start : following.stop]
            training.want(wanted, following.epoch, following.start)
        step += 1
        rate = learning_rate(train, samples_applied, total_samples, training.recipe.schedule)
        if replica.buffers.changing:
            before_step()  # computing changes them
        replica.loss_scale = replica.run_scale
        try:
            loss = training.compute(indices, epoch, start)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"step {step}: {error}") from error
        replica.buffers.find()
        training.examine(partial(training.few, indices, epoch, start))
        norms = layer_norms()
        grad_norm = replica.clip(train.gradient_clipping)
        before_step()
        if loss.overflow is None:
            replica.step(rate)
            replica.update_average()
        replica.note_step(overflow=loss.overflow)
        samples_applied += len(indices)
        yield StepTaken(
            version=step,
            samples=batch,
            loss=loss.mean,
            learning_rate=rate,
            grad_norm=grad_norm,
            layer_norms=norms,
            num_terms=loss.num_terms,
            is_skipped=loss.overflow is not None,
        )
