"""Stages of a causal language model of Hugging Face's transformers, of any architecture that passes a check.

The model's modules stay where they are. Blocks of other stages pass their input on; what stands before the
blocks does nothing but in the first stage (positions that were learnt add nothing, an embedding is not
scaled again), and what stands behind them nothing but in the last one. All stages but the last run the base
model, because a head may do more than a matrix product, such as cap its logits.

An architecture that computes something between blocks, or scales what it is given, would go wrong silently.
So each is tried in a random twin with a few blocks, whole and in stages, before it is trained.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smolcluster.errors import ConfigError
from smolcluster.training.compute import trained_dtype
from smolcluster.training.labels import is_from_transformers, is_kind
from smolcluster.training.layer_seeds import may_draw
from smolcluster.training.stages.cut import Stage, place_at
from smolcluster.utils.isolated_rng import forked_rng

TWIN_LAYERS = 4
TWIN_CUTS = ((0, 1), (1, 3), (3, 4))
TWIN_TOKENS = (2, 7)
"""Sequences and tokens a sequence."""
TWIN_VOCABULARY = 64
TWIN_HEADS = 4
TOLERANCE = 1e-4
"""Of outputs and gradients of the twin in float32, beside the largest of them."""
_SCALES = ("embedding_multiplier",)
"""Attributes that a base model multiplies its embeddings by, also those that it is given."""
_INPUTS = ("input_ids", "inputs_embeds")
_NOT_PASSED = (*_INPUTS, "labels", "use_cache", "past_key_values")


_INNER_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("ffn_dim", "ffn_hidden_size", "n_inner", "word_embed_proj_dim"),
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)
"""What the code of an architecture raises that does not go together with its configuration."""


class Logits(NamedTuple):
    """What the last stage returns: logits (batch, seq, vocabulary)."""

    logits: Tensor

    def answer(self, labels: Tensor | None) -> Any:
        """As the model whole answers: with the mean loss over `labels` (batch, seq), where they are given."""
        if labels is None:
            return self
        from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415 - optional

        loss = ForCausalLMLoss(self.logits, labels, self.logits.size(-1))
        return SimpleNamespace(logits=self.logits, loss=loss)


@dataclass(frozen=True)
class Traits:
    """How an architecture runs its blocks.

    Attributes:
        before, after: what of the blocks' owner runs before and after them, and has weights or drops out.
        tuple_length: of what a block returns; None: a tensor.
    """

    before: frozenset[str]
    after: frozenset[str]
    tuple_length: int | None


class HuggingFaceStage(Stage):
    """Blocks [start, end) of a causal language model, and what stands before the first and behind the last.

    The first stage takes tokens (batch, seq) or named values as the model does, the others what the one
    before returned: a dict of `inputs_embeds`, (batch, seq, width), and the other named values.
    """

    def __init__(
        self, model: nn.Module, start: int, end: int, traits: Traits | None = None
    ) -> None:
        """Take these blocks out of `model`, which is of no use afterwards; `traits` None: find them out.

        Raises:
            ConfigError: its architecture does not come to the same in stages.
        """
        nn.Module.__init__(self)
        inner = language_model(model)
        traits = traits or checked_traits(inner)
        _, blocks = _blocks(inner)
        self.start, self.end, self.num_layers = start, end, len(blocks)
        self.model_draws, self.dtype = may_draw(model), trained_dtype(model)
        self.before_layer = lambda _: None
        for number in range(max(1, start), end):
            blocks[number].register_forward_pre_hook(self._announce(number))
        names = {id(each): name for name, each in model.named_parameters()}
        tied = [] if self.is_first and self.is_last else _tied(inner)
        _reduce(inner, traits, start, end)
        self.tied = tuple(names[id(each)] for each in inner.parameters() if id(each) in tied)
        self.held_before = () if self.is_first else self.tied
        prefix = next(name for name, module in model.named_modules() if module is inner)
        for name, child in inner.named_children():
            place_at(self, f"{prefix}.{name}" if prefix else name, child)
        if hasattr(model, "peft_config"):
            self.peft_config = model.peft_config
        self._inner = (inner,)  # in a tuple, so that it is no module of this one

    @property
    def text_config(self) -> Any:
        """The configuration of transformers' model."""
        [inner] = self._inner
        return inner.config.get_text_config()

    def own_layers(self) -> list[nn.Module]:
        [inner] = self._inner
        return list(_blocks(inner)[1][self.start : self.end])

    def _announce(self, number: int) -> Any:
        return lambda *_: self.before_layer(number)

    def forward(self, value: Any) -> Any:
        """Compute the blocks; the last stage returns `Logits`."""
        named = dict(value) if isinstance(value, Mapping) else {"input_ids": value}
        given = {key: named[key] for key in _INPUTS if key in named}
        passed = {key: each for key, each in named.items() if key not in _NOT_PASSED}
        if self.is_first:
            self.before_layer(0)
        [inner] = self._inner
        runner = inner if self.is_last else inner.base_model
        output = runner(**given, **passed, use_cache=False, return_dict=True)
        if self.is_last:
            return Logits(output.logits)
        return {"inputs_embeds": output.last_hidden_state, **passed}


