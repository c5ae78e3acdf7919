"""What a run of DiLoCo will cost: its own rule in fast motion, or in closed form where rounds are long.

Where the whole is exchanged at the end of such a round, worker w computes n_w batches and is then away for
e_w seconds, to send what it has changed and to get new weights: a round takes the T with Σ (T - e_w) / step_w
batches in it. Where exchanges are behind computation nothing is lost, but what a link cannot carry.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import harmonic_mean
from typing import Any

from smolcluster.algorithms.DiLoCo.config import DEFAULT_FRAGMENTS, DiLoCoConfig, gradient_codec
from smolcluster.algorithms.DiLoCo.fast_motion import FastMotion, Found, Run
from smolcluster.algorithms.DiLoCo.rounds import (
    choose_local_steps,
    hiding_round_s,
    most_local_steps,
    waiting_round_s,
)
from smolcluster.algorithms.DiLoCo.sync_beginning import MOST_WAITING, why_none
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
from smolcluster.algorithms.planning.stores import Traffic, as_spread, with_stores
from smolcluster.configs.schema import Settings

UNKNOWN_EPOCH = 100_000
"""Samples, where it is not known how many there are."""


def step_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    """Bytes of a worker's step to the server and from it: a round's, spread over its steps."""
    local_steps = settings.of(DiLoCoConfig).local_steps or _most_steps(job, settings)
    up, down = _round_nbytes(job, settings)
    return up // local_steps, down // local_steps


def predict(site: Site, job: Job, settings: Settings) -> Forecast:
    """What a run will be like once its rounds are as long as they get, with its synchronous beginning."""
    config, (up, down) = settings.of(DiLoCoConfig), _round_nbytes(job, settings)
    site = as_spread(site, settings, Traffic(up, down))
    run = Run(
        mode=config.mode,
        num_fragments=config.num_fragments(DEFAULT_FRAGMENTS),
        local_steps=config.local_steps,
        total_batches=_total_batches(job, settings),
        up_nbytes=up,
        down_nbytes=down,
    )
    found = FastMotion(site, run).find() or _of_long_rounds(site, run)
    has_none = why_none(len(settings.cluster.store_nodes), settings.train.optimizer)
    fraction = 0.0 if has_none else config.sync_fraction
    in_steps = replace(
        run,
        mode="sync",
        num_fragments=1,
        local_steps=1,
        up_nbytes=job.encoded_nbytes(gradient_codec(_codec_up(settings))),
    )
    batches_s = _with_beginning(site, in_steps, found.batches_s, fraction)
    samples_per_s = settings.train.samples_per_push * batches_s
    exchanges_s = len(site.workers) * found.exchanges_s
    return Forecast(
        samples_per_s=samples_per_s,
        received_bytes_s=up * exchanges_s,
        sent_bytes_s=down * exchanges_s,
        lost=lost_share(samples_per_s, samples_alone(site, settings)),
        chosen=f"local_steps of about {found.local_steps}" if config.local_steps is None else "",
    )


def candidates(site: Site, job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
    """Stores, and codecs for both ways; how many steps a round has is best left to what is measured."""
    codecs = ("fp32", "int8", "int4")
    choices: Iterator[dict[str, Any]] = (
        {"codec_up": codec, "codec_down": codec, "local_steps": None} for codec in codecs
    )
    return with_stores(site, settings, choices, Traffic(*_round_nbytes(job, settings)))


def _with_beginning(site: Site, in_steps: Run, batches_s: float, sync_fraction: float) -> float:
    """Batches a second of a run that begins `in_steps`, and has so many a second afterwards.

    There is none where workers would wait in it for more than their share of the computing time.
    """
    if not sync_fraction:
        return batches_s
    computing_batches_s = sum(1 / worker.step_s for worker in site.workers)
    synchronous = FastMotion(site, in_steps).find() or _of_long_rounds(site, in_steps)
    waited = computing_batches_s / synchronous.batches_s - 1
    share = sync_fraction if sync_fraction * waited <= MOST_WAITING else 0.0
    return 1 / (share / synchronous.batches_s + (1 - share) / batches_s)


def _of_long_rounds(site: Site, run: Run) -> Found:
    """The same in closed form: what happens at the ends of rounds is a small part of them."""
    steps_s = [worker.step_s for worker in site.workers]
    ups_s = [seconds_of(run.up_nbytes, rate) for rate in up_rates(site, lambda _, rate: rate)]
    downs_s = [seconds_of(run.down_nbytes, rate) for rate in down_rates(site)]
    away_s = [
        up_s + down_s + site.apply_s + worker.latency_s + HANDLING_S
        for worker, up_s, down_s in zip(site.workers, ups_s, downs_s, strict=True)
    ]
    waits, step_s = run.mode == "sync", harmonic_mean(steps_s)
    least_s = waiting_round_s(min(away_s)) if waits else hiding_round_s(away_s, [])
    local_steps = run.local_steps or choose_local_steps(
        step_s, least_s, run.total_batches, len(steps_s)
    )
    num_batches = local_steps * len(steps_s)
    round_s = local_steps * step_s
    if waits:
        round_s = _round_s(num_batches, steps_s, away_s)
    elif run.mode == "streaming":
        round_s = max(round_s, *ups_s, *downs_s)
    return Found(num_batches / round_s, 1 / round_s, local_steps)


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
    down = settings.of(DiLoCoConfig).codec_down or "fp32"
    return job.encoded_nbytes(_codec_up(settings)), job.encoded_nbytes(down)


def _codec_up(settings: Settings) -> str:
    return settings.of(DiLoCoConfig).codec_up or codec_of(settings)


def _total_batches(job: Job, settings: Settings) -> int:
    return settings.train.num_batches(job.num_samples or UNKNOWN_EPOCH)


def _most_steps(job: Job, settings: Settings) -> int:
    return most_local_steps(_total_batches(job, settings), settings.cluster.num_workers)
