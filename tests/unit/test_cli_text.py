"""Language models at the command line: `train.py` as documented, `train --resume`, `generate`."""

import io
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from smolcluster.cli import main
from smolcluster.configs.resolve import load_resolved
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from texts import TINY, write_text

TRAIN_PY = Path(__file__).resolve().parents[2] / "src" / "smolcluster" / "train.py"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_a_process: None) -> None:
    """No network and no settings of others; what a process changes for good is put back."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "SMOLCLUSTER_RUNS_DIR": str(tmp_path / "runs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The options of `train` for a tiny GPT on a tiny text."""
    text = write_text(tmp_path / "text.txt", 150)
    return ["--config", "stdlib", "--override", *TINY, f"data.root={text}"]


def only_error(err: str) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if "ERROR" in line or line.startswith("error:")]
    return line


# train.py


def test_without_a_network_train_py_says_what_works_without() -> None:
    argv = [sys.executable, str(TRAIN_PY)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    line = only_error(done.stderr)
    assert "openai-community/gpt2" in line, "it is the documented GPT that is trained"
    assert "HF_HUB_OFFLINE is set" in line
    assert "stdlib" in line


def test_train_py_takes_the_documented_options_and_prints_what_any_console_can_show(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young model writes bytes that are no text, which become U+FFFD: ASCII has none."""
    console = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", stdout := io.TextIOWrapper(console, encoding="ascii"))
    words = (*tiny, "training.batch_size=8", "training.epochs=2")
    monkeypatch.setattr(sys, "argv", [str(TRAIN_PY), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TRAIN_PY), run_name="__main__")
    assert ended.value.code == 0
    stdout.flush()
    shown = console.getvalue().decode("ascii")
    run = find_run(tmp_path / "runs")
    train = load_resolved(run.config).train
    assert (train.batch_size, train.num_epochs, train.dataset.name) == (8, 2, "text")
    assert "validation perplexity" in shown
    assert "tokens/s" in shown
    assert "a sample of what the model writes" in shown
    assert "\N{REPLACEMENT CHARACTER}" in run.sample.read_text()
    assert "\x1b" not in shown, "what it writes may not move the cursor"


def test_a_text_that_may_not_be_fetched_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"{host} was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    overrides = ("data.download=false", "data.tokenizer=bytes")
    assert main(["train", "--config", "gpt", "--override", *overrides]) == 1
    line = only_error(capsys.readouterr().err)
    assert "Salesforce/wikitext was not fetched before" in line
    assert "dataset.download is false" in line
    assert "dataset.name=stdlib dataset.tokenizer=bytes" in line


# train --resume


def test_a_run_goes_on_with_its_own_configuration(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "auto", "--run-id", "mine", *tiny]) == 0, "it begins"
    run = find_run(tmp_path / "runs", "mine")
    before, steps = load_resolved(run.config), read_summary(run.summary).steps
    for words in (["mine"], ["latest"], ["auto"], [str(run.root)], ["mine", *tiny]):
        capsys.readouterr()
        assert main(["train", "--resume", *words]) == 1
        error = only_error(capsys.readouterr().err)
        assert "run mine has ended; to train on, raise num_epochs above 1" in error
    changes = ("num_epochs=2", "model.max_seq_len=8")
    assert main(["train", "--resume", "mine", "--override", *changes]) == 1
    error = only_error(capsys.readouterr().err)
    assert "model.max_seq_len: 16 -> 8" in error
    assert "num_epochs: 1 -> 2" in error
    assert main(["train", "--resume", "mine", "--override", "num_epochs=2"]) == 0
    assert read_summary(run.summary).steps == 2 * steps
    after = load_resolved(run.config)
    assert after.train == before.train.model_copy(update={"num_epochs": 2})
    assert after.node.dataset == before.node.dataset
    assert main(["resume", "mine", "--override", "training.epochs=3"]) == 0
    assert main(["train", "--resume", "latest", *tiny, "training.epochs=4"]) == 0
    assert read_summary(run.summary).steps == 4 * steps


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume", "nowhere"], "no run 'nowhere' under"),
        (["--resume", "one", "--run-id", "two"], "--resume is 'one' and --run-id 'two'"),
    ],
)
def test_a_run_that_is_not_there_does_not_go_on(
    tiny: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["train", *arguments, *tiny]) == 2
    assert says in only_error(capsys.readouterr().err)


def test_a_path_that_does_not_exist_is_a_wrong_setting(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("data.root", "dataset.root", "data.tokenizer", "model.pretrained"):
        assert main(["train", *tiny, f"{key}={tmp_path}/nothing"]) == 2
        said = key.replace("data.", "dataset.")
        assert f"{said} is {tmp_path}/nothing, which " in only_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-tokens", "-1"), ("--top-k", "0"), ("--temperature", "-1")]
)
def test_a_wrong_flag_of_generate_is_called_what_it_is(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "mine", flag, value]) == 2
    assert f"'{flag}'" in only_error(capsys.readouterr().err)


# generate


def test_a_trained_model_writes(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *tiny]) == 0
    capfd.readouterr()
    assert main(["generate", "--prompt", "the ", "--max-tokens", "20"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("the ")
    assert captured.err == ""
