"""What a run of DiLoCo will cost: rounds in which all arrive together.

A round is `local_steps` batches a worker on average. Where the whole is exchanged at its end, worker w
computes n_w of them and is then away for e_w seconds, to send what it has changed and to get new weights: a
round takes the T with Σ (T - e_w) / step_w batches in it. Streaming exchanges behind computation: a round
takes as long as computing, or as a link is busy in one direction, or as the exchange of a fragment, whichever
is most.
"""

import math
from collections.abc import Iterator
from statistics import harmonic_mean
from typing import Any

from smolcluster.algorithms.DiLoCo.config import DEFAULT_FRAGMENTS, DiLoCoConfig
from smolcluster.algorithms.DiLoCo.peers import LEAST_AHEAD
from smolcluster.algorithms.DiLoCo.rounds import (
    choose_local_steps,
    hiding_round_s,
    waiting_round_s,
)
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
    ups_s = [seconds_of(up, rate) for rate in up_rates(site, lambda _, rate: rate)]
    downs_s = [seconds_of(down, rate) for rate in down_rates(site)]
    steps_s = [worker.step_s for worker in site.workers]
    find = _waiting if settings.of(DiLoCoConfig).mode == "sync" else _hiding
    local_steps, round_s = find(site, job, settings, ups_s, downs_s)
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


def _waiting(
    site: Site, job: Job, settings: Settings, ups_s: list[float], downs_s: list[float]
) -> tuple[int, float]:
    """H, and the seconds of a round at whose end workers wait for the exchange of the whole.

    `ups_s`, `downs_s`: how long each worker's part of it takes.
    """
    steps_s = [worker.step_s for worker in site.workers]
    away_s = [
        up_s + down_s + site.apply_s + worker.latency_s + HANDLING_S
        for worker, up_s, down_s in zip(site.workers, ups_s, downs_s, strict=True)
    ]
    local_steps = _local_steps(waiting_round_s(min(away_s)), steps_s, job, settings)
    return local_steps, _round_s(local_steps * len(steps_s), steps_s, away_s)


def _hiding(
    site: Site, job: Job, settings: Settings, ups_s: list[float], downs_s: list[float]
) -> tuple[int, float]:
    """The same where fragments are exchanged behind computation.

    A fragment's exchange begins with the batches that a worker holds, which are computed first.
    """
    steps_s = [worker.step_s for worker in site.workers]
    config = settings.of(DiLoCoConfig)
    num_fragments = config.num_fragments(DEFAULT_FRAGMENTS)
    exchange_s = max(
        LEAST_AHEAD * worker.step_s + up_s / num_fragments + worker.latency_s
        for worker, up_s in zip(site.workers, ups_s, strict=True)
    )
    exchange_s += site.apply_s + HANDLING_S
    uploads_s = [up_s / num_fragments for up_s in ups_s]
    least_s = hiding_round_s([exchange_s] * num_fragments, uploads_s)
    local_steps = _local_steps(least_s, steps_s, job, settings)
    computing_s = local_steps * harmonic_mean(steps_s)
    if config.mode == "async":  # a slow link holds up nobody else
        return local_steps, computing_s
    return local_steps, max(computing_s, exchange_s, *ups_s, *downs_s)


def _local_steps(round_s: float, steps_s: list[float], job: Job, settings: Settings) -> int:
    return settings.of(DiLoCoConfig).local_steps or choose_local_steps(
        harmonic_mean(steps_s), round_s, _total_batches(job, settings), len(steps_s)
    )


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
