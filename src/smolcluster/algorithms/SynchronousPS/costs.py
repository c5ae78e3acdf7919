"""What a run of SyncPS will cost.

A step: all compute their parts, cut as `sharing` cuts them; the parts' gradients travel bucket by bucket,
and a bucket's mean leaves for everybody as soon as the slowest flow has brought it.
"""

from collections.abc import Iterator
from math import ceil
from typing import Any

from smolcluster.algorithms.planning.costs import (
    HANDLING_S,
    Forecast,
    Job,
    Site,
    codec_of,
    down_rates,
    lost_share,
    most_steps_s,
    samples_alone,
    seconds_of,
    up_rates,
)
from smolcluster.algorithms.planning.stores import Traffic, as_spread, with_stores
from smolcluster.algorithms.shares import Cost
from smolcluster.algorithms.SynchronousPS.sharing import sizes_by_cost
from smolcluster.configs.schema import Settings

BUCKET_VALUES = 1 << 18
"""Values of a bucket of 1 MiB of float32."""
UNEVEN = 1.09
"""So many times as long pushes take that share the server's link, for flows do not share evenly: as measured
with four workers at 12 MB/s by `benchmarks/exchange.py`."""


def step_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    """Bytes of a worker's step to the server and from it: a gradient, and the mean of all."""
    encoded = job.encoded_nbytes(codec_of(settings))
    return encoded, encoded


def predict(site: Site, job: Job, settings: Settings) -> Forecast:
    """What a run will be like in its steady state."""
    sent, received = step_nbytes(job, settings)
    site = as_spread(site, settings, Traffic(sent, received, to_server=received))
    sizes, uploads = sizes_and_uploads(site, sent, settings)
    members = [place for place, size in enumerate(sizes) if size]
    computed = [
        _computing(site, settings, place).seconds(sizes[place]) for place in range(len(sizes))
    ]
    buckets = max(1, ceil(job.num_params / BUCKET_VALUES))
    brought_s = max(computed[place] + uploads[place] for place in members)
    first_s = max(computed[place] + uploads[place] / buckets for place in members)
    down = down_rates(site)
    told_s = [seconds_of(received, down[place]) for place in members]
    step_s = max(
        max(brought_s + each / buckets, first_s + each) + site.workers[place].latency_s
        for place, each in zip(members, told_s, strict=True)
    )
    step_s = max(step_s + HANDLING_S, len(members) / most_steps_s(site))
    samples_per_s = settings.global_batch_size / step_s
    return Forecast(
        samples_per_s=samples_per_s,
        received_bytes_s=len(members) * sent / step_s,
        sent_bytes_s=len(sizes) * received / step_s,
        lost=lost_share(samples_per_s, samples_alone(site, settings)),
        is_exact=True,
    )


def sizes_and_uploads(site: Site, sent: int, settings: Settings) -> tuple[list[int], list[float]]:
    """Each worker's samples of a step, and the seconds that its push takes.

    Who pushes nothing leaves its share of the server's link to the others, whose parts become cheaper; so
    sizes are cut again until the same workers have one.
    """
    sizes = [1] * len(site.workers)
    for _ in range(len(sizes) + 1):
        pushing = sizes
        rates = up_rates(site, lambda place, rate: rate if pushing[place] else 0.0)  # noqa: B023
        uploads = [
            seconds_of(sent, rate) * (UNEVEN if rate < worker.up_bytes_s else 1)
            for worker, rate in zip(site.workers, rates, strict=True)
        ]
        costs = []
        for place, upload_s in enumerate(uploads):
            own, latency_s = _computing(site, settings, place), site.workers[place].latency_s
            costs.append(Cost(own.fixed_s + latency_s + min(upload_s, 1e9), own.each_s))
        sizes = sizes_by_cost(costs, settings.global_batch_size)
        if list(map(bool, pushing)) == list(map(bool, sizes)):
            break
    return sizes, uploads


def _computing(site: Site, settings: Settings, place: int) -> Cost:
    """What a part costs a worker but for its way."""
    worker = site.workers[place]
    return Cost(worker.update_s, worker.compute_s / settings.train.samples_per_push)


def candidates(site: Site, job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
    """Stores and codecs."""
    sent, received = step_nbytes(job, settings)
    choices = ({"codec": name} for name in ("fp32", "int8", "int4"))
    return with_stores(site, settings, choices, Traffic(sent, received, to_server=received))
