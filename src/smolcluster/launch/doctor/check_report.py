"""What `smolcluster doctor` found, as a table with what mends it, and as JSON."""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from smolcluster.launch.doctor.findings import Finding, NodeChecks, State
from smolcluster.launch.doctor.table import ORDER
from smolcluster.observability.terminal import displayable
from smolcluster.utils.units import format_count

MAX_CELL = 18
"""Columns of a cell."""
FRAME = 3
"""Columns around a cell."""
STYLES: Mapping[State, str] = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skipped": "dim",
}


def count(nodes: Sequence[NodeChecks], state: State) -> int:
    return sum(found.state == state for node in nodes for found in node.findings.values())


def exit_code(nodes: Sequence[NodeChecks]) -> int:
    return int(count(nodes, "fail") > 0)


def as_json_text(nodes: Sequence[NodeChecks]) -> str:
    told = {
        node.name: {
            "ssh": node.host.destination,
            "role": "server" if node.is_server else "worker",
            "checks": {name: asdict(found) for name, found in _in_order(node)},
        }
        for node in nodes
    }
    counts = {state: count(nodes, state) for state in STYLES}
    return json.dumps({"ok": not exit_code(nodes), "counts": counts, "nodes": told}, indent=2)


def _in_order(node: NodeChecks) -> Iterator[tuple[str, Finding]]:
    return ((name, node.findings[name]) for name in ORDER if name in node.findings)


def show(nodes: Sequence[NodeChecks], console: Console) -> None:
    names = [name for name in ORDER if any(name in node.findings for node in nodes)]
    for beside in columns(nodes, console.width - FRAME - 1 - max(map(len, names))):
        table = Table("", *(node.name for node in beside))
        for name in names:
            found = (node.findings.get(name) for node in beside)
            table.add_row(name, *(_styled(each, console) for each in found))
        console.print(table)
    console.print(Group(*_remedies(nodes, console)), soft_wrap=True)


def columns(nodes: Sequence[NodeChecks], width: int) -> Iterator[list[NodeChecks]]:
    """The nodes that stand side by side in a width, table by table."""
    beside: list[NodeChecks] = []
    left = width
    for node in nodes:
        needed = FRAME + max(map(len, (node.name, *map(_cell, node.findings.values()))))
        if beside and needed > left:
            yield beside
            beside, left = [], width
        beside.append(node)
        left -= needed
    yield beside


def _styled(finding: Finding | None, console: Console) -> Text:
    if finding is None:
        return Text()
    return Text(displayable(console, _cell(finding)), STYLES[finding.state], no_wrap=True)


def _cell(finding: Finding) -> str:
    words = {"skipped": f"- {finding.what}", "warn": "warning", "fail": "FAILS"}
    text = words.get(finding.state, finding.what)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def _remedies(nodes: Sequence[NodeChecks], console: Console) -> Iterator[Text]:
    """What is wrong, with what mends it; what is the same on several nodes is said once."""
    alike: dict[tuple[str, Finding], list[str]] = defaultdict(list)
    for node in nodes:
        for found in _in_order(node):
            alike[found].append(node.name)
    for state, word in (("warn", "warning"), ("fail", "FAILS")):
        for (name, finding), names in alike.items():
            if finding.state == state:
                line = _wrapped(f"{word} {', '.join(names)}: {name}: {finding.what}", console)
                yield Text.assemble((word, STYLES[finding.state]), line.removeprefix(word))
                yield Text(_wrapped(f"  -> {finding.fix}", console))
    warnings = format_count(count(nodes, "warn"), "warning")
    if failures := count(nodes, "fail"):
        yield Text(f"{format_count(failures, 'failure')}, {warnings}", "bold red")
    else:
        extra = f" ({warnings})" if count(nodes, "warn") else ""
        yield Text(f"the cluster is ready{extra}", "green")


def _wrapped(text: str, console: Console) -> str:
    """The text in lines of the console's width, with every `command` whole on one."""
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole,
        console.width,
        subsequent_indent=" " * 5,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(displayable(console, line.replace("\0", " ")) for line in lines)
