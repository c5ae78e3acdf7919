"""Prometheus itself reads what the project serves, and every panel of the dashboards finds its data.

Needs Debian's packages `prometheus` (with promtool) and, for one test, `docker-compose`.
"""

import json
import math
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from exporting import METER, a_status, a_worker, free_ports
from harness import free_port, local_settings
from processes import Processes
from smolcluster.launch.observe.targets import targets_of, write_targets
from smolcluster.observability.exporter import (
    RunCollector,
    metrics_address,
    serve_metrics,
)
from smolcluster.runs.launched import LaunchedProcess, Process
from smolcluster.runs.status import RunStatus
from waiting import eventually

STACK = Path(__file__).resolve().parents[2] / "logging"
DASHBOARDS = STACK / "grafana" / "dashboards"
DEADLINE_S = 150.0
RATE_INTERVAL = "3s"
BAD_QUERY = 400

Answer = list[dict[str, Any]]


def tool(name: str) -> str:
    """The path of a program that not every machine has."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def promtool(*words: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *words],
        cwd=STACK,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_the_configuration_and_the_rules_right() -> None:
    assert "5 rules found" in promtool("check", "config", "prometheus.yml")


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules/alerts_test.yml")


def test_debians_old_compose_understands_the_file() -> None:
    done = subprocess.run(
        [tool("docker-compose"), "config"],
        cwd=STACK,
        env={"PATH": os.environ["PATH"], "GRAFANA_PASSWORD": "other"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "GF_SECURITY_ADMIN_PASSWORD: other" in done.stdout


class Prometheus:
    """A Prometheus with the project's own configuration, but that it asks more often."""

    def __init__(self, processes: Processes) -> None:
        self.targets = processes.folder / "stack"
        self.targets.mkdir()
        self._port = free_port()
        config = YAML(typ="safe").load((STACK / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "300ms", "evaluation_interval": "1s"}
        config["rule_files"] = [str(STACK / "rules" / "alerts.yml")]
        [job] = config["scrape_configs"]
        [found] = job["file_sd_configs"]
        found |= {"files": [str(self.targets / "targets" / "*.json")], "refresh_interval": "1s"}
        job["scrape_timeout"] = "300ms"
        assert "host.docker.internal" in job["relabel_configs"].pop()["replacement"]
        file = processes.folder / "prometheus.yml"
        file.write_text(json.dumps(config))
        processes.start(
            tool("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={processes.folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        )

    def ask(self, expression: str) -> Answer:
        """What an expression gives now; nothing while Prometheus starts."""
        words = urllib.parse.urlencode({"query": expression})
        try:
            url = f"http://127.0.0.1:{self._port}/api/v1/query?{words}"
            with urllib.request.urlopen(url, timeout=10) as reply:
                return list(json.load(reply)["data"]["result"])
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == BAD_QUERY:
                raise AssertionError(f"{expression}: {error.read().decode()}") from error
            return []

    def wait_for_labels(
        self, expression: str, names: tuple[str, ...], *values: tuple[str, ...]
    ) -> None:
        """Wait until its series are these by some of their labels; for moments there may be none."""

        def are_there() -> bool:
            found = [each["metric"] for each in self.ask(expression)]
            return sorted(tuple(each[name] for name in names) for each in found) == sorted(values)

        eventually(are_there, f"not so: {names} of {expression} are {values}")


def panels() -> Iterator[tuple[str, str]]:
    """The PromQL of every panel, with its dashboard and title."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        page = json.loads(file.read_text())
        for panel in page["panels"]:
            for target in panel["targets"]:
                if target["datasource"]["type"] == "prometheus":
                    yield f"{page['title']}: {panel['title']}", target["expr"]


def filled_in(expression: str) -> str:
    """An expression as Grafana would send it, for all runs and nodes."""
    for name, value in (("$__rate_interval", RATE_INTERVAL), ("$run", ".*"), ("$node", ".*")):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def is_data(answer: Answer) -> bool:
    return any(not math.isnan(float(each["value"][1])) for each in answer)


def processes_of(*nodes: str) -> list[LaunchedProcess]:
    """A server on mini1 and a worker on each of the nodes."""
    server = LaunchedProcess(
        node="mini1", role="server", rank=None, ssh=None, run_dir="r", session="s"
    )
    return [
        server,
        *(
            server.model_copy(update={"node": node, "role": "worker", "rank": rank})
            for rank, node in enumerate(nodes)
        ),
    ]


def moving_status(step: int) -> RunStatus:
    """A run of so many steps, with perplexity as well as accuracy."""
    workers = [
        a_worker(
            rank,
            node,
            samples=step * 50,
            sent_bytes=step * 1000,
            received_bytes=step * 2000,
            staleness=[step, step, 0, 0, 0, 0, 0, 0],
        )
        for rank, node in enumerate(("pi5", "win"))
    ]
    pushes = {"applied": step, "stale": step // 2}
    return a_status(
        step=step, samples_applied=step * 100, workers=workers, pushes=pushes, val_perplexity=12.0
    )


def moving(who: Process, runs: Path) -> RunCollector:
    """A process that has gone a step further whenever it is asked."""
    steps, meter = count(1), replace(METER)

    def step() -> RunStatus | None:
        meter.steps, meter.samples = meter.steps + 1, meter.samples + 32
        meter.seconds = [seconds + 0.01 for seconds in meter.seconds]
        return moving_status(next(steps)) if who.rank is None else None

    return RunCollector(who, meter, runs, status=step)


def test_every_panel_has_data(processes: Processes, tmp_path: Path) -> None:
    prometheus = Prometheus(processes)
    cluster = local_settings(f"metrics_port={free_ports(3)}", workers=2).cluster
    started = processes_of("pi5", "win")
    targets = targets_of("r1", started, cluster)
    write_targets(prometheus.targets, "r1", targets)
    with ExitStack() as serving:
        for process in started:
            who = Process(role=process.role, node=process.node, rank=process.rank)
            worker_id = None if process.rank is None else process.rank + 1
            served = metrics_address(cluster, worker_id)
            assert served is not None
            serving.enter_context(serve_metrics(moving(who, tmp_path), *served, warn=pytest.fail))
        missing = list(panels())

        def all_there() -> bool:
            missing[:] = [
                (title, expression)
                for title, expression in missing
                if not is_data(prometheus.ask(filled_in(expression)))
            ]
            return not missing

        eventually(all_there, lambda: f"missing: {missing}")
        prometheus.wait_for_labels("smolcluster_loss", ("run",), ("r1",))
        steps = 'smolcluster_process_steps_total{role="worker"}'
        prometheus.wait_for_labels(steps, ("rank", "node"), ("0", "pi5"), ("1", "win"))
        up = 'smolcluster_worker_up{node="win"} == 1'
        prometheus.wait_for_labels(up, ("node",), ("win",))
        prometheus.wait_for_labels("smolcluster_run_info", ("algorithm",), ("edp",))
        alert = 'ALERTS{alertname="StalenessBeyondBound"}'
        eventually(lambda: prometheus.ask(alert), "no alert of dropped pushes")
