"""Models of a folder: a stage reads its own tensors, and its adapters are those of the whole model."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from peers import logger
from pretrained_models import WORKLOAD, adapters, peft, saved, text_arguments, transformers
from smolcluster.errors import ConfigError, DataError
from smolcluster.training import pretrained
from smolcluster.training.finetune import next_token_loss
from smolcluster.training.named import load_named
from smolcluster.training.pretrained import Pretrained, is_adapter
from smolcluster.training.stages.build import build_stage, model_input, output_loss
from smolcluster.training.stages.cut import Stage
from smolcluster.training.weight_files import INDEX_FILE, WEIGHTS_FILE
from smolcluster.training.workload import Workload
from smolcluster.utils.isolated_rng import forked_rng
from smolcluster.utils.seed import derive_seed

SEED = 5
CPU = torch.device("cpu")


def stage(model: Pretrained, start: int, end: int) -> Stage:
    return build_stage(Workload(model, next_token_loss, [0]), start, end, SEED, CPU)


def whole(model: Pretrained) -> nn.Module:
    with forked_rng():
        torch.manual_seed(derive_seed(SEED, "weights"))
        return model()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("architecture", "dtype", "is_lora", "part_size"),
    [
        ("gpt2", torch.float32, True, "20KB"),
        ("gpt_neox", torch.float32, False, "5GB"),
        ("gptj", torch.bfloat16, False, "5GB"),
        ("llama", torch.bfloat16, True, "5GB"),
        ("llama", torch.float32, False, "10KB"),
    ],
)
def test_stages_have_the_tensors_of_the_whole_model(
    tmp_path: Path, architecture: str, dtype: torch.dtype, is_lora: bool, part_size: str
) -> None:
    folder = saved(tmp_path, architecture, dtype, part_size)
    model = Pretrained(folder, lora=adapters() if is_lora else None)
    expected = whole(model)
    found: dict[str, Tensor] = {}
    for cut in ((0, 1), (1, 2), (2, 3)):
        own = stage(model, *cut)
        tensors = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        for name, tensor in tensors.items():
            other = expected.state_dict(keep_vars=True).get(name)
            other = expected.get_buffer(name) if other is None else other
            assert torch.equal(tensor, other), name
            assert (tensor.dtype, tensor.requires_grad) == (other.dtype, other.requires_grad)
        found |= tensors
    assert found.keys() >= dict(expected.named_parameters()).keys()


def test_the_loss_of_stages_with_adapters_is_that_of_the_whole_model(tmp_path: Path) -> None:
    model = Pretrained(saved(tmp_path), lora=adapters("q_proj", "down_proj"))
    trained = Workload(model, next_token_loss, [0])
    batch = (torch.arange(10).view(2, 5), torch.arange(1, 11).view(2, 5))
    value = model_input(trained, batch)
    for cut in ((0, 2), (2, 3)):
        value = stage(model, *cut)(value)
    total, count = output_loss(trained)(value, batch)
    expected, num_terms = next_token_loss(whole(model), batch)
    assert count == num_terms == 10
    torch.testing.assert_close(total, expected)


def test_adapters_of_all_stages_are_those_that_peft_loads(tmp_path: Path) -> None:
    model = Pretrained(saved(tmp_path / "base"), lora=adapters("q_proj", "up_proj"))
    union: dict[str, Tensor] = {}
    for cut in ((0, 1), (1, 3)):
        own = dict(stage(model, *cut).named_parameters())
        union |= {name: each for name, each in own.items() if is_adapter(name)}
    with torch.device("meta"):
        config = transformers().AutoConfig.from_pretrained(tmp_path / "base")
        base = transformers().AutoModelForCausalLM.from_config(config)
        unsplit = peft().get_peft_model(base, adapters("q_proj", "up_proj"))
    names = {name for name, each in unsplit.named_parameters() if each.requires_grad}
    assert union.keys() == names


def test_a_stage_reads_no_more_than_its_tensors(tmp_path: Path) -> None:
    model = Pretrained(saved(tmp_path, part_size="10KB"))
    stored = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    said: list[str] = []
    build_stage(Workload(model, next_token_loss, [0]), 1, 2, SEED, CPU, log=logger(said))
    nbytes = sum(each.nbytes for name, each in stored.items() if name.startswith("model.layers.1."))
    assert f"{nbytes / 1000:.1f}" in said[0] or f"{nbytes:,}" in said[0], (said, nbytes)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ({}, ConfigError, "neither"),
        ({"pytorch_model.bin": "0"}, ConfigError, "pickled"),
        ({INDEX_FILE: "{"}, DataError, "no index"),
        ({INDEX_FILE: json.dumps({"weight_map": {"w": "../x"}})}, DataError, "beside it"),
        ({INDEX_FILE: json.dumps({"weight_map": {"w": "a.safetensors"}})}, DataError, "not there"),
        ({WEIGHTS_FILE: "0"}, DataError, "cannot be read"),
    ],
)
def test_a_folder_without_good_weights_is_refused(
    tmp_path: Path, content: Mapping[str, str], error: type[Exception], words: str
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(error, match=words):
        Pretrained(tmp_path)


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for changed, words in (
        ({"intermediate_size": 32}, "has the shape"),
        ({"attention_bias": True}, "no tensor"),
    ):
        path.write_text(json.dumps({**config, **changed}), encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            stage(Pretrained(tmp_path), 0, 1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("use_dora", True), ("modules_to_save", ["lm_head"]), ("init_lora_weights", "pissa")],
)
def test_adapters_that_cannot_be_split_are_refused(
    tmp_path: Path, setting: str, value: Any
) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=setting):
        Pretrained(tmp_path, lora=peft().LoraConfig(**{setting: value}))


def test_adapters_must_be_those_of_peft(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="must be a LoraConfig"):
        Pretrained(tmp_path, lora=SimpleNamespace())


@pytest.mark.parametrize("targets", [("q_proj", "nothing"), ("nothing",)])
def test_a_target_in_no_stage_is_refused(tmp_path: Path, targets: tuple[str, ...]) -> None:
    model = Pretrained(saved(tmp_path), lora=adapters(*targets))
    with pytest.raises(ConfigError, match="nothing"):
        stage(model, 0, 1)


def test_weights_of_4_bits_are_for_cuda(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="frozen"):
        Pretrained(tmp_path, four_bit=True)
    own = stage(Pretrained(tmp_path, lora=adapters("q_proj"), four_bit=True), 0, 1)
    assert all(each.is_floating_point() for each in own.parameters())
    assert "4-bit weights need a CUDA device" in caplog.text


def test_frozen_matrices_of_blocks_become_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear4bit(nn.Linear):
        def __init__(self, inputs: int, outputs: int, **said: Any) -> None:
            super().__init__(inputs, outputs, bias=said["bias"], device=said["device"])

    def params(value: Tensor, **_: Any) -> nn.Parameter:
        return nn.Parameter(value.to(torch.uint8), requires_grad=False)

    library = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit, Params4bit=params))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    model = nn.Module()
    model.head = nn.Linear(4, 4).requires_grad_(False)
    model.blocks = nn.ModuleList(
        [nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))]
    )
    pretrained.quantize(model, torch.bfloat16)
    kinds = {name: each.dtype for name, each in model.named_parameters() if "weight" in name}
    assert kinds.pop("blocks.0.0.weight") == torch.uint8
    assert set(kinds.values()) == {torch.float32}


def test_a_training_file_names_the_folder_and_the_text(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    found = load_named(WORKLOAD, text_arguments(tmp_path) | {"folder": "model"}, SEED)
    assert isinstance(found.maker, Pretrained)
    assert found.tokens_per_sample == 8
    inputs, _ = batch = found.train.batch(torch.arange(2, dtype=torch.int32))
    assert inputs.shape == (2, 8)
    total, count = next_token_loss(whole(found.maker), batch)
    assert (total.shape, int(count)) == ((), 16)
