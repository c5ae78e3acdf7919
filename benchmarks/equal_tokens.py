"""The loss of DiLoCo beside that of synchronous training with the same total batch, at equal tokens.

What runs is what a user runs: `smolcluster train` with batches of 32, and `smolcluster launch diloco` with
four workers of this machine and batches of 8 each (two or eight workers in arms that say so), both on the
workload of `shakespeare.py`; the loss is that of `summary.json`. An epoch is 500 steps. Warm-up over 100,
then a cosine to a tenth of the rate, clipping at 1, weight decay 0.01.

The rate is the best for synchronous training, on a grid of √2, chosen on the first seed; DiLoCo with the same
optimizer has the same. Seeds are paired: what an arm loses is the mean of the differences seed by seed, with
its standard error.

Runs whose results are in the file are not repeated. Each size of model has a file of its own.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from common import PROJECT, free_port, report, say
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary

TOTAL_BATCH = 32
STEPS_AN_EPOCH, WARM_UP = 500, 100
WORKLOAD = Path(__file__).with_name("shakespeare.py")
RESULTS = PROJECT / "benchmarks" / "results"
MODELS = {"0.12M": (64, 2), "1.84M": (192, 4)}
"""Width and layers, by the number of parameters."""
FILES = {"0.12M": RESULTS / "diloco.json", "1.84M": RESULTS / "diloco-1.84M.json"}
DEADLINE_S = 3600.0
INT4 = "codec_up=int4", "codec_down=int4"
FP32 = "codec_up=null", "codec_down=null"
NO_BEGINNING = "sync_fraction=0"
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "0.12M": {"adamw": (0.0028, 0.004, 0.0057, 0.008, 0.0113), "muon": (0.008, 0.0113, 0.016)},
    "1.84M": {"adamw": (0.002, 0.0028, 0.004), "muon": (0.0057, 0.008, 0.0113)},
}


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        overrides: of DiLoCo; None: it is synchronous, in one process.
        wanted: so many nats it may lose.
        num_workers: of DiLoCo; the total batch is the same for all.
    """

    title: str
    optimizer: str
    overrides: tuple[str, ...] | None = None
    wanted: float | None = None
    num_workers: int = 4


ARMS = {
    "adamw": Arm("synchronous AdamW", "adamw"),
    "muon": Arm("synchronous Muon", "muon"),
    "adamw-shipped": Arm("AdamW, H by measured times", "adamw", ("local_steps=null", *INT4), 0.03),
    "muon-shipped": Arm("Muon, H by measured times", "muon", ("local_steps=null", *INT4), 0.03),
    "adamw-int4": Arm("AdamW, streaming, int4", "adamw", INT4, 0.03),
    "adamw-sync-int4": Arm("AdamW, sync, int4", "adamw", ("mode=sync", *INT4), 0.03),
    "adamw-no-beginning": Arm(
        "AdamW, streaming, int4, no beginning", "adamw", (NO_BEGINNING, *INT4)
    ),
    "muon-int4": Arm("Muon, streaming, int4", "muon", INT4, 0.02),
    "muon-sync-int4": Arm("Muon, sync, int4", "muon", ("mode=sync", *INT4), 0.02),
    "muon-sync-fp32": Arm("Muon, sync, fp32", "muon", ("mode=sync", *FP32), 0.02),
    "muon-no-beginning": Arm("Muon, streaming, int4, no beginning", "muon", (NO_BEGINNING, *INT4)),
    "muon-async-int4": Arm("Muon, async, int4", "muon", ("mode=async", *INT4), 0.05),
    "muon-30": Arm("Muon, streaming, int4, H = 30", "muon", ("local_steps=30", *INT4), 0.03),
    "muon-sync-30": Arm(
        "Muon, sync, int4, H = 30", "muon", ("mode=sync", "local_steps=30", *INT4), 0.03
    ),
    "muon-5": Arm("Muon, streaming, int4, H = 5", "muon", ("local_steps=5", *INT4), 0.03),
    "muon-3": Arm("Muon, streaming, int4, H = 3", "muon", ("local_steps=3", *INT4), 0.03),
    "muon-2": Arm("Muon, streaming, int4, 2 workers", "muon", INT4, num_workers=2),
    "muon-8": Arm("Muon, streaming, int4, 8 workers", "muon", INT4, num_workers=8),
}
"""Four workers and H = 10, where nothing else is said; all but those that say so begin synchronously."""


@dataclass(frozen=True)
class Result:
    """A run's validation loss, nats a byte, and the megabytes of one worker, up and down."""

    arm: str
    epochs: int
    rate: float
    seed: int
    loss: float
    mb: float

    @property
    def key(self) -> tuple[str, int, float, int]:
        return self.arm, self.epochs, self.rate, self.seed


class Results:
    """What has been measured, in a JSON file."""

    def __init__(self, file: Path, text: Path, model: str) -> None:
        self._file, self._text, self._model = file, text, model
        known = json.loads(file.read_text()) if file.is_file() else []
        self.all = {each.key: each for each in (Result(**one) for one in known)}

    def of(self, name: str, epochs: int, rate: float, seed: int) -> Result:
        """Of this run, which is made if it has not been."""
        key = name, epochs, rate, seed
        if key not in self.all:
            self.all[key] = trained(name, epochs, rate, seed, self._text, model=self._model)
            ordered = sorted(self.all.values(), key=lambda each: each.key)
            self._file.write_text(json.dumps([asdict(each) for each in ordered], indent=1) + "\n")
        return self.all[key]

    def rate(self, name: str, epochs: int) -> float:
        """The best for synchronous training with the arm's optimizer."""
        optimizer = ARMS[name].optimizer
        return _best_rate(
            [self.of(optimizer, epochs, rate, 0) for rate in RATES[self._model][optimizer]]
        )

    def seeds(self, name: str, epochs: int, num_seeds: int) -> list[Result]:
        """One a seed, with that rate."""
        rate = self.rate(name, epochs)
        return [self.of(name, epochs, rate, seed) for seed in range(num_seeds)]

    def losses(self, name: str, epochs: int) -> dict[int, float]:
        """What there is of an arm, by seed."""
        known = [each for each in self.all.values() if each.epochs == epochs]
        firsts = [each for each in known if (each.arm, each.seed) == (ARMS[name].optimizer, 0)]
        rate = _best_rate(firsts) if firsts else None
        return {each.seed: each.loss for each in known if (each.arm, each.rate) == (name, rate)}


