"""One file and one command on three hosts: a Llama is fine-tuned in stages, and merged into one model."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import LAUNCH_TIMEOUT_S, STORIES_TIMEOUT_S, Launching
from pretrained_models import saved
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]

HOSTS = ("mini1", "mini2", "pi5")
FOLDER = "tuning"
"""The clone on each host: what other tests find in theirs stays as it is."""
PROGRAM = "examples/demo_llama8b4bit_distributed.py"
ROWS = [{"instruction": f"Count to {number}.", "output": "1 2 3"} for number in range(16)]
TRAINING = {"visualize": False, "learning_rate": 0.05, "checkpoint_steps": 2, "num_epochs": 1}


def llama(folder: Path) -> Path:
    """A random one of four layers, with a token for each byte and some to spare."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    saved(folder, num_hidden_layers=4, vocab_size=320)
    vocabulary = {token: number for number, token in enumerate([*alphabet, "</s>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


def bring_packages(launching: Launching) -> None:
    """An environment that has what fine-tuning needs besides, on each host."""
    for name in HOSTS:
        launching.lab[name].checkout(FOLDER)
        launching.lab[name].link_environment(f"{FOLDER}/.venv")


def bring_files(launching: Launching, base: Path) -> None:
    """The configuration that `init` writes, the base and the data, in the home of each host."""
    coordinator, *workers = (launching.lab[name].address for name in HOSTS)
    machines = ["--server", coordinator]
    for each in workers:
        machines += ["--worker", each]
    words = ["init", "--hetero", *machines, "--layers", "4", "--force"]
    written = launching.run(launching.command(*words))
    assert written.returncode == 0, written.stderr
    config = json.loads(launching.controller.path("hetero_config.json").read_text())
    config["training"] = TRAINING
    config["workload_args"] = {
        "base_model": "~/llama",
        "data": "~/rows.jsonl",
        "max_length": 96,
        "lora_rank": 2,
    }
    for name in HOSTS:
        host = launching.lab[name]
        host.write("hetero_config.json", json.dumps(config), mode=0o600)
        host.write("rows.jsonl", "\n".join(map(json.dumps, ROWS)))
        for file in base.iterdir():
            host.write(f"llama/{file.name}", "")
            host.path(f"llama/{file.name}").write_bytes(file.read_bytes())


def train(launching: Launching, *words: str) -> str:
    """The same command on each host, the coordinator's last; returns what it has printed on all."""
    command = f".venv/bin/python {PROGRAM} --config ~/hetero_config.json {shlex.join(words)}"
    running = []
    for name in reversed(HOSTS):
        running.append(launching.lab[name].popen(f"cd {FOLDER} && {command}"))

    def told() -> str:
        return "\n".join(each.output for each in running)

    for each in reversed(running):
        eventually(lambda each=each: each.process.poll() is not None, told, LAUNCH_TIMEOUT_S)  # type: ignore[misc]
        assert each.process.returncode == 0, told()
    return told()


def taken_out(launching: Launching, *words: str) -> Path:
    """What a command of the coordinator's has made of the newest run."""
    command = [".venv/bin/smolcluster", words[0], "lora_unsloth_sft_distributed/latest", *words[1:]]
    launching.lab["mini1"].output(f"cd {FOLDER} && {shlex.join(command)}")
    return launching.lab["mini1"].path(FOLDER) / words[2]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(24)[None]).logits
    return found


def test_three_hosts_fine_tune_a_model_and_merge_what_they_have_trained(
    launching: Launching, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama(tmp_path / "llama")
    bring_packages(launching)
    bring_files(launching, base)
    assert re.search(r"\[coordinator\] .*step 4/4 · loss ", train(launching))

    model_of = transformers.AutoModelForCausalLM.from_pretrained
    merged = model_of(taken_out(launching, "merge", "--into", "merged")).eval()
    adapters = taken_out(launching, "export", "--to", "adapters", "--transformers")
    tuned = peft.PeftModel.from_pretrained(model_of(base), str(adapters)).eval()
    torch.testing.assert_close(logits(merged), logits(tuned), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(merged), logits(model_of(base).eval()), atol=1e-3)

    assert "at step 2, after 8 samples" in train(launching, "--resume_step", "2")
    again = model_of(taken_out(launching, "merge", "--into", "again")).eval()
    torch.testing.assert_close(logits(again), logits(merged))
