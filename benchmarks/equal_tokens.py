"""The loss of DiLoCo beside that of synchronous training with the same total batch, at equal tokens.

Four workers in one process, one after the other: a small GPT on the bytes of tiny Shakespeare, in windows of
64, each handed out once an epoch, in one order for all arms. The pieces are those of a run: inner AdamW with
clipping and a cosine, whose moments stay; codec and error feedback on the way up and down, where the store
takes the decoded outer step as workers do; the outer optimizer. What a network does is left out: all workers
are equally fast, and nothing is late or lost.

Each arm has the learning rate that suits it, the best of `RATES` on the first seed: an AdamW that sees a
quarter of the batch takes other steps at the same rate. Arms that differ in their codecs alone have the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common import report, say
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer, outer_defaults
from smolcluster.algorithms.DiLoCo.rounds import Pace, plan_round, warmed_up
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec
from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import build_gpt

NUM_WORKERS = 4
BATCH = 8
LENGTH = 64
RATES = 0.003, 0.006, 0.012, 0.024
"""Highest inner learning rates to choose from."""
LOCAL_STEPS = 10
NUM_VALIDATED = 512
"""Windows of the end of the text."""
MODEL = {"model_dim": 64, "num_layers": 2, "num_heads": 4, "ff_dim": 256, "dropout": 0.0}
WARM_UP = 0.05
LEAST_RATE = 0.1
"""Of the highest, at the end."""
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
NUM_SYNC_ROUNDS = 4
"""Before changes are applied as they come."""
MOMENTUM_DELAY = 2
"""Changes of each worker."""


@dataclass(frozen=True)
class Arm:
    """One way to train: in rounds of local steps, or all at once."""

    name: str
    mode: Literal["together", "sync", "async"] = "sync"
    """One process with the whole batch; or as DiLoCo's `mode`."""
    codec_up: str = "fp32"
    codec_down: str = "fp32"
    outer: tuple[float, float] | None = None
    """γ and β of the outer step; None: the defaults."""
    local_steps: int = LOCAL_STEPS
    """Mean H."""
    wanted: float | None = None
    """How many nats it may lose on the first arm."""

    @property
    def family(self) -> "Arm":
        """The arm whose learning rate it has."""
        return replace(self, name="", codec_up="fp32", codec_down="fp32", wanted=None)


AVERAGE = 1.0, 0.0
"""γ and β with which θ becomes the workers' mean."""
ARMS = (
    Arm("synchronous", mode="together"),
    Arm("H = 1, mean of the workers", outer=AVERAGE, local_steps=1),
    Arm("mean of the workers", outer=AVERAGE),
    Arm("fp32"),
    Arm("int8 up and down", codec_up="int8", codec_down="int8", wanted=0.02),
    Arm("int4 up and down", codec_up="int4", codec_down="int4", wanted=0.03),
    Arm("topk up, int8 down", codec_up="topk", codec_down="int8", outer=AVERAGE),
    Arm("async, int4 up and down", "async", "int4", "int4", wanted=0.05),
)


class Learner:
    """A model whose parameters lie in one vector `flat`, with AdamW of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        config = GPTConfig.model_validate(MODEL | {"max_seq_len": LENGTH})
        self.model = build_gpt(config, vocab_size=256)
        parameters = list(self.model.parameters())
        self.flat = torch.cat([each.detach().flatten() for each in parameters])
        self.flat.grad = self.grads = torch.zeros_like(self.flat)
        start = 0
        for each in parameters:
            place = slice(start, start := start + each.numel())
            each.data, each.grad = self.flat[place].view_as(each), self.grads[place].view_as(each)
        self.inner = torch.optim.AdamW([self.flat], weight_decay=WEIGHT_DECAY)

    def gradient(self, windows: Tensor) -> None:
        """Add the mean loss's gradient on int64 (batch, LENGTH + 1) to what is there."""
        mean = self._summed(windows) / (len(windows) * LENGTH)
        mean.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> None:
        """Clip, take an inner step along the gradient, and forget it."""
        torch.nn.utils.clip_grad_norm_([self.flat], MAX_NORM)
        self.inner.param_groups[0]["lr"] = learning_rate
        self.inner.step()
        self.grads.zero_()

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        """Mean over all targets, nats."""
        parts = [self._summed(part) for part in torch.split(windows, 64)]
        return float(torch.stack(parts).sum()) / (len(windows) * LENGTH)

    def _summed(self, windows: Tensor) -> Tensor:
        return self.model.loss(windows[:, :-1], windows[:, 1:])


