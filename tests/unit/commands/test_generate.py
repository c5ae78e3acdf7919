"""What can be done with a trained language model: let it write, take it elsewhere, let it go on."""

import io
import json
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file

from harness import local_settings
from smolcluster.algorithms import single
from smolcluster.algorithms.context import ServerContext
from smolcluster.cli import main
from smolcluster.commands.checkpoints import export_model
from smolcluster.commands.generate import chat, generate
from smolcluster.configs.load import dump_yaml, read_yaml
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch import language_model
from smolcluster.launch.flow import LaunchOptions
from smolcluster.launch.language_model import Author, GenerateOptions, LanguageModel, gpt_of
from smolcluster.launch.saved import resume, store_of
from smolcluster.models.sampling import sample
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.build import build
from smolcluster.training.builtin import SAMPLE_TOKENS, TEMPERATURE, TOP_K
from smolcluster.training.checkpoint import averaged
from smolcluster.utils.stopping import Interrupted
from texts import tiny_settings, train_alone, write_text

WISH = GenerateOptions(max_tokens=40, temperature=0.9, top_k=None, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a language model that has a few checkpoints; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        be_alone(patch, folder)
        text = write_text(folder / "text.txt")
        often = "checkpoint_steps=5", "training.eval_steps=5", "ema_decay=0.9"
        settings = tiny_settings(text, folder / "runs", *often, algorithm="single")
        train_alone(settings, "mine")
    return folder / "runs" / "mine"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunPaths:
    """A copy of that run."""
    return RunPaths(shutil.copytree(trained, tmp_path / "runs" / "mine", symlinks=True))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_alone(monkeypatch, tmp_path)


def be_alone(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("HF_HUB_OFFLINE", "1")
    # imported while the variable is set, it would stay offline for all tests that come after
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def written(
    paths: RunPaths,
    capsys: pytest.CaptureFixture[str],
    *,
    prompt: str = "the cat",
    **changes: object,
) -> str:
    capsys.readouterr()
    assert generate(str(paths.root), prompt, replace(WISH, **changes)) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


# Writing


@pytest.mark.parametrize("prompt", ["", "naïve ☃\n\ttext", "x" * 100])
def test_the_prompt_stands_before_what_is_written(
    run: RunPaths, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    text = written(run, capsys, prompt=prompt, temperature=0.0)
    assert text.startswith(prompt)
    assert len(text) > len(prompt) + 1
    assert text.endswith("\n")
    assert written(run, capsys, prompt=prompt, max_tokens=0) == prompt + "\n"


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.0, "top_k": None, "seed": 0},
        {"temperature": 0.9, "top_k": 3, "seed": 5},
    ],
)
def test_it_writes_what_the_best_model_says_after_the_beginning_of_a_document(
    run: RunPaths, capsys: pytest.CaptureFixture[str], wish: dict[str, Any]
) -> None:
    checkpoint = store_of(run).best()
    assert checkpoint is not None
    model = gpt_of(run, checkpoint)
    chosen = {"temperature": wish["temperature"], "top_k": wish["top_k"]}
    generator = torch.Generator().manual_seed(wish["seed"])
    tokens = sample(model, [0, *b"the cat"], 40, generator=generator, **chosen)
    expected = "the cat" + bytes(tokens).decode(errors="replace") + "\n"
    assert written(run, capsys, **wish) == expected


