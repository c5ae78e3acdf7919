"""A registered model whose layers are the workers': its weights go there first, and come back at the end."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from smolcluster.algorithms.context import ServerContext
from smolcluster.errors import CheckpointError
from smolcluster.training.checkpoint import CheckpointStore, Snapshot, TrainingState
from smolcluster.training.replica import Replica

INITIAL = "initial"
"""A folder of the run's."""


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose tensors have names, shapes and types, and no values."""

    def without_values(tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty

    known = {id(each): without_values(each) for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, known)


def initial_weights(model: nn.Module, context: ServerContext) -> Path | None:
    """Write a model's weights for a server that has none; None: the run goes on, or keeps nothing.

    Raises:
        CheckpointError: they cannot be written.
    """
    if context.store is None or context.checkpoint is not None:
        return None
    store = CheckpointStore(context.store.folder.parent / INITIAL, 1, context.log)
    outlined = context.training.replica
    replica = Replica(
        copy.deepcopy(model).cpu(),
        context.training.recipe.optimizer_for(context.settings.train),
        weight_decay=context.settings.train.weight_decay,
        bucket_bytes=outlined.bucket_bytes,
    )
    state = TrainingState(
        run_id=context.run.run_id,
        algorithm=context.run.algorithm,
        incarnation=context.incarnation,
        step=0,
        samples_applied=0,
        epoch=0,
        dataset_fingerprint=context.training.workload.fingerprint,
        seed=context.run.seed,
        codec=context.codec,
    )
    return store.save(Snapshot.of(replica, state))


@torch.no_grad()
def load_newest(model: nn.Module, context: ServerContext, step: int) -> None:
    """Give a model the weights of the run's end, which is `step`.

    One that is not saved is for the run's owner to say, when all else is written.

    Raises:
        CheckpointError: they are lost.
    """
    if context.store is not None and context.store.newest_step() != step:
        return
    checkpoint = None if context.store is None else context.store.newest_good()
    if checkpoint is None or checkpoint.state.step != step:
        raise CheckpointError(
            f"the weights of step {step} are lost, because they could not be saved: see above"
        )
    known: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in checkpoint.model.items():
        known[name].copy_(tensor)
