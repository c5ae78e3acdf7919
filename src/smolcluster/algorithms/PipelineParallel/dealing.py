"""To whom the layers are dealt: who must be there first, how they reach each other, and what fits.

dealer.join(worker)
crew = dealer.deal(...)         # None: more workers must come, or links are being measured
dealer.take_link(peer, measured)
dealer.relieve(crew, peer, ...) # a stage was out of memory: the next cut counts on less there
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

from smolcluster.algorithms.PipelineParallel.automatic import (
    automatic_cut,
    is_measured,
    problem_for,
    slowed,
    speeds_of,
)
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Builders, Crew, Peer, named
from smolcluster.algorithms.PipelineParallel.link_speed import (
    PATIENCE_S,
    UNMEASURED,
    Survey,
    in_words,
)
from smolcluster.algorithms.PipelineParallel.moving import Decision, StageTimes, rest_after
from smolcluster.algorithms.PipelineParallel.plan import (
    Cut,
    StageMap,
    even_cut,
    schedule_of,
    unmeasured,
    written_cut,
)
from smolcluster.algorithms.planning.layers import (
    Link,
    Problem,
    gigabytes,
    memory_of,
    plan_layers,
)
from smolcluster.configs.schema import ClusterConfig, TrainConfig
from smolcluster.errors import ClusterEmpty, ConfigError, OutOfMemory, RunFailed
from smolcluster.server.worker import Worker
from smolcluster.training.schedules.simulation import Costs
from smolcluster.training.schedules.validation import held_by_stage
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_duration
from smolcluster.wire.messages import LinkMeasured, MeasureLink

LESS_MEMORY = 0.9
"""Of what a stage was planned to take: what its machine is counted on for once that was too much."""


class Dealer:
    """Knows the workers that are there, and says which layers are whose, from one plan to the next."""

    def __init__(
        self,
        config: PipelineConfig,
        train: TrainConfig,
        cluster: ClusterConfig,
        num_layers: int,
        log: logging.Logger,
        *,
        num_copies: int = 0,
        role: str = "worker",
    ) -> None:
        """`num_copies`: see `problem_of`. `role`: what workers are to people who have the layers."""
        self._num_copies, self._role = num_copies, role
        self._config, self._train, self._cluster = config, train, cluster
        self._num_layers, self._log = num_layers, log
        self.peers: dict[int, Peer] = {}
        """Who is there, by session."""
        self.builders = Builders()
        self._considered: set[int] = set()
        """Those of them, by session, that the newest plan takes or leaves out for good reason."""
        self._survey = Survey()
        self._survey_deadline = Deadline(0.0)
        """Until when those that it asks must have answered."""
        self._waiting_since: float | None = None
        """Since when those that are there cannot have all layers."""
        self._has_dealt = False
        self._attempt = 0
        """Of the newest plan or survey; each has a larger one than those before."""
        self._num_moves = 0
        """How often layers were dealt out again because stages did not take what was planned."""

    def join(self, worker: Worker) -> None:
        peer = Peer(worker)
        self.peers[peer.id] = peer
        if not self.builders.may_build(worker.member):
            why = self.builders.reason(worker.member.worker_id)
            self._log.warning("%s is back and takes no part: %s", worker.name, why)

    def leave(self, worker: Worker) -> Peer | None:
        """Note that a worker has gone, and whether it could not build its layers; None: it was not there."""
        peer = self.peers.pop(worker.member.session_id, None)
        if peer is None:
            return None
        self._survey.lose(peer.instance)
        if peer.building_attempt is None:
            return peer
        if worker.goodbye is None:
            self.builders.lost(worker.member, worker.name)
        elif worker.goodbye.fault is not None:
            self.builders.failed(worker.member, f"{worker.name}: {worker.goodbye.reason}")
        return peer

    def leave_out(self, peer: Peer, reason: str) -> None:
        """A worker has no memory for a single layer: it stays without, and the others share them.

        Raises:
            OutOfMemory: `shard_plan` gives it some.
        """
        worker, own = peer.worker, self._cluster.node_of(peer.worker.member.node)
        what = f"{worker.name} can have no layers: {reason}"
        if isinstance(self._config.shard_plan, dict) and own in self._config.shard_plan:
            raise OutOfMemory(f"{what}; leave it out of shard_plan, or raise microbatches")
        self.builders.failed(worker.member, what)
        self._log.warning("%s; it takes no part", what)

    @property
    def able(self) -> list[Peer]:
        """The workers that may have layers."""
        found = [
            each for each in self.peers.values() if self.builders.may_build(each.worker.member)
        ]
        return sorted(found, key=lambda each: each.worker.member.worker_id)

    @property
    def ready(self) -> list[Peer]:
        """Those of them that neighbours could reach, and that have measured layers if they could."""
        return [each for each in self.able if each.listening is not None]

    def deal(self, *, is_preparing: bool) -> Crew | None:
        """Who has which layers from now on; None: it is not time to deal them out.

        `is_preparing`: whether other workers may still join.

        Raises:
            RunFailed: no worker can build layers.
            ConfigError: at first, the layers cannot be cut for all that are there.
            ClusterEmpty: those that must come have not for too long.
        """
        able = [each.worker.member.worker_id for each in self.able]
        why_none = self.builders.why_none_is_left(able)
        if why_none is not None and not is_preparing:
            raise RunFailed(f"no worker is left that can build its layers: {why_none}")
        ready = self.ready
        peers = named(ready)
        if missing := self._missing(peers, len(able)):
            why = self.builders.why_not([each.worker.member.worker_id for each in ready])
            reason = ": ".join(filter(None, (missing, why)))
            self._wait_for_more(reason, are_all_ready=len(ready) == len(able))
            return None
        if self._measure_links(peers):
            return None
        try:
            cut = self.cut(peers)
            if not (self._has_dealt or is_measured(self._config)):
                check_memory(cut.map, peers, self._config, self._train, self._num_copies)
        except ConfigError as error:
            if not self._has_dealt:
                raise
            self._wait_for_more(str(error))
            return None
        if links := in_words(self._links(peers)):
            self._log.info("links: %s", links)
        self._log.info("layers: %s", ": ".join(filter(None, (str(cut.map), cut.words))))
        self._waiting_since, self._has_dealt = None, True
        self._considered = {each.id for each in ready}
        self._attempt += 1
        for each in self.peers.values():
            each.building_attempt = None
        owners = [peers[name] for name in cut.map.nodes]
        return Crew(self._attempt, cut, owners, self._times(cut, peers))

    def _times(self, cut: Cut, peers: Mapping[str, Peer]) -> StageTimes | None:
        if cut.problem is None or cut.plan is None:
            return None
        hosts = {name: each.host for name, each in peers.items()}
        return StageTimes(cut.problem, cut.plan, hosts=hosts, rest_s=rest_after(self._num_moves))

    def newcomers(self, crew: Crew) -> list[Peer]:
        """Workers that could take layers and have none."""
        peers = named(self.ready)
        here = {each.id for each in peers.values()}
        if isinstance(self._config.shard_plan, dict) or here <= self._considered:
            return []
        try:
            chosen = [peers[name] for name in self.cut(peers).map.nodes]
        except ConfigError:
            chosen = []
        found = [each for each in chosen if each not in crew.peers]
        if not found:
            self._considered = here
        return found

    def take_as_measured(self, crew: Crew, decision: Decision) -> None:
        """Plan with what stages took from now on."""
        self._num_moves += 1
        peers = named(self.ready) | dict(zip(crew.map.nodes, crew.peers, strict=True))
        for name, factor in decision.slowness.items():
            peer = peers.get(name)
            if peer is not None and peer.measured is not None:
                peer.measured = slowed(peer.measured, factor)

    def cut(self, peers: Mapping[str, Peer]) -> Cut:
        """The cut for these workers, without waiting for any.

        Raises:
            ConfigError: there is none.
        """
        if self._config.shard_plan == "auto":
            return automatic_cut(
                self._num_layers,
                peers,
                self._config,
                self._train,
                self._links(peers),
                num_copies=self._num_copies,
            )
        if self._config.shard_plan == "even":
            stages = even_cut(self._num_layers, list(peers), self._config)
            return unmeasured(stages, self._config)
        names = {self._cluster.node_of(name): name for name in peers}
        ranges = {
            names.get(node, node): [each] if isinstance(each, tuple) else each
            for node, each in self._config.shard_plan.items()
        }
        return unmeasured(written_cut(self._num_layers, ranges, self._config), self._config)

    def relieve(self, crew: Crew, peer: Peer, reason: str) -> None:
        """Count on less memory of a worker than its layers were planned to take.

        Raises:
            OutOfMemory: it cannot have fewer, or they were not dealt out by what they take.
        """
        rank = crew.peers.index(peer)
        what = f"out of memory: {peer.worker.name}, layers {crew.map.layers_of(rank)}: {reason}"
        if crew.cut.plan is None or peer.measured is None:
            advice = "set activation_checkpointing to full, raise microbatches, or set shard_plan to auto"
            if cut := crew.map.relieved(rank):
                advice = f"less is {cut} as shard_plan; or {advice}"
            raise OutOfMemory(f"{what}; {advice}")
        num_sharing = sum(each.place == peer.place for each in self.ready)
        less = int(LESS_MEMORY * crew.cut.plan.stages[rank].memory_bytes * num_sharing)
        peer.measured = peer.measured.model_copy(update={"memory_bytes": less})
        try:
            self.cut(named(self.ready))
        except ConfigError as error:
            raise OutOfMemory(f"{what}; with fewer layers there: {error}") from None

    def take_link(self, peer: Peer, measured: LinkMeasured) -> None:
        """Take what a worker has measured of what it sends to the one that it was paired with."""
        if measured.attempt != self._attempt or peer.instance not in self._survey.asked:
            return
        link = Link(measured.bytes_s, measured.latency_s)
        if measured.reason or not measured.bytes_s:
            self._log.warning("%s: a link is slow: %s", peer.worker.name, measured.reason)
            link = UNMEASURED
        self._survey.take(peer.instance, link)

    def _missing(self, peers: Mapping[str, Peer], num_able: int) -> str | None:
        """Who must come before layers can be dealt out: at first all, later those of a written plan."""
        if isinstance(self._config.shard_plan, dict):
            names = sorted(self._config.shard_plan.keys() - set(map(self._cluster.node_of, peers)))
            return f"shard_plan has layers for {', '.join(names)}" if names else None
        num_unable = len(self.peers) - num_able
        wanted = 1 if self._has_dealt else max(1, self._cluster.num_workers - num_unable)
        if len(peers) >= wanted:
            return None
        there = f"{num_able} of {wanted} {self._role}s are there"
        if len(peers) == num_able:
            return there
        return f"{there} ({len(peers)} have measured their layers)"

    def _wait_for_more(self, reason: str, *, are_all_ready: bool = True) -> None:
        """Those that are there cannot have all layers: others may come, or come back.

        Raises:
            ClusterEmpty: they have not for too long.
        """
        cluster, now = self._cluster, time.monotonic()
        limit_s = max(cluster.start_timeout_s, cluster.empty_cluster_timeout_s)
        if self._waiting_since is None:
            self._waiting_since = now
            limit = format_duration(limit_s)
            self._log.info("%s; waiting up to %s for more %ss", reason, limit, self._role)
        if not are_all_ready:
            limit_s = max(limit_s, cluster.prepare_timeout_s)
        if now - self._waiting_since >= limit_s:
            raise ClusterEmpty(reason)

    def _measure_links(self, peers: Mapping[str, Peer]) -> bool:
        """Have those workers measure how they reach each other that have not yet; False: all have."""
        if self._survey.asked and not self._survey_deadline.expired:
            return True
        names = {each.instance: name for name, each in peers.items()}
        for sender, receiver in self._survey.give_up().items():
            self._log.warning(
                "the link from %s to %s was not measured, and is taken for slow",
                names.get(sender, sender),
                names.get(receiver, receiver),
            )
        if not is_measured(self._config) or any(each.measured is None for each in peers.values()):
            return False
        hosts = {each.instance: each.host for each in peers.values()}
        pairs = self._survey.begin(hosts)
        if not pairs:
            return False
        self._attempt += 1
        self._survey_deadline = Deadline(PATIENCE_S)
        by_instance = {each.instance: each for each in peers.values()}
        for one, other in pairs:
            pair = (by_instance[one], by_instance[other])
            for rank, each in enumerate(pair):
                neighbour = pair[1 - rank].as_neighbour(1 - rank)
                message = MeasureLink(attempt=self._attempt, rank=rank, neighbour=neighbour)
                each.worker.live_session.send(message)
        return True

    def _links(self, peers: Mapping[str, Peer]) -> dict[tuple[str, str], Link]:
        """Those that were measured between workers, by their names."""
        known = self._survey.links
        pairs = permutations(peers.items(), 2)
        return {
            (one, other): known[a.instance, b.instance]
            for (one, a), (other, b) in pairs
            if (a.instance, b.instance) in known
        }


def check_memory(
    stages: StageMap,
    machines: Mapping[str, Peer],
    config: PipelineConfig,
    train: TrainConfig,
    num_copies: int = 0,
) -> None:
    """Refuse a cut in which a machine has more layers than fit; where one has not measured, nothing is known.

    `num_copies`: see `problem_of`.

    Raises:
        ConfigError: names the machine, what it needs and has, and a cut that would fit if there is one.
    """
    machines = {node: machines[node] for node in stages.nodes}
    known = speeds_of(stages.cuts[-1], machines)
    if len(known) < len(machines):
        return
    problem = problem_for(known, {}, config, train, num_copies)
    needed = _needed(problem, stages, config)
    for place in dict.fromkeys(each.place for each in machines.values()):
        nodes = [node for node, each in machines.items() if each.place == place]
        measured = [machines[node].measured for node in nodes]
        has = max(each.memory_bytes for each in measured if each is not None)
        needs = sum(needed[node] for node in nodes)
        if needs > has:
            told = " and ".join(
                f"layers {stages.layers_of(stages.nodes.index(node))} of {node}" for node in nodes
            )
            raise ConfigError(
                f"shard_plan: {told} need {gigabytes(needs)}, the device has {gigabytes(has)} free: "
                f"{_remedy(problem)}"
            )


def _needed(problem: Problem, stages: StageMap, config: PipelineConfig) -> dict[str, float]:
    """The bytes that each node's stages take together."""
    schedule = schedule_of(config, len(stages.nodes), problem.num_microbatches)
    found = dict.fromkeys(stages.nodes, 0.0)
    for stage, held in enumerate(held_by_stage(schedule)):
        layers = stages.layers(stage)
        found[stages.nodes[stages.ranks[stage]]] += memory_of(
            problem, layers.start, layers.stop, held
        )
    return found


def _remedy(problem: Problem) -> str:
    """A cut that fits, on machines that are taken for equally fast."""
    alike = (Costs(1.0, 1.0, 1.0),) * len(problem.layers)
    machines = tuple(replace(each, costs=alike) for each in problem.machines)
    try:
        plan = plan_layers(replace(problem, machines=machines))
    except ConfigError as error:
        return str(error)
    told = ", ".join(f"{each.machine}: [{each.start}, {each.end}]" for each in plan.stages)
    return f"{{{told}}} would fit"
