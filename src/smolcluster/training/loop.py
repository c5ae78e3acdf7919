"""Training in a single process: the baseline that the distributed algorithms are compared with.

EDP with one worker and an update interval of 1 takes exactly these steps.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from smolcluster.configs.schema import TrainConfig
from smolcluster.data.permutation import EpochOrders
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.build import TrainingContext
from smolcluster.training.schedule import learning_rate


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step that has been taken.

    Attributes:
        start: place of the batch's first sample in the epoch's order.
        loss: mean over the batch's loss terms, before the step.
        grad_norm: L2 norm of the gradient before it was clipped.
        layer_norms: the same by parameter, where it was measured.
    """

    epoch: int
    start: int
    num_samples: int
    loss: float
    num_terms: float
    learning_rate: float
    grad_norm: float
    layer_norms: Mapping[str, float]
    is_skipped: bool = False
    """Whether its gradient overflowed in float16: the samples count, the weights are as before."""


def training_steps(
    training: TrainingContext,
    train: TrainConfig,
    *,
    samples_applied: int = 0,
    step: int = 0,
    before_step: Callable[[], None] = lambda: None,
    layer_norms: Callable[[], Mapping[str, float]] = dict,
) -> Iterator[TrainingStep]:
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
    total_samples = train.num_epochs * num_samples
    while samples_applied < total_samples:
        epoch, start = divmod(samples_applied, num_samples)
        indices = orders[epoch][start : start + train.samples_per_step]
        training.want(indices, epoch, start)  # first: a stream is read in order
        _want_next(training, orders, epoch, start + len(indices), train)
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
        norms = layer_norms()
        grad_norm = replica.clip(train.gradient_clipping)
        before_step()
        if loss.overflow is None:
            replica.step(rate)
            replica.update_average()
        replica.note_step(overflow=loss.overflow)
        samples_applied += len(indices)
        yield TrainingStep(
            *(epoch, start, len(indices), loss.mean, loss.num_terms, rate, grad_norm, norms),
            is_skipped=loss.overflow is not None,
        )


def _want_next(
    training: TrainingContext, orders: EpochOrders, epoch: int, start: int, train: TrainConfig
) -> None:
    """Begin to load the batch after the one that is computed now."""
    if training.prefetch is None:
        return
    if start == training.num_samples:
        epoch, start = epoch + 1, 0
    if epoch < train.num_epochs:
        training.want(orders[epoch][start : start + train.samples_per_step], epoch, start)
