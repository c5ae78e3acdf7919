"""The folder `logging`: what Grafana, Loki, Prometheus and the shippers are told fits together."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from harness import free_port
from loki import Receiver, receiving
from smolcluster.launch.observe.stack import is_loki
from smolcluster.launch.observe.targets import listens
from smolcluster.observability.shipping.lines import LokiLine, labels_of
from smolcluster.observability.shipping.loki import LokiClient, PushReply, push_body
from smolcluster.runs.paths import log_stem
from smolcluster.utils.retry import Deadline
from waiting import DEADLINE_S

PROJECT = Path(__file__).resolve().parents[2]
STACK = PROJECT / "logging"
LABELS = {"job", "component", "host", "run", "rank", "level"}
"""Loki's."""
FIELDS = {"message"}
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


def page(name: str) -> Any:
    return json.loads((STACK / "grafana" / "dashboards" / f"{name}.json").read_text("utf-8"))


def test_every_dashboard_is_tested() -> None:
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
    made = static | set(stages["labels"])
    assert made == (LABELS if role == "worker" else LABELS - {"rank"})
    assert target["labels"]["job"] == f"smolcluster-{role}"
    assert target["labels"]["__path__"].endswith(f"/*/logs/{role}-*.log")
    assert target["labels"]["__path_exclude__"].endswith(f"/latest/logs/{role}-*.log")
    assert stages["labeldrop"] == ["filename"]
    stem = {"server": "server-mini2", "worker": "worker-rank12-mini2"}[role]
    found = re.search(stages["regex"]["expression"], f"/me/runs/edp-1/logs/{stem}.log")
    assert found is not None
    of_the_name = {"run": "edp-1", "component": role, "host": stem, "rank": "12"}
    assert found.groupdict() == {name: of_the_name[name] for name in found.groupdict()}
    assert set(found.groupdict()) | {"job", "level"} == made, (
        "lines that are no JSON have them, too"
    )
    [client] = config["clients"]
    assert client["url"].startswith("${LOKI_URL")
    assert client["url"].endswith("/loki/api/v1/push")


@pytest.mark.parametrize(
    ("role", "rank"),
    [
        *(("server", None), ("worker", 12), ("store", None), ("stage", None)),
        *(("rank", None), ("rank", 12)),
    ],
)
def test_alloy_gives_the_same_labels(role: str, rank: int | None) -> None:
    text = (STACK / "config.alloy").read_text()
    code = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    for opening, closing in ("()", "[]", "{}"):
        assert code.count(opening) == code.count(closing)
    [kept] = re.findall(r"stage\.label_keep \{\s*values = \[(.*?)\]", text)
    assert set(re.findall(r'"(\w+)"', kept)) == LABELS
    [made] = re.findall(r"stage\.labels \{\s*values = \{(.*?)\}", text)
    assert set(re.findall(r"(\w+) = ", made)) == LABELS - {"job"}
    assert text.count("/latest/logs/*") == text.count("__path__ ")
    assert f'/*/logs/{role}-*.log"' in text
    stem = log_stem(role, "mini2", rank)
    of_a_file: dict[str, str] = {}
    for expression in re.findall(r'expression = "(.*)"', text):
        if found := re.search(expression, f"/me/runs/edp-1/logs/{stem}.log"):
            of_a_file |= found.groupdict()
    labels = labels_of(stem, "edp-1")
    assert f'"{labels.pop("job")}"' in text
    assert of_a_file == labels
    assert 'sys.env("LOKI_URL")' in text


