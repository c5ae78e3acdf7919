"""`smolcluster advise`: measure, predict, recommend.

machines prepared -> real steps on each -> ways to the server -> what each algorithm predicts -> advice
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from smolcluster.algorithms.planning.advice import Advice, Option, advise, best_settings
from smolcluster.algorithms.planning.costs import (
    STEP_HANDLING_S,
    Interface,
    Job,
    Site,
    Worker,
    costs_of,
)
from smolcluster.configs.overrides import from_environment, from_overrides, without_workload
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import AlgorithmSpec, algorithms, get_algorithm
from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.advise.measuring import Computer, busy, measure_all
from smolcluster.launch.advise.speed import (
    ASKED,
    ASKED_FILE,
    CLUSTER_FILE,
    CODE_FOLDER,
    SPEED,
    TRAIN_FILE,
    Asked,
    Speed,
)
from smolcluster.launch.host import Host, host_of
from smolcluster.launch.kept import cluster_bytes
from smolcluster.launch.links import Say, Way, measure_all_ways
from smolcluster.launch.places import machines_of, project_root
from smolcluster.launch.plan import Machine, Request
from smolcluster.launch.prepare import bring_project
from smolcluster.launch.project import packed, read_project
from smolcluster.launch.requests import Resolved, resolved, settings_of
from smolcluster.launch.workload_code import code_of
from smolcluster.runs.advice import LinkSpeed, Prediction
from smolcluster.runs.paths import all_runs
from smolcluster.utils.at_once import at_once

ALONE = "this machine"
"""Where all of a cluster is on it."""


@dataclass(frozen=True)
class Found:
    """What was measured, and what follows from it.

    Attributes:
        speeds: by node; of `--local` those of workers side by side.
        ways: from nodes to the server, but for those on the server's machine.
        stated: where the cluster file says that each node reaches the server.
        tokens_per_sample: 0 where samples are no text.
        followed: what is launched if the advice is followed; None: nothing.
    """

    speeds: Mapping[str, Speed]
    ways: Mapping[str, Way]
    stated: Mapping[str, str]
    advice: Advice
    tokens_per_sample: int
    followed: Resolved | None

    @property
    def prediction(self) -> Prediction | None:
        """What is kept with a run that follows the advice."""
        chosen, (alone, alone_samples_per_s) = self.advice.chosen, self.advice.alone
        if chosen is None:
            return None
        forecast = chosen.forecast
        return Prediction(
            algorithm=chosen.algorithm,
            settings=dict(chosen.settings),
            samples_per_s=forecast.samples_per_s,
            lost=forecast.lost,
            received_bytes_s=forecast.received_bytes_s,
            sent_bytes_s=forecast.sent_bytes_s,
            alone=alone,
            alone_samples_per_s=alone_samples_per_s,
            links={
                node: LinkSpeed(up_bytes_s=1e6 * way.up_mb_s, down_bytes_s=1e6 * way.down_mb_s)
                for node, way in self.ways.items()
            },
        )


def find_advice(asked: Resolved, say: Say, *, sync: bool = True) -> Found:
    """Measure the machines and links of a cluster and say what to do with them.

    `asked` names the files; which algorithm it names does not matter. Machines that do not answer are left
    out, with one line each.

    Raises:
        ConfigError: no algorithm can follow the files.
        LaunchError: the server's machine, or every worker, is out of reach.
    """
    if asked.local:
        speeds, alone = _measured_here(asked, say)
        ways: dict[str, Way] = {}
    else:
        speeds, ways = _measured_there(asked, say, sync=sync)
        alone = {node: _samples_per_s(speed) for node, speed in speeds.items()}
    site = site_of(asked.settings, speeds, ways)
    if asked.local:
        site = replace(site, num_cores=os.cpu_count() or 1)
    if not site.workers:
        raise LaunchError("no worker's machine could be measured: see the lines above")
    measured = speeds[site.workers[0].name]
    job = Job(measured.num_params, measured.num_samples)
    advice = advise(options_of(asked, site, job, measured.batch_size, say), alone)
    return Found(
        speeds=speeds,
        ways=ways,
        stated=asked.settings.cluster.host_ip,
        advice=advice,
        tokens_per_sample=measured.tokens_per_sample,
        followed=None if advice.chosen is None else _following(asked, advice.chosen),
    )


# --- measured


def _measured_here(asked: Resolved, say: Say) -> tuple[dict[str, Speed], dict[str, float]]:
    """Workers side by side, then this machine alone."""
    nodes, question = asked.settings.cluster.workers, questions_of(asked)
    of_all = {"is_local": True, "num_workers": len(nodes)}
    with tempfile.TemporaryDirectory() as meeting:
        together = {"meeting": meeting, "crowd": len(nodes), **of_all}
        crowd = [
            this_machine(node, question(one_thread(asked, node), node=node, **together))
            for node in nodes
        ]
        speeds = _speeds(crowd, say)
    alone = _speeds([this_machine(ALONE, question(**of_all))], say)
    if not alone:
        raise LaunchError("this machine cannot be measured: see the line above")
    # With one thread, or beside others, it cannot be faster; if it was, the machine had other things to do.
    best = max(_samples_per_s(each) for each in (*speeds.values(), alone[ALONE]))
    return speeds, {ALONE: best}


def _speeds(computers: Sequence[Computer], say: Say) -> dict[str, Speed]:
    speeds = measure_all(computers, say, SPEED)
    for line in filter(None, (busy(node, speed) for node, speed in speeds.items())):
        say(line)
    return speeds


def this_machine(node: str, asked: bytes) -> Computer:
    return Computer(Host(node), sys.executable, str(Path.cwd()), asked)


def one_thread(asked: Resolved, node: str) -> tuple[str, ...]:
    """Overrides as a launch with --local has them: side by side more threads get into each other's way."""
    is_stated = settings_of(asked.request, True, node).node.threads is not None
    return () if is_stated else ("threads=1",)


