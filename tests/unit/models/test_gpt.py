import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpt2_reference import in_our_shape, reference_for, tiny_config, twin_of
from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import DataError
from smolcluster.models.gpt import GPT, build_gpt
from smolcluster.training.replica import Replica

VOCAB = 37


def tokens_of(batch: int, seq: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(0, vocab_size, (batch, seq))


def tiny(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(tiny_config(**changes), VOCAB)


@pytest.mark.parametrize(
    ("sizes", "batch", "seq"),
    [
        ({}, 3, 12),
        ({}, 1, 1),
        ({"num_heads": 1, "ff_dim": 8}, 2, 7),
        ({"model_dim": 48, "num_heads": 4, "num_layers": 4, "max_seq_len": 64}, 2, 64),
    ],
)
def test_logits_and_gradients_are_those_of_gpt2(
    sizes: dict[str, object], batch: int, seq: int
) -> None:
    torch.manual_seed(0)
    config = tiny_config(**sizes)
    theirs = reference_for(config, VOCAB)
    ours = twin_of(theirs, config)
    tokens, targets = tokens_of(batch, seq), tokens_of(batch, seq)

    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)

    functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    (ours.loss(tokens, targets) / targets.numel()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in ours.named_parameters():
        gradient = theirs.get_parameter(f"transformer.{name}").grad
        assert gradient is not None
        torch.testing.assert_close(
            parameter.grad, in_our_shape(name, gradient), rtol=1e-4, atol=1e-5, msg=name
        )


def test_the_output_layer_is_the_embedding_and_counts_once() -> None:
    model = tiny()
    width, inner = 16, 40
    block = (width * 3 * width + 3 * width) + (width * width + width) + 4 * width
    block += (width * inner + inner) + (inner * width + width)
    expected = VOCAB * width + 12 * width + 2 * block + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert Replica(model, "adam").num_params == expected

    tokens = tokens_of(1, 5)
    before = model(tokens)
    with torch.no_grad():
        model.wte.weight[7 if 7 not in tokens else 8 if 8 not in tokens else 9] *= 2
    assert (model(tokens) != before).any(dim=1).sum() == 1


def test_initial_weights_have_gpt2s_scales() -> None:
    torch.manual_seed(0)
    num_layers = 8
    model = GPT(GPTConfig(model_dim=128, num_layers=num_layers, ff_dim=512), 500)
    for name, parameter in model.named_parameters():
        if ".ln_" in name or name.startswith("ln_f"):
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            std = 0.02 / math.sqrt(2 * num_layers) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std, name


def test_dropout_is_on_in_training_only() -> None:
    model, tokens = tiny(dropout=0.5), tokens_of(2, 8)
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_dropout_is_everywhere_that_gpt2_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedding, within attention, and of what each half of a block adds."""
    seen: list[tuple[str, float]] = []
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def watched(inputs: Tensor, p: float, training: bool) -> Tensor:
        seen.append(("dropout", p if training else 0.0))
        return dropout(inputs, p, training)

    def attending(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool) -> Tensor:
        seen.append(("attention", dropout_p))
        return attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)

    monkeypatch.setattr(functional, "dropout", watched)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    tiny(dropout=0.25, num_layers=1).train()(tokens_of(1, 3))
    assert seen == [(kind, 0.25) for kind in ("dropout", "attention", "dropout", "dropout")]


def test_a_sequence_that_is_too_long_is_refused_in_one_line() -> None:
    model = tiny()
    for call in (model, lambda tokens: model.loss(tokens, tokens)):
        with pytest.raises(DataError, match=r"^a sequence has 13 tokens, the model takes 12: .*$"):
            call(tokens_of(1, 13))


def test_a_shorter_window_than_the_pretrained_one_takes_its_first_positions(
    tmp_path: Path,
) -> None:
    theirs = reference_for(tiny_config(), VOCAB)
    theirs.save_pretrained(tmp_path)
    model = build_gpt(tiny_config(pretrained=tmp_path, max_seq_len=5), VOCAB).eval()
    tokens = tokens_of(2, 5)
    assert model.wpe.weight.shape == (5, 16)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
