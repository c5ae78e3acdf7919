"""Merged models and saved adapters are what transformers and peft make of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrained_models import adapters, peft, saved, transformers
from smolcluster.errors import CheckpointError
from smolcluster.training.merging import write_adapters, write_merged
from smolcluster.training.pretrained import Pretrained
from smolcluster.utils.isolated_rng import forked_rng


def trained(model: Pretrained) -> tuple[Any, dict[str, Tensor]]:
    """The whole model after some training, and its trained parameters."""
    with forked_rng():
        torch.manual_seed(3)
        whole = model()
        parameters = {name: each for name, each in whole.named_parameters() if each.requires_grad}
        for each in parameters.values():
            each.data += 0.1 * torch.randn_like(each)
    return whole, {name: each.detach().clone() for name, each in parameters.items()}


def loaded(folder: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(folder)


def check_equal(model: Any, expected: Any) -> None:
    found, other = model.state_dict(), expected.state_dict()
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, other[name]), name
        assert tensor.dtype == other[name].dtype


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("architecture", "dtype", "part_size"),
    [
        ("gpt2", torch.float32, "20KB"),
        ("gpt_neox", torch.float32, "5GB"),
        ("llama", torch.bfloat16, "10KB"),
    ],
)
def test_a_merged_model_is_what_peft_merges(
    tmp_path: Path, architecture: str, dtype: torch.dtype, part_size: str
) -> None:
    base = saved(tmp_path / "base", architecture, dtype, part_size)
    model = Pretrained(base, lora=adapters())
    whole, values = trained(model)
    write_merged(model, values, tmp_path / "merged")
    check_equal(loaded(tmp_path / "merged"), whole.merge_and_unload())
    files = {each.name for each in (tmp_path / "merged").iterdir()}
    assert files == {each.name for each in base.iterdir()}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_adapters_load_in_plain_peft(tmp_path: Path, architecture: str) -> None:
    model = Pretrained(saved(tmp_path / "base", architecture), lora=adapters())
    whole, values = trained(model)
    write_adapters(model, values, tmp_path / "adapters")
    found = peft().PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapters")
    check_equal(found, whole)


def test_weights_that_were_trained_themselves_take_the_base_s_place(tmp_path: Path) -> None:
    model = Pretrained(saved(tmp_path / "base", "gpt2"))
    whole, values = trained(model)
    write_merged(model, values, tmp_path / "tuned")
    check_equal(loaded(tmp_path / "tuned"), whole)


def test_what_is_there_is_not_overwritten_and_nothing_is_missing(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    model = Pretrained(base, lora=adapters("q_proj"))
    _, values = trained(model)
    with pytest.raises(CheckpointError, match="not empty"):
        write_merged(model, values, base)
    values.popitem()
    for write in (write_merged, write_adapters):
        with pytest.raises(CheckpointError, match=r"there is no .*lora_"):
            write(model, values, tmp_path / "new")
