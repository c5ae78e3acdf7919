"""The logs of a run on three hosts come to a receiver that follows Loki's push API, on the controller."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Running
from launching import CACHE, LAUNCH_TIMEOUT_S, PACED, STORIES_TIMEOUT_S, Launching
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]
RECEIVED, WORDS = "received.jsonl", "promtail.log"
SHORT = ("num_epochs=40", "batch_size=32")
"""Long enough for all to join."""
PROMTAIL = """#!/bin/sh
echo "$LOKI_URL $SMOLCLUSTER_RUNS_DIR $*"
exec sleep 1000
"""


class Loki:
    """The receiver."""

    def __init__(self, launching: Launching) -> None:
        self._launching = launching
        self._running: Running | None = None

    def up(self) -> None:
        launching = self._launching
        words = [str(launching.programs / "python"), f"{launching.root}/tests/loki.py"]
        self._running = launching.popen([*words, "0.0.0.0", "3100", RECEIVED])  # noqa: S104
        eventually(
            lambda: "listening" in self._running.output if self._running else False, "a receiver"
        )

    def down(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def wait_for(self, expected: dict[tuple[str, str], list[str]]) -> None:
        """Until it holds just these lines: it answers a request before it writes them down."""
        eventually(lambda: self.texts() == expected, lambda: f"{self.texts()} != {expected}")

    def texts(self) -> dict[tuple[str, str], list[str]]:
        """The lines by the labels job and host, in their order."""
        found: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        for entry in self.entries():
            labels = entry["labels"]
            found[labels["job"], labels["host"]].append((entry["ns"], entry["text"]))
        return {key: [text for _, text in sorted(values)] for key, values in found.items()}

    def entries(self) -> list[dict[str, Any]]:
        text = self._launching.controller.path(RECEIVED).read_text()
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


@pytest.fixture
def loki(launching: Launching) -> Iterator[Loki]:
    launching.controller.path(RECEIVED).unlink(missing_ok=True)
    loki = Loki(launching)
    loki.up()
    yield loki
    loki.down()


def logs_of(launching: Launching, *nodes: str) -> dict[tuple[str, str], list[str]]:
    """What is in the log files of the newest run on these nodes."""
    files = [file for node in nodes for file in launching.folder(node).glob("logs/*.log")]
    return {_key(file): file.read_text().splitlines() for file in files}


def _key(file: Path) -> tuple[str, str]:
    return f"smolcluster-{file.stem.partition('-')[0]}", file.stem


def test_the_logs_of_every_node_arrive_and_nothing_is_left(
    launching: Launching, loki: Loki
) -> None:
    """Of a run that is left alone, with Promtail on a node; and of one that is stopped."""
    pi5 = launching.lab["pi5"]
    pi5.write(".local/bin/promtail", PROMTAIL, mode=0o755)
    left_alone = launching.run(launching.launch("--detach", "--override", *SHORT))
    assert left_alone.returncode == 0, left_alone.stderr
    launching.wait_until_clean()
    assert launching.status()["state"] == "ended"
    loki.wait_for(logs := logs_of(launching, "mini1", "mini2"))  # Promtail ships pi5's
    folder = f"{pi5.home}/{launching.projects['pi5']}"
    config = "-config.expand-env=true -config.file=logging/promtail-worker-remote.yaml"
    said = (launching.folder("pi5") / WORDS).read_text()
    url = f"http://{launching.controller.address}:3100"
    assert said.splitlines()[-1] == f"{url} {folder}/runs {config}"
    pi5.path(".local/bin/promtail").unlink()

    # Loki is away while the run is stopped; who ships later finds all that is missing.
    running = launching.popen(launching.launch("--no-sync", "--override", *PACED))
    running.wait_for("all have joined", LAUNCH_TIMEOUT_S)
    loki.down()
    stopped = launching.run(launching.command("stop"))
    assert stopped.returncode == 0, stopped.stdout
    assert running.wait(LAUNCH_TIMEOUT_S) != 0
    assert launching.is_clean(), launching.left()
    loki.up()
    for node, project in launching.projects.items():
        run = f"{project}/runs/{launching.run_id}"
        own = f"{CACHE}/projects/latest" if node in launching.brought else project
        program = [f"{own}/.venv/bin/python", "-P", "-m", "smolcluster.cli"]
        launching.lab[node].output([*program, "ship", f"./{run}", "--loki", url, "--once"])
    second = logs_of(launching, "mini1", "mini2", "pi5")
    assert {host for _, host in second} == {
        *("server-mini1", "worker-rank0-mini2", "worker-rank1-pi5"),
    }
    loki.wait_for({key: logs.get(key, []) + lines for key, lines in second.items()})
    labels = [entry["labels"] for entry in loki.entries()]
    assert {(each["component"], each.get("rank")) for each in labels} == {
        *(("server", None), ("worker", "0"), ("worker", "1")),
    }
    assert "INFO" in {each["level"] for each in labels}
