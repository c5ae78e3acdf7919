"""`smolcluster plan`: measure a model's layers on each machine and the links between them, then cut it.

machines prepared -> each layer on each -> links of all pairs -> order and cut -> what one more would bring
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from smolcluster.algorithms.planning.costs import VALUE_NBYTES
from smolcluster.algorithms.planning.layers import (
    LayerPlan,
    Link,
    Problem,
    one_more,
    plan_layers,
)
from smolcluster.algorithms.planning.measured import problem_of
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.advise.command import (
    ALONE,
    one_thread,
    questions_of,
    reach,
    this_machine,
)
from smolcluster.launch.advise.measuring import Computer, measure_all
from smolcluster.launch.host import Host
from smolcluster.launch.links import Say, measure_all_ways
from smolcluster.launch.requests import Resolved
from smolcluster.runs.model_file import ModelFile
from smolcluster.training.stages.measure import LayerSpeeds

LAYER_SPEEDS = ModelFile[LayerSpeeds](LayerSpeeds, "is damaged")
MICROBATCHES_A_STAGE = 4
NO_WAY = Link(bytes_s=1.0)
"""Between machines that do not reach each other, not by way of a third one either."""


@dataclass(frozen=True)
class Wanted:
    """What the user says of the pipeline.

    Attributes:
        num_microbatches: None: as many as the batch can be divided into, up to 4 a machine.
        codec: how activations travel.
        recompute: whether stages keep a microbatch's input alone, and compute the rest again.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    codec: str = "fp32"
    recompute: bool = False


@dataclass(frozen=True)
class FoundPlan:
    """What was measured, and what follows from it.

    Attributes:
        more: like which machine another one would help most, and the plan with it.
    """

    problem: Problem
    plan: LayerPlan
    more: tuple[str, LayerPlan]
    devices: Mapping[str, str]


def find_layer_plan(asked: Resolved, wanted: Wanted, say: Say, *, sync: bool = True) -> FoundPlan:
    """Measure, and plan.

    Raises:
        ConfigError: what is wanted or the model is wrong, or nothing fits in memory.
        LaunchError: no machine could be measured.
    """
    if wanted.codec not in VALUE_NBYTES:
        raise ConfigError(f"--codec is {wanted.codec}, must be one of {', '.join(VALUE_NBYTES)}")
    settings = asked.settings
    num = num_microbatches(settings, wanted)
    if asked.local:
        speeds, links = _measured_here(asked, num, say), dict[tuple[str, str], Link]()
    else:
        reached = reach(asked, say, sync=sync, num_microbatches=num)
        speeds, links = _measured_there(reached, settings, say)
    if not speeds:
        raise LaunchError("no worker's machine could be measured: see the lines above")
    problem = problem_of(
        speeds,
        links,
        settings.train,
        num_microbatches=num,
        schedule=wanted.schedule,
        codec=wanted.codec,
        recompute=wanted.recompute,
    )
    plan = plan_layers(problem)
    devices = {node: each.device for node, each in speeds.items()}
    return FoundPlan(problem, plan, one_more(problem, plan), devices)


def num_microbatches(settings: Settings, wanted: Wanted) -> int:
    """As wanted, or the most that divide the batch, up to 4 a machine.

    Raises:
        ConfigError: they do not divide it.
    """
    size = settings.train.samples_per_push
    if wanted.num_microbatches is None:
        most = min(size, MICROBATCHES_A_STAGE * len(settings.cluster.workers))
        return max(each for each in range(1, most + 1) if size % each == 0)
    if wanted.num_microbatches < 1 or size % wanted.num_microbatches:
        fit = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ConfigError(
            f"--microbatches is {wanted.num_microbatches}, must divide the step's {size} samples: "
            f"choose one of {fit}, or another batch_size"
        )
    return wanted.num_microbatches


# --- measured


def _measured_here(asked: Resolved, num: int, say: Say) -> dict[str, LayerSpeeds]:
    """This machine, as each of `--workers` processes side by side that share its memory."""
    nodes = asked.settings.cluster.workers
    of_all = {"is_local": True, "num_workers": len(nodes), "num_microbatches": num}
    question = questions_of(asked)(one_thread(asked, nodes[0]), **of_all)
    found = measure_all([this_machine(ALONE, question)], say, LAYER_SPEEDS)
    return {
        node: each.model_copy(update={"memory_bytes": each.memory_bytes // len(nodes)})
        for node in nodes
        for each in found.values()
    }


def _measured_there(
    reached: Sequence[Computer], settings: Settings, say: Say
) -> tuple[dict[str, LayerSpeeds], dict[tuple[str, str], Link]]:
    """The workers' machines, each for itself, then the ways between all pairs of them."""
    cluster = settings.cluster
    computers = [each for each in reached if each.host.node in cluster.workers]
    speeds = measure_all(computers, say, LAYER_SPEEDS)
    hosts = [each.host for each in computers if each.host.node in speeds]
    return speeds, measure_pairs(hosts, cluster.port, say)


def measure_pairs(hosts: Sequence[Host], port: int, say: Say) -> dict[tuple[str, str], Link]:
    """The links between all machines, both ways; those of one machine are left out."""
    links: dict[tuple[str, str], Link] = {}
    for place, host in enumerate(hosts):
        others = [each for each in hosts[place + 1 :] if each.destination != host.destination]
        for node, way in measure_all_ways(host, others, {}, port, say).items():
            links[node, host.node] = Link(1e6 * way.up_mb_s, way.latency_s / 2)
            links[host.node, node] = Link(1e6 * way.down_mb_s, way.latency_s / 2)
    apart = [
        (one.node, other.node)
        for one, other in combinations(hosts, 2)
        if one.destination != other.destination
    ]
    return links | relayed(apart, links)


def relayed(
    pairs: Sequence[tuple[str, str]], links: Mapping[tuple[str, str], Link]
) -> dict[tuple[str, str], Link]:
    """The links of those pairs that do not reach each other, by way of the best machine between them."""
    found: dict[tuple[str, str], Link] = {}
    for one, other in (each for pair in pairs for each in (pair, pair[::-1])):
        if (one, other) in links:
            continue
        ways = [
            Link(min(first.bytes_s, last.bytes_s), first.latency_s + last.latency_s)
            for (sender, middle), first in links.items()
            if sender == one and (last := links.get((middle, other))) is not None
        ]
        found[one, other] = max(ways, key=lambda each: each.bytes_s, default=NO_WAY)
    return found
