"""Muon for hidden matrices, AdamW for all else: the steps of PyTorch's classes, and who gets which."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smolcluster.configs.schema import GPTConfig, GradientClipping
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import GPT
from smolcluster.training import muon
from smolcluster.training.muon import MuonOptimizer
from smolcluster.training.recipe import OptimizerSpec
from smolcluster.training.replica import Replica

RATE, DECAY = 0.01, 0.1
SIZES = GPTConfig(model_dim=16, num_layers=2, num_heads=2, ff_dim=48, max_seq_len=8, dropout=0.0)
HIDDEN = [
    f"h.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES, 11)


def replica_of(model: nn.Module, arguments: Mapping[str, Any] = {}, **more: Any) -> Replica:
    return Replica(model, OptimizerSpec("muon", arguments), weight_decay=DECAY, **more)


def by_muon(model: nn.Module, **arguments: Any) -> list[str]:
    optimizer = replica_of(model, arguments).optimizer
    assert isinstance(optimizer, MuonOptimizer)
    return sorted(optimizer.split.by_muon)


def batch_of(step: int) -> Tensor:
    return torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(step))


def losses(replica: Replica, steps: range, clip: float) -> list[float]:
    found = []
    for step in steps:
        replica.grads.zero_()
        loss = replica.model.loss(batch_of(step), batch_of(step).roll(-1, 1)) / 32  # type: ignore[operator]
        loss.backward()
        found.append(loss.item())
        replica.clip(GradientClipping(max_norm=clip))
        replica.step(RATE)
    return found


def losses_by_pytorch(model: GPT, steps: range, clip: float) -> list[float]:
    named = dict(model.named_parameters())
    hidden = [named[name] for name in HIDDEN]
    embeddings = [model.wte.weight, model.wpe.weight]
    others = [weight for weight in named.values() if weight.ndim == 1]
    optimizers = (
        torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(embeddings, lr=RATE, weight_decay=DECAY, fused=True),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0, fused=True),
    )
    found = []
    for step in steps:
        model.zero_grad()
        loss = model.loss(batch_of(step), batch_of(step).roll(-1, 1)) / 32
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
    return found


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch iterates, whatever this machine's processor has instructions for."""
    monkeypatch.setattr(muon, "has_bfloat16", lambda _: True)


@pytest.mark.usefixtures("in_bfloat16")
def test_losses_and_weights_are_those_of_pytorch_s_muon_and_adamw() -> None:
    replica, model = replica_of(gpt()), gpt()
    expected_losses = losses_by_pytorch(model, range(30), clip=1e9)
    assert losses(replica, range(30), clip=1e9) == pytest.approx(expected_losses, rel=1e-6)
    named = dict(model.named_parameters())
    expected = torch.cat([named[name].detach().flatten() for name, _ in replica.layers])
    torch.testing.assert_close(replica.params, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (3, 20), (20, 3), (1, 5)])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_singular_values_of_a_step_are_near_one(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], has_bfloat16: bool
) -> None:
    monkeypatch.setattr(muon, "has_bfloat16", lambda _: has_bfloat16)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = muon.orthogonalized(matrix, 5)
    assert found.shape == shape
    values = torch.linalg.svdvals(found.float())
    assert ((values > 0.3) & (values < 1.4)).all()


def test_a_gpt_s_blocks_are_muon_s_and_its_embeddings_adamw_s() -> None:
    optimizer = replica_of(gpt()).optimizer
    assert isinstance(optimizer, MuonOptimizer)
    assert sorted(optimizer.split.by_muon) == sorted(HIDDEN)
    assert "Muon trains 8 matrices" in optimizer.split.sentence
    assert "wte.weight, wpe.weight (embedding)" in optimizer.split.sentence


def test_the_output_layer_is_adamw_s() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_emb = nn.Parameter(torch.zeros(8, 4))
            self.kernels = nn.Conv2d(1, 4, 3)
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 1)
            self.score = nn.Linear(4, 4)

    names = {"self_attn.in_proj_weight", "self_attn.out_proj.weight"}
    names |= {"linear1.weight", "linear2.weight"}
    assert by_muon(Classifier()) == sorted(f"blocks.layers.0.{name}" for name in names)


def test_layers_one_after_another_end_with_the_output_layer() -> None:
    flat = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert by_muon(flat) == ["0.weight", "2.weight"]
    nested = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert by_muon(nested) == ["0.0.weight", "1.0.weight"]


def test_patterns_name_what_is_whose() -> None:
    found = by_muon(gpt(), adamw=("*.attn.*", "h.0.mlp.c_fc.weight"), muon="wpe.*")
    assert found == [
        "h.0.mlp.c_proj.weight",
        "h.1.mlp.c_fc.weight",
        "h.1.mlp.c_proj.weight",
        "wpe.weight",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"adamw": "h.9.*"}, "optimizer_args.adamw has 'h.9.*', which is no"),
        ({"muon": "ln_f.weight"}, "optimizer_args.muon names ln_f.weight, which has 1 dim"),
        ({"muon": "wte.*", "adamw": "wte.*"}, "both name wte.weight"),
        ({"adamw": "*"}, "no matrix besides.*set optimizer to adamw"),
        ({"momentun": 0.9}, "momentun, which muon does not take.*mean momentum"),
    ],
)
def test_arguments_that_fit_nothing_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replica_of(gpt(), arguments)


def test_groups_are_refused() -> None:
    spec = OptimizerSpec("muon", groups=[{"names": "*"}])
    with pytest.raises(ConfigError, match="optimizer is muon, which has groups of its own"):
        Replica(gpt(), spec)


def test_a_server_of_several_is_refused() -> None:
    optimizer = replica_of(gpt()).optimizer
    with pytest.raises(ConfigError, match=r"optimizer is muon.*servers lists several"):
        optimizer.part(slice(0, 100))


def test_a_state_of_adamw_is_not_taken_for_muon_s() -> None:
    """The averages of squares that Muon does not keep would be 0 in an AdamW that goes on with them."""
    adamw = Replica(gpt(), "adamw")
    assert adamw.optimizer.state.keys() != replica_of(gpt()).optimizer.state.keys()
