"""`smolcluster doctor`: what would go wrong on the machines of a cluster, and what mends it.

    first contact -> the machine, the project on it -> a listener on the server -> the workers connect to it

All machines at once, some checks of a machine at once, and each check has its time limit; so the whole takes
as long as the slowest machine. Only the workers' measurements of their links take turns.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from smolcluster.configs.load import find_config, read_config
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.check_report import CheckReport, as_json_text, show
from smolcluster.launch.doctor.checks import (
    CONTACT_SCRIPT,
    MACHINE_CHECKS,
    find_twins,
    identity,
    judge_system,
    read_facts,
)
from smolcluster.launch.doctor.checks_links import (
    link_checks,
    port_check,
)
from smolcluster.launch.doctor.checks_project import PROJECT_CHECKS
from smolcluster.launch.doctor.findings import (
    Answer,
    Check,
    Context,
    Finding,
    fail,
    ok,
    skipped,
)
from smolcluster.launch.host import Host, TookTooLong, Unreachable, host_of
from smolcluster.launch.manifest import read_tree, without
from smolcluster.launch.probing import Listener, read_listener
from smolcluster.launch.remote import own_paths, project_root
from smolcluster.launch.requests import cluster_source
from smolcluster.launch.sync import environment_digest
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import condensed

CONTACT_S = 15.0
MAX_SESSIONS = 6
"""At once on one machine: its SSH server allows 10 over one connection."""
PLAIN_WIDTH = 100
"""Columns where the output is no terminal."""
MARK = ":: doctor"
"""Begins what a script says, because a user's shell may greet before; `ps` there shows which check it is."""
SSH, HOST_KEY, SYSTEM, IDENTITY = "SSH", "host key", "system", "identity"


@dataclass
class NodeChecks:
    """A node that is looked at; `findings` by the names of checks."""

    host: Host
    context: Context
    findings: dict[str, Finding] = field(default_factory=dict)
    identity: str | None = None

    @property
    def is_reached(self) -> bool:
        states = [self.findings[name].state for name in (SSH, SYSTEM) if name in self.findings]
        return states == ["ok", "ok"]