def reach(asked: Resolved, say: Say, *, sync: bool, **more: Any) -> list[Computer]:
    """Log in to the machines of a cluster file, and send them the project; who does not answer is left out.

    `more`: fields of what all are asked.
    """
    project = read_project(project_root())
    machines = machines_of(
        *(asked.request, asked.settings, asked.cluster_file, asked.train_file),
        here=all_runs(),
        project=project,
    )
    question = questions_of(asked)
    say(f"looking at {', '.join(machines)}")

    def ready(machine: Machine) -> Computer | None:
        host, env = machine.host, dict(machine.env)
        try:
            host.run("true")
            bring_project([machine], say, project=project, sync=sync)
        except SmolclusterError as error:
            say(f"{error}; it is left out")
            return None
        own = question(node=host.node, environ=env, **more)
        return Computer(host, machine.python, machine.project_dir, own)

    return [each for each in at_once(ready, list(machines.values())) if each is not None]


def _measured_there(
    asked: Resolved, say: Say, *, sync: bool
) -> tuple[dict[str, Speed], dict[str, Way]]:
    """The machines of a cluster file, each for itself, then their ways to the server."""
    cluster = asked.settings.cluster
    computers = reach(asked, say, sync=sync)
    if cluster.server not in [each.host.node for each in computers]:
        raise LaunchError(f"nothing can be said without {cluster.server}, the server's machine")
    speeds = _speeds(computers, say)
    server = host_of(cluster, cluster.server)
    workers = [host_of(cluster, node) for node in cluster.workers if node in speeds]
    apart = [each for each in workers if each.destination != server.destination]
    ways = measure_all_ways(server, apart, cluster.host_ip, cluster.port, say)
    lost = {each.node for each in apart} - set(ways)
    return {node: speed for node, speed in speeds.items() if node not in lost}, ways


def questions_of(asked: Resolved) -> Callable[..., bytes]:
    """What makes of overrides, and fields of `Asked`, what one machine is asked: an archive.

    The run's files and code in it are read and packed once, so that all machines measure the same.

    Raises:
        ConfigError: one cannot be read, or the code is too large.
    """
    workload, stated = asked.request.workload, without_workload(asked.request.overrides)
    code = None if workload is None else code_of(workload)
    contents = {
        CLUSTER_FILE: cluster_bytes(asked.cluster_file, asked.request.without),
        TRAIN_FILE: asked.train_file.read_bytes(),
    }
    if code is not None:
        contents[f"{CODE_FOLDER}.tgz"] = code.packed

    def question(overrides: Sequence[str] = (), **more: Any) -> bytes:
        told = Asked(
            overrides=(*overrides, *stated),
            workload=workload if code is None else code.name,
            has_code=code is not None,
            **more,
        )
        return packed({ASKED_FILE: ASKED.text(told), **contents}, 0o600)

    return question


def _samples_per_s(speed: Speed) -> float:
    return speed.batch_size / (median(speed.compute_s) + speed.update_s)


# --- predicted


