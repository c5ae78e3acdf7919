import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt2_reference import tiny_config
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.models.gpt import GPT
from smolcluster.models.sampling import sample

VOCAB, WINDOW = 37, 12
PROMPT = [3, 1, 4]


@pytest.fixture
def model() -> GPT:
    """One whose logits differ enough for the choice to be clear, with dropout."""
    torch.manual_seed(0)
    model = GPT(tiny_config(dropout=0.5), VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def draw(model: GPT, num_tokens: int = 30, *, seed: int = 0, **settings: object) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(sample(model, PROMPT, num_tokens, generator=generator, **settings))  # type: ignore[arg-type]


def continued(model: GPT, num_tokens: int, choose: Callable[[Tensor], int]) -> list[int]:
    """The definition: the whole window anew for each token."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(choose(model(torch.tensor([tokens[-WINDOW:]]))[0, -1]))
    return tokens[len(PROMPT) :]


def test_temperature_0_takes_the_likeliest_token_beyond_the_window_too(model: GPT) -> None:
    expected = continued(model, 30, lambda logits: int(logits.argmax()))
    assert draw(model, temperature=0.0) == expected
    assert len(set(expected)) > 3, "a model that says little tests little"


def test_top_1_is_greedy_at_any_temperature(model: GPT) -> None:
    assert draw(model, temperature=2.0, top_k=1) == draw(model, temperature=0.0)


def test_tokens_are_drawn_by_their_probability(model: GPT) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]))[0, -1]
    expected = torch.softmax(logits / 1.5, dim=0)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        next(sample(model, PROMPT, 1, temperature=1.5, generator=generator)) for _ in range(700)
    ]
    shares = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / len(drawn)
    assert (shares - expected).abs().max() < 0.06


def test_top_k_draws_among_the_likeliest_only(model: GPT) -> None:
    with torch.no_grad():
        best = model(torch.tensor([PROMPT]))[0, -1].topk(3).indices.tolist()
    drawn = {draw(model, 1, seed=seed, temperature=50.0, top_k=3)[0] for seed in range(60)}
    assert drawn == set(best)


def test_a_seed_gives_the_same_text_and_another_one_another(model: GPT) -> None:
    assert draw(model, seed=5) == draw(model, seed=5)
    assert draw(model, seed=5) != draw(model, seed=6)


def test_top_k_beyond_the_vocabulary_means_all(model: GPT) -> None:
    assert draw(model, top_k=10 * VOCAB) == draw(model, top_k=None)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e300])
def test_no_temperature_overflows(model: GPT, temperature: float) -> None:
    tokens = draw(model, temperature=temperature)
    assert len(tokens) == 30
    if temperature < 1:
        assert tokens == draw(model, temperature=0.0)


def test_of_a_prompt_beyond_the_window_the_last_tokens_count(model: GPT) -> None:
    prompt = [token % VOCAB for token in range(40)]
    whole = list(sample(model, prompt, 8, temperature=0))
    assert whole == list(sample(model, prompt[-WINDOW:], 8, temperature=0))
    assert whole != list(sample(model, prompt[:WINDOW], 8, temperature=0))


def test_the_models_mode_stays_as_it_is_and_gradients_stay_on(model: GPT) -> None:
    expected = draw(model, temperature=0)
    model.train()
    model.h[0].eval()
    modes = [module.training for module in model.modules()]
    tokens = []
    for token in sample(model, PROMPT, 30, temperature=0):
        tokens.append(token)
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert tokens == expected


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "settings", "message"),
    [
        ([], 1, {}, "the prompt has no tokens"),
        ([0, VOCAB], 1, {}, f"the prompt holds token {VOCAB}, the model knows 0 to {VOCAB - 1}"),
        ([-1], 1, {}, "the prompt holds token -1"),
        ([0], -1, {}, "num_tokens is -1, must be 0 or more"),
        ([0], 1, {"temperature": -0.1}, "temperature is -0.1, must be finite and 0 or more"),
        ([0], 1, {"temperature": math.nan}, "temperature is nan"),
        ([0], 1, {"temperature": math.inf}, "temperature is inf"),
        ([0], 1, {"top_k": 0}, "top_k is 0, must be 1 or more"),
    ],
)
def test_an_argument_out_of_range_is_refused_at_once(
    model: GPT, prompt: list[int], num_tokens: int, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        sample(model, prompt, num_tokens, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_diverged_weights_are_told(model: GPT) -> None:
    with torch.no_grad():
        model.ln_f.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss, match="logits are NaN or infinite"):
        draw(model, 1)
    assert not model.training
