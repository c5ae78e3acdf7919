"""A stage's layers compiled one by one, as `torch.compile` is used on repeated blocks.

What lies between layers, such as seeding dropout, is not compiled, nor are the hooks of a layer itself, by
which FSDP gathers its weights. Layers of one kind share what was compiled.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smolcluster.errors import ConfigError
from smolcluster.training.stages.cut import Stage


def compile_layers(stage: Stage) -> None:
    """Let each layer be compiled when it is first computed.

    Raises:
        ConfigError: PyTorch has no compiler for this Python.
    """
    for layer in stage.own_layers():
        try:
            layer.forward = torch.compile(layer.forward)
        except RuntimeError as error:
            raise _does_not_work(error) from error


@contextmanager
def compiler_named() -> Iterator[None]:
    """Say of an error of the compiler that it is one; those of what is compiled pass.

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
    return ConfigError(
        f"compile is true, but torch.compile does not work here: {reason[:200]}; install a C++ compiler (or "
        "Triton for a GPU), or set compile to false"
    )
