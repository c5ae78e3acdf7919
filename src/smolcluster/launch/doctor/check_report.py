"""What `smolcluster doctor` found, as a table with what mends it, and as JSON."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from smolcluster.launch.doctor.findings import Context, Finding, State
from smolcluster.observability.terminal import displayable, steady
from smolcluster.utils.units import format_count

MAX_CELL = 18
"""Columns of a cell."""
STYLES: Mapping[State, str] = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skipped": "dim",
}
FRAME = 3
"""Columns around a cell."""


@dataclass(frozen=True)
class CheckReport:
    """What was found of each node, by the names of checks; the server is first."""

    nodes: Mapping[str, tuple[Context, Mapping[str, Finding]]]

    @property
    def exit_code(self) -> int:
        return int(any(finding.state == "fail" for _, _, finding in self))

    @property
    def checks(self) -> list[str]:
        made = {name for _, name, _ in self}
        return [name for name in ORDER if name in made]

    def __iter__(self) -> Iterator[tuple[str, str, Finding]]:
        for node, (_, findings) in self.nodes.items():
            for name in sorted(findings, key=ORDER.index):
                yield node, name, findings[name]

    def count(self, state: State) -> int:
        return sum(finding.state == state for _, _, finding in self)


ORDER = (
    *("SSH", "host key", "system", "identity", "clock", "Python", "uv", "tmux", "rsync"),
    *(
        "disk",
        "memory",
        "sleep",
        "secret",
        "code",
        "environment",
        "torch",
        "port",
        "server",
        "link",
    ),
)


def as_json_text(check_report: CheckReport) -> str:
    nodes = {
        node: {
            "ssh": context.destination,
            "role": "server" if context.is_server else "worker",
            "checks": {name: asdict(findings[name]) for name in ORDER if name in findings},
        }
        for node, (context, findings) in check_report.nodes.items()
    }
    states: tuple[State, ...] = ("ok", "warn", "fail", "skipped")
    counts = {state: check_report.count(state) for state in states}
    return json.dumps(
        {"ok": check_report.exit_code == 0, "counts": counts, "nodes": nodes}, indent=2
    )


def show(check_report: CheckReport, console: Console) -> None:
    with steady(console):
        for nodes in columns(check_report, console.width):
            console.print(_table(check_report, nodes, console))
        console.print(Group(*_remedies(check_report, console)), soft_wrap=True)


def columns(check_report: CheckReport, width: int) -> Iterator[list[str]]:
    free = width - FRAME - 1 - max(map(len, check_report.checks))
    nodes: list[str] = []
    left = free
    for node, (_, findings) in check_report.nodes.items():
        needed = FRAME + max(map(len, (node, *map(_cell, findings.values()))))
        if nodes and needed > left:
            yield nodes
            nodes, left = [], free
        nodes.append(node)
        left -= needed
    yield nodes


def _table(check_report: CheckReport, nodes: Sequence[str], console: Console) -> Table:
    table = Table("", *nodes)
    for name in check_report.checks:
        found = (check_report.nodes[node][1].get(name) for node in nodes)
        table.add_row(name, *(_styled(finding, console) for finding in found))
    return table


def _styled(finding: Finding | None, console: Console) -> Text:
    if finding is None:
        return Text()
    return Text(displayable(console, _cell(finding)), STYLES[finding.state], no_wrap=True)


def _cell(finding: Finding) -> str:
    match finding.state:
        case "ok":
            text = finding.what
        case "skipped":
            text = f"- {finding.what}"
        case "warn":
            text = "warning"
        case "fail":
            text = "FAILS"
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def _remedies(check_report: CheckReport, console: Console) -> Iterator[RenderableType]:
    for state, word in (("warn", "warning"), ("fail", "FAILS")):
        for (name, finding), nodes in _alike(check_report).items():
            if finding.state == state:
                line = _wrapped(f"{word} {', '.join(nodes)}: {name}: {finding.what}", console)
                yield Text.assemble((word, STYLES[state]), line.removeprefix(word))
                yield Text(_wrapped(f"  -> {finding.fix}", console))
    failures, warnings = check_report.count("fail"), check_report.count("warn")
    if not failures:
        extra = f" ({format_count(warnings, 'warning')})" if warnings else ""
        yield Text(f"the cluster is ready{extra}", "green")
    else:
        yield Text(
            f"{format_count(failures, 'failure')}, {format_count(warnings, 'warning')}", "bold red"
        )


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
    shown = (displayable(console, line.replace("\0", " ")) for line in lines)
    return "\n".join(shown)


def _alike(check_report: CheckReport) -> dict[tuple[str, Finding], list[str]]:
    alike: dict[tuple[str, Finding], list[str]] = {}
    for node, name, finding in check_report:
        alike.setdefault((name, finding), []).append(node)
    return alike