def site_of(settings: Settings, speeds: Mapping[str, Speed], ways: Mapping[str, Way]) -> Site:
    """The machines that answered, and what connects them."""
    cluster = settings.cluster
    workers = []
    for node in cluster.workers:
        if node not in speeds:
            continue
        speed = speeds[node]
        worker = Worker(node, median(speed.compute_s), speed.update_s + STEP_HANDLING_S)
        if way := ways.get(node):  # else it is on the server's machine
            worker = replace(
                worker,
                up_bytes_s=1e6 * way.up_mb_s,
                down_bytes_s=1e6 * way.down_mb_s,
                latency_s=way.latency_s,
                via=way.via,
            )
        workers.append(worker)
    own = speeds.get(cluster.server)
    updates = [own.update_s] if own else [speed.update_s for speed in speeds.values()]
    return Site(tuple(workers), interfaces_of(ways), apply_s=max(updates, default=0.0))


def interfaces_of(ways: Mapping[str, Way]) -> dict[str, Interface]:
    """Those of the server that several workers share, by name."""
    sharing = {
        way.via: [each for each in ways.values() if each.via == way.via] for way in ways.values()
    }
    return {via: _interface(each) for via, each in sharing.items() if each[1:]}


def _interface(ways: Sequence[Way]) -> Interface:
    """What the server's end carries: what arrived while all sent, and no less than one alone brought."""

    def limit(crowd: Sequence[float | None], alone: Sequence[float]) -> float:
        known = [each for each in crowd if each is not None]
        if len(known) < len(ways):
            return 1e6 * max(alone)
        return 1e6 * max(sum(known), *alone)

    return Interface(
        limit([way.crowd_up_mb_s for way in ways], [way.up_mb_s for way in ways]),
        limit([way.crowd_down_mb_s for way in ways], [way.down_mb_s for way in ways]),
    )


def options_of(asked: Resolved, site: Site, job: Job, batch_size: int, say: Say) -> list[Option]:
    """The best settings of each algorithm that predicts, and can follow what the files say.

    Raises:
        ConfigError: no algorithm can; the message says why not.
    """
    options, reasons = list[Option](), list[str]()
    for spec in algorithms().values():
        try:
            if tried := _tried(spec, asked, site, job, batch_size):
                options.append(best_settings(tried))
        except ConfigError as error:
            reasons.append(f"{spec.title} is left out: {error}")
    if not options:
        raise ConfigError("; ".join(reasons) or "no algorithm is installed that predicts anything")
    for reason in reasons:
        say(reason)
    return options


def _tried(
    spec: AlgorithmSpec, asked: Resolved, site: Site, job: Job, batch_size: int
) -> list[Option]:
    """What an algorithm predicts: first as the files say, then with what else may be worth it.

    Raises:
        ConfigError: it cannot follow what the files say.
    """
    if (model := costs_of(spec)) is None:
        return []

    def with_batch_size(settings: Settings) -> Settings:
        return settings.with_batch_size(batch_size // settings.train.gradient_accumulation)

    of_it = resolved(replace(asked.request, algorithm=spec), local=asked.local).checked()
    own = with_batch_size(of_it.settings)
    candidates = model.candidates(site, job, own)
    followed = can_follow(of_it, candidates, stated(asked.request, os.environ))
    return [
        Option(spec.name, keys, model.predict(site, job, with_batch_size(settings)))
        for keys, settings in (({}, own), *followed)
    ]


def can_follow(
    asked: Resolved, candidates: Iterable[Mapping[str, Any]], fixed: Collection[str] = ()
) -> Iterator[tuple[dict[str, Any], Settings]]:
    """The candidates, each some keys with other values, that a run would not refuse, with their settings.

    `fixed` keys stay as they are, and so does the optimizer, which `auto` might choose anew.
    """
    own = asked.settings
    told = {**dict(own.train), **dict(own.cluster)}
    for candidate in candidates:
        keys = {
            name: value
            for name, value in candidate.items()
            if name not in fixed and value != told[name]
        }
        with suppress(ConfigError):
            settings = asked.with_overrides(as_overrides(keys)).checked().settings
            if settings.train.optimizer != own.train.optimizer:
                keys["optimizer"] = own.train.optimizer
                settings = asked.with_overrides(as_overrides(keys)).checked().settings
            yield keys, settings


def stated(request: Request, environ: Mapping[str, str]) -> set[str]:
    """The keys that the user has set by hand or in the environment: they are not chosen anew."""
    said = (*from_overrides(request.overrides), *from_environment(environ))
    return {assignment.path[0] for assignment in said}


def as_overrides(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys as `--override` takes them."""
    return tuple(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in keys.items()
    )


def _following(asked: Resolved, chosen: Option) -> Resolved:
    """What is launched if the advice is followed."""
    overrides = (*asked.request.overrides, *as_overrides(chosen.settings))
    spec = get_algorithm(chosen.algorithm)
    request = replace(asked.request, algorithm=spec, overrides=overrides)
    return resolved(request, local=asked.local).checked()
