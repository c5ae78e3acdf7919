"""A pipeline's plan as a document: `smolcluster plan --json` prints it, a run keeps it as `plan.json`."""

from collections.abc import Mapping

from pydantic import Field

from smolcluster.algorithms.planning.layers import LayerPlan, Problem
from smolcluster.runs.model_file import ModelFile, Strict


class PlanStage(Strict):
    """The layers `[start, end)` of a machine.

    Attributes:
        device: in words; empty: not known.
        seconds: of a microbatch, forward and backward.
        memory_bytes: the most that is held at once.
    """

    machine: str
    device: str = ""
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    seconds: float = 0.0
    memory_bytes: int = 0


class PlanLink(Strict):
    """What a microbatch sends between a stage and the next one, and how long each way takes."""

    nbytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0


class PlanFile(Strict):
    """A cut, and what it was predicted to be like; links are between each stage and the next."""

    schedule: str
    num_microbatches: int
    step_s: float
    bubble: float
    bottleneck: str
    stages: tuple[PlanStage, ...]
    links: tuple[PlanLink, ...]
    one_more: str = ""
    one_more_step_s: float = 0.0


PLAN = ModelFile[PlanFile](PlanFile, "is no plan of a pipeline", unless="make one: plan --json")


def document_of(
    problem: Problem,
    plan: LayerPlan,
    devices: Mapping[str, str],
    *,
    one_more: str = "",
    one_more_step_s: float = 0.0,
) -> PlanFile:
    """A plan as a document; `devices` are in words, by machine; `one_more`: see `PlanFile`."""
    pairs = zip(plan.stages[:-1], plan.boundaries, strict=True)
    return PlanFile(
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        step_s=plan.step_s,
        bubble=plan.bubble,
        bottleneck=plan.bottleneck,
        stages=tuple(
            PlanStage(
                machine=each.machine,
                device=devices[each.machine],
                start=each.start,
                end=each.end,
                seconds=each.costs.total_s,
                memory_bytes=int(each.memory_bytes),
            )
            for each in plan.stages
        ),
        links=tuple(
            PlanLink(
                nbytes=problem.layers[one.end - 1].output_bytes,
                forward_s=way.forward_s,
                backward_s=way.backward_s,
                latency_s=way.latency_s,
            )
            for one, way in pairs
        ),
        one_more=one_more,
        one_more_step_s=one_more_step_s,
    )
