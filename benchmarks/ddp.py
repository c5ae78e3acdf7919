"""PyTorch's DistributedDataParallel on Gloo: what it learns by steps, and how long these take.

The two are measured apart. `learn` trains on loopback as fast as this machine can, and `take_time` on
machines with their pace and links: what is learnt does not depend on time, because each step waits for
everybody. Each rank has `batch_size` samples of a step. Hooks of torch.distributed.algorithms: fp16,
PowerSGD (1905.13727) of rank 4 from step 10 on, and post-local SGD (1808.07217) from step 10 on, with an
average every 16 steps.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paced import Machine, Pace
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.data.tokens import TokenBlocks
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.evaluate import evaluate, evaluation_of
from smolcluster.training.schedule import learning_rate

HOOK_BEGINS = 10
RANK = 4
PERIOD = 16
ONE_BUCKET_MB = 1024
TIMED_STEPS = {"": 8, "fp16": 10, "powersgd": HOOK_BEGINS + 20, "localsgd": HOOK_BEGINS + PERIOD}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Training:
    """What all ranks train, by configuration files; `num_held_out` samples are evaluated."""

    cluster_file: str
    train_file: str
    num_held_out: int
    hook: str = ""
    world: int = 1

    @cached_property
    def settings(self) -> Settings:
        return load_settings(self.cluster_file, self.train_file, None, [], environ={})

    def build(self) -> TrainingContext:
        """The model and its data, the same for each rank."""
        settings = self.settings
        return build(settings.train, settings.cluster.seed, settings.node.dataset, CPU)


class WithLoss(nn.Module):
    """A model whose forward pass gives the mean loss, so that DDP sees all of it."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__()
        self.model = training.replica.copy_model().train()
        self.loss = training.workload.loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Token ids, both (batch, seq) -> ()."""
        total, num_terms = self.loss(self.model, (inputs, targets))
        mean: Tensor = total / num_terms
        return mean


class Rank:
    """One process's part: a slice of each step's batch."""

    def __init__(self, training: Training, rank: int) -> None:
        self.context = training.build()
        self.train, self.world, self.rank = training.settings.train, training.world, rank
        self.whole = WithLoss(self.context)
        # PowerSGD's callbacks reduce: of several buckets in any order, at which Gloo aborts
        bucket_cap_mb = ONE_BUCKET_MB if training.hook == "powersgd" else None
        self.ddp = DistributedDataParallel(self.whole, bucket_cap_mb=bucket_cap_mb)
        decayed = [each for each in self.ddp.parameters() if each.dim() > 1]
        rest = [each for each in self.ddp.parameters() if each.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.train.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(groups, lr=self.train.learning_rate)
        self.groups = inner.param_groups
        self.optimizer = self.hooked(training.hook, inner)
        self.order = self.context.order(0)
        self.num_applied = 0

    def hooked(self, hook: str, optimizer: Optimizer) -> Optimizer:
        """Register a communication hook; returns the optimizer that goes with it."""
        if hook == "fp16":
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if hook == "powersgd":
            power = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=HOOK_BEGINS
            )
            self.ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        if hook == "localsgd":
            alone, _ = dist.new_subgroups(1)
            local = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
                None, alone, HOOK_BEGINS
            )
            self.ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=HOOK_BEGINS)
            return PostLocalSGDOptimizer(optimizer, averager)
        return optimizer

    def step(self, before_backward: Callable[[], None] = lambda: None) -> None:
        """Take a step of `world` batches, which lie side by side in the epoch's order."""
        size = self.train.batch_size
        first = (self.num_applied + self.rank * size) % (len(self.order) - size)
        inputs, targets = self.context.workload.train.batch(self.order[first : first + size])
        loss = self.ddp(inputs, targets)
        before_backward()
        loss.backward()
        nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        rate = learning_rate(self.train, self.num_applied, 2**40, num_optimizers=self.world)
        for group in self.groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_applied += self.world * size


def join(machine: Machine, folder: Path, rank: int, world: int) -> None:
    machine.enter(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = machine.host.interface
    rendezvous = f"file://{folder}/gloo"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def learn(pipe: Pipe, machine: Machine, folder: Path, rank: int, training: Training) -> None:
    """Take as many steps as it is asked for, then answer with the validation loss, or with 0.0."""
    join(machine, folder, rank, training.world)
    part = Rank(training, rank)
    while wanted := pipe.recv():
        for _ in range(wanted):
            part.step()
        pipe.send(validation_loss(part, training.num_held_out) if rank == 0 else 0.0)
    leave()


def take_time(pipe: Pipe, machine: Machine, folder: Path, rank: int, training: Training) -> None:
    """Take the timed steps at the machine's pace, and answer with the seconds of each."""
    join(machine, folder, rank, training.world)
    part = Rank(training, rank)
    pace = machine.pace(training.settings.train.batch_size, folder)
    times = []
    dist.barrier()
    for _ in range(TIMED_STEPS[training.hook]):
        started = time.monotonic()
        part.step(before_backward=lambda: rest_of(pace, training.settings.train.batch_size))
        times.append(time.monotonic() - started)
    pipe.send(times)
    leave()


def leave() -> None:
    """End when all can: Gloo's threads abort a process whose peers are gone."""
    dist.barrier()
    dist.destroy_process_group()


def rest_of(pace: Pace, num_samples: int) -> None:
    """Sleep as long as the machine computes: before the backward pass, at whose end all are waited for.

    The backward pass itself adds its real time, which is small beside the pace's.
    """
    with pace.stretching(num_samples):
        pass


def validation_loss(part: Rank, num_samples: int) -> float:
    model, workload = part.whole.model, part.context.workload
    samples = held_out(part.context, num_samples)
    totals = evaluate(model, samples, CPU, loss=workload.loss)
    model.train()
    return evaluation_of(totals, {}).loss


def held_out(context: TrainingContext, num_samples: int) -> TokenBlocks:
    """The first samples of the text that is held out."""
    blocks = context.workload.validation
    if not isinstance(blocks, TokenBlocks):
        raise SystemExit("no text is held out")
    tokens = blocks.tokens[: num_samples * blocks.length + 1]
    return replace(blocks, tokens=tokens, is_whole=False)