def _best_rate(tried: Sequence[Result]) -> float:
    return min(tried, key=lambda each: each.loss).rate


def trained(name: str, epochs: int, rate: float, seed: int, text: Path, *, model: str) -> Result:
    """Train in a folder that is removed afterwards."""
    arm = ARMS[name]
    program: tuple[str, ...] = ("train",)
    num_workers = 1
    if arm.overrides is not None:
        num_workers = arm.num_workers
        program = ("launch", "diloco", "--local", "--workers", str(num_workers), "--no-tmux")
    with TemporaryDirectory() as folder:
        overrides = {
            "runs_dir": folder,
            "workload_args.text": text.resolve(),
            "workload_args.model_dim": MODELS[model][0],
            "workload_args.num_layers": MODELS[model][1],
            "threads": 1,
            "seed": seed,
            "num_epochs": epochs,
            "batch_size": TOTAL_BATCH // num_workers,
            "optimizer": arm.optimizer,
            "weight_decay": 0.01,
            "learning_rate": rate,
            "lr_schedule.warmup_iters": WARM_UP,
            "lr_schedule.min_lr": rate / 10,
            "gradient_clipping.enabled": "true",
            "gradient_clipping.max_norm": 1.0,
            "eval_steps": 1_000_000,
            "track_gradients": "false",
        }
        command = [sys.executable, "-m", "smolcluster.cli", *program, "--workload"]
        command += [f"{WORKLOAD}:workload", "--override"]
        command += [f"{key}={value}" for key, value in overrides.items()]
        if arm.overrides is not None:
            command += [f"port={free_port()}", "local_steps=10", *arm.overrides]
        done = subprocess.run(
            command,
            env=os.environ | {"WANDB_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            cwd=folder,
        )
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}: {done.stdout}{done.stderr}")
        summary = read_summary(find_run(Path(folder)).summary)
    loss, nbytes = summary.final.val_loss, summary.bytes.sent + summary.bytes.received
    if loss is None:
        raise SystemExit(f"{name} has no validation loss")
    say(f"{name}, {epochs} epochs, rate {rate:g}, seed {seed}: {loss:.4f}")
    return Result(name, epochs, rate, seed, round(loss, 5), round(nbytes / num_workers / 1e6, 1))


def rows(
    results: Results, epochs: int, names: Sequence[str], num_seeds: int
) -> Iterator[tuple[str, ...]]:
    """The table of runs of so many epochs, each row once it is measured."""
    yield "", "rate", "nats a byte", "beyond", "wanted", "seeds", "MB a worker"
    for name in names:
        arm = ARMS[name]
        own = results.seeds(name, epochs, num_seeds)
        beside = results.seeds(arm.optimizer, epochs, num_seeds)
        beyond = [one.loss - other.loss for one, other in zip(own, beside, strict=True)]
        wanted = "" if arm.wanted is None else f"<= {arm.wanted}"
        figures = f"{own[0].rate:g}", with_error([each.loss for each in own], "")
        yield (
            arm.title,
            *figures,
            "" if arm.overrides is None else with_error(beyond, "+"),
            wanted,
            str(num_seeds),
            f"{own[0].mb:g}" if own[0].mb else "",
        )


def with_error(values: Sequence[float], sign: str) -> str:
    """The mean, and its standard error where there are several."""
    error = f" ± {stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.4f}{error}"


def measure_loss(
    names: Sequence[str],
    epochs: Sequence[int],
    num_seeds: int,
    text: Path,
    *,
    model: str,
    out: Path | None = None,
) -> None:
    """Measure what is missing in `out`, print a table for each number of epochs, and draw them."""
    out = out or FILES[model]
    results = Results(out, text, model)
    for number in epochs:
        steps = f"{number * STEPS_AN_EPOCH} steps of {TOTAL_BATCH} samples"
        report(
            f"Loss at equal tokens, {model} parameters, {steps}",
            list(rows(results, number, names, num_seeds)),
        )
    draw(results, out.with_suffix(".svg"))


def draw(results: Results, file: Path) -> None:
    """Each seed's loss, by arm."""
    import matplotlib as mpl  # noqa: PLC0415 - not for the processes of a run

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "diloco"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    lengths = sorted({each.epochs for each in results.all.values()})
    shown = [
        (name, arm)
        for name, arm in reversed(ARMS.items())
        if any(results.losses(name, epochs) for epochs in lengths)
    ]
    figure, panels = plt.subplots(
        1,
        len(lengths),
        figsize=(6 * len(lengths), 5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for epochs, panel in zip(lengths, panels[0], strict=True):
        for height, (name, arm) in enumerate(shown):
            losses = list(results.losses(name, epochs).values())
            panel.plot(losses, [height] * len(losses), "o", color="C0" if arm.overrides else "C1")
        panel.set(
            title=f"{epochs * STEPS_AN_EPOCH} steps",
            xlabel="validation loss, nats a byte, a dot a seed",
            yticks=range(len(shown)),
            yticklabels=[arm.title for _, arm in shown],
        )
        panel.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None})
