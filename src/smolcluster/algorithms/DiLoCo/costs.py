"""What a run of DiLoCo will cost: rounds in which all arrive together.

A round is `local_steps` batches a worker on average. Worker w computes n_w of them and is then away for e_w
seconds, to send what it has changed and to get new weights: a round takes the T with Σ (T - e_w) / step_w
batches in it.
"""

import math
from collections.abc import Iterator
from statistics import harmonic_mean
from typing import Any

from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.algorithms.DiLoCo.rounds import choose_local_steps
from smolcluster.algorithms.planning.costs import (
    HANDLING_S,
    Forecast,
    Job,
    Site,
    codec_of,
    down_rates,
    lost_share,
    samples_alone,
    seconds_of,
    up_rates,
)
from smolcluster.configs.resolve import Settings

UNKNOWN_EPOCH = 100_000
"""Samples, where it is not known how many there are."""


def step_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    """Bytes of a worker's step to the server and from it: a round's, spread over its steps."""
    local_steps = settings.of(DiLoCoConfig).local_steps or _most_steps(job, settings)
    up, down = _round_nbytes(job, settings)
    return up // local_steps, down // local_steps


def predict(site: Site, job: Job, settings: Settings) -> Forecast:
    """What a run will be like once its rounds are as long as they get."""
    up, down = _round_nbytes(job, settings)
    ups, downs = up_rates(site, lambda _, rate: rate), down_rates(site)
    away_s = [
        seconds_of(up, up_rate)
        + seconds_of(down, down_rate)
        + site.apply_s
        + worker.latency_s
        + HANDLING_S
        for worker, up_rate, down_rate in zip(site.workers, ups, downs, strict=True)
    ]
    steps_s = [worker.step_s for worker in site.workers]
    local_steps = settings.of(DiLoCoConfig).local_steps or choose_local_steps(
        harmonic_mean(steps_s), min(away_s), _total_batches(job, settings), len(steps_s)
    )
    round_s = _round_s(local_steps * len(steps_s), steps_s, away_s)
    samples_per_s = settings.train.samples_per_push * local_steps * len(steps_s) / round_s
    return Forecast(
        samples_per_s=samples_per_s,
        received_bytes_s=len(steps_s) * up / round_s,
        sent_bytes_s=len(steps_s) * down / round_s,
        lost=lost_share(samples_per_s, samples_alone(site, settings)),
        chosen=f"local_steps of about {local_steps}"
        if settings.of(DiLoCoConfig).local_steps is None
        else "",
    )


def candidates(_site: Site, _job: Job, _settings: Settings) -> Iterator[dict[str, Any]]:
    """Codecs for both ways; how many steps a round has is best left to what is measured."""
    for codec in ("fp32", "int8", "int4"):
        yield {"codec_up": codec, "codec_down": codec, "local_steps": None}


def _round_s(num_batches: int, steps_s: list[float], away_s: list[float]) -> float:
    """The T by which so many batches have arrived; who is away for longer computes none."""
    speed = done = 0.0
    round_s = math.inf
    for away, step in sorted(zip(away_s, steps_s, strict=True)):
        if round_s <= away:
            break
        speed += 1 / step
        done += away / step
        round_s = (num_batches + done) / speed
    return round_s


def _round_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    config = settings.of(DiLoCoConfig)
    up = config.codec_up or codec_of(settings)
    return job.encoded_nbytes(up), job.encoded_nbytes(config.codec_down or "fp32")


def _total_batches(job: Job, settings: Settings) -> int:
    num_samples = settings.train.num_epochs * (job.num_samples or UNKNOWN_EPOCH)
    return math.ceil(num_samples / settings.train.samples_per_push)


def _most_steps(job: Job, settings: Settings) -> int:
    num_workers = settings.cluster.num_workers
    return choose_local_steps(1e-9, 1.0, _total_batches(job, settings), num_workers)
