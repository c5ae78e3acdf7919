"""Meshes of real processes take the steps that one process takes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import mesh_rank
from harness import free_port
from processes import Processes
from smolcluster.errors import ModelChanged
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from smolcluster.training.schedules.instructions import Instruction, Op, generate

WORLD_SIZE = 4
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tuning_demo" / "train_simple.py"


IN_CI = ("dp2-fsdp2-uncut", "tp2-pp2-1f1b", "tp2-pp2-interleaved", "dp2-pp2-dualpipev")
COMPILED = ("tp2-pp2-compiled", "fsdp2-pp2-compiled")
REST = tuple(sorted(mesh_rank.CASES.keys() - {*IN_CI, *COMPILED}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_CI, id="ci"),
        pytest.param(COMPILED[:1], id="compiled-tp2", marks=pytest.mark.nightly),
        pytest.param(COMPILED[1:], id="compiled-fsdp2", marks=pytest.mark.nightly),
        *(
            pytest.param(REST[part::3], id=f"rest-{part}", marks=pytest.mark.nightly)
            for part in range(3)
        ),
    ],
)
def test_a_mesh_trains_as_one_process_does(processes: Processes, names: tuple[str, ...]) -> None:
    program = (sys.executable, mesh_rank.__file__)
    ranks = [
        processes.start(*program, str(rank), str(WORLD_SIZE), str(processes.folder), *names)
        for rank in range(WORLD_SIZE)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * WORLD_SIZE, "\n".join(each.output for each in ranks)
    for name in names:
        mesh_rank.compare(name, mesh_rank.CASES[name], processes.folder)


def check_profile(folder: Path, num_ranks: int) -> None:
    """All that each rank computed in the profiled steps is in one file, at the same place in time."""
    whole = json.loads((folder / "trace.json").read_text())
    for rank in range(num_ranks):
        own = json.loads((folder / f"rank-{rank}.json").read_text())
        names, times = [
            [
                [event[key] for event in trace["traceEvents"] if is_product(event)]
                for trace in (own, {"traceEvents": of_rank(whole, rank)})
            ]
            for key in ("name", "ts")
        ]
        assert names[0] and names[0] == names[1]
        later = (own["baseTimeNanoseconds"] - whole["baseTimeNanoseconds"]) / 1000
        assert times[1] == [each + later for each in times[0]]


def of_rank(trace: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["pid"] == rank]


def is_product(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event["name"] in ("aten::addmm", "aten::mm")


@pytest.mark.nightly
def test_a_run_goes_on_with_another_mesh(processes: Processes) -> None:
    """It leaves what every run leaves, and a profile; it has one loss scale; its checkpoint is of no mesh."""
    program = (sys.executable, "-m", "smolcluster.distributed_training", "--config", "digits")
    half = ("--override", "precision=fp16")
    flags = ("--batch-size", "128", "--run-id", "spread", "--epochs", "1", "--tp", "2", *half)
    port = str(free_port())
    there = ("--world-size", "2", "--master-port", port)
    ranks = [
        processes.start(*program, *there, "--rank", str(r), *flags, "--profile") for r in (0, 1)
    ]
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    for rank in ranks:  # none loses another one, or the store, at a good end
        assert "TCPStore" not in rank.output and "Traceback" not in rank.output
    paths = find_run(processes.runs)
    assert str(paths.root / "profile" / "trace.json") in ranks[0].output
    check_profile(paths.root / "profile", 2)
    first = read_summary(paths.summary)
    alone = processes.start(
        *(*program, "--batch-size", "128", "--resume", "spread", "--epochs", "2", *half),
    )
    assert alone.wait() == 0, alone.output
    both = read_summary(paths.summary)
    assert both.steps == 2 * first.steps
    assert both.final.val_loss is not None and first.final.val_loss is not None
    assert both.final.val_loss < first.final.val_loss
    steps = [
        each.record for each in follow_metrics(paths.metrics).poll() if each.record.kind == "step"
    ]
    skipped = [each.values["overflows"] for each in steps]
    assert skipped[0] == 1
    assert skipped[first.steps :] == [skipped[first.steps - 1]] * first.steps


@pytest.mark.nightly
def test_each_rank_writes_down_the_instructions_of_its_schedule(processes: Processes) -> None:
    """The example, which starts all ranks by itself: eight, unless flags say less."""
    folder = processes.folder / "instructions"
    processes.environ["SMOLCLUSTER_INSTRUCTION_LOG"] = str(folder)
    less = ("--world-size", "2", "--tp", "1", "--pp", "2", "--microbatches", "4")
    child = processes.start(
        *(sys.executable, str(EXAMPLE), *less),
        *("--config", "digits", "--batch-size", "128", "--epochs", "1"),
    )
    assert child.wait() == 0, child.output
    num_steps = read_summary(find_run(processes.runs).summary).steps
    for number, expected in enumerate(generate("1f1b", 2, 4)):
        lines = (folder / f"rank-{number}.jsonl").read_text().splitlines()
        steps: dict[int, list[Instruction]] = {}
        for line in map(json.loads, lines):
            done = Instruction(Op(line["op"]), line["microbatch"], line["stage"])
            steps.setdefault(line["step"], []).append(done)
        assert steps == {step: list(expected) for step in range(1, num_steps + 1)}


NORMALISED = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from smolcluster import Workload

words = torch.arange(64) % 8


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def workload():
    make = lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 8))
    return Workload(make, loss, TensorDataset(words, words), TensorDataset(words, words))
"""


@pytest.mark.nightly
def test_a_model_that_changes_its_weights_is_refused_as_in_one_process(
    processes: Processes,
) -> None:
    """Where the whole weights are there only as long as they are computed with."""
    file, program = processes.folder / "normalised.py", processes.folder / "mesh.py"
    file.write_text(NORMALISED)
    program.write_text(
        "from smolcluster.distributed_training import main\nraise SystemExit(main())"
    )
    child = processes.start(
        *(sys.executable, str(program), "--world-size", "2"),
        *("--fsdp", "2", "--workload", f"{file}:workload", "--batch-size", "32"),
    )
    assert child.wait() == ModelChanged.exit_code, child.output
    assert "model: parameter 0.weight (Embedding) changes as the model computes" in child.output
    assert "set max_norm=None" in child.output
