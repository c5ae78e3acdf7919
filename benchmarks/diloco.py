"""What DiLoCo's outer step should be: momentum by the number of rounds, weights of unlike workers, joiners.

In one process, with nothing sent: a perceptron 64-32-10 on the digits, four workers with batches of 16 and
AdamW of their own, whose rate warms up and falls along a cosine over the whole run. A round has 40 batches
after 4, 8 and 16. A figure is the validation loss of the weights that the server has at the end, a mean over
the seeds, for the best of the inner learning rates. All is seeded: a second run prints the same.

`momentum`: β by the number of rounds, γ = 0.7. `weighting`: how the workers' changes are averaged when they
took unlike numbers of steps. `joiner`: a worker that comes half-way, with cold moments; its first change at
less than its weight. `loss`: real runs of a small GPT at equal tokens, beside synchronous training; see
`equal_tokens.py`.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common import DEFAULT_DATA, report
from equal_tokens import ARMS, MODELS, measure_loss
from smolcluster.algorithms.DiLoCo.outer import OuterOptimizer
from smolcluster.algorithms.DiLoCo.rounds import warmed_up
from smolcluster.algorithms.shares import Cost, shared_out
from smolcluster.data.dataset import Split
from smolcluster.data.digits import load_digits

NUM_WORKERS = 4
BATCH = 16
LOCAL_STEPS = 10
INNER_RATES = (0.001, 0.003, 0.01, 0.03)
SIZES = ((64, 32), (1, 32), (32, 10), (1, 10))
PACES: Mapping[str, tuple[float, ...]] = {
    "1 : 1 : 1 : 1": (1, 1, 1, 1),
    "2.6 : 2.6 : 2.6 : 1": (0.35, 0.35, 0.35, 0.9),
    "20 : 8 : 3 : 1": (0.05, 0.125, 1 / 3, 1),
}
"""Seconds of a step of each worker, by their speeds."""
Shares = Callable[[Sequence[int]], list[float]]
"""Steps of each worker's change to its factor in the mean."""


WARM_UP = 0.05
LEAST_RATE = 0.1
"""Of the highest inner learning rate, at the end."""


def schedule(progress: float) -> float:
    """The inner learning rate's part of its highest: a linear warm-up, and a cosine."""
    height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (progress + 1e-3) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * height)


def by_terms(steps: Sequence[int]) -> list[float]:
    return [each / sum(steps) for each in steps]


def uniform(steps: Sequence[int]) -> list[float]:
    present = sum(each > 0 for each in steps)
    return [float(each > 0) / present for each in steps]


def normalised(steps: Sequence[int]) -> list[float]:
    """FedNova (2007.07481): Σ p_i Δ_i / τ_i, times the mean Σ p_i τ_i of the numbers of steps."""
    terms = by_terms(steps)
    mean = sum(p * tau for p, tau in zip(terms, steps, strict=True))
    return [p / max(1, tau) * mean for p, tau in zip(terms, steps, strict=True)]


WEIGHTINGS: Mapping[str, Shares] = {
    "by terms": by_terms,
    "uniform": uniform,
    "FedNova": normalised,
}


@dataclass(frozen=True)
class Arm:
    """One way to train: all that differs between figures of a table, but for the workers and rounds."""

    learning_rate: float
    momentum: float
    shares: Shares = by_terms
    first_weight: float = 1.0
    """Factor on the weight of a joiner's first change."""


