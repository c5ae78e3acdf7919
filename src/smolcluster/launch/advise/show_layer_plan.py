"""What `smolcluster plan` prints: for people, and as JSON, which `smolcluster diagram` reads."""

import json
from collections.abc import Iterator
from functools import partial

from rich.table import Table
from rich.text import Text

from smolcluster.algorithms.planning.layers import LayerPlan, gigabytes, in_words, milliseconds
from smolcluster.algorithms.planning.plan_file import PLAN, PlanFile, document_of
from smolcluster.launch.advise.layer_plan import FoundPlan, Wanted, find_layer_plan
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import resolved
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.utils.words import write_json


def plan_command(
    request: Request,
    wanted: Wanted,
    *,
    local: bool,
    sync: bool,
    in_json: bool,
) -> int:
    """Measure, plan, and print it; returns the exit code.

    Raises:
        SmolclusterError: nothing can be measured, or nothing fits.
    """
    say = partial(print_line, SteadyConsole(stderr=True))
    found = find_layer_plan(resolved(request, local=local), wanted, say, sync=sync)
    if in_json:
        write_json(json.loads(PLAN.text(plan_file(found))))
        return 0
    console = SteadyConsole()
    console.print(stages_table(found))
    for line in lines(found):
        console.print(Text(line), soft_wrap=True)
    return 0


def stages_table(found: FoundPlan) -> Table:
    """A row a stage: its machine, layers, times and memory."""
    table = Table("machine", "layers", "a microbatch", "busy", "memory", "of", "device")
    plan = found.plan
    for rank, stage in enumerate(plan.stages):
        machine = found.problem.machine(stage.machine)
        row = (
            *(stage.machine, f"{stage.start} to {stage.end - 1}"),
            *(milliseconds(stage.costs.total_s), f"{plan.timeline.busy_s(rank) / plan.step_s:.0%}"),
            *(gigabytes(stage.memory_bytes), gigabytes(machine.memory_bytes)),
            found.devices[stage.machine],
        )
        table.add_row(*map(Text, row))
    return table


def lines(found: FoundPlan) -> Iterator[str]:
    """The plan in words, as a cluster file has it, and what one more machine would bring."""
    plan, (like, more) = found.plan, found.more
    used = {stage.machine for stage in plan.stages}
    unused = [each.name for each in found.problem.machines if each.name not in used]
    yield in_words(plan)
    if unused:
        yield f"not used, because the step would be longer with it: {', '.join(unused)}"
    yield f"shard_plan: {{{shard_plan(plan)}}}"
    yield (
        f"one more machine like {like}: step {milliseconds(more.step_s)}, "
        f"{plan.step_s / more.step_s:.2f} times as fast"
    )


def shard_plan(plan: LayerPlan) -> str:
    return ", ".join(f"{each.machine}: [{each.start}, {each.end}]" for each in plan.stages)


def plan_file(found: FoundPlan) -> PlanFile:
    """The plan as a document."""
    like, more = found.more
    return document_of(
        found.problem, found.plan, found.devices, one_more=like, one_more_step_s=more.step_s
    )
