"""The learning rate as a function of the samples applied, not of time or of who is present."""

import math

from smolcluster.configs.schema import TrainConfig


def learning_rate(config: TrainConfig, samples_applied: int, total_samples: int) -> float:
    """Return the learning rate of the step after `samples_applied` of `total_samples` samples.

    Without `lr_schedule` it is constant. With it, it rises linearly over `warmup_iters` steps of
    `samples_per_step` samples to `learning_rate` (the first step already gets its share), then falls
    along half a cosine to `min_lr`, which is reached when all samples are applied.
    """
    schedule = config.lr_schedule
    if schedule is None:
        return config.learning_rate
    step = config.samples_per_step
    warmup = schedule.warmup_iters * step
    if samples_applied < warmup:
        share = (samples_applied + step) / (warmup + step)
        return config.learning_rate * share
    if samples_applied >= total_samples:
        return schedule.min_lr
    progress = (samples_applied - warmup) / (total_samples - warmup)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + height * (config.learning_rate - schedule.min_lr)
