"""The learning rate as a function of the samples applied, not of time or of who is present."""

import math

from pydantic import BaseModel, ConfigDict, PositiveInt

from smolcluster.configs.schema import TrainConfig
from smolcluster.training.recipe import Schedule
from smolcluster.utils.user_code import user_code, wrong_result

SCHEDULE = "schedule"
"""Where a checkpoint's progress has a `ScheduleState`."""


class ScheduleState(BaseModel):
    """What a checkpoint must say for the learning rate to go on as it was, whatever is configured then."""

    model_config = ConfigDict(extra="forbid")

    num_optimizers: PositiveInt = 1
    """As `learning_rate` takes it; earlier versions, which do not say it, have taken 1."""


def learning_rate(
    config: TrainConfig,
    samples_applied: int,
    total_samples: int,
    own: Schedule | None = None,
    num_optimizers: int = 1,
) -> float:
    """Return the learning rate of the step after `samples_applied` of `total_samples` samples.

    An `own` schedule gives the factor on `learning_rate`, in place of `lr_schedule`.
    Without `lr_schedule` it is constant. With it, it rises linearly over `warmup_iters` steps of
    `samples_per_step` samples to `learning_rate` (the first step already gets its share), then falls
    along half a cosine to `min_lr`, which is reached when all samples are applied.

    `num_optimizers`: that share the samples, each of which takes steps of its own: a step of the warm-up is
    one of each, so that each takes as many of them as the only one would.

    Raises:
        UserCodeError: the own schedule raised, or its factor is negative, infinite or no number.
    """
    if own is not None:
        return config.learning_rate * _factor(own, samples_applied, total_samples)
    schedule = config.lr_schedule
    if schedule is None:
        return config.learning_rate
    step = num_optimizers * config.samples_per_step
    warmup = schedule.warmup_iters * step
    if samples_applied < warmup:
        share = (samples_applied + step) / (warmup + step)
        return config.learning_rate * share
    if samples_applied >= total_samples:
        return schedule.min_lr
    progress = (samples_applied - warmup) / (total_samples - warmup)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + height * (config.learning_rate - schedule.min_lr)


def _factor(schedule: Schedule, samples_applied: int, total_samples: int) -> float:
    with user_code("training.schedule"):
        factor = schedule(samples_applied, total_samples)
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        problem = f"{factor!r} after {samples_applied} of {total_samples} samples"
        raise wrong_result(
            "training.schedule", schedule, f"must give a factor of 0 or more, not {problem}"
        )
    return float(factor)
