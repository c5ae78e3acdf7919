"""What a run of EDP will cost: its workers in fast motion.

A worker computes a batch while the push of the one before travels. Every `worker_update_interval` steps the
weights come whole, and the answer to the next push comes behind them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from smolcluster.algorithms.planning.costs import (
    HANDLING_S,
    Forecast,
    Job,
    Site,
    codec_of,
    lost_share,
    most_steps_s,
    samples_alone,
    seconds_of,
)
from smolcluster.algorithms.planning.simulation import Done, Flow, Process, Simulation, Sleep
from smolcluster.algorithms.planning.stores import Traffic, as_spread, with_stores
from smolcluster.configs.schema import Settings

CYCLES = 30
"""From one pull to the next; so many of the slowest worker are simulated."""


def step_nbytes(job: Job, settings: Settings) -> tuple[int, int]:
    """Bytes of a worker's step to the server and, of its pulls, from it."""
    return job.encoded_nbytes(codec_of(settings)), (
        job.model_nbytes // settings.cluster.worker_update_interval
    )


def predict(site: Site, job: Job, settings: Settings) -> Forecast:
    """What a run will be like in its steady state."""
    pushed, pulled = step_nbytes(job, settings)
    site = as_spread(site, settings, Traffic(pushed, pulled))
    workers = _Workers(site, job, settings)
    longest_s = max(workers.cycle_s(place) for place in range(len(site.workers)))
    steps_s = min(workers.steps_per_s(longest_s, CYCLES * longest_s), most_steps_s(site))
    samples_per_s = settings.train.samples_per_push * steps_s
    return Forecast(
        samples_per_s=samples_per_s,
        received_bytes_s=pushed * steps_s,
        sent_bytes_s=pulled * steps_s,
        lost=lost_share(samples_per_s, samples_alone(site, settings)),
    )


class _Workers:
    """The workers of a site, in fast motion."""

    def __init__(self, site: Site, job: Job, settings: Settings) -> None:
        self._site, self._simulation = site, Simulation(site)
        self._pushed, self._model_nbytes = step_nbytes(job, settings)[0], job.model_nbytes
        self._interval = settings.cluster.worker_update_interval
        self._num_steps = 0
        """Pushes that the server has applied."""

    def steps_per_s(self, from_s: float, until_s: float) -> float:
        """Pushes that are applied a second."""
        for place in range(len(self._site.workers)):
            self._simulation.start(self._work(place))
        self._simulation.run(from_s)
        began_s, before = self._simulation.now, self._num_steps
        self._simulation.run(until_s)
        return (self._num_steps - before) / (self._simulation.now - began_s)

    def cycle_s(self, place: int) -> float:
        """Roughly the time from one pull to the next of a worker, while nobody else sends."""
        worker = self._site.workers[place]
        push_s = seconds_of(self._pushed, worker.up_bytes_s)
        pull_s = seconds_of(self._model_nbytes, worker.down_bytes_s)
        return self._interval * max(worker.step_s, push_s) + pull_s

    def _work(self, place: int) -> Process:
        """What a worker does, as `EDP/worker.py` has it."""
        worker = self._site.workers[place]
        acked, weights = Done(is_done=True), Done(is_done=True)
        yield Sleep(place / len(self._site.workers) * self.cycle_s(place))
        for number in itertools.count(1):
            yield Sleep(worker.compute_s)
            yield acked
            acked = Done()
            self._simulation.start(self._push(place, acked, weights))
            if number % self._interval or not weights.is_done:
                yield Sleep(worker.update_s)
                continue
            flow = Flow(place, "down", self._model_nbytes)
            weights = flow.done
            self._simulation.start(_after(acked, flow))
            if self._interval == 1:
                yield weights

    def _push(self, place: int, acked: Done, weights: Done) -> Process:
        """A push until it is acknowledged, which comes behind weights that are on their way."""
        yield Flow(place, "up", self._pushed)
        yield self._simulation.serve(self._site.apply_s)
        self._num_steps += 1
        yield weights
        yield Sleep(self._site.workers[place].latency_s + HANDLING_S)
        self._simulation.finish(acked)


def _after(first: Done, flow: Flow) -> Process:
    yield first
    yield flow


def candidates(site: Site, job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
    """Stores and codecs."""
    choices = ({"codec": name} for name in ("fp32", "int8", "int4"))
    return with_stores(site, settings, choices, Traffic(*step_nbytes(job, settings)))
