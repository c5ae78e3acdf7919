"""What a process of a pipeline builds of a workload: its own layers, with their initial weights."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.data.dataset import Batch
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.training.labels import LabelsSeen
from smolcluster.training.lazy import check_shapes
from smolcluster.training.modes import begin_training
from smolcluster.training.pretrained import Pretrained
from smolcluster.training.stages.cut import Stage, check_shared, layers_of
from smolcluster.training.stages.huggingface import (
    HuggingFaceStage,
    Logits,
    blocks_of,
    language_model,
)
from smolcluster.training.stages.recording import CannotRecord, Tape, alone, recording
from smolcluster.training.workload import Terms, Workload
from smolcluster.utils.isolated_rng import forked_rng
from smolcluster.utils.seed import derive_seed
from smolcluster.utils.units import format_bytes


def num_layers(
    workload: Workload, *, may_be_one: bool = False, shares_ends_alone: bool = False
) -> int:
    """How many layers the workload's model has; `may_be_one`: see `layers_of`.

    Raises:
        ConfigError: it cannot be cut, or is to share parameters as `check_shared` says and shares others.
    """
    model, _ = _recorded(workload)
    layers = model_layers(model, workload, may_be_one=may_be_one)
    if shares_ends_alone:
        check_shared(model, layers)
    return len(layers)


def outline(workload: Workload) -> nn.Module:
    """The workload's model on `meta`: names, shapes and types, and no values.

    Raises:
        ConfigError: the workload's model was made before, or it cannot be made without its weights.
    """
    model, tape = _recorded(workload)
    if tape is None:
        model.to("meta")
    return model


def model_layers(
    model: nn.Module, workload: Workload, *, may_be_one: bool = False
) -> list[nn.Module]:
    """The layers of the workload's model; a Hugging Face model's blocks. `may_be_one`: see `layers_of`.

    Raises:
        ConfigError: it cannot be cut.
    """
    if _is_language_model(model, workload):
        return blocks_of(model)
    return layers_of(model, workload.stages, may_be_one=may_be_one)


def build_stage(
    workload: Workload,
    start: int,
    end: int,
    seed: int,
    device: torch.device,
    *,
    may_be_one: bool = False,
    log: logging.Logger | None = None,
) -> Stage:
    """Build layers [start, end) with the initial weights that the whole model would have under `seed`.

    No other tensors are in memory but one at a time, unless the model's initial values cannot be recorded;
    then it is built whole, which the log says, and what is not needed is given back. `may_be_one`: see
    `layers_of`.

    Raises:
        ConfigError: the model cannot be cut.
        UserCodeError: the workload's functions raised an exception.
    """
    with alone, forked_rng():
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        model, tape = _recorded(workload)
        stage = _cut(model, workload, start, end, may_be_one=may_be_one)
        if tape is not None:
            _read_weights(workload, stage, device, log)
            try:
                tape.fill([stage], device)
            except CannotRecord as problem:
                if log is not None:
                    log.warning(
                        "%s: the whole model is made in this process once, and then what it does not need is "
                        "dropped",
                        problem,
                    )
            else:
                return stage
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        model = workload.new_model()
    return _cut(model, workload, start, end, may_be_one=may_be_one).to(device)


def _cut(model: nn.Module, workload: Workload, start: int, end: int, *, may_be_one: bool) -> Stage:
    begin_training(model)  # its own override may freeze layers, and is no part of a stage
    if _is_language_model(model, workload):
        return HuggingFaceStage(model, start, end)
    return Stage(model, layers_of(model, workload.stages, may_be_one=may_be_one), start, end)


def _is_language_model(model: nn.Module, workload: Workload) -> bool:
    return workload.stages is None and language_model(model) is not None


def _recorded(workload: Workload) -> tuple[nn.Module, Tape | None]:
    """The model on `meta`, and what makes it real; None: it is real, because that could not be recorded.

    Raises:
        ConfigError: the workload's model, or a part of it, was made before.
    """
    if isinstance(workload.maker, Pretrained):
        with recording() as tape:
            return workload.maker.skeleton(), tape
    if workload.is_built:
        raise ConfigError(
            "the workload's model is a module, which holds all weights: a pipeline or mesh needs a function "
            "that makes it, such as Workload(lambda: Model(...), ...), so that each process makes its part"
        )
    try:
        with recording() as tape:
            model = workload.new_model()
    except SmolclusterError:
        model = workload.new_model()
        check_shapes(model)
        return model, None
    check_shapes(model)
    _check_new(model, workload)
    return model, tape


def _check_new(model: nn.Module, workload: Workload) -> None:
    """See that each call of the function makes its parameters: what it shares belongs to all models.

    Raises:
        ConfigError: it returns some that another call returns as well.
    """
    # what is on `meta` was made in this call; of real ones (`torch.tensor([...])`) only another call tells
    real = {id(each): name for name, each in model.named_parameters() if not each.is_meta}
    if not real:
        return
    with recording():
        again = workload.new_model()
    if shared := [real[id(each)] for each in again.parameters() if id(each) in real]:
        raise ConfigError(
            f"the function that makes the workload's model returns the same {shared[0]} at each call: a "
            "pipeline or mesh needs one that makes all layers anew, so that each process makes its own"
        )


def _read_weights(
    workload: Workload, stage: Stage, device: torch.device, log: logging.Logger | None
) -> None:
    """What is stored in a folder is no initial weight that is drawn."""
    if isinstance(workload.maker, Pretrained):
        nbytes = workload.maker.read_into(stage, device)
        if log is not None:
            size, folder = format_bytes(nbytes), workload.maker.folder
            log.info("%s read from %s for layers %d to %d", size, folder, stage.start, stage.end)


class _InputFound(BaseException):
    """Carries what a loss gives its model out of the user's code."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Probe(nn.Module):
    """Stands for a model, to see what a loss gives it."""

    def forward(self, *values: Any, **named: Any) -> Any:
        if len(values) == 1 and not named:
            raise _InputFound(values[0])
        if named and not values:
            raise _InputFound(named)
        raise ConfigError(
            f"the loss gives the model {len(values)} positional and {len(named)} named values; a pipeline "
            "needs one value, or named ones alone"
        )


