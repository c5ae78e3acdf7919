"""Machines, layers, links and devices as a picture, by Graphviz or as Mermaid."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smolcluster.algorithms.planning.plan_file import PlanFile, PlanLink
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.hetero.file import HeteroConfig
from smolcluster.utils.units import format_bytes, format_count
from smolcluster.utils.words import one_line

Form = Literal["svg", "pdf", "png", "mmd"]
DOT_S = 60.0
COORDINATOR = "coordinator: no layers"


Box = tuple[str, ...]
"""A process: its machine first, then what it has, a line each."""


@dataclass(frozen=True)
class Line:
    """What connects two boxes, by their places."""

    source: int
    target: int
    label: str = ""
    is_dashed: bool = False


@dataclass(frozen=True)
class Diagram:
    """Boxes and what connects them."""

    title: str
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


# --- what is shown


def of_plan(plan: PlanFile, title: str) -> Diagram:
    """The stages in the order of the layers; the links with what a microbatch sends."""
    boxes = tuple(
        _box(
            stage.machine,
            layers_words(stage.start, stage.end),
            stage.device,
            f"{1e3 * stage.seconds:.3g} ms a microbatch" if stage.seconds else "",
            format_bytes(stage.memory_bytes) if stage.memory_bytes else "",
        )
        for stage in plan.stages
    )
    lines = tuple(Line(at, at + 1, link_words(link)) for at, link in enumerate(plan.links))
    told = f"{title}: {plan.schedule}, {format_count(plan.num_microbatches, 'microbatch')}"
    step = f", step {1e3 * plan.step_s:.4g} ms, bubble {plan.bubble:.0%}" if plan.step_s else ""
    return Diagram(told + step, boxes, lines)


def of_cluster(cluster: Mapping[str, Any], title: str) -> Diagram:
    """The server and its workers, or the stages of a plan written by hand, which talk to each other.

    Raises:
        ConfigError: it is no cluster file.
    """
    try:
        server, workers = str(cluster["server"]), [str(each) for each in cluster["workers"]]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{title} names no server and no workers: give a cluster file, a plan or a run"
        ) from None
    port = cluster.get("port")
    plan, nodes = cluster.get("shard_plan"), cluster.get("nodes") or {}
    stages = by_hand(plan) if isinstance(plan, Mapping) else [(each, "") for each in workers]
    is_pipeline = plan is not None
    role = COORDINATOR if is_pipeline else "server"
    first = _box(server, role, f"port {port}" if port else "")
    boxes = tuple(_box(node, layers, _device_of(nodes, node)) for node, layers in stages)
    addresses = cluster.get("host_ip") or {}
    star = tuple(
        Line(at, 0, _address_of(addresses, node), is_dashed=is_pipeline)
        for at, (node, _) in enumerate(stages, start=1)
    )
    chain = tuple(Line(at, at + 1) for at in range(1, len(stages)) if is_pipeline)
    return Diagram(title, (first, *boxes), (*chain, *star))


def of_hetero(config: HeteroConfig, title: str) -> Diagram:
    """The same of a `hetero_config.json`, with each machine's address."""
    star = of_cluster(config.cluster(Path(), None), title)
    machines = (config.machine_of(box[0]) for box in star.boxes)
    boxes = tuple((*box, machine.ip) for box, machine in zip(star.boxes, machines, strict=True))
    lines = tuple(replace(line, label="") for line in star.lines)  # all of the coordinator's
    return Diagram(title, boxes, lines)


def _box(*lines: str | None) -> Box:
    return tuple(filter(None, lines))


def by_hand(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Node and layers of each stage, in the order of the layers."""
    stages = []
    for node, stated in plan.items():
        ranges = stated if stated and not isinstance(stated[0], int) else [stated]
        stages += [(int(start), int(end), str(node)) for start, end in ranges]
    return [(node, layers_words(start, end)) for start, end, node in sorted(stages)]


def layers_words(start: int, end: int) -> str:
    return f"layer {start}" if end == start + 1 else f"layers {start} to {end - 1}"


def link_words(link: PlanLink) -> str:
    """What a microbatch sends, and how long the slower way takes."""
    words = [format_bytes(link.nbytes)] if link.nbytes else []
    if seconds := max(link.forward_s, link.backward_s):
        words.append(f"{1e3 * seconds:.3g} ms")
    return ", ".join(words)


def _device_of(nodes: Mapping[str, Any], node: str) -> str:
    own = nodes.get(node)
    return str(own.get("device") or "") if isinstance(own, Mapping) else ""


def _address_of(addresses: Any, node: str) -> str:
    return str(addresses.get(node, "")) if isinstance(addresses, Mapping) else str(addresses)


# --- how it is written


def mermaid_of(diagram: Diagram) -> str:
    """A flowchart as GitHub and many editors draw it."""
    text = ["---", f"title: {_quoted(diagram.title)}", "---", "flowchart LR"]
    for at, box in enumerate(diagram.boxes):
        text.append(f'    n{at}["{"<br/>".join(map(_escaped, box))}"]')
    for line in diagram.lines:
        arrow = "-.-" if line.is_dashed else "<-->"
        label = f'|"{_escaped(line.label)}"|' if line.label else ""
        text.append(f"    n{line.source} {arrow}{label} n{line.target}")
    return "\n".join(text) + "\n"


def dot_of(diagram: Diagram) -> str:
    """The same for Graphviz."""
    text = [
        "graph {",
        f"  label={_quoted(diagram.title)}; labelloc=t; rankdir=LR; fontname=Helvetica;",
        "  node [shape=box, style=rounded, fontname=Helvetica];",
        "  edge [dir=both, fontname=Helvetica, fontsize=10];",
    ]
    for at, box in enumerate(diagram.boxes):
        text.append(f"  n{at} [label={_quoted(chr(10).join(box))}];")
    for line in diagram.lines:
        style = ", style=dashed, dir=none" if line.is_dashed else ""
        text.append(f"  n{line.source} -- n{line.target} [label={_quoted(line.label)}{style}];")
    return "\n".join([*text, "}"]) + "\n"


def _escaped(text: str) -> str:
    """Text within a Mermaid label: quotes and angle brackets would end it or be markup."""
    named = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}
    return "".join(named.get(char, char) for char in one_line(text))


def _quoted(text: str) -> str:
    """A string of DOT and of YAML: lines apart, quotes and backslashes escaped."""
    escaped = (
        one_line(part).replace("\\", "\\\\").replace('"', '\\"') for part in text.split("\n")
    )
    return '"' + "\\n".join(escaped) + '"'


def drawn(diagram: Diagram, form: Form) -> bytes:
    """The picture as a file's content.

    Raises:
        ConfigError: Graphviz is not installed.
        LaunchError: it failed.
    """
    if form == "mmd":
        return mermaid_of(diagram).encode()
    dot = shutil.which("dot")
    if dot is None:
        raise ConfigError(
            f"--format {form} needs Graphviz, whose program dot is missing: install graphviz (apt, brew), "
            "or take --format mmd"
        )
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command; the diagram is its input
            [dot, f"-T{form}"],
            input=dot_of(diagram).encode(),
            capture_output=True,
            timeout=DOT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"dot cannot draw the diagram: {one_line(str(error))}") from error
    if done.returncode:
        said = one_line(done.stderr.decode(errors="replace").strip())
        raise LaunchError(f"dot cannot draw the diagram: {said or done.returncode}")
    return done.stdout
