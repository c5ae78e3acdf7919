"""A stage as a mesh computes it: compiled, computed again, sharded, or with a part of the vocabulary."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.configs.schema import Precision
from smolcluster.errors import ConfigError
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.compute import StageCompute
from smolcluster.training.stages.cut import Stage
from smolcluster.training.workload import Workload
from smolcluster.utils.user_code import user_code


def stage_compute(
    stage: Stage, workload: Workload, seeds: LayerSeeds, config: MeshConfig, precision: Precision
) -> StageCompute:
    """What computes a stage that has been spread over its ranks.

    Raises:
        ConfigError: its layers shall be compiled, but PyTorch's compiler does not work here.
    """
    has_part = config.mesh.loss_parallel and stage.is_last
    kernels = loss_parallel if has_part else nullcontext
    compiling = compiler_named if config.compile else nullcontext
    if config.compile:
        compile_layers(stage)
    # activations that are computed again in the backward draw the same numbers
    every = {"full": 1, "selective": 2}.get(config.activation_checkpointing)
    for layer in dict.fromkeys(stage.own_layers()[::every] if every else ()):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @contextmanager
    def around(what: str) -> Iterator[None]:
        with kernels(), user_code(what), compiling():
            yield

    return StageCompute(stage, workload, seeds, precision=precision, around=around)


@contextmanager
def adding_up(stage: Stage) -> Iterator[None]:
    """Add up a step's gradients in this block; at its end sum them over the ranks that share weights."""
    for parameter in stage.parameters():
        parameter.grad = None
    if not isinstance(stage, FSDPModule):
        yield
        return
    stage.set_requires_gradient_sync(False)
    stage.set_reshard_after_backward(False)
    stage.set_manual_backward_finalization(True)
    yield
    stage.set_requires_gradient_sync(True)
    stage.set_reshard_after_backward(True)
    stage.finalize_backward()
    stage.set_manual_backward_finalization(False)


UNFINISHED = re.compile(r"ImportError: (\S+\.so): (?:file too short|invalid ELF header)")
"""What the loader says of a library of which only a part is there."""


def compile_layers(stage: Stage) -> None:
    """Let each layer be compiled when it is first computed, as `torch.compile` is used on repeated blocks.

    What lies between layers, such as seeding dropout, is not compiled, nor are the hooks of a layer itself,
    by which FSDP gathers its weights. Layers of one kind share what was compiled.

    Raises:
        ConfigError: PyTorch has no compiler for this Python.
    """
    for layer in dict.fromkeys(stage.own_layers()):
        try:
            layer.forward = torch.compile(layer.forward)
        except RuntimeError as error:
            raise _does_not_work(error) from error


@contextmanager
def compiler_named() -> Iterator[None]:
    """Say of an error of the compiler that it is one; those of what is compiled pass.

    A process that is killed while it compiles leaves part of a library in PyTorch's cache, which every later
    one would try to load: that is removed.

    Raises:
        ConfigError: it is.
    """
    from torch._dynamo.exc import (  # noqa: PLC0415 - loading the compiler takes seconds
        ObservedException,
        TorchDynamoException,
        TorchRuntimeError,
        UserError,
    )
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        yield
    except (TorchRuntimeError, UserError, ObservedException):
        raise
    except (TorchDynamoException, InvalidCxxCompiler) as error:
        raise _does_not_work(error) from error


def _does_not_work(error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if (library := UNFINISHED.search(reason)) and _is_removed(Path(library[1])):
        return ConfigError(
            f"compile is true, but {library[1]} was left unfinished by a process that ended while it "
            "compiled; it is removed now: start again"
        )
    return ConfigError(
        f"compile is true, but torch.compile does not work here: {reason[:200]}; install a C++ compiler (or "
        "Triton for a GPU), or set compile to false"
    )


def _is_removed(library: Path) -> bool:
    """Whether it was a file of PyTorch's cache of compiled layers, so that it could be removed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415

    if not library.resolve().is_relative_to(Path(cache_dir()).resolve()):
        return False
    try:
        library.unlink(missing_ok=True)
    except OSError:
        return False
    return True
