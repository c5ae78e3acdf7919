"""A model larger than any stage's memory limit: what each stage's process takes, beside what was planned.

A Llama of random weights lies in a folder, in files of about a layer each. Each stage is a process of its own
whose memory is limited (`RLIMIT_DATA`) to what its machine is said to have free, on top of what the
interpreter and PyTorch take before the stage is built. The planner cuts the model from layers that were
measured; the peak is of resident memory, by Linux's own count, from before the build to the last step.

* `full`: all weights are trained with AdamW: they, gradients and moments are three times a stage's limit.
* `lora`: weights are frozen, and alone three times a stage's limit.
"""

import logging
import resource
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from exchange import Children
from smolcluster.algorithms.PipelineParallel.execution import Execution, OwnStage
from smolcluster.algorithms.PipelineParallel.links import Links, Route
from smolcluster.algorithms.planning.layers import PlannedStage, plan_layers
from smolcluster.algorithms.planning.measured import problem_of
from smolcluster.configs.schema import DatasetConfig, GPTConfig, TrainConfig
from smolcluster.data.dataset import Place
from smolcluster.training.compute import Microbatch
from smolcluster.training.finetune import lora_config, next_token_loss
from smolcluster.training.pretrained import Pretrained
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.training.schedules.instructions import generate
from smolcluster.training.stages.build import build_stage
from smolcluster.training.stages.measure import LayerSpeeds, measure_workload
from smolcluster.training.workload import Workload
from smolcluster.utils.meter import Meter
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import StageNeighbour
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 3
ROOM = 3.0
"""How many times a stage's limit the model is."""
LENGTH, VOCABULARY, SEED = 32, 1000, 1
TIMEOUT_S = 120.0
CPU = torch.device("cpu")
TRAIN = TrainConfig(
    model=GPTConfig(), dataset=DatasetConfig(name="text"), optimizer="adamw", batch_size=4
)


@dataclass(frozen=True)
class Case:
    """A model in a folder, and whether only adapters are trained."""

    folder: Path
    is_lora: bool
    secret: Secret

    def workload(self) -> Workload:
        lora = lora_config(4, None, ["q_proj", "v_proj"], 0.0) if self.is_lora else None
        tokens = torch.randint(
            0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        rows = [(each, each) for each in tokens]
        return Workload(Pretrained(self.folder, lora=lora), next_token_loss, rows)


def saved_llama(folder: Path, num_layers: int, width: int) -> int:
    """Write a random model; returns the bytes of its weights."""
    import transformers  # noqa: PLC0415 - optional

    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=8,
        num_hidden_layers=num_layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    nbytes: int = sum(each.nbytes for each in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{nbytes // num_layers // 1000}KB")
    return nbytes


def write_model(pipe: Pipe, folder: Path, num_layers: int, width: int) -> None:
    pipe.send(saved_llama(folder, num_layers, width))


def measure_layers(pipe: Pipe, case: Case) -> None:
    torch.set_num_threads(1)
    pipe.send(measure_workload(case.workload(), SEED, 1, CPU))


def memory(key: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def warm_up() -> None:
    """Load what PyTorch loads when it computes, and begin its threads."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros(8, 64)).sum().backward()
    optimizer.step()


def compute_stage(pipe: Pipe, case: Case, rank: int, planned: PlannedStage, limit: int) -> None:
    """Train one stage for some steps under the limit, and say what it took."""
    torch.set_num_threads(1)
    hello = introduce(f"stage{rank}")
    workload = case.workload()
    links = Links(
        Node(hello=hello, secret=case.secret, log=logging.getLogger()),
        server=None,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        heartbeat_timeout_s=TIMEOUT_S,
    )
    with closing(links):
        places = links.listen(["127.0.0.1"])
        pipe.send(
            StageNeighbour(rank=rank, node=hello.node, instance=hello.instance, places=places)
        )
        others = tuple(each for each in pipe.recv() if each.rank != rank)
        ranks = tuple(range(NUM_STAGES))
        links.connect(Route(rank, 1, 0, ranks, others, "fp32", TIMEOUT_S), TIMEOUT_S)
        build_stage(workload, planned.start, planned.start + 1, SEED, torch.device("meta"))
        warm_up()
        before = memory("VmRSS")
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + limit, most))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        stage = build_stage(workload, planned.start, planned.end, SEED, CPU)
        own = sum(each.nbytes for each in stage.parameters())
        replica = Replica(stage, "adamw", is_stage=True)
        stages = {rank: OwnStage.of(replica, workload, SEED)}
        execution = Execution(stages, ranks, links, Meter())
        losses = [take_step(execution, workload, replica, rank, turn) for turn in range(NUM_STEPS)]
        pipe.send(
            {
                "stage": rank,
                "weights_mb": own / 1e6,
                "planned_mb": planned.memory_bytes / 1e6,
                "peak_mb": (memory("VmHWM") - before) / 1e6,
                "losses": losses,
            }
        )
        pipe.recv()


def take_step(
    execution: Execution, workload: Workload, replica: Replica, rank: int, turn: int
) -> float:
    train = workload.train
    parts = [
        Microbatch(1, lambda at=at: train.batch(torch.tensor([at])), Place(SEED, turn, at))  # type: ignore[misc]
        for at in range(NUM_MICROBATCHES)
    ]
    lists = generate("1f1b", NUM_STAGES, NUM_MICROBATCHES)
    outcome = execution.run(turn, lists[rank], parts)
    replica.grads.div_(NUM_MICROBATCHES * LENGTH)
    with torch.no_grad():
        replica.step(1e-3)
    return outcome.loss.total


def measured(num_layers: int, width: int, *, is_lora: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, Children() as children:
        folder = Path(place)
        nbytes = children.hear(children.start(write_model, folder, num_layers, width))
        case = Case(folder, is_lora, Secret(Path(), secrets.token_bytes(32)))
        speeds: LayerSpeeds = children.hear(children.start(measure_layers, case))
        needed = nbytes if is_lora else 4 * nbytes
        limit = int(needed / ROOM)
        machines: Mapping[str, LayerSpeeds] = {
            f"m{each}": speeds.model_copy(update={"memory_bytes": limit})
            for each in range(NUM_STAGES)
        }
        problem = problem_of(
            machines,
            {},
            TRAIN,
            num_microbatches=NUM_MICROBATCHES,
            schedule="1f1b",
            codec="fp32",
        )
        plan = plan_layers(problem)
        pipes = [
            children.start(compute_stage, case, rank, stage, limit)
            for rank, stage in enumerate(plan.stages)
        ]
        known = [children.hear(each) for each in pipes]
        for pipe in pipes:
            pipe.send(known)
        for row in [children.hear(each) for each in pipes]:
            losses = row.pop("losses")
            if row["stage"] == NUM_STAGES - 1:
                row["first_loss"], row["last_loss"] = losses[0], losses[-1]
            yield {
                "kind": "lora" if is_lora else "full",
                "model_mb": needed / 1e6,
                "limit_mb": limit / 1e6,
                **row,
                "peak / planned": row["peak_mb"] / row["planned_mb"],
            }