def language_model(model: nn.Module) -> Any:
    """The language model of transformers that `model` is, or that adapters of peft were put on.

    None: it is no model of transformers, or one whose configuration has no number of blocks, such as ResNet.
    """
    base: Any = model
    if is_kind(model, "peft.peft_model.PeftModel"):
        base = base.get_base_model()
    return base if is_from_transformers(base) and _num_hidden_layers(base) is not None else None


def _num_hidden_layers(model: Any) -> int | None:
    """What the configuration says; None: nothing. Its code may raise anything, such as of several texts."""
    try:
        found = model.config.get_text_config().num_hidden_layers
    except Exception:
        return None
    return found if isinstance(found, int) else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a causal language model, in order.

    Raises:
        ConfigError: they are not found.
    """
    return list(_blocks(language_model(model))[1])


def _blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """The path of the model's list of blocks, and that list."""
    num_layers = _num_hidden_layers(model)
    lists = [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) == num_layers
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of {num_layers} blocks to cut between"
        )
    return lists[0]


def _owner(model: Any) -> nn.Module:
    path, _ = _blocks(model)
    owner: nn.Module = model.get_submodule(path.rpartition(".")[0])
    return owner


def _tied(model: Any) -> list[int]:
    """The parameters, by id, that the input embedding shares with the output layer."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if first is None or last is None:
        return []
    return [
        id(each) for each in first.parameters() if any(each is own for own in last.parameters())
    ]


def _reduce(model: Any, traits: Traits, start: int, end: int) -> None:
    """Leave of a model what the stage computes."""
    owner, (_, blocks) = _owner(model), _blocks(model)
    is_first, is_last = start == 0, end == len(blocks)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = bool(_tied(model))
    for number, block in enumerate(blocks):
        if not start <= number < end:
            blocks[number] = _Passing(block, traits.tuple_length)
    for name, child in list(owner.named_children()):
        if not is_first and name in traits.before and child is not embedding:
            owner.register_module(
                name, _Nothing() if isinstance(child, nn.Embedding) else nn.Identity()
            )
        if not is_last and name in traits.after:
            owner.register_module(name, nn.Identity())
    for scale in _SCALES:
        if not is_first and hasattr(owner, scale):
            setattr(owner, scale, 1.0)
    if not is_last and head is not None:
        _replace(model, head)
    if not is_first and not (is_last and is_tied):
        _replace(model, embedding)


def _replace(model: nn.Module, module: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is module:
                parent.register_module(name, nn.Identity())


class _Nothing(nn.Module):
    """Positions that were added before."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class _Passing(nn.Module):
    """A block of another stage; what it says of itself, such as its kind of attention, is still said."""

    def __init__(self, block: nn.Module, tuple_length: int | None) -> None:
        super().__init__()
        self._tuple_length = tuple_length
        for name, value in vars(block).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *values: Tensor, **named: Any) -> Any:
        hidden = values[0] if values else named["hidden_states"]
        if self._tuple_length is None:
            return hidden
        return (hidden, *(None,) * (self._tuple_length - 1))


