"""Text from a language model: each token is drawn from what the model says of the ones before it.

While the tokens fit into the model's window, attention's keys and values are kept, so that a step
computes one token. Beyond that the window slides: learned positions belong to places in the window, so
every token moves and all of them are computed anew.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.models.gpt import GPT, Cache


def sample(
    model: GPT,
    prompt_tokens: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Go on with a prompt, token by token.

    A step runs in evaluation mode; between two, the model's mode is what it was.

    Args:
        model: on any device.
        prompt_tokens: one or more; of a longer prompt than max_seq_len the last ones count.
        num_tokens: how many come.
        temperature: what the logits are divided by; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens; None: all.
        generator: the source of chance, on the CPU; None: PyTorch's global one.

    Raises:
        ConfigError: an argument is out of its range; at once, not with the first token.
        NonFiniteLoss: the model's logits are NaN or infinite.
    """
    _check(model, prompt_tokens, num_tokens, temperature, top_k)
    most = min(top_k or model.vocab_size, model.vocab_size)
    choose = partial(_choose, temperature=temperature, top_k=most, generator=generator)
    return _continue(model, list(prompt_tokens), num_tokens, choose)


def _choose(
    logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator | None
) -> int:
    """A token from its logits (V,) on the CPU."""
    if temperature == 0:
        return int(logits.argmax())
    # In float64, and with the largest one at 0: no temperature makes it overflow.
    largest, tokens = logits.double().topk(top_k)
    probabilities = functional.softmax((largest - largest[0]) / temperature, dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _continue(
    model: GPT, tokens: list[int], num_tokens: int, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    window = model.config.max_seq_len
    caches = model.new_caches()
    for _ in range(num_tokens):
        with _evaluating(model):
            if len(tokens) <= window:
                logits = _next_logits(model, tokens[caches[0].length :], caches)
            else:
                logits = _next_logits(model, tokens[-window:], None)
            chosen = choose(logits)
        tokens.append(chosen)
        yield chosen


def _next_logits(model: GPT, tokens: list[int], caches: list[Cache] | None) -> Tensor:
    """Logits (V,), on the CPU, of the token that comes next."""
    weight = model.wte.weight
    hidden = model.hidden_states(torch.tensor([tokens], device=weight.device), caches)
    logits = functional.linear(hidden[0, -1], weight).float().cpu()
    if not logits.isfinite().all():
        raise NonFiniteLoss("the model's logits are NaN or infinite: its weights have diverged")
    return logits


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A block without gradients, in evaluation mode; each module's mode is put back after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check(
    model: GPT, prompt: Sequence[int], num_tokens: int, temperature: float, top_k: int | None
) -> None:
    if not prompt:
        raise ConfigError("the prompt has no tokens: give it at least one")
    wrong = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"the prompt holds token {wrong}, the model knows 0 to {model.vocab_size - 1}: "
            "use the tokenizer that it was trained with"
        )
    if num_tokens < 0:
        raise ConfigError(f"num_tokens is {num_tokens}, must be 0 or more")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature is {temperature}, must be finite and 0 or more")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}, must be 1 or more")
