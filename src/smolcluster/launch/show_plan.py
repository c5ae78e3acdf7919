"""The plan of a launch for people: a table, the commands, and a picture in Mermaid's words."""

import shlex
import sys
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from smolcluster.configs.schema import Settings
from smolcluster.launch.estimate import LINKS_MB_S, StepCost, cost_of
from smolcluster.launch.host import shell_path
from smolcluster.launch.workload_code import WorkloadCode
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.utils.units import format_address, format_bytes, format_count, format_duration


def show_plan(
    launched: Launched,
    settings: Settings,
    code: WorkloadCode | None = None,
    *,
    has_known_model: bool = True,
) -> None:
    cost = cost_of(settings, launched.algorithm) if has_known_model else None
    SteadyConsole().print(plan_table(launched, settings, cost))
    lines = [*commands(launched), "", *costs(cost)]
    if code is not None:
        size, files = format_bytes(len(code.packed)), format_count(code.num_files, "file")
        lines.append(f"your code is sent to every machine: {files}, {size} packed")
    lines += [
        "",
        "```mermaid",
        *mermaid(launched, settings),
        "```",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def plan_table(launched: Launched, settings: Settings, cost: StepCost | None) -> Table:
    """A row a process; it fits 80 columns, so folders are left to the commands."""
    table = Table("process", "node", "ssh", "server at", "memory", title=f"run {launched.run_id}")
    for process in launched.processes:
        memory = "?"  # of a helper: a part of the server's or a worker's
        if cost is not None and not process.is_helper:
            memory = format_bytes(
                cost.server_nbytes if process.rank is None else cost.worker_nbytes
            )
        place = process.ssh or "this machine"
        where = address_of(process, settings)
        row = (_name(process), process.node, place, where, memory)
        table.add_row(*map(Text, row))  # [fe80::1] would be read as markup
    return table


def address_of(process: LaunchedProcess, settings: Settings) -> str:
    """Where a process finds the server, and a stage its worker; or where the server listens."""
    cluster = settings.cluster
    stages = cluster.stages_with(process.node) if process.role == "stage" else None
    if stages is not None:
        return format_address(stages.host_ip[process.node], stages.port)
    return format_address(cluster.host_ip[process.node], cluster.port)


def commands(launched: Launched) -> Iterator[str]:
    for process in launched.processes:
        yield f"{process.title}, in tmux session {process.session}:"
        yield f"  cd {shell_path(process.project_dir)} && {shlex.join(process.argv)}"


def costs(cost: StepCost | None) -> Iterator[str]:
    """Bytes and seconds of a step on a worker's link, in lines of at most 80 columns."""
    if cost is None:
        yield "memory and bytes are not known: data, tokenizer, workload or script decide the model's size"
        return
    yield f"{cost.num_params:,} parameters; memory is without PyTorch and activations"
    yield (
        f"a step of a worker sends {format_bytes(cost.sent_nbytes)} and receives "
        f"{format_bytes(cost.received_nbytes)}, which takes"
    )
    rates = [f"{format_duration(cost.transfer_s(rate))} at {rate:,g} MB/s" for rate in LINKS_MB_S]
    yield f"  {', '.join(rates)}"


def mermaid(launched: Launched, settings: Settings) -> Iterator[str]:
    """The processes and their links, in the words of https://mermaid.js.org."""
    yield "graph LR"
    for number, process in enumerate(launched.processes):
        yield f'  p{number}["{_name(process)}<br/>{process.node}"]'
    for number, other in enumerate(launched.others, 1):
        yield f'  p{number} -- "{address_of(other, settings)}" --> p0'


def _name(process: LaunchedProcess) -> str:
    return process.role if process.rank is None else f"worker {process.rank + 1}"
