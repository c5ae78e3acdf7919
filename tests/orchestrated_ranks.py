"""An orchestrator with `tensor_parallel`: `orchestrated_ranks.py NAME=VALUE...`, settings of its environment.

Each of its steps has the loss that one process has on the same batches.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from smolcluster import DistributedConfig, Orchestrator
from smolcluster.data.permutation import epoch_permutation
from smolcluster.training.hooks import Hooks, StepDone
from smolcluster.training.recipe import Training

WIDTH, NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 8, 96, 8, 2


class Mlp(nn.Module):
    """Its layers are called as GPT's, and so cut."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.c_proj(self.c_fc(inputs).tanh())
        return inputs + outputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.mlp(inputs)
        return outputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.h:
            inputs = block(inputs)
        return inputs

    def stages(self) -> list[nn.Module]:
        return list(self.h)


def samples() -> TensorDataset:
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.flip(1).argmax(dim=1))


def main() -> None:
    told = dict(each.split("=") for each in sys.argv[1:])
    num_workers = int(told.pop("WORKERS"))
    config = DistributedConfig.from_env(told, num_workers=num_workers, optimizer="sgd")
    config.learning_rate, config.max_grad_norm, config.compact_log = 0.1, None, True
    torch.manual_seed(3)
    model = Net()
    alone, steps = copy.deepcopy(model), list[StepDone]()
    with Orchestrator(config) as orchestrator:
        orchestrator.register_model(model, training=Training(hooks=Hooks(on_step=steps.append)))
        assert orchestrator.wait_for_workers() == num_workers
        data = DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
        held_out = DataLoader(samples(), batch_size=BATCH_SIZE)
        summary = orchestrator.start_training(data, held_out, num_epochs=NUM_EPOCHS)
    assert summary.samples_applied == NUM_EPOCHS * NUM_SAMPLES
    size = BATCH_SIZE * config.mesh.dp
    assert {step.num_samples for step in steps} == {size}
    assert len(steps) == NUM_EPOCHS * NUM_SAMPLES // size
    inputs, targets = samples().tensors
    for number, step in enumerate(steps):
        start = number * size
        order = epoch_permutation(config.seed, start // NUM_SAMPLES, NUM_SAMPLES).long()
        chosen = order[start % NUM_SAMPLES :][:size]
        loss = functional.cross_entropy(alone(inputs[chosen]), targets[chosen])
        assert abs(loss.item() - step.loss) < 1e-5, (number, loss.item(), step.loss)
        parameters = list(alone.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(step.learning_rate * gradient)
    for own, trained in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, trained, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main()
