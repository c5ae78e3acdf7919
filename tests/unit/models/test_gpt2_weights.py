import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gpt2_reference import reference_for, tiny_config, twin_of
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.models.gpt import GPT, build_gpt
from smolcluster.models.gpt2_weights import write_gpt2

if TYPE_CHECKING:  # it takes seconds
    from transformers import GPT2LMHeadModel, GPT2Model

VOCAB = 37
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture
def theirs() -> "GPT2LMHeadModel":
    torch.manual_seed(0)
    return reference_for(tiny_config(), VOCAB)


@pytest.fixture
def folder(theirs: "GPT2LMHeadModel", tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load(folder: Path) -> GPT:
    return build_gpt(tiny_config(pretrained=folder), VOCAB).eval()


def assert_same(ours: GPT, theirs: "GPT2LMHeadModel") -> None:
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_transformers_reads_what_is_written_without_a_key_too_many_or_too_few(
    theirs: "GPT2LMHeadModel", tmp_path: Path
) -> None:
    config = tiny_config()
    ours = twin_of(theirs, config)
    folder = tmp_path / "deep" / "folder"
    write_gpt2(ours.state_dict(), config, folder)

    from transformers import GPT2LMHeadModel

    again: GPT2LMHeadModel
    loaded: Any = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    again, report = loaded
    assert not any(report.values()), report
    assert_same(ours, again.eval())  # type: ignore[no-untyped-call]
    assert again.config.n_inner == 40
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_what_is_written_is_read_again_exactly(tmp_path: Path) -> None:
    config = tiny_config()
    weights = GPT(config, VOCAB).state_dict()
    write_gpt2(weights, config, tmp_path)
    again = load(tmp_path).state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_what_transformers_writes_is_read(folder: Path, theirs: "GPT2LMHeadModel") -> None:
    assert_same(load(folder), theirs)


def test_names_without_their_prefix_are_read(tmp_path: Path, theirs: "GPT2LMHeadModel") -> None:
    bare: GPT2Model = theirs.transformer
    bare.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    assert_same(load(tmp_path), theirs)


def test_masks_and_a_tied_output_layer_are_left_out(
    folder: Path, theirs: "GPT2LMHeadModel"
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
        tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    edit_weights(folder, add)
    assert_same(load(folder), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_become_float32(folder: Path, theirs: "GPT2LMHeadModel", dtype: torch.dtype) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    edit_weights(folder, halve)
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    nn.Module.to(theirs, dtype)
    nn.Module.to(theirs, torch.float32)
    assert_same(model, theirs)


def test_a_configuration_that_says_little_means_gpt2_itself(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"n_embd is 768, but model\.model_dim is 16"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_dim": 32}, r"n_embd is 16, but model\.model_dim is 32: set model\.model_dim=16"),
        ({"num_layers": 3}, r"n_layer is 2, but model\.num_layers is 3"),
        ({"num_heads": 4}, r"n_head is 2, but model\.num_heads is 4"),
        ({"ff_dim": 64}, r"n_inner is 40, but model\.ff_dim is 64"),
        ({"max_seq_len": 13}, r"n_positions is 12, but model\.max_seq_len is 13"),
    ],
)
def test_another_size_is_refused_with_both_values(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        build_gpt(tiny_config(pretrained=folder, **changes), VOCAB)


def test_another_vocabulary_is_refused_with_both_values(folder: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 37, but the tokenizer has 256 tokens"):
        build_gpt(tiny_config(pretrained=folder), 256)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("n_embd", "16"),
        ("n_layer", 0),
    ],
)
def test_a_model_that_computes_something_else_is_refused(
    folder: Path, field: str, value: object
) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises(ConfigError, match=rf"config\.json: {field} is {value!r}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("transformer.h.1.mlp.c_fc.bias"), r"lacks h\.1\.mlp\.c_fc\.bias, of shape \(40,\)"),
        (
            put("transformer.wte.weight", torch.zeros(38, 16)),
            r"holds wte\.weight of shape \(38, 16\), but .* means \(37, 16\)",
        ),
        (
            put("transformer.h.0.mlp.c_fc.weight", torch.zeros(40, 16)),
            r"holds h\.0\.mlp\.c_fc\.weight of shape \(16, 40\), but .* means \(40, 16\)",
        ),
        (put("transformer.h.2.ln_1.bias", torch.zeros(16)), r"holds h\.2\.ln_1\.bias, which no"),
        (put("transformer.ln_f.bias", torch.zeros(16).long()), r"ln_f\.bias as torch\.int64"),
        (put("transformer.ln_f.bias", torch.full((16,), torch.nan)), r"NaN or infinity in ln_f"),
        (put("ln_f.bias", torch.zeros(16)), r"a tensor both with and without transformer\."),
    ],
)
def test_damaged_weights_are_refused_by_file_and_key(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{message}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_an_output_layer_of_its_own_is_refused(folder: Path) -> None:
    edit_weights(folder, put("lm_head.weight", torch.zeros(37, 16)))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not wte\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "nothing in it", "rubbish"])
def test_a_damaged_file_is_refused_by_name(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    left = {"cut short": content[:-5], "nothing in it": b"", "rubbish": b"\xff" * 99}
    if damage != "missing":
        path.write_bytes(left[damage])
    with pytest.raises(CheckpointError, match=rf"^{path} .*; copy the folder again") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json: its content is \[1\]"):
        load(folder)


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    folder: Path, theirs: "GPT2LMHeadModel"
) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is a pickle, .* not read") as caught:
        load(folder)
    assert "\n" not in str(caught.value)

    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    run_command(str(caught.value).split(": ", 1)[1])
    assert_same(load(Path(f"{folder}-whole")), theirs)


def test_weights_in_parts_are_refused_with_the_command_that_joins_them(
    folder: Path, theirs: "GPT2LMHeadModel"
) -> None:
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="5KB")
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="in several files, one is read") as caught:
        load(folder)
    run_command(str(caught.value).split(": ", 1)[1])
    assert_same(load(Path(f"{folder}-whole")), theirs)


def run_command(line: str) -> None:
    """Run the program of a `python -c "…"` line."""
    program = line.removeprefix('python -c "').removesuffix('"')
    scope: dict[str, Any] = {}
    exec(program, scope)  # noqa: S102


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_existing_files_are_not_overwritten(tmp_path: Path, name: str) -> None:
    config = tiny_config()
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"{name} exists and is not overwritten"):
        write_gpt2(GPT(config, VOCAB).state_dict(), config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"cannot write GPT-2 weights to {tmp_path}/file"):
        write_gpt2(GPT(config, VOCAB).state_dict(), config, tmp_path / "file")


def test_the_folder_of_a_run_is_answered_with_how_to_export_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    command = f"smolcluster export --transformers {tmp_path} --to DIR"
    with pytest.raises(ConfigError, match=command):
        load(tmp_path)


def test_a_folder_that_does_not_exist_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.pretrained is {tmp_path}/nothing, which"):
        load(tmp_path / "nothing")
