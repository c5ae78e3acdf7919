"""Tiny texts and language models, for tests of whole runs."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from harness import free_port
from smolcluster.algorithms import single
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.observability.logs import NodeLog
from smolcluster.runs.summary import Summary
from smolcluster.training.workload import Workload

TINY = (
    "model.model_dim=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.ff_dim=32",
    "model.max_seq_len=16",
    "model.dropout=0",
    "data.name=text",
    "training.batch_size=4",
    "training.eval_steps=10",
    "training.track_gradients=false",
    "lr_schedule.warmup_iters=5",
    "threads=1",
)
"""Overrides of the shipped `stdlib` that make a run of it one of a second."""
FROZEN = ("optimizer=sgd", "lr_schedule=null", "training.learning_rate=1e-30")
"""Overrides with which weights stay as they are: no evaluation is lower than the first one."""
WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "and", "the"),
    *("dog", "ran", "to", "find", "it", "in", "red", "sun"),
)


def write_text(path: Path, num_words: int = 300) -> Path:
    """Write some sentences, the same ones each time: about 4 bytes a word."""
    chosen = random.Random(1)  # noqa: S311 - for words
    words = [chosen.choice(WORDS) for _ in range(num_words)]
    lines = [" ".join(words[start : start + 8]) for start in range(0, num_words, 8)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_settings(
    text: Path,
    runs: Path | None = None,
    *overrides: str,
    workers: int = 1,
    algorithm: AlgorithmName = "edp",
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """What `--local` uses to train a tiny GPT on a file."""
    places = [f"data.root={text}", *([] if runs is None else [f"runs_dir={runs}"])]
    cluster = [f"port={free_port()}", "heartbeat_timeout_s=60", "empty_cluster_timeout_s=20"]
    return load_settings(
        "edp" if algorithm == "single" else algorithm,
        "stdlib",
        None,
        [*TINY, *places, *cluster, *overrides],
        environ=environ or {},
        local=True,
        local_workers=workers,
    )


def train_alone(
    settings: Settings,
    run_id: str,
    *,
    resume: str | None = None,
    body: Callable[[ServerContext], Summary] = single.train,
    workload: Workload | None = None,
) -> None:
    """Own a run in this process, as `smolcluster train` does."""
    log = NodeLog("trainer", "me")
    try:
        own_run(
            Owner("single", "trainer", "me", settings, workload=workload),
            log,
            body,
            run_id=run_id,
            resume=resume,
            progress=None,
            output=None,
        )
    finally:
        log.close()