class Simulation:
    """Trains one model for each arm and seed side by side: `cells`, of parameters (cells, num_params)."""

    def __init__(self, arms: Sequence[Arm], num_seeds: int, inner_rate: float) -> None:
        self.cells = list(itertools.product(arms, range(num_seeds)))
        data = load_digits(0)
        self.train, self.validation = cast(Split, data.train), cast(Split, data.validation)
        self.inner_rate = inner_rate
        self.theta = torch.stack([_initial(seed) for _, seed in self.cells])
        num_params = self.theta.shape[1]
        self.outer = [
            OuterOptimizer(num_params, arm.learning_rate, arm.momentum) for arm, _ in self.cells
        ]
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(num_seeds)]
        self.workers = [self.theta.clone().requires_grad_() for _ in range(NUM_WORKERS)]
        self.inner = [torch.optim.AdamW([each], weight_decay=0.01) for each in self.workers]

    def run(self, rounds: Sequence[Sequence[int]]) -> list[list[float]]:
        """Take rounds of so many steps of each worker; the validation losses after each, by cell."""
        total, done, losses = sum(map(sum, rounds)), 0, []
        present: set[int] = {number for number, steps in enumerate(rounds[0]) if steps}
        for steps in rounds:
            for worker, count in enumerate(steps):
                for step in range(count):
                    self._step(worker, schedule((done + step * len(steps)) / total))
            done += sum(steps)
            now = {number for number, count in enumerate(steps) if count}
            self._exchange(steps, joined=now - present)
            present |= now
            losses.append(self._validate())
        return losses

    def _step(self, worker: int, height: float) -> None:
        split = self.train
        drawn = [
            torch.randint(split.num_samples, (BATCH,), generator=each) for each in self.generators
        ]
        chosen = torch.stack([drawn[seed] for _, seed in self.cells])
        inner = self.inner[worker]
        inner.param_groups[0]["lr"] = self.inner_rate * height
        inner.zero_grad()
        outputs = _forward(self.workers[worker], split.inputs[chosen])
        targets = split.targets[chosen].flatten()
        loss = cross_entropy(outputs.flatten(0, 1), targets, reduction="sum") / BATCH
        loss.backward()  # type: ignore[no-untyped-call]
        inner.step()

    @torch.no_grad()
    def _exchange(self, steps: Sequence[int], joined: set[int]) -> None:
        for cell, (arm, _) in enumerate(self.cells):
            shares = arm.shares(steps)
            for worker in joined:
                shares[worker] *= arm.first_weight
            full = sum(arm.shares(steps)) / sum(shares)  # the others count for more
            delta = torch.zeros_like(self.theta[cell])
            for share, weights in zip(shares, self.workers, strict=True):
                delta.add_(self.theta[cell] - weights[cell], alpha=share * full)
            self.outer[cell].step(self.theta[cell], delta)
        for weights in self.workers:
            weights.copy_(self.theta)

    @torch.no_grad()
    def _validate(self) -> list[float]:
        split = self.validation
        outputs = _forward(self.theta, split.inputs.expand(len(self.cells), -1, -1))
        targets = split.targets.expand(len(self.cells), -1)
        losses = cross_entropy(outputs.mT, targets, reduction="none").mean(1)
        return [float(loss) for loss in losses]


