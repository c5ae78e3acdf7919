"""The table of `smolcluster doctor`: a row a check, in the order in which they are shown; what runs it."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.checks import MACHINE_CHECKS
from smolcluster.launch.doctor.checks_links import LINK_CHECKS, PORT_CHECK, PORT_FACTS
from smolcluster.launch.doctor.checks_project import PROJECT_CHECKS, exports
from smolcluster.launch.doctor.findings import Check, Finding, NodeChecks, fail, skipped
from smolcluster.launch.host import Done, TookTooLong, Unreachable
from smolcluster.launch.node_facts import facts_script, read_facts
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import condensed

TABLE = (*MACHINE_CHECKS, *PROJECT_CHECKS, PORT_CHECK, *LINK_CHECKS)
SSH, HOST_KEY, SYSTEM, IDENTITY = "SSH", "host key", "system", "identity"
"""What the first contact tells, before the table."""
ORDER = (SSH, HOST_KEY, SYSTEM, IDENTITY, *(check.name for check in TABLE))

CONTACT = ("system", "apple_silicon", "packages", "identity", "clock")
"""Facts that the first contact asks for: none takes long, so the time that it takes is the connection's."""
FACTS = (
    *("folder", "interpreter", *PORT_FACTS),
    *(check.name for check in TABLE if check.script is None and check.name not in CONTACT),
)
CONTACT_S = 15.0

Run = Callable[..., Done]


def not_reached(node: NodeChecks) -> str | None:
    """Why nothing can be looked at on a machine; None: it can."""
    if SYSTEM not in node.findings:
        return "needs SSH"
    return None if node.findings[SYSTEM].state == "ok" else "unknown system"


def run_table(node: NodeChecks, of: str, run: Run | None = None) -> None:
    """Make all checks of a kind at once, and put down what was found; `run` as `Host.run`."""
    wanted = [
        each for each in TABLE if each.of == of and (node.packages or each.name != "workload")
    ]
    why_not = {each.name: not_reached(node) or each.why_not(node) for each in wanted}
    node.findings |= {name: skipped(why) for name, why in why_not.items() if why}
    due = [each for each in wanted if why_not[each.name] is None]
    found = at_once(lambda check: look_at(node, check, run or node.host.run), due)
    node.findings |= {check.name: each for check, each in zip(due, found, strict=True)}


def look_at(node: NodeChecks, check: Check, run: Run) -> Finding:
    limit_s = check.limit_s(node) if callable(check.limit_s) else check.limit_s
    try:
        if check.script is None:
            answer = node.facts.told.get(check.name)
        else:
            answer = ask(run, check.name, check.script(node), limit_s, check.stdin(node))
    except LaunchError as error:
        return refused(error, node, limit_s)
    if answer is None:
        return refused(TookTooLong(), node, CONTACT_S)
    try:
        return check.judge(answer, node)
    except (ValueError, LookupError):
        said = condensed(answer.stderr_tail)
        return fail(
            f"the answer makes no sense ({said})", f"{node.there('true')} should say nothing"
        )


def ask_facts(node: NodeChecks, name: str, facts: Sequence[str], *, alone: bool = False) -> Done:
    """Ask what the machine says of itself; what was not said in time is missing.

    `alone`: over a connection of its own, for which the host's key is verified.

    Raises:
        LaunchError: it is out of reach, or has said nothing in time.
    """
    machine, begun = node.machine, time.time()
    script = facts_script(
        *facts,
        folder=machine.project_dir,
        interpreter=machine.interpreter,
        secret_file=machine.secret_file,
        port=node.cluster.port,
    )
    try:
        run = partial(node.host.run, alone=alone)
        return ask(run, name, script, CONTACT_S, exports(node).encode())
    except TookTooLong as error:
        answer = Done(0, error.stdout, "", begun, CONTACT_S)
        if not read_facts(answer).told:
            raise
        return answer


def ask(run: Run, name: str, script: str, limit_s: float, stdin: bytes = b"") -> Done:
    """Run a check's script; `ps` there shows which check it is.

    Raises:
        LaunchError: it did not end in time, or the machine is out of reach.
    """
    return run(f": 'doctor: {name}'\n{script}", stdin=stdin, timeout_s=limit_s)


def refused(error: LaunchError, node: NodeChecks, limit_s: float) -> Finding:
    if isinstance(error, Unreachable):
        return fail(error.what, error.fix)
    if isinstance(error, TookTooLong):
        return fail(
            f"no answer within {limit_s:g} s", f"see what keeps it busy: {node.there('uptime')}"
        )
    return fail(str(error), "mend this machine")
