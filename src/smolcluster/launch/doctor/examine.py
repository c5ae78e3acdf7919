"""`smolcluster doctor`: what would go wrong on the machines of a cluster, and what mends it.

    first contact -> the machine, the project on it -> a listener on the server -> the workers connect to it

All machines at once, some checks of a machine at once, and each check has its time limit; so the whole takes
as long as the slowest machine. Only the workers' measurements of their links take turns.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from smolcluster.configs.function_name import known_here
from smolcluster.configs.load import find_config, read_config
from smolcluster.configs.meant import cluster_source, training_source
from smolcluster.configs.overrides import workload_overrides
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.check_report import as_json_text, exit_code, show
from smolcluster.launch.doctor.checks import (
    CONTACT_SCRIPT,
    MACHINE_CHECKS,
    find_twins,
    judge_system,
    read_facts,
)
from smolcluster.launch.doctor.checks_links import PORT_CHECK, link_checks
from smolcluster.launch.doctor.checks_project import PROJECT_CHECKS, WORKLOAD_CHECKS
from smolcluster.launch.doctor.findings import Answer, Check, Finding, NodeChecks, fail, ok, skipped
from smolcluster.launch.host import Done, TookTooLong, Unreachable, host_of
from smolcluster.launch.links import Listener, read_listener
from smolcluster.launch.project import read_project
from smolcluster.launch.remote import project_root
from smolcluster.launch.workload_code import check_source, packages_of
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_count
from smolcluster.utils.words import condensed

CONTACT_S = 15.0
MAX_SESSIONS = 6
"""At once on one machine: its SSH server allows 10 over one connection."""
PLAIN_WIDTH = 100
"""Columns where the output is no terminal."""
Run = Callable[..., Done]
SSH, HOST_KEY, SYSTEM, IDENTITY = "SSH", "host key", "system", "identity"


def doctor(
    config: str | None, overrides: list[str], as_json: bool, workload: str | None = None
) -> int:
    """Look at the machines of a cluster file and print what was found; 1 if something fails.

    `workload`: a function whose imports are looked for there.

    Raises:
        ConfigError: the cluster file, an override or the workload is wrong.
    """
    source = cluster_source(config)
    stated = [*overrides, *workload_overrides(workload)]
    trained = training_source(None, source, workload=workload)
    settings = load_settings(source, trained, None, stated)
    cluster = settings.cluster
    raw = read_config(find_config(source, "cluster"), "cluster").get("nodes") or {}
    nodes = nodes_of(cluster, raw)
    if settings.train.workload is not None:
        name = known_here(settings.train.workload)
        check_source(name, settings.train.workload_args)
        for node in nodes:
            node.packages = tuple(packages_of(name))
    console = SteadyConsole(stderr=True)
    waiting = f"looking at {format_count(len(nodes), 'machine')} …"
    with console.status(waiting) if console.is_terminal else nullcontext():
        examine(nodes)
    if as_json:
        sys.stdout.write(as_json_text(nodes) + "\n")
    else:
        show(nodes, SteadyConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return exit_code(nodes)


def nodes_of(cluster: ClusterConfig, raw: Mapping[str, Mapping[str, Any]]) -> list[NodeChecks]:
    """What is known of each node beforehand, the server first; `raw`: the file's `nodes`, as written."""
    root = project_root()
    project = read_project(root)
    token = secrets.token_hex(8)
    nodes = []
    for node in cluster.machines:
        settings, host = cluster.nodes.get(node, NodeConfig()), host_of(cluster, node)
        is_here = host.destination is None
        brought = settings.project_dir or project.folder(settings.torch)
        folder = str(root) if is_here else brought
        secret_file = (raw.get(node) or {}).get("secret_file")
        nodes.append(
            NodeChecks(
                host,
                cluster,
                folder=folder,
                python=sys.executable if is_here else f"{folder}/.venv/bin/python",
                secret_file=None if secret_file is None else str(secret_file),
                sums=project.sums,
                token=token,
            )
        )
    return nodes


def examine(nodes: Sequence[NodeChecks]) -> None:
    """Look at the nodes of a cluster, and put down with each what was found."""
    at_once(examine_machine, nodes)
    for node, twin in find_twins(nodes).items():
        next(each for each in nodes if each.name == node).findings[IDENTITY] = twin
    server = next(node for node in nodes if node.is_server)
    cluster = server.cluster
    workers = [node for node in nodes if node.name in (*cluster.workers, *cluster.store_nodes[1:])]
    with listening(server) as listener:
        for worker in workers:
            worker.listener = listener
        checks = link_checks(server.cluster)
        at_once(lambda worker: look_at_all(worker, checks), workers)