def _initial(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    layers = [
        torch.randn(rows, columns, generator=generator) / rows**0.5
        if rows > 1
        else torch.zeros(rows, columns)
        for rows, columns in SIZES
    ]
    return torch.cat([layer.flatten() for layer in layers])


def _forward(flat: Tensor, inputs: Tensor) -> Tensor:
    """Logits (cells, batch, 10) of `flat` (cells, num_params) for `inputs` (cells, batch, 64)."""
    parts = flat.split([rows * columns for rows, columns in SIZES], dim=1)  # type: ignore[no-untyped-call]
    w1, b1, w2, b2 = (part.view(len(flat), *size) for part, size in zip(parts, SIZES, strict=True))
    return torch.baddbmm(b2, torch.relu(torch.baddbmm(b1, inputs, w1)), w2)


def planned(num_rounds: int, paces: Sequence[float], joins_at: int = 0) -> list[list[int]]:
    """Steps of each worker in each round; the last worker comes in round `joins_at`."""
    rounds = []
    for number in range(num_rounds):
        able = paces if number >= joins_at else paces[:-1]
        budget = NUM_WORKERS * warmed_up(number, LOCAL_STEPS)
        plan = shared_out(budget, {worker: Cost(0.0, step_s) for worker, step_s in enumerate(able)})
        rounds.append([plan.get(worker, 0) for worker in range(NUM_WORKERS)])
    return rounds


def best_losses(
    arms: Sequence[Arm], rounds: Sequence[Sequence[int]], num_seeds: int
) -> dict[Arm, tuple[float, float]]:
    """Mean validation loss at the end for the best inner rate, and half the spread over the seeds."""
    best: dict[Arm, tuple[float, float]] = {}
    for rate in INNER_RATES:
        losses = Simulation(arms, num_seeds, rate).run(rounds)[-1]
        for number, arm in enumerate(arms):
            mine = losses[number * num_seeds : (number + 1) * num_seeds]
            found = sum(mine) / num_seeds, (max(mine) - min(mine)) / 2
            best[arm] = min(best.get(arm, (math.inf, 0.0)), found)
    return best


def measure_momentum(num_seeds: int) -> dict[str, object]:
    momenta = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
    arms = [Arm(0.7, beta) for beta in momenta]
    rows = []
    results: dict[str, object] = {}
    for num_rounds in (6, 12, 25, 50, 100, 200):
        losses = best_losses(arms, planned(num_rounds, PACES["1 : 1 : 1 : 1"]), num_seeds)
        found = [round(losses[arm][0], 3) for arm in arms]
        results[f"{num_rounds} rounds"] = found
        rows.append((str(num_rounds), *(f"{each:.3f}" for each in found)))
    head = ("rounds", *(f"β = {beta}" for beta in momenta))
    report("Outer momentum, γ = 0.7", [head, *rows])
    return results


def measure_weighting(num_seeds: int) -> dict[str, object]:
    arms = [Arm(0.7, 0.5, shares) for shares in WEIGHTINGS.values()]
    rows = []
    results: dict[str, object] = {}
    for speeds, paces in PACES.items():
        losses = best_losses(arms, planned(100, paces), num_seeds)
        results[speeds] = [[round(each, 4) for each in losses[arm]] for arm in arms]
        rows.append((speeds, *(f"{losses[arm][0]:.4f} ± {losses[arm][1]:.4f}" for arm in arms)))
    report("Weights of unlike workers, 100 rounds", [("speeds", *WEIGHTINGS), *rows])
    return results


def measure_joiner(num_seeds: int) -> dict[str, object]:
    """After the joiner's first round, five rounds on, and at the end."""
    weights = (1.0, 0.5, 0.25, 0.0)
    arms = [Arm(0.7, 0.5, first_weight=each) for each in weights]
    rows = []
    results: dict[str, object] = {}
    for joins_at, when in ((10, "round 10 of 100"), (50, "round 50 of 100")):
        simulation = Simulation(arms, num_seeds, 0.01)
        losses = simulation.run(planned(100, PACES["1 : 1 : 1 : 1"], joins_at))
        for after, name in ((0, "its first"), (4, "its fifth"), (99 - joins_at, "the last")):
            by_cell = losses[joins_at + after]
            means = [
                sum(by_cell[number * num_seeds : (number + 1) * num_seeds]) / num_seeds
                for number in range(len(arms))
            ]
            results[f"{when}, after {name}"] = [round(each, 4) for each in means]
            rows.append((when, name, *(f"{each:.4f}" for each in means)))
    head = ("joins in", "loss after round", *(f"weight x {each:g}" for each in weights))
    report("A joiner's first change", [head, *rows])
    return results


PARTS = {
    "momentum": measure_momentum,
    "weighting": measure_weighting,
    "joiner": measure_joiner,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="DiLoCo's outer step, in one process.")
    parts = [*PARTS, "loss"]
    parser.add_argument("--part", choices=parts, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each figure")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="of `loss`")
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 3], help="of `loss`")
    parser.add_argument("--text", type=Path, default=DEFAULT_DATA / "tinyshakespeare.txt")
    parser.add_argument("--model", choices=MODELS, default="0.12M", help="of `loss`, parameters")
    parser.add_argument("--out", type=Path, help="of `loss`, joined where it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object of the others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for part in arguments.part or parts:
        if part == "loss":
            asked = arguments
            measure_loss(
                asked.arms, asked.epochs, asked.seeds, asked.text, model=asked.model, out=asked.out
            )
        else:
            results[part] = PARTS[part](arguments.seeds)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