def doctor(config: str | None, overrides: list[str], as_json: bool) -> int:
    """Look at the machines of a cluster file and print what was found; 1 if something fails.

    Raises:
        ConfigError: the cluster file or an override is wrong.
    """
    source = cluster_source(config)
    cluster = load_settings(source, "nn", None, overrides).cluster
    raw = read_config(find_config(source, "cluster"), "cluster").get("nodes") or {}
    patients = [
        NodeChecks(host_of(cluster, node), context)
        for node, context in contexts(cluster, raw).items()
    ]
    console = SteadyConsole(stderr=True)
    waiting = f"looking at {len(patients)} machine{'s' if len(patients) > 1 else ''} …"
    with console.status(waiting) if console.is_terminal else nullcontext():
        check_report = examine(patients, cluster)
    if as_json:
        sys.stdout.write(as_json_text(check_report) + "\n")
    else:
        show(check_report, SteadyConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return check_report.exit_code


def contexts(cluster: ClusterConfig, raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Context]:
    """What is known of each node beforehand, the server first; `raw`: the file's `nodes`, as written."""
    try:
        root = project_root()
    except LaunchError:
        root = None
    tree = read_tree(root) if root else None
    token = secrets.token_hex(8)
    known = {}
    for node in dict.fromkeys((cluster.server, *cluster.workers)):
        settings = cluster.nodes.get(node, NodeConfig())
        destination = host_of(cluster, node).destination
        is_here = destination is None
        folder = str(root) if is_here and root else settings.project_dir
        stated = raw.get(node) or {}
        secret_file = stated.get("secret_file")
        kept = tuple(own_paths(stated, folder, stated.get("runs_dir")))
        known[node] = Context(
            node,
            cluster,
            destination,
            folder=folder,
            python=sys.executable if is_here else f"{folder}/.venv/bin/python",
            secret_file=None if secret_file is None else str(secret_file),
            tree=None if tree is None else without(tree, kept),
            environment=environment_digest(root, settings.torch) if root else "",
            token=token,
        )
    return known


def examine(patients: Sequence[NodeChecks], cluster: ClusterConfig) -> CheckReport:
    at_once(examine_machine, patients)
    identities = {each.host.node: each.identity for each in patients if each.identity}
    destinations = {each.host.node: each.host.destination for each in patients}
    twins = find_twins(identities, destinations, cluster)
    for each in patients:
        if each.host.node in twins:
            each.findings[IDENTITY] = twins[each.host.node]
    server = next(each for each in patients if each.context.is_server)
    workers = [each for each in patients if each.host.node in cluster.workers]
    with listening(server) as listener:
        checks = link_checks(cluster)

        def examine_links(worker: NodeChecks) -> None:
            worker.context = replace(worker.context, listener=listener)
            look_at_all(worker, checks)

        at_once(examine_links, workers)
    return CheckReport({each.host.node: (each.context, each.findings) for each in patients})


def examine_machine(node_checks: NodeChecks) -> None:
    make_contact(node_checks)
    look_at_all(node_checks, [*MACHINE_CHECKS, *PROJECT_CHECKS])


def make_contact(node_checks: NodeChecks) -> None:
    context, findings = node_checks.context, node_checks.findings
    try:
        answer = ask(node_checks.host, SYSTEM, CONTACT_SCRIPT, CONTACT_S)
    except Unreachable as error:
        wrong = fail(error.what, error.fix)
        if error.cause.startswith("host_key"):
            findings |= {SSH: skipped("needs its key"), HOST_KEY: wrong}
        else:
            findings |= {SSH: wrong, HOST_KEY: skipped("needs SSH")}
    except LaunchError as error:
        findings[SSH] = refused(error, context, CONTACT_S)
        findings[HOST_KEY] = skipped("needs SSH")
    else:
        findings[SSH] = ok(f"{answer.took_s:.1f} s" if context.destination else "this machine")
        findings[HOST_KEY] = ok("known") if context.destination else skipped("this machine")
        findings[SYSTEM] = judged(judge_system, answer, context)
        node_checks.context = replace(context, facts=read_facts(answer))


def look_at_all(node_checks: NodeChecks, checks: Iterable[Check]) -> None:
    made = list(checks)
    found = at_once(lambda check: look_at(node_checks, check)[0], made, most=MAX_SESSIONS)
    node_checks.findings |= {check.name: each for check, each in zip(made, found, strict=True)}


def look_at(node_checks: NodeChecks, check: Check) -> tuple[Finding, Answer | None]:
    """Make a check; the finding, and the answer where there is one."""
    context = node_checks.context
    if not node_checks.is_reached:
        return skipped(
            "needs SSH" if SYSTEM not in node_checks.findings else "unknown system"
        ), None
    if reason := check.why_not(context):
        return skipped(reason), None
    try:
        answer = ask(
            node_checks.host, check.name, check.script(context), check.limit_s, check.stdin(context)
        )
    except LaunchError as error:
        return refused(error, context, check.limit_s), None
    finding = judged(check.judge, answer, context)
    if check.name == IDENTITY and finding.state == "ok":
        node_checks.identity = identity(answer)
    return finding, answer


def ask(host: Host, name: str, script: str, limit_s: float, stdin: bytes = b"") -> Answer:
    """Run a check's script.

    Raises:
        LaunchError: it did not end in time, or the machine is out of reach.
    """
    begun, start = time.time(), time.monotonic()
    done = host.run(f"echo '{MARK} {name}'\n{script}", stdin=stdin, timeout_s=limit_s)
    took_s = time.monotonic() - start
    _, mark, said = done.stdout.partition(f"{MARK} {name}\n")
    return Answer(done.code, said if mark else done.stdout, done.stderr, begun, took_s)


def judged(
    judge: Callable[[Answer, Context], Finding], answer: Answer, context: Context
) -> Finding:
    """What is thought of an answer, also of one that makes no sense."""
    try:
        return judge(answer, context)
    except (ValueError, LookupError):
        said = condensed(answer.stderr_tail)
        return fail(
            f"the answer makes no sense ({said})", f"{context.there('true')} should say nothing"
        )


def refused(error: LaunchError, context: Context, limit_s: float) -> Finding:
    if isinstance(error, Unreachable):
        return fail(error.what, error.fix)
    if isinstance(error, TookTooLong):
        return fail(
            f"no answer within {limit_s:g} s", f"see what keeps it busy: {context.there('uptime')}"
        )
    return fail(str(error), "mend this machine")


@contextmanager
def listening(server: NodeChecks) -> Iterator[Listener | None]:
    """Look at the server's port; the listener is there as long as the block lasts."""
    check = port_check()
    finding, answer = look_at(server, check)
    server.findings[check.name] = finding
    listener = read_listener(answer) if answer else None
    try:
        yield listener
    finally:
        if listener and listener.pid:
            end(server.host, listener)


def end(host: Host, listener: Listener) -> None:
    try:
        host.run(listener.stop_script, timeout_s=CONTACT_S)
    except LaunchError:
        return
