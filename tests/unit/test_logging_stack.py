"""The folder `logging`: what Grafana, Loki, Prometheus and the shippers are told fits together."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ruamel.yaml import YAML

PROJECT = Path(__file__).resolve().parents[2]
STACK = PROJECT / "logging"
LABELS = {"job", "component", "host", "rank", "level"}
"""Loki's."""
FIELDS = {"run", "message"}
"""Of a log line, which queries may take out of it."""
NAMES = ("run", "workers", "links", "logs")
USERS_QUERIES = (
    '{job="smolcluster-worker"}',
    '{job="smolcluster-server"}',
    '{host="worker-rank0-mini2"}',
    '{level="ERROR"}',
    '{job="smolcluster-worker"} |= "loss"',
)


def yaml(path: str) -> Any:
    return YAML(typ="safe").load((STACK / path).read_text(encoding="utf-8"))


def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_dashboards", PROJECT / "scripts" / "make_dashboards.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def page(name: str) -> Any:
    return json.loads((STACK / "grafana" / "dashboards" / f"{name}.json").read_text("utf-8"))


def test_the_dashboards_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(monkeypatch)
    for dashboard in made.DASHBOARDS:
        file = STACK / "grafana" / "dashboards" / f"{dashboard.name.lower()}.json"
        assert file.read_text("utf-8") == made.rendered(dashboard), (
            "uv run scripts/make_dashboards.py"
        )
    assert {file.stem for file in (STACK / "grafana" / "dashboards").iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap_and_use_data_sources_that_are_provisioned(name: str) -> None:
    known = {
        source["uid"]
        for source in yaml("grafana/provisioning/datasources/smolcluster.yaml")["datasources"]
    }
    taken: set[tuple[int, int]] = set()
    for panel in page(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert {
            panel["datasource"]["uid"],
            *(t["datasource"]["uid"] for t in panel["targets"]),
        } <= known


@pytest.mark.parametrize("name", NAMES)
def test_queries_use_variables_that_are_there(name: str) -> None:
    shown = page(name)
    known = {variable["name"] for variable in shown["templating"]["list"]}
    own = {"__rate_interval", "__auto"}
    for expression in expressions(name):
        assert set(re.findall(r"\$(\w+)", expression)) <= known | own


def expressions(name: str) -> Iterator[str]:
    for panel in page(name)["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def selector(query: str) -> str:
    """The first pair of braces of a LogQL query, quotes respected."""
    found = re.search(r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}', query)
    assert found, query
    return found[1]


@pytest.mark.parametrize("query", [*USERS_QUERIES, *expressions("logs")])
def test_logs_are_asked_for_by_labels_that_they_have(query: str) -> None:
    matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"', selector(query))
    assert {label for label, _, _ in matchers} <= LABELS
    certain = [
        value for _, sign, value in matchers if sign in ("=", "=~") and value not in ("", ".*")
    ]
    assert certain, "Loki refuses a query whose matchers all match nothing"
    parsed = set(re.findall(r'(\w+)="\w+"', query.partition("| json")[2].partition("|")[0]))
    assert parsed <= FIELDS
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


@pytest.mark.parametrize("role", ["server", "worker"])
def test_promtail_gives_every_label_and_leaves_the_link_out(role: str) -> None:
    config = yaml(f"promtail-{role}-remote.yaml")
    [job] = config["scrape_configs"]
    [target] = job["static_configs"]
    stages = {name: stage for each in job["pipeline_stages"] for name, stage in each.items()}
    static = {name for name in target["labels"] if not name.startswith("__")}
    assert static | set(stages["labels"]) == LABELS
    assert target["labels"]["job"] == f"smolcluster-{role}"
    assert target["labels"]["__path__"].endswith(f"/*/logs/{role}-*.log")
    assert target["labels"]["__path_exclude__"].endswith(f"/latest/logs/{role}-*.log")
    assert stages["labeldrop"] == ["filename"]
    [host] = re.findall(stages["regex"]["expression"], f"/runs/r1/logs/{role}-rank0-mini2.log")
    assert host == (f"{role}-rank0-mini2", role)
    [client] = config["clients"]
    assert client["url"].startswith("${LOKI_URL")
    assert client["url"].endswith("/loki/api/v1/push")


def test_alloy_gives_the_same_labels() -> None:
    text = (STACK / "config.alloy").read_text()
    code = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    for opening, closing in ("()", "[]", "{}"):
        assert code.count(opening) == code.count(closing)
    [kept] = re.findall(r"stage\.label_keep \{\s*values = \[(.*?)\]", text)
    assert set(re.findall(r'"(\w+)"', kept)) == LABELS
    [made] = re.findall(r"stage\.labels \{\s*values = \{(.*?)\}", text)
    assert set(re.findall(r"(\w+) = ", made)) == LABELS - {"job"}
    assert text.count("/latest/logs/*") == 2
    assert 'sys.env("LOKI_URL")' in text


def test_who_is_on_the_network_reaches_loki_and_nothing_else() -> None:
    services = yaml("docker-compose.yml")["services"]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    assert services["loki"]["ports"] == ["${LOKI_BIND:-0.0.0.0}:3100:3100"]
    for name, service in services.items():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "a pinned version"
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name


def test_what_is_mounted_is_there() -> None:
    compose = yaml("docker-compose.yml")
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (
                (STACK / source).exists()
                if source.startswith(".")
                else source in compose["volumes"]
            )


def test_loki_forgets_what_is_old() -> None:
    config = yaml("loki-config.yaml")
    assert config["compactor"]["retention_enabled"]
    assert config["compactor"]["delete_request_store"] == "filesystem"
    assert config["limits_config"]["retention_period"] == "720h"
    [period] = config["schema_config"]["configs"]
    assert period["index"]["period"] == "24h", "retention needs it"
