"""Language models: our loop beside a bare one, clusters beside one process, and what is learnt.

* `loop`: tokens/s of our training in one process, and of a bare PyTorch loop over `transformers`'
  GPT2LMHeadModel of the same shape, with the same optimizer and clipping, in paired rounds.
* `optimizer`: processor time of a whole step with Muon and with AdamW, one thread, a GPT of 10.8 M weights.
* `cluster`: tokens/s of EDP and SyncPS with 2 workers of 1 thread each, and of one process with 2.
* `memory`: by how many copies of the parameters a worker's peak memory exceeds that of one process.
* `context`: train the small GPT on the standard library's text as `launch_edp_gpt.sh --local` does, then
  evaluate it with its context cut to a few bytes.
* `shakespeare`: one process, SyncPS and EDP with 2 workers on the same text with the GPT-2 tokenizer: the
  largest difference of a step's loss, and the validation loss that EDP with 8-bit pushes comes to.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.nn import functional

from common import DEADLINE_S, DEFAULT_DATA, paired_ratios, report, seconds_of, steps_of
from processes import Processes
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import DatasetPlace, GPTConfig, GradientClipping, TrainConfig
from smolcluster.data.dataset import Batch, Dataset
from smolcluster.data.tokens import TokenBlocks
from smolcluster.launch.language_model import gpt_of
from smolcluster.launch.saved import store_of
from smolcluster.models.gpt import GPT
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.build import build
from smolcluster.training.builtin import builtin_workload
from smolcluster.training.loop import training_steps
from smolcluster.training.replica import Replica

GPT2_VOCAB = 50257
CUT_CONTEXTS = (3, 8, 32)
OPTIMIZER_BATCHES = (4, 128), (8, 256), (16, 256)
ANSWERS_AT_ONCE = 8192
SMALL = ["model.model_dim=128", "model.num_layers=4", "model.num_heads=4", "model.ff_dim=512"]
QUIET = ["track_gradients=false", "checkpoint_steps=null", "eval_steps=1000000"]


class Command(Processes):
    """A command of the program, which ends with the block; runs and secret are in `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder)
        program = "import sys; from smolcluster.cli import main; sys.exit(main())"
        self.child = self.start(sys.executable, "-c", program, *arguments, forked=False)

    def finish(self) -> RunPaths:
        """The run that it has made, when it has ended well."""
        if code := self.child.process.wait(DEADLINE_S):
            raise SystemExit(f"{self.child.argv} ended with {code}: {self.child.output}")
        return find_run(self.runs)

    def wait_for_steps(self, count: int) -> RunPaths:
        """The run, when it has taken so many steps."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end and self.child.process.poll() is None:
            time.sleep(0.5)
            if (self.runs / "latest").exists() and len(steps_of(find_run(self.runs))) > count:
                return find_run(self.runs)
        raise SystemExit(f"no steps: {self.child.output}")


def run_to_its_end(folder: Path, *arguments: str) -> RunPaths:
    """Run a command and return the run that it has made."""
    with Command(folder, *arguments) as command:
        return command.finish()


def commands(overrides: Sequence[str], config: str = "stdlib") -> dict[str, list[str]]:
    """The same training in one process of 2 threads, and on clusters of 2 workers with 1 thread each."""
    launch = ["--local", "--workers", "2", "--train-config", config, "--override", *overrides]
    return {
        "one process": ["train", "--config", config, "--override", *overrides, "threads=2"],
        "EDP": ["launch", "edp", *launch],
        "SyncPS": ["launch", "syncps", *launch],
    }


def optimizer(rounds: int) -> list[list[str]]:
    """A whole step with Muon and with AdamW, in turn. Processor time: other programs do not count."""
    torch.set_num_threads(1)
    config = GPTConfig(
        model_dim=384, num_layers=6, num_heads=6, ff_dim=1536, max_seq_len=256, dropout=0.0
    )
    names = "adamw", "muon"
    models = [GPT(config, 256) for _ in names]
    replicas = [
        Replica(model, name, weight_decay=0.1) for model, name in zip(models, names, strict=True)
    ]
    rows = [["batch", "AdamW, ms", "Muon, ms", "of it the optimizer's, ms", "times as long"]]
    for shape in OPTIMIZER_BATCHES:
        tokens = torch.randint(256, shape)
        whole, updates = ([list[float](), list[float]()] for _ in range(2))
        for _ in range(rounds + 1):
            for number, replica in enumerate(replicas):
                began = time.process_time()
                replica.grads.zero_()
                loss = models[number].loss(tokens, tokens.roll(-1, 1)) / tokens.numel()
                torch.autograd.backward(loss)
                computed = time.process_time()
                replica.clip(GradientClipping(max_norm=1.0))
                replica.step(1e-3)
                whole[number].append(time.process_time() - began)
                updates[number].append(time.process_time() - computed)
        ms = [1e3 * median(each[1:]) for each in (*whole, updates[1])]
        ratio = median(muon / adamw for adamw, muon in zip(*whole, strict=True))
        rows.append([" x ".join(map(str, shape)), *(f"{each:.0f}" for each in ms), f"{ratio:.2f}"])
    return rows


def stream(num_tokens: int, vocab_size: int, length: int) -> Dataset:
    """Random text: what is computed does not depend on it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
    blocks = TokenBlocks(tokens.numpy(), length)
    return Dataset("random", blocks, blocks, length, vocab_size, "random", "perplexity")


def ours(train: TrainConfig, dataset: Dataset, steps: int) -> Callable[[], None]:
    """So many steps of `training_steps`, each time it is called."""
    workload = builtin_workload(train, dataset)
    training = build(train, 0, DatasetPlace(), torch.device("cpu"), workload=workload)
    taken = training_steps(training, train)

    def go() -> None:
        for _ in range(steps):
            next(taken)

    return go


def bare(train: TrainConfig, dataset: Dataset, steps: int) -> Callable[[], None]:
    """As many steps of a plain loop over the model of `transformers`."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - seconds, for this part only

    sizes = train.model
    if not isinstance(sizes, GPTConfig):
        raise SystemExit("the training file is of no GPT")
    model = GPT2LMHeadModel(  # type: ignore[no-untyped-call]
        GPT2Config(
            vocab_size=dataset.num_classes,
            n_positions=sizes.max_seq_len,
            n_embd=sizes.model_dim,
            n_layer=sizes.num_layers,
            n_head=sizes.num_heads,
            n_inner=sizes.ff_dim,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.learning_rate, fused=True)
    batches = iter(range(10**9))

    def batch() -> Batch:
        first = next(batches) * train.batch_size % (dataset.train.num_samples - train.batch_size)
        return dataset.train.batch(torch.arange(first, first + train.batch_size))

    def go() -> None:
        for _ in range(steps):
            inputs, targets = batch()
            optimizer.zero_grad()
            logits = model(inputs).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    return go


def loop(rounds: int) -> list[list[str]]:
    """Compare the two loops at three shapes."""
    rows = [["batch", "tokens", "width", "layers", "vocabulary", "bare, tokens/s", "ours", "ratio"]]
    for batch, width, layers, vocab_size, steps in (
        (16, 128, 4, 256, 4),
        (16, 128, 4, GPT2_VOCAB, 1),
        (8, 256, 6, GPT2_VOCAB, 1),
    ):
        sizes = GPTConfig(
            model_dim=width, num_layers=layers, num_heads=4, ff_dim=4 * width, dropout=0.0
        )
        settings = load_settings("edp", "stdlib", environ={})
        train = settings.train.model_copy(
            update={"batch_size": batch, "model": sizes, "num_epochs": 10**6}
        )
        dataset = stream(200_000, vocab_size, sizes.max_seq_len)
        paired = paired_ratios(bare(train, dataset, steps), ours(train, dataset, steps), rounds)
        tokens = steps * batch * sizes.max_seq_len
        shape = [str(n) for n in (batch, sizes.max_seq_len, width, layers, vocab_size)]
        rates = [f"{tokens / s:,.0f}" for s in (paired.reference_s, paired.candidate_s)]
        rows.append([*shape, *rates, f"{paired.ratio:.2f}"])
    return rows


def tokens_per_s(run: RunPaths) -> float:
    """Of the second half of a run, in which everybody has joined."""
    lines = steps_of(run)
    lines = lines[len(lines) // 2 :]
    first, last = lines[0], lines[-1]
    began, ended = seconds_of(first), seconds_of(last)
    values = [line.record.values["samples_applied"] for line in (first, last)]
    length = read_summary(run.summary).tokens_per_sample or 1
    return (values[1] - values[0]) * length / (ended - began)


def cluster(text: list[str], rounds: int) -> list[list[str]]:
    overrides = [*text, *SMALL, *QUIET, "num_epochs=1", "batch_size=16"]
    each = commands(overrides)
    each["one process"].append("batch_size=32")  # as many samples a step as SyncPS
    rates: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(rounds):
        for name, arguments in each.items():
            with TemporaryDirectory() as folder:
                rates[name].append(tokens_per_s(run_to_its_end(Path(folder), *arguments)))
    alone = rates.pop("one process")
    rows = [["algorithm", "tokens/s", "one process of 2 threads", "ratio (aim 0.9)"]]
    for name, values in rates.items():
        ratio = sorted(value / one for value, one in zip(values, alone, strict=True))
        middle = ratio[len(ratio) // 2]
        rows.append([name, f"{max(values):,.0f}", f"{max(alone):,.0f}", f"{middle:.2f}"])
    return rows


def peak_bytes(pid: int) -> int:
    """The largest resident memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory(text: list[str]) -> list[list[str]]:
    """Peak memory of a worker after some steps, beside that of one process after as many."""
    wide = ["model.model_dim=256", "model.num_layers=6", "model.num_heads=4", "model.ff_dim=1024"]
    overrides = [*text, *wide, *QUIET, "num_epochs=50", "batch_size=4", "model.max_seq_len=64"]
    settings = load_settings("edp", "stdlib", None, overrides, environ={})
    build(settings.train, 0, settings.node.dataset, torch.device("cpu"))  # nobody else tokenizes
    peaks, parameters = {}, 0
    for name, arguments in commands(overrides).items():
        with TemporaryDirectory() as folder, Command(Path(folder), *arguments) as command:
            run = command.wait_for_steps(12)
            peaks[name] = max(map(peak_bytes, trainers(run, command.child.process.pid)))
            parameters = 4 * started(run)
            command.child.kill(signal.SIGTERM)
            command.child.process.wait(DEADLINE_S)
    rows = [
        ["algorithm", "parameters, MB", "peak, MB", "one process, MB", "copies beyond (aim 1.5)"]
    ]
    alone = peaks.pop("one process")
    for name, peak in peaks.items():
        copies = (peak - alone) / parameters
        sizes = [f"{size / 1e6:.0f}" for size in (parameters, peak, alone)]
        rows.append([name, *sizes, f"{copies:.2f}"])
    return rows


def trainers(run: RunPaths, pid: int) -> list[int]:
    """The processes of a run that compute gradients."""
    if not run.processes.is_file():
        return [pid]
    entries = json.loads(run.processes.read_text())
    return [entry["pid"] for entry in entries if entry["role"] == "worker"]


def started(run: RunPaths) -> int:
    with run.events.open() as events:
        return int(json.loads(next(events))["num_params"])


def context(folder: Path) -> list[list[str]]:
    """Train as the launch script does; evaluate with ever less context."""
    run = run_to_its_end(folder, "launch", "edp-gpt", "--local")
    settings = load_settings("edp", run.config, environ={})
    checkpoint = store_of(run).newest_good()
    train = settings.train
    training = build(train, settings.cluster.seed, settings.node.dataset, torch.device("cpu"))
    validation = training.workload.validation
    if checkpoint is None or not isinstance(validation, TokenBlocks):
        raise SystemExit(f"{run.root} has no checkpoint of a language model")
    model = gpt_of(run, checkpoint)
    evaluation = training.evaluate(model)
    whole = evaluation.metrics["perplexity"] if evaluation else math.nan
    lines, summary = steps_of(run), read_summary(run.summary)
    began, ended = seconds_of(lines[0]), seconds_of(lines[-1])
    rows = [["context, bytes", "validation perplexity a byte", "times worse"]]
    rows.append([f"up to {summary.tokens_per_sample}", f"{whole:.3f}", ""])
    for size in CUT_CONTEXTS:
        cut = cut_perplexity(model, validation, size)
        rows.append([str(size), f"{cut:.3f}", f"{cut / whole:.2f}"])
    rows.append([f"from the first step to the last: {ended - began:.0f} s", "", ""])
    return rows


def cut_perplexity(model: GPT, validation: TokenBlocks, size: int) -> float:
    """Perplexity of every token that has `size` tokens before it, of which the model sees only these."""
    tokens = torch.from_numpy(validation.tokens.astype("int64"))
    windows = tokens.unfold(0, size + 1, 1)
    loss = 0.0
    with torch.inference_mode():
        for part in torch.split(windows, ANSWERS_AT_ONCE):
            logits = model(part[:, :-1])[:, -1]
            loss += functional.cross_entropy(logits, part[:, -1], reduction="sum").item()
    return math.exp(loss / len(windows))


def shakespeare(folder: Path, text: list[str], epochs: int) -> list[list[str]]:
    """The same training in three ways."""
    overrides = [*text, *SMALL, f"num_epochs={epochs}", "track_gradients=false", "eval_steps=40"]
    each = commands([*overrides, "learning_rate=6e-4", "lr_schedule.warmup_iters=10"])
    each["one process"] += ["batch_size=16"]
    each["SyncPS"] += ["global_batch_size=16", "batch_size=8"]
    each["EDP"] += ["batch_size=4", "codec=int8", "worker_update_interval=1"]
    runs: dict[str, tuple[Summary, dict[int, float]]] = {}
    for name, arguments in each.items():
        run = run_to_its_end(folder / name, *arguments)
        losses = {line.record.step: line.record.values["loss"] for line in steps_of(run)}
        runs[name] = read_summary(run.summary), losses
    alone, curve = runs["one process"]
    rows = [["", "steps", "samples", "validation loss", "perplexity", "to one process"]]
    for name, (summary, losses) in runs.items():
        final = summary.final.val_loss or math.nan
        told = f"{final / (alone.final.val_loss or math.nan) - 1:+.2%} of the validation loss"
        if name == "SyncPS":
            most = max(abs(losses[step] / curve[step] - 1) for step in curve)
            told = f"{most:.1e} relative, largest difference of a step's loss"
        rows.append(
            [
                *(name, str(summary.steps), f"{summary.samples_applied:,}", f"{final:.4f}"),
                *(f"{summary.final.val_perplexity:.1f}", told if name != "one process" else ""),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Language models.")
    parts = ("loop", "optimizer", "cluster", "memory", "context", "shakespeare")
    parser.add_argument("--part", choices=("all", *parts), default="all")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="shakespeare: passes over the text")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs of shakespeare")
    options = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    data = options.data.resolve()
    text = ["data.name=text", f"data.root={data / 'tinyshakespeare.txt'}"]
    text += [f"data.tokenizer={data / 'gpt2-tokenizer'}"]
    with TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        measure: dict[str, tuple[str, Callable[[], list[list[str]]]]] = {
            "loop": ("One process, beside transformers", lambda: loop(options.rounds)),
            "optimizer": ("Muon beside AdamW", lambda: optimizer(options.rounds)),
            "cluster": ("Clusters of 2 workers", lambda: cluster(text, options.rounds)),
            "memory": ("A worker's memory", lambda: memory(text)),
            "context": ("What the small GPT has learnt", lambda: context(Path(scratch))),
            "shakespeare": ("Tiny Shakespeare", lambda: shakespeare(folder, text, options.epochs)),
        }
        for name, (title, call) in measure.items():
            if options.part in ("all", name):
                report(title, call())


if __name__ == "__main__":
    main()