def examine_machine(node: NodeChecks) -> None:
    make_contact(node)
    why = not_reached(node)
    node.findings[IDENTITY] = skipped(why) if why else ok("one name")
    look_at_all(
        node, [*MACHINE_CHECKS, *PROJECT_CHECKS, *(WORKLOAD_CHECKS if node.packages else ())]
    )


def make_contact(node: NodeChecks) -> None:
    findings, is_here = node.findings, node.is_here
    try:
        run = partial(node.host.run, alone=True)
        answer = ask(run, SYSTEM, CONTACT_SCRIPT, CONTACT_S)
    except LaunchError as error:
        wrong = refused(error, node, CONTACT_S)
        if isinstance(error, Unreachable) and error.cause.startswith("host_key"):
            findings |= {SSH: skipped("needs its key"), HOST_KEY: wrong}
        else:
            findings |= {SSH: wrong, HOST_KEY: skipped("needs SSH")}
        return
    findings[SSH] = ok("this machine" if is_here else f"{answer.took_s:.1f} s")
    findings[HOST_KEY] = skipped("this machine") if is_here else ok("known")
    findings[SYSTEM] = judge_system(answer, node)
    node.facts = read_facts(answer)


def not_reached(node: NodeChecks) -> str | None:
    """Why nothing can be looked at on a machine; None: it can."""
    if SYSTEM not in node.findings:
        return "needs SSH"
    return None if node.findings[SYSTEM].state == "ok" else "unknown system"


def look_at_all(node: NodeChecks, checks: Sequence[Check]) -> None:
    found = at_once(lambda check: look_at(node, check)[0], checks, most=MAX_SESSIONS)
    node.findings |= {check.name: each for check, each in zip(checks, found, strict=True)}


def look_at(
    node: NodeChecks, check: Check, run: Run | None = None
) -> tuple[Finding, Answer | None]:
    """Make a check; the finding, and the answer where there is one. `run` as `Host.run`."""
    if reason := not_reached(node) or check.why_not(node):
        return skipped(reason), None
    script = check.script if isinstance(check.script, str) else check.script(node)
    try:
        stdin = check.stdin(node)
        answer = ask(run or node.host.run, check.name, script, check.limit_s, stdin=stdin)
    except LaunchError as error:
        return refused(error, node, check.limit_s), None
    return judged(check, answer, node), answer


def ask(run: Run, name: str, script: str, limit_s: float, stdin: bytes = b"") -> Answer:
    """Run a check's script; `ps` there shows which check it is.

    Raises:
        LaunchError: it did not end in time, or the machine is out of reach.
    """
    begun, start = time.time(), time.monotonic()
    done = run(f": 'doctor: {name}'\n{script}", stdin=stdin, timeout_s=limit_s)
    return Answer(done.code, done.stdout, done.stderr, begun, time.monotonic() - start)


def judged(check: Check, answer: Answer, node: NodeChecks) -> Finding:
    """What is thought of an answer, also of one that makes no sense."""
    try:
        return check.judge(answer, node)
    except (ValueError, LookupError):
        said = condensed(answer.stderr_tail)
        return fail(
            f"the answer makes no sense ({said})", f"{node.there('true')} should say nothing"
        )


def refused(error: LaunchError, node: NodeChecks, limit_s: float) -> Finding:
    if isinstance(error, Unreachable):
        return fail(error.what, error.fix)
    if isinstance(error, TookTooLong):
        return fail(
            f"no answer within {limit_s:g} s", f"see what keeps it busy: {node.there('uptime')}"
        )
    return fail(str(error), "mend this machine")


@contextmanager
def listening(server: NodeChecks) -> Iterator[Listener | None]:
    """Look at the server's port; the listener is there as long as the block lasts."""
    with ExitStack() as stack:

        def hold(script: str, **how: Any) -> Done:
            return stack.enter_context(server.host.holding(script, **how))

        server.findings[PORT_CHECK.name], answer = look_at(server, PORT_CHECK, hold)
        yield read_listener(answer) if answer else None