def checked_traits(model: Any) -> Traits:
    """How the architecture runs its blocks, after a random twin of it has come to the same in stages.

    Raises:
        ConfigError: it has not.
    """
    name = type(model).__name__
    try:
        with forked_rng(), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            twin, traits = _working_twin(model)
            problem = _difference(twin, traits)
    except _FAILURES as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ConfigError(f"{name} cannot be cut into stages by the general rule ({problem:.200})")
    return traits


def _working_twin(model: Any) -> tuple[Any, Traits]:
    """A narrow twin, and what it shows; a twin as wide as the model, where the narrow one does not run."""
    try:
        twin = _twin(model, is_narrow=True)
        return twin, _observed(twin)
    except _FAILURES:
        twin = _twin(model, is_narrow=False)
        return twin, _observed(twin)


def _twin(model: Any, *, is_narrow: bool) -> Any:
    """A model of the same architecture with few blocks and random weights, in float32 on the CPU."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if is_narrow:
        _narrow(text)
    text.num_hidden_layers = TWIN_LAYERS
    text.vocab_size = TWIN_VOCABULARY
    text.dtype = torch.float32
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, None)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        text.layer_types = (list(kinds) * TWIN_LAYERS)[:TWIN_LAYERS]
    return type(model)(config).float().eval()


def _narrow(config: Any) -> None:
    """Let a model have few heads of the size that they have, and no more in between: four blocks of a model
    of 70 billion parameters would take 14 GB and minutes.
    """
    heads, width = config.num_attention_heads, config.hidden_size
    config.num_attention_heads = TWIN_HEADS
    for key in _KEY_HEADS:
        groups = getattr(config, key, None)
        if isinstance(groups, int):
            setattr(config, key, max(1, TWIN_HEADS * groups // heads))
    narrow = min(width, width // heads * TWIN_HEADS)
    config.hidden_size = narrow
    for key in _INNER_WIDTHS:
        value = getattr(config, key, None)
        if isinstance(value, int):
            setattr(config, key, min(value, narrow))


def _observed(twin: Any) -> Traits:
    owner, (path, blocks) = _owner(twin), _blocks(twin)
    list_name = path.rpartition(".")[2]
    order: list[str] = []
    lengths: set[int | None] = set()

    def note_block(_module: nn.Module, _inputs: Any, output: Any) -> None:
        order.append("")
        lengths.add(len(output) if isinstance(output, tuple) else None)

    hooks = [block.register_forward_hook(note_block) for block in blocks]
    for name, child in owner.named_children():
        if name != list_name and _matters(child):
            hooks.append(child.register_forward_hook(lambda *_, name=name: order.append(name)))
    with torch.no_grad():
        twin(input_ids=_tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    begin, end = order.index(""), len(order) - order[::-1].index("")
    [length] = lengths
    return Traits(frozenset(order[:begin]), frozenset(order[end:]), length)


def _matters(module: nn.Module) -> bool:
    """Whether a module changes what passes through it, and does not only compute where tokens stand."""
    return any(True for _ in module.parameters()) or isinstance(module, nn.Dropout)


def _difference(twin: Any, traits: Traits) -> str | None:
    """What differs in the twin between its stages and the whole; None: nothing."""
    stages = [HuggingFaceStage(copy.deepcopy(twin), *cut, traits) for cut in TWIN_CUTS]
    tokens = _tokens()
    whole = twin(input_ids=tokens, use_cache=False).logits
    weights = torch.linspace(-1.0, 1.0, whole.numel()).view_as(whole)
    (whole * weights).sum().backward()
    value: Any = tokens
    for stage in stages:
        value = stage(value)
    (value.logits * weights).sum().backward()
    if not _is_close(value.logits, whole):
        return "its logits differ"
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    for name, parameter in twin.named_parameters():
        found = gradients.get(name)
        if parameter.grad is not None and (found is None or not _is_close(found, parameter.grad)):
            return f"the gradient of {name} differs"
    return None


def _is_close(value: Tensor, expected: Tensor) -> bool:
    value, expected = value.detach(), expected.detach()
    return bool((value - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6))


def _tokens() -> Tensor:
    count = TWIN_TOKENS[0] * TWIN_TOKENS[1]
    return torch.arange(3, 3 + count).view(TWIN_TOKENS) % TWIN_VOCABULARY