def test_nobody_else_reaches_the_stack_unless_asked_and_it_neither_starts_nor_grows_by_itself() -> (
    None
):
    services = yaml("docker-compose.yml")["services"]
    assert {name: service.get("ports") for name, service in services.items()} == {
        "grafana": ["127.0.0.1:3000:3000"],
        "loki": None,
        "push": ["${LOKI_BIND:-127.0.0.1}:3100:3100"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }
    for name, service in services.items():
        assert service["restart"] == "on-failure:5", name
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "a pinned version"
        if name != "push":
            assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name


@pytest.fixture
def pushing(tmp_path: Path) -> Iterator[tuple[str, Receiver]]:
    """The gateway before a receiver, run by an nginx of this machine; its address, and the receiver."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if nginx is None:
        pytest.skip("no nginx")
    port = free_port()
    with receiving() as receiver:
        config = (STACK / "push.conf").read_text()
        for old, new in {
            "listen 3100;": f"listen 127.0.0.1:{port};",
            "http://loki:3100": receiver.url,
        }.items():
            assert old in config
            config = config.replace(old, new)
        temporary = " ".join(
            f"{kind}_temp_path {tmp_path}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        whole = (
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; "
            f"events {{}} http {{ {temporary} {config} }}"
        )
        (tmp_path / "nginx.conf").write_text(whole)
        words = [nginx, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
            try:
                deadline = Deadline(DEADLINE_S)
                while not listens(f"127.0.0.1:{port}"):
                    assert process.poll() is None
                    assert not deadline.expired
                yield f"http://127.0.0.1:{port}", receiver
            finally:
                process.kill()


def test_through_the_open_port_logs_are_pushed_and_neither_read_nor_deleted(
    pushing: tuple[str, Receiver],
) -> None:
    url, receiver = pushing
    loki = LokiClient(url)
    entry = LokiLine((("job", "x"),), time.time_ns(), "a line")
    assert loki.push(push_body([entry])) == PushReply("accepted")
    loki.close()
    assert receiver.received.texts() == ["a line"]
    assert is_loki(url)
    for method, path in (
        ("POST", "/loki/api/v1/delete?query={job=~%22.%2B%22}"),
        ("PUT", "/loki/api/v1/delete"),
        ("GET", "/loki/api/v1/query_range"),
        ("GET", "/loki/api/v1/push"),
        ("POST", "/flush"),
        ("POST", "/loki/api/v1/push/../delete"),
    ):
        assert httpx.request(method, url + path, trust_env=False).status_code == 403, path


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=application/json"}, 415),
        ({}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil.example.org"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json"}, 204),
        ({"Content-Type": "application/json; charset=utf-8"}, 400),
        ({"Content-Type": "application/x-protobuf"}, 400),
    ],
)
def test_a_page_in_a_browser_pushes_no_logs(
    pushing: tuple[str, Receiver], headers: dict[str, str], code: int
) -> None:
    """What a page may send elsewhere without asking first has another type, and names the page.

    400 is the answer of the receiver behind, which understands the type alone that `ship` sends.
    """
    url, receiver = pushing
    body = push_body([LokiLine((("job", "x"),), time.time_ns(), "forged")])
    sent = {"Content-Encoding": "gzip", **headers}
    push = f"{url}/loki/api/v1/push"
    assert httpx.post(push, content=body, headers=sent, trust_env=False).status_code == code
    assert receiver.received.texts() == (["forged"] if code == 204 else [])


def test_grafana_has_no_usual_password_and_answers_by_one_name() -> None:
    environment = yaml("docker-compose.yml")["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert environment["GF_SERVER_DOMAIN"] == "localhost"
    assert environment["GF_SERVER_ENFORCE_DOMAIN"] == "true"


def test_lines_that_are_no_json_break_no_count() -> None:
    for expression in expressions("logs"):
        assert "| json" in expression
        stages = expression.partition("| json")[2]
        assert "| drop __error__, __error_details__" in stages
        assert "__error__" not in stages.partition("| drop __error__, __error_details__")[2]


def test_grafana_asks_loki_for_no_alerts() -> None:
    [loki] = [
        source
        for source in yaml("grafana/provisioning/datasources/smolcluster.yaml")["datasources"]
        if source["type"] == "loki"
    ]
    assert loki["jsonData"]["manageAlerts"] is False


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
    assert "deletion_mode" not in config["limits_config"], "an error in its log for each query"
    [period] = config["schema_config"]["configs"]
    assert period["index"]["period"] == "24h", "retention needs it"
