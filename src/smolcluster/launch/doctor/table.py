"""The table of `smolcluster doctor`: a row a check, in the order in which they are shown; what runs it."""

import time
from collections.abc import Callable

from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.checks import MACHINE_CHECKS
from smolcluster.launch.doctor.checks_links import LINK_CHECKS, PORT_CHECK
from smolcluster.launch.doctor.checks_project import PROJECT_CHECKS, WORKLOAD_CHECKS
from smolcluster.launch.doctor.findings import Answer, Check, Finding, NodeChecks, fail, skipped
from smolcluster.launch.host import Done, TookTooLong, Unreachable
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import condensed

TABLE = (*MACHINE_CHECKS, *PROJECT_CHECKS, *WORKLOAD_CHECKS, PORT_CHECK, *LINK_CHECKS)
SSH, HOST_KEY, SYSTEM, IDENTITY = "SSH", "host key", "system", "identity"
"""What the first contact tells, before the table."""
ORDER = (SSH, HOST_KEY, SYSTEM, IDENTITY, *(check.name for check in TABLE))
MAX_SESSIONS = 6
"""At once on one machine: its SSH server allows 10 over one connection."""

Run = Callable[..., Done]


def not_reached(node: NodeChecks) -> str | None:
    """Why nothing can be looked at on a machine; None: it can."""
    if SYSTEM not in node.findings:
        return "needs SSH"
    return None if node.findings[SYSTEM].state == "ok" else "unknown system"


def run_table(node: NodeChecks, of: str, run: Run | None = None) -> None:
    """Make all checks of a kind at once, and put down what was found; `run` as `Host.run`."""
    due = [each for each in TABLE if each.of == of and (node.packages or each.name != "workload")]
    found = at_once(lambda check: look_at(node, check, run), due, most=MAX_SESSIONS)
    node.findings |= {check.name: each for check, each in zip(due, found, strict=True)}


def look_at(node: NodeChecks, check: Check, run: Run | None = None) -> Finding:
    if reason := not_reached(node) or check.why_not(node):
        return skipped(reason)
    script = check.script if isinstance(check.script, str) else check.script(node)
    limit_s = check.limit_s(node) if callable(check.limit_s) else check.limit_s
    try:
        answer = ask(run or node.host.run, check.name, script, limit_s, check.stdin(node))
        return check.judge(answer, node)
    except LaunchError as error:
        return refused(error, node, limit_s)
    except (ValueError, LookupError):
        said = condensed(answer.stderr_tail)
        return fail(
            f"the answer makes no sense ({said})", f"{node.there('true')} should say nothing"
        )


def ask(run: Run, name: str, script: str, limit_s: float, stdin: bytes = b"") -> Answer:
    """Run a check's script; `ps` there shows which check it is.

    Raises:
        LaunchError: it did not end in time, or the machine is out of reach.
    """
    begun, start = time.time(), time.monotonic()
    done = run(f": 'doctor: {name}'\n{script}", stdin=stdin, timeout_s=limit_s)
    return Answer(done.code, done.stdout, done.stderr, begun, time.monotonic() - start)


def refused(error: LaunchError, node: NodeChecks, limit_s: float) -> Finding:
    if isinstance(error, Unreachable):
        return fail(error.what, error.fix)
    if isinstance(error, TookTooLong):
        return fail(
            f"no answer within {limit_s:g} s", f"see what keeps it busy: {node.there('uptime')}"
        )
    return fail(str(error), "mend this machine")