class Answer(nn.Module):
    """Stands for a model whose output comes from the last stage of a pipeline."""

    stands_for_a_model_of_transformers = True
    loss_type = "ForCausalLM"
    """Of the loss of `Logits`, as transformers calls it."""

    def __init__(self, output: Callable[[], Any]) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_values: Any, **named: Any) -> Any:
        output = self._output()
        if isinstance(output, Logits):
            return output.answer(named.get("labels"))
        return output


def model_input(workload: Workload, batch: Batch) -> Any:
    """What the workload's loss gives the model for a batch: the input of the first stage.

    Raises:
        ConfigError: it does not call the model, or not so that stages can be called.
    """
    try:
        workload.loss(_Probe(), batch)
    except _InputFound as found:
        return found.value
    raise ConfigError(
        "the loss never calls the model it is given, so that nobody can tell the model's input: write "
        "it as loss(model, batch) that calls model(...) once"
    )


def output_loss(
    workload: Workload, model_returned: Callable[[], None] = lambda: None
) -> Callable[[Any, Batch], Terms | Tensor]:
    """(the last stage's output, batch) to what the workload's loss returns where its model gives that.

    Of a mean over labels that a model of transformers returns it is their sum and their number.
    `model_returned` is called where the model would return, such as to seed what the loss draws then.
    """
    own = workload.output_loss
    if own is not None:

        @wraps(own, updated=())
        def of_output(output: Any, batch: Batch) -> Terms | Tensor:
            model_returned()
            return own(output, batch)

        return of_output

    def loss(output: Any, batch: Batch) -> Terms | Tensor:
        is_called = False

        def answer() -> Any:
            nonlocal is_called
            if is_called:
                raise ConfigError(
                    "the loss calls the model more than once for a batch, but a pipeline or mesh computes "
                    "it once: call it once, or use SyncPS, EDP or DiLoCo"
                )
            is_called = True
            model_returned()
            return output

        stand_in = Answer(answer)
        seen = LabelsSeen(stand_in)
        with seen.watching():
            result: Terms | Tensor = seen.counted(workload.loss(stand_in, batch))
        return result

    return loss
