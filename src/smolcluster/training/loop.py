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
        epoch: the epoch it belongs to, from 0.
        start: place of the batch's first sample in the epoch's order.
        num_samples: samples of its batch.
        loss: mean loss of the batch, before the step.
        num_terms: loss terms that it is the mean of.
        learning_rate: of this step.
        grad_norm: L2 norm of the gradient before it was clipped.
        layer_norms: the same by parameter, where it was measured.
    """

    epoch: int
    start: int
    num_samples: int
    loss: float
    num_terms: int
    learning_rate: float
    grad_norm: float
    layer_norms: Mapping[str, float]


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

    A step takes `train.samples_per_step` samples.

    Args:
        training: what is trained, and on what.
        train: how.
        samples_applied: samples that have been applied before.
        step: steps that have been taken before.
        before_step: called when the weights are about to change.
        layer_norms: measures the gradient of a step before it is clipped, by parameter.

    Raises:
        NonFiniteLoss: naming step and layer; the weights are those before the step.
    """
    replica, num_samples = training.replica, training.num_samples
    orders = EpochOrders(training.seed, num_samples)
    total_samples = train.num_epochs * num_samples
    while samples_applied < total_samples:
        epoch, start = divmod(samples_applied, num_samples)
        indices = orders[epoch][start : start + train.samples_per_step]
        step += 1
        rate = learning_rate(train, samples_applied, total_samples)
        try:
            loss = training.compute(indices, epoch, start)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"step {step}: {error}") from error
        norms = layer_norms()
        grad_norm = replica.clip(train.gradient_clipping)
        before_step()
        replica.step(rate)
        samples_applied += len(indices)
        yield TrainingStep(epoch, start, len(indices), *loss, rate, grad_norm, norms)