def test_a_run_s_sample_is_of_the_weights_that_it_evaluates(run: RunPaths) -> None:
    newest = store_of(run).newest_good()
    assert newest is not None
    generator = torch.Generator().manual_seed(newest.state.seed)
    chosen: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": TOP_K}
    tokens = sample(gpt_of(run, newest), [0], SAMPLE_TOKENS, generator=generator, **chosen)
    assert run.sample.read_text() == bytes(tokens).decode(errors="replace") + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_is_written_passes_any_pipe(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    pipe = io.BytesIO()
    stdout = io.TextIOWrapper(pipe, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert generate(str(run.root), "naïve ☃", replace(WISH, temperature=5.0)) == 0
    stdout.flush()
    assert pipe.getvalue().startswith("naïve ☃".encode(encoding, "replace"))


def test_on_a_terminal_no_control_sequence_is_written(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = written(run, capsys, prompt="\x1b]0;mine\x07cat", temperature=5.0)
    assert text.startswith(r"\x1b]0;mine\x07cat")
    assert all(each.isprintable() for each in text.splitlines())


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_chat_goes_on_from_all_that_was_typed_and_written(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = replace(WISH, temperature=1.5, max_tokens=12)
    checkpoint = store_of(run).best()
    assert checkpoint is not None
    model, generator = gpt_of(run, checkpoint), torch.Generator().manual_seed(0)
    tokens, expected = [0], ""
    for line in (b"the cat\n", b"a dog\n"):
        tokens += line
        written = list(sample(model, tokens, 12, temperature=1.5, generator=generator))
        written = written[: written.index(0)] if 0 in written else written
        expected += bytes(written).decode(errors="replace") + "\n"
        tokens += [*written, *b"\n"]
    typed(monkeypatch, "the cat", "a dog")
    assert chat(str(run.root), wish) == 0
    assert capsys.readouterr().out == expected


def test_what_is_typed_must_be_text(run: RunPaths) -> None:
    with pytest.raises(ConfigError, match=r"'\\udcff\\n' is not text in this terminal's encoding"):
        Author(LanguageModel(str(run.root)), WISH).read("\udcff\n")


def test_pieces_are_whole_characters_and_together_the_text(run: RunPaths) -> None:
    wish = replace(WISH, temperature=3.0)
    author = Author(LanguageModel(str(run.root)), wish)
    author.read("☃ ")
    pieces = list(author.write())
    assert len(pieces) > 5, "it comes piece by piece"
    author = Author(LanguageModel(str(run.root)), wish)
    author.read("☃ ")
    assert "".join(pieces) == "".join(author.write())


def damage(folder: Path) -> None:
    file = folder.resolve() / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_without_any_good_one_there_is_nothing_to_write_with(run: RunPaths) -> None:
    for folder in run.checkpoints.glob("step-*"):
        damage(folder)
    with pytest.raises(CheckpointError, match="run mine has no good checkpoint in"):
        generate(str(run.root), "", WISH)


def test_what_memory_does_not_hold_is_not_read(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list((run.checkpoints / "latest").iterdir())
    nbytes = sum(file.stat().st_size for file in files)
    monkeypatch.setattr(language_model, "virtual_memory", lambda: Mock(available=nbytes - 1))
    with pytest.raises(CheckpointError, match=r"a checkpoint of run mine takes .* of memory, and"):
        generate(str(run.root), "", WISH)
    monkeypatch.setattr(language_model, "virtual_memory", lambda: Mock(available=nbytes))
    assert generate(str(run.root), "", WISH) == 0


def test_a_tokenizer_that_has_become_another_one_is_refused(run: RunPaths, tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    pair.mkdir()
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ċ": 3, "<|endoftext|>": 4}
    (pair / "vocab.json").write_text(json.dumps(vocabulary))
    (pair / "merges.txt").write_text("#version: 0.2\na b\n")
    config = read_yaml(run.config)
    config["train"]["dataset"]["tokenizer"] = str(pair)
    run.config.write_text(dump_yaml(config))
    with pytest.raises(CheckpointError) as raised:
        generate(str(run.root), "", WISH)
    text = str(raised.value)
    assert "run mine was trained with 256 tokens" in text
    assert f"the tokenizer {pair} has 5 now" in text
    assert text.isprintable()


def test_a_checkpoint_of_other_sizes_is_refused(run: RunPaths) -> None:
    config = read_yaml(run.config)
    config["train"]["model"]["num_layers"] = 2
    run.config.write_text(dump_yaml(config))
    with pytest.raises(CheckpointError, match=r"is of another model: .*h\.1\.") as raised:
        generate(str(run.root), "", WISH)
    assert str(raised.value).isprintable()


@pytest.fixture
def labelled(tmp_path: Path) -> RunPaths:
    """A run of a SimpleNN."""
    settings = local_settings(
        f"runs_dir={tmp_path / 'runs'}", "num_epochs=1", "batch_size=500", "threads=1", workers=1
    )
    train_alone(settings, "labelled")
    return RunPaths(tmp_path / "runs" / "labelled")


def test_a_run_of_labels_has_nothing_to_say(labelled: RunPaths, tmp_path: Path) -> None:
    says = "run labelled trained a SimpleNN, which is no language model"
    with pytest.raises(ConfigError, match=says):
        generate(str(labelled.root), "", WISH)
    with pytest.raises(ConfigError, match=says):
        export_model(str(labelled.root), tmp_path / "out", best=False, transformers=True)
    assert not (tmp_path / "out").exists()


def test_the_command_line_passes_every_wish_on(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(run, capsys, prompt="a dog", max_tokens=9, temperature=0.5, top_k=3, seed=7)
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(run.root.parent))
    wishes = ("--prompt", "a dog", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "3")
    assert main(["generate", "mine", *wishes, "--seed", "7"]) == 0
    assert capsys.readouterr().out == expected


# Elsewhere


@pytest.mark.slow
def test_transformers_reads_what_is_exported_and_computes_the_same(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    assert export_model(str(run.root), folder, best=False, transformers=True) == 0
    assert f"-> {folder}" in capsys.readouterr().out
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(str(folder))
    theirs.eval()  # type: ignore[no-untyped-call]
    checkpoint = store_of(run).newest_good()
    assert checkpoint is not None
    ours = gpt_of(run, checkpoint)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


def test_what_is_exported_can_be_trained_on(run: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export_model(str(run.root), folder, best=True, transformers=True)
    text = write_text(tmp_path / "text.txt")
    settings = tiny_settings(text, None, f"model.pretrained={folder}")
    training = build(settings.train, 1, settings.node.dataset, torch.device("cpu"))
    best = store_of(run).best()
    assert best is not None
    expected = averaged(best)
    assert not torch.equal(expected["wte.weight"], best.model["wte.weight"])
    parameters = dict(training.replica.model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(parameters[name], tensor), name
    evaluation = training.evaluate()
    assert evaluation is not None
    assert evaluation.loss == pytest.approx(best.state.val_loss, rel=1e-5)


# Going on


def stopped(context: ServerContext) -> Summary:
    """Seven steps, and then a signal."""
    asked = iter(range(7))

    def check() -> None:
        if next(asked, None) is None:
            raise Interrupted(signal.SIGTERM, is_orderly=True)

    return single.train(replace(context, check_stop=check))


@pytest.fixture(scope="module")
def whole_and_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, and of one like it that was stopped after seven steps; not to be changed."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        be_alone(patch, folder)
        text = write_text(folder / "text.txt", 150)
        extra = ("seed=7", "model.dropout=0.2")
        settings = tiny_settings(text, folder / "runs", *extra, algorithm="single")
        train_alone(settings, "whole")
        with pytest.raises(Interrupted):
            train_alone(settings, "half", body=stopped)
    return folder / "runs"


@pytest.fixture
def half(whole_and_half: Path, tmp_path: Path) -> RunPaths:
    """A copy of the run that was stopped; and beside it, `whole`."""
    return RunPaths(shutil.copytree(whole_and_half, tmp_path / "runs", symlinks=True) / "half")


def weights_of(paths: RunPaths) -> dict[str, torch.Tensor]:
    return load_file(paths.checkpoints / "latest" / "model.safetensors")


@pytest.mark.usefixtures("as_a_process")
def test_a_single_run_goes_on_as_it_was(half: RunPaths) -> None:
    assert resume(str(half.root), None, [], LaunchOptions()) == 0
    whole = RunPaths(half.root.parent / "whole")
    ours, expected = weights_of(half), weights_of(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert read_summary(half.summary).final == read_summary(whole.summary).final


def test_a_single_run_has_no_workers(half: RunPaths) -> None:
    with pytest.raises(ConfigError, match="run half trains in one process and has none"):
        resume(str(half.root), 2, [], LaunchOptions())


@pytest.mark.usefixtures("as_a_process")
def test_the_command_that_would_go_on_does(
    half: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(str(half.root), None, ["training.eval_steps=3"], LaunchOptions(dry_run=True)) == 0
    program, *arguments = shlex.split(capsys.readouterr().out)
    assert program == "smolcluster"
    assert not half.summary.exists()
    assert main(arguments) == 0
    whole = RunPaths(half.root.parent / "whole")
    assert read_summary(half.summary).steps == read_summary(whole.summary).steps
    ours, expected = weights_of(half), weights_of(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
