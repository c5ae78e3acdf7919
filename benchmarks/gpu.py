"""What works on this machine's GPUs, and how fast, by runs of the command itself: at most eight minutes.

Each row is a run, or two that are compared: in one process in three precisions beside the CPU, SyncPS and EDP
with two workers on one GPU, DiLoCo with four at 30 million parameters beside one process at equal tokens, a
4-bit model with adapters as a pipeline on one GPU, and a mesh of all GPUs by NCCL. `--device cpu` runs what
needs no GPU in small, to try the script itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common import PROJECT, free_port, report, say
from pretrained_models import text_arguments
from smolcluster.errors import SmolclusterError
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.utils.units import format_duration

RESULTS = PROJECT / "benchmarks" / "results" / "gpu.md"
RUN_LIMIT_S = 150.0
"""Of a single run."""
TOTAL_LIMIT_S = 480.0
SMALL = ("model.num_layers=2", "model.model_dim=64", "model.num_heads=2", "model.ff_dim=256")
LARGE = ("model.num_layers=9", "model.model_dim=512", "model.num_heads=8", "model.ff_dim=2048")
"""28.5 million parameters."""
FLAT = ("lr_schedule=null", "learning_rate=0.001", "optimizer=adamw")
LLAMA = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}


@dataclass(frozen=True)
class Row:
    """One line of the table: `state` is ok, FAILED, or skipped with the reason in `said`."""

    what: str
    state: str
    said: str
    took_s: float


class Failed(Exception):
    """A run did not do what it should; the message says what."""


class Skipped(Exception):
    """A run cannot be made here; the message says why."""


class Bench:
    """Runs of the command, each in a folder of its own, on one device."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.is_gpu, self.folder = device, device.startswith("cuda"), folder
        self.end = time.monotonic() + TOTAL_LIMIT_S
        self.num_steps = 60 if self.is_gpu else 12
        self.size = LARGE if self.is_gpu else SMALL
        self._num_runs = 0

    def run(self, *words: str, device: str | None = None, overrides: Sequence[str] = ()) -> Summary:
        """What a run has come to; `words` follow `smolcluster`.

        Raises:
            Failed: it ended with an error, or took too long.
        """
        self._num_runs += 1
        run_id = f"check-{self._num_runs}"
        flags = ("--no-tmux",) if words[0] == "launch" else ("--run-id", run_id)
        own = (f"runs_dir={self.folder}", f"device={device or self.device}", "eval_steps=1000000")
        ports = (f"port={free_port()}",) if words[0] == "launch" else ()
        command = [sys.executable, "-m", "smolcluster.cli", *words, *flags]
        before = set(self.folder.glob("*/summary.json"))
        limit_s = min(RUN_LIMIT_S, self.end - time.monotonic())
        if limit_s < 30:
            raise Skipped(f"the {format_duration(TOTAL_LIMIT_S)} are over")
        try:
            done = subprocess.run(
                [*command, "--override", *own, *ports, *overrides],
                timeout=limit_s,
                check=False,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not over after {format_duration(limit_s)}") from None
        new = {each for each in self.folder.glob("*/summary.json") if not each.parent.is_symlink()}
        if done.returncode or not new - before:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise Failed(f"exit code {done.returncode}: {' '.join(said)[:200]}")
        return read_summary(RunPaths((new - before).pop().parent).summary)

    def gpt(
        self,
        *words: str,
        size: Sequence[str] = SMALL,
        num_steps: int | None = None,
        device: str | None = None,
        **changes: object,
    ) -> Summary:
        """A run of a GPT on the text of Python's library; `changes` are keys."""
        stated = [f"{key}={value}" for key, value in changes.items()]
        train = ("--config", "stdlib") if words[0] == "train" else ("--train-config", "stdlib")
        return self.run(
            *(*words, *train, "--num-steps", str(num_steps or self.num_steps)),
            device=device,
            overrides=(*size, *FLAT, *stated),
        )


def loss_of(summary: Summary) -> float:
    """The mean loss of the last epoch.

    Raises:
        Failed: there is none.
    """
    loss = summary.final.train_loss
    if loss is None:
        raise Failed("the run has no loss")
    return loss


def near(found: float, expected: float, tolerance: float, of_what: str) -> str:
    """Say how near two losses are.

    Raises:
        Failed: they are not.
    """
    said = f"loss {found:.4f}, {of_what} {expected:.4f}"
    if not abs(found - expected) <= tolerance:
        raise Failed(f"{said}: more than {tolerance:g} apart")
    return said


def speed(summary: Summary) -> str:
    tokens = (summary.tokens_per_sample or 1) * summary.samples_applied / summary.wall_s
    return f"{tokens:,.0f} tokens/s"


def one_process(bench: Bench) -> str:
    expected = loss_of(bench.gpt("train", device="cpu"))
    summary = bench.gpt("train")
    return f"{near(loss_of(summary), expected, 2e-3, 'on the CPU')}, {speed(summary)}"


def bf16(bench: Bench) -> str:
    summary = bench.gpt("train", precision="bf16")
    expected = loss_of(bench.gpt("train"))
    return f"{near(loss_of(summary), expected, 3e-2, 'in float32')}, {speed(summary)}"


def fp16(bench: Bench) -> str:
    if not bench.is_gpu:
        raise Skipped("the CPU has no fast float16")
    summary = bench.gpt("train", precision="fp16")
    return f"{near(loss_of(summary), loss_of(bench.gpt('train')), 3e-2, 'in float32')}, {speed(summary)}"


def syncps(bench: Bench) -> str:
    words = ("launch", "syncps", "--local", "--workers", "2")
    summary = bench.gpt(*words, global_batch_size=16)
    expected = loss_of(bench.gpt("train", global_batch_size=16))
    return f"{near(loss_of(summary), expected, 2e-3, 'one process')}, {speed(summary)}"


def edp(bench: Bench) -> str:
    summary = bench.gpt("launch", "edp", "--local", "--workers", "2", size=bench.size)
    megabytes = 1e-6 * (summary.bytes.sent + summary.bytes.received) / summary.wall_s
    return f"{speed(summary)}, {megabytes:,.0f} MB/s between GPU memory, sockets and GPU memory"


def diloco(bench: Bench) -> str:
    num_steps, words = 8 * bench.num_steps, ("launch", "diloco", "--local", "--workers", "4")
    summary = bench.gpt(*words, size=bench.size, num_steps=num_steps, batch_size=8)
    alone = bench.gpt("train", size=bench.size, num_steps=num_steps // 4, batch_size=32)
    expected = loss_of(alone)
    return (
        f"loss {loss_of(summary):.4f}, one process {expected:.4f} at equal tokens, {speed(summary)}"
    )


def four_bit(bench: Bench) -> str:
    with tempfile.TemporaryDirectory() as folder:
        arguments = text_arguments(Path(folder), **LLAMA) | {
            "four_bit": bench.is_gpu,
            "lora_rank": 8,
        }
        words = ("launch", "pipeline", "--local", "--workers", "3")
        workload = ("--workload", "smolcluster.training.finetune:workload", "--num-steps", "40")
        overrides = (f"workload_args={json.dumps(arguments)}", "learning_rate=0.01")
        summary = bench.run(*words, *workload, overrides=overrides)
    worse = 0.99 * torch.tensor(20.0).log().item()
    if loss_of(summary) >= worse:
        raise Failed(f"loss {loss_of(summary):.4f}, that of guessing is {worse:.4f}")
    return f"loss {loss_of(summary):.4f} after guessing's {worse:.4f}, {speed(summary)}"


def mesh(bench: Bench) -> str:
    num_gpus = torch.cuda.device_count()
    if bench.is_gpu and num_gpus < 2:
        raise Skipped("NCCL takes one rank a GPU, and there is one GPU")
    ranks = num_gpus if bench.is_gpu else 2
    sizes = (f"mesh.dp={ranks}", "mesh.tp=1", "mesh.pp=1", "microbatches=1")
    summary = bench.run(
        *("launch", "mesh", "--local", "--num-steps", str(bench.num_steps)),
        device=bench.device,
        overrides=(*SMALL, *FLAT, *sizes),
    )
    return f"{ranks} ranks, loss {loss_of(summary):.4f}, {speed(summary)}"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "one process, float32": one_process,
    "one process, bf16": bf16,
    "one process, fp16 with loss scaling": fp16,
    "SyncPS, 2 workers on one device": syncps,
    "EDP, 2 workers on one device": edp,
    "DiLoCo, 4 workers on one device": diloco,
    "pipeline of a 4-bit model with LoRA, 3 stages on one device": four_bit,
    "mesh of all GPUs": mesh,
}


def checked(bench: Bench, what: str) -> Row:
    begun = time.monotonic()
    try:
        state, said = "ok", CHECKS[what](bench)
    except Skipped as error:
        state, said = "skipped", str(error)
    except (Failed, SmolclusterError) as error:
        state, said = "FAILED", str(error)
    row = Row(what, state, said, time.monotonic() - begun)
    say(f"{row.what}: {row.state}, {row.said} ({row.took_s:.0f} s)")
    return row


def machine(device: str) -> str:
    """What it was measured on."""
    if not device.startswith("cuda"):
        return f"no GPU, PyTorch {torch.__version__}"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}"


def write(rows: Sequence[Row], device: str, path: Path) -> None:
    """Leave the table of the rows so far, and the same as JSON beside it."""
    lines = [
        "# GPUs",
        "",
        f"`bash scripts/gpu_check.sh` on {machine(device)}:",
        "",
        "| | | | s |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.state} | {row.said} | {row.took_s:.0f} |" for row in rows),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    results = {"machine": machine(device), "rows": [asdict(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="What works on this machine's GPUs.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--to", type=Path, default=RESULTS, help="Markdown to write the table to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.device, Path(folder))
        rows: list[Row] = []
        for what in arguments.only:
            rows.append(checked(bench, what))
            write(rows, arguments.device, arguments.to)
    heading = ("check", "", "", "s")
    told = [(row.what, row.state, row.said, f"{row.took_s:.0f}") for row in rows]
    report(machine(arguments.device), [heading, *told])
    say(f"written to {arguments.to}")
    return int(any(row.state == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