class Text:
    """Windows of LENGTH + 1 bytes: those to train on, in one seeded order an epoch, and the validation's."""

    def __init__(self, path: Path, seed: int) -> None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        windows = data[: (len(data) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
        self.validation, self.train = windows[-NUM_VALIDATED:], windows[:-NUM_VALIDATED]
        self._seed = seed

    def batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            order = torch.randperm(len(self.train), generator=generator)
            for part in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
                yield self.train[part]


class Link:
    """One direction: what is sent is decoded at once, and what is lost is added to the next."""

    def __init__(self, codec_name: str, numel: int) -> None:
        self._codec = get_codec(codec_name)
        self._feedback = ErrorFeedback(self._codec, numel)
        self.nbytes = 0

    def send(self, values: Tensor) -> Tensor:
        out = torch.empty(self._codec.encoded_nbytes(len(values)), dtype=torch.uint8)
        self._feedback.encode(slice(0, len(values)), values, out)
        self._feedback.commit()
        self.nbytes += len(out)
        received = torch.empty_like(values)
        self._codec.decode(out, received)
        return received


class Run:
    """One arm with one seed: `num_batches` in all, handed out in order."""

    def __init__(self, arm: Arm, rate: float, text: Text, seed: int, num_batches: int) -> None:
        self._arm, self._rate, self._text, self._total = arm, rate, text, num_batches
        self._batches = text.batches()
        self._given = 0
        self._learners = [
            Learner(seed) for _ in range(1 if arm.mode == "together" else NUM_WORKERS)
        ]
        self.theta = self._learners[0].flat.clone()
        numel = len(self.theta)
        self.up = [Link(arm.codec_up, numel) for _ in self._learners]
        self.down = [Link(arm.codec_down, numel) for _ in self._learners]
        """To each worker; where all have the same weights, the first one's is for all."""

    def loss(self) -> float:
        """Train; the validation loss of θ."""
        if self._arm.mode == "together":
            self._together()
        else:
            self._apart()
        self._learners[0].flat.copy_(self.theta)
        return self._learners[0].loss(self._text.validation)

    @property
    def nbytes(self) -> int:
        """Sent up by a worker, and down to one."""
        return self.up[0].nbytes + self.down[0].nbytes

    def _together(self) -> None:
        (learner,) = self._learners
        while self._given < self._total:
            rate = self._scheduled()
            batches = [self._next() for _ in range(NUM_WORKERS)]
            learner.gradient(torch.cat(batches))
            learner.step(rate)
        self.theta.copy_(learner.flat)

    def _apart(self) -> None:
        rounds = list(_budgets(self._total, self._arm.local_steps))
        gamma_beta = outer_defaults(len(rounds)) if self._arm.outer is None else self._arm.outer
        is_async = self._arm.mode == "async"
        delay = MOMENTUM_DELAY * NUM_WORKERS
        outer = DelayedNesterov(len(self.theta), *gamma_beta, delay if is_async else 1)
        for budget in rounds[:NUM_SYNC_ROUNDS] if is_async else rounds:
            self._round(budget, outer)
        self._asynchronously(outer)

    def _round(self, budget: int, outer: OuterOptimizer) -> None:
        plan = plan_round(budget, {worker: Pace(1.0) for worker in range(NUM_WORKERS)})
        for step in range(max(plan.values())):
            for worker, learner in enumerate(self._learners):
                if step < plan.get(worker, 0):
                    self._local_step(learner)
        mean = torch.zeros_like(self.theta)
        for worker, learner in enumerate(self._learners):
            share = plan.get(worker, 0) / budget
            mean.add_(self.up[worker].send(self.theta - learner.flat), alpha=share)
        stepped = self.theta.clone()
        outer.step(stepped, mean)
        self.theta.sub_(self.down[0].send(self.theta - stepped))  # as workers decode it
        for learner in self._learners:
            learner.flat.copy_(self.theta)

    def _asynchronously(self, outer: DelayedNesterov) -> None:
        """What is left: each worker brings its change every H steps, the workers at evenly spread times."""
        begun = [self.theta.clone() for _ in self._learners]
        every = self._arm.local_steps
        step = 0
        while self._given < self._total:
            step += 1
            for worker, learner in enumerate(self._learners):
                self._local_step(learner)
                if (step + worker * every // NUM_WORKERS) % every == 0:
                    delta = self.up[worker].send(begun[worker] - learner.flat)
                    share = 1 / NUM_WORKERS
                    outer.apply(self.theta, delta, share, outer.count(share))
                    begun[worker].sub_(self.down[worker].send(begun[worker] - self.theta))
                    learner.flat.copy_(begun[worker])

    def _local_step(self, learner: Learner) -> None:
        rate = self._scheduled()
        learner.gradient(self._next())
        learner.step(rate)

    def _next(self) -> Tensor:
        self._given += 1
        return next(self._batches)

    def _scheduled(self) -> float:
        return self._rate * schedule(self._given / self._total)


def schedule(progress: float) -> float:
    """The inner learning rate's part of its highest: a linear warm-up, and a cosine."""
    height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (progress + 1e-3) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * height)


def _budgets(total: int, local_steps: int) -> Iterator[int]:
    """Batches of each round."""
    given = index = 0
    while given < total:
        budget = min(NUM_WORKERS * warmed_up(index, local_steps), total - given)
        yield budget
        given, index = given + budget, index + 1


@dataclass(frozen=True)
class Found:
    """What became of an arm: losses in nats a byte, one a seed; MB of one worker, both ways."""

    rate: float
    losses: tuple[float, ...]
    mb: float

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def spread(self) -> float:
        """Half of what lies between the seeds."""
        return (max(self.losses) - min(self.losses)) / 2


def trained(arm: Arm, rate: float, seed: int, text: Path, steps: int) -> tuple[float, float]:
    """Validation loss, and MB."""
    run = Run(arm, rate, Text(text, seed), seed, NUM_WORKERS * steps)
    loss = run.loss()
    say(f"{arm.name}, rate {rate:g}, seed {seed}: {loss:.4f}")
    return loss, run.nbytes / 1e6


def found_of(arm: Arm, rates: Sequence[float], num_seeds: int, text: Path, steps: int) -> Found:
    """Choose the rate on the first seed, and train with the others as well."""
    firsts = {rate: trained(arm, rate, 0, text, steps) for rate in rates}
    rate = min(firsts, key=lambda each: firsts[each][0])
    loss, mb = firsts[rate]
    others = (trained(arm, rate, seed, text, steps)[0] for seed in range(1, num_seeds))
    return Found(rate, (loss, *others), mb)


def measure_loss(num_seeds: int, text: Path, steps: int) -> dict[str, object]:
    """Print the table, and return its figures; the first arm is what the others are compared with.

    `steps`: of each worker; a synchronous one is a step of all of them.
    """
    rows: list[tuple[str, ...]] = [
        ("", "rate", "nats a byte", "±", "beyond", "wanted", "MB a worker")
    ]
    found: dict[str, Found] = {}
    rates: dict[Arm, tuple[float, ...]] = {}
    for arm in ARMS:
        own = found[arm.name] = found_of(arm, rates.get(arm.family, RATES), num_seeds, text, steps)
        rates[arm.family] = (own.rate,)
        beyond = own.mean - found[ARMS[0].name].mean
        wanted = "" if arm.wanted is None else f"<= {arm.wanted}"
        figures = f"{own.rate:g}", f"{own.mean:.4f}", f"{own.spread:.4f}", f"{beyond:+.4f}"
        rows.append((arm.name, *figures, wanted, f"{own.mb:.1f}" if own.mb else ""))
    report(f"Loss at equal tokens, {steps} steps of each of {NUM_WORKERS} workers", rows)
    return {name: asdict(each) for name, each in found.items()}
