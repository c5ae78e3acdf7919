"""The table of `smolcluster doctor`: a row a check, in the order in which they are shown; what runs it."""

from collections.abc import Callable, Sequence
from functools import partial

from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.checks import MACHINE_CHECKS
from smolcluster.launch.doctor.checks_links import LINK_CHECKS, PORT_CHECK
from smolcluster.launch.doctor.checks_project import PROJECT_CHECKS, WORKLOAD_CHECKS
from smolcluster.launch.doctor.findings import QUICK_S, Check, Finding, NodeChecks, fail, skipped
from smolcluster.launch.host import Done, TookTooLong, Unreachable
from smolcluster.launch.node_facts import Facts, facts_script, read_facts
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import condensed

TABLE = (*MACHINE_CHECKS, *PROJECT_CHECKS, *WORKLOAD_CHECKS, PORT_CHECK, *LINK_CHECKS)
SSH, HOST_KEY, SYSTEM, IDENTITY = "SSH", "host key", "system", "identity"
"""What the first contact tells, before the table."""
ORDER = (SSH, HOST_KEY, SYSTEM, IDENTITY, *(check.name for check in TABLE))

Run = Callable[..., Done]


def not_reached(node: NodeChecks) -> str | None:
    """Why nothing can be looked at on a machine; None: it can."""
    if SYSTEM not in node.findings:
        return "needs SSH"
    return None if node.findings[SYSTEM].state == "ok" else "unknown system"


def run_table(node: NodeChecks, of: str, run: Run | None = None) -> None:
    """Make all checks of a kind at once, and put down what was found; `run` as `Host.run`."""
    run = run or node.host.run
    due = [each for each in TABLE if each.of == of and (node.packages or each.name != "workload")]
    why_not = {each.name: not_reached(node) or each.why_not(node) for each in due}
    node.findings |= {name: skipped(why) for name, why in why_not.items() if why}
    wanted = [each for each in due if why_not[each.name] is None]
    of_facts = [each for each in wanted if each.script is None]
    looks = [partial(look_at, node, each, run) for each in wanted if each.script is not None]
    looks += [partial(look_at_facts, node, of_facts)] * bool(of_facts)
    for found in at_once(lambda look: look(), looks):
        node.findings |= found


def look_at(node: NodeChecks, check: Check, run: Run) -> dict[str, Finding]:
    script = check.script(node) if callable(check.script) else str(check.script)
    limit_s = check.limit_s(node) if callable(check.limit_s) else check.limit_s
    try:
        answer = ask(run, check.name, script, limit_s, check.stdin(node))
    except LaunchError as error:
        return {check.name: refused(error, node, limit_s)}
    return {check.name: judged(check, answer, node)}


def look_at_facts(node: NodeChecks, checks: Sequence[Check]) -> dict[str, Finding]:
    """Check what the machine says of itself; what it does not say in time fails alone."""
    machine, names = node.machine, [each.name for each in checks]
    script = facts_script(
        *(*names, "interpreter"),
        folder=machine.project_dir,
        interpreter=machine.interpreter,
        secret_file=machine.secret_file,
    )
    try:
        answer = ask(node.host.run, "facts", script, QUICK_S)
    except TookTooLong as error:
        answer = Done(0, error.stdout, "")
    except LaunchError as error:
        return dict.fromkeys(names, refused(error, node, QUICK_S))
    told = read_facts(answer).told
    node.facts = Facts({**node.facts.told, **told})
    late = refused(TookTooLong(), node, QUICK_S)
    return {
        each.name: judged(each, told[each.name], node) if each.name in told else late
        for each in checks
    }


def judged(check: Check, answer: Done, node: NodeChecks) -> Finding:
    try:
        return check.judge(answer, node)
    except (ValueError, LookupError):
        said = condensed(answer.stderr_tail)
        return fail(
            f"the answer makes no sense ({said})", f"{node.there('true')} should say nothing"
        )


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
