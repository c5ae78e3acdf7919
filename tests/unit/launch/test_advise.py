"""From what machines and links say to advice, without any machine."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from smolcluster.algorithms.planning.costs import Interface, Job, Site, Worker, costs_of
from smolcluster.configs.load import parse_yaml
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch import requests
from smolcluster.launch.advise import command
from smolcluster.launch.advise import speed as speeds
from smolcluster.launch.advise.command import (
    Found,
    as_overrides,
    can_follow,
    find_advice,
    options_of,
    questions_of,
    site_of,
    stated,
)
from smolcluster.launch.advise.measuring import Computer, busy, measure_all
from smolcluster.launch.advise.show import advice_line, as_document, lines, show
from smolcluster.launch.advise.speed import ASKED_FILE, CLUSTER_FILE, SPEED, Asked, Speed, meet
from smolcluster.launch.host import Done, Host
from smolcluster.launch.kept import keep_prediction
from smolcluster.launch.links import Way
from smolcluster.launch.plan import Request
from smolcluster.launch.project import packed
from smolcluster.launch.requests import resolved
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.advice import ADVICE, LinkSpeed
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.runs.paths import RunPaths

CLUSTER = """
host_ip: {mini1: 10.0.0.1, pi5: 10.0.0.1, win: 192.168.1.4}
server: mini1
workers: [mini1, pi5, win]
num_workers: 3
port: 65432
nodes: {mini1: {ssh: local}}
"""


def speed(seconds: float, *, tokens: int = 64) -> Speed:
    return Speed(
        compute_s=(seconds, seconds, seconds),
        update_s=0.0,
        batch_size=4,
        num_params=1_830_000,
        num_samples=1000,
        tokens_per_sample=tokens,
    )


def way(mb_s: float, crowd: float | None = None, address: str = "10.0.0.1") -> Way:
    return Way(address, "eth0", 1e-3, mb_s, mb_s, "fast", crowd, crowd)


def requested(folder: Path, *overrides: str) -> Request:
    file = folder / "cluster.yaml"
    if not file.exists():
        file.write_text(CLUSTER)
    return requests.request_of(
        local=False,
        num_workers=None,
        config=str(file),
        train_config="stdlib",
        overrides=("batch_size=4", *overrides),
    )


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., Request]:
    return partial(requested, tmp_path)


@pytest.fixture
def found(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Found]:
    """What is found where machines and links say this."""

    def make(speeds: Mapping[str, Speed], ways: Mapping[str, Way], *overrides: str) -> Found:
        monkeypatch.setattr(command, "_measured_there", lambda *_, **__: (speeds, ways))
        return find_advice(resolved(request_of(*overrides), local=False), said.append)

    said: list[str] = []
    return make


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What is found where links are slow, one of which has a better address: it takes two seconds."""
    ways = {"pi5": way(3, 2), "win": way(3, 2, address="10.0.0.9")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_measured_there", lambda *_, **__: (FAST, ways))
        request = requested(tmp_path_factory.mktemp("slow"))
        return find_advice(resolved(request, local=False), lambda _line: None)


@pytest.fixture
def tried(request_of: Callable[..., Request]) -> Callable[..., list[Mapping[str, Any]]]:
    """What else an algorithm tries where all hosts' links are as fast as the server's."""
    workers = tuple(Worker(name, 0.1, 0.0, 1e6, 1e6, 1e-3, "eth0") for name in ("pi5", "win"))
    site = Site(workers, {"eth0": Interface(1e6, 1e6)})

    def make(algorithm: str, *overrides: str) -> list[Mapping[str, Any]]:
        spec = get_algorithm(algorithm)
        request = replace(request_of(*overrides), algorithm=spec)
        asked, model = resolved(request, local=False), costs_of(spec)
        assert model is not None
        candidates = model.candidates(site, Job(1_000_000), asked.settings)
        return [keys for keys, _ in can_follow(asked, candidates)]

    return make


FAST = {"mini1": speed(0.35), "pi5": speed(0.9), "win": speed(0.35)}


def test_fast_links_are_worth_it_and_the_exact_algorithm_is_taken(
    found: Callable[..., Found],
) -> None:
    advice = found(FAST, {"pi5": way(1000, 900), "win": way(1000, 900)}).advice
    assert advice.chosen is not None
    assert advice.chosen.forecast.is_exact
    assert not advice.chosen.settings, "as the file says: lossless"
    assert advice.alone[0] == "mini1"
    assert advice.alone[1] == pytest.approx(4 / 0.35)
    assert 2 < advice.gain < 2.5


def test_links_that_carry_next_to_nothing_are_not(found: Callable[..., Found]) -> None:
    slow = found(
        {"mini1": speed(0.01), "pi5": speed(0.35), "win": speed(0.35)},
        {"pi5": way(0.01, 0.01), "win": way(0.01, 0.01)},
    )
    assert slow.advice.chosen is None
    assert slow.followed is None
    assert slow.prediction is None
    assert advice_line(slow).startswith(
        "do not distribute this: mini1 alone trains 25,600 tokens/s"
    )


def test_a_key_that_the_user_has_set_is_kept(found: Callable[..., Found]) -> None:
    ways = {"pi5": way(5, 3), "win": way(5, 3)}
    assert all(
        "codec" not in each.settings for each in found(FAST, ways, "codec=fp16").advice.options
    )


@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_candidates_that_contradict_what_is_stated_are_no_option(
    tried: Callable[..., list[Mapping[str, Any]]], algorithm: str
) -> None:
    """Only int8 agrees with use_quantization."""
    assert {keys.get("codec", "int8") for keys in tried(algorithm)} > {"int8"}
    quantized = tried(algorithm, "use_quantization=true")
    assert {keys.get("codec", "int8") for keys in quantized} == {"int8"}


@pytest.mark.parametrize("override", ["update_rule=mixing", "optimizer=muon", "ema_decay=0.9"])
def test_hosts_and_codecs_that_a_run_would_refuse_are_not_tried(
    tried: Callable[..., list[Mapping[str, Any]]], override: str
) -> None:
    assert any("servers" in keys for keys in tried("edp"))
    assert not any("servers" in keys for keys in tried("edp", override))
    if override == "update_rule=mixing":  # which travel whole
        assert {keys.get("codec", "fp32") for keys in tried("edp", override)} == {"fp32"}


def test_on_several_hosts_the_optimizer_that_auto_has_chosen_stays(
    tried: Callable[..., list[Mapping[str, Any]]],
) -> None:
    spread = [keys for keys in tried("syncps", "optimizer=auto") if "servers" in keys]
    assert spread
    assert all(keys["optimizer"] == "muon" for keys in spread)
    assert not any("servers" in keys for keys in tried("edp", "optimizer=auto"))


def test_where_no_algorithm_can_follow_it_is_one_line(
    found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = Mock(side_effect=ConfigError("timeout is 3, which is wrong"))
    monkeypatch.setattr(requests, "check_algorithm", refuses)
    with pytest.raises(ConfigError, match="EDP is left out: timeout is 3, which is wrong; "):
        found(FAST, {"pi5": way(5, 3), "win": way(5, 3)})


def test_what_the_environment_says_is_kept() -> None:
    asked = requests.request_of(
        local=True,
        num_workers=1,
        config=None,
        train_config=None,
        overrides=["training.batch_size=4", "diloco.local_steps=16"],
    )
    environ = {"SMOLCLUSTER_CODEC": "int8", "SMOLCLUSTER_EDP__STALENESS__BOUND": "3", "HOME": "/"}
    assert stated(asked, environ) == {"batch_size", "local_steps", "codec", "staleness"}


def test_what_is_launched_has_the_algorithm_and_its_settings(slow: Found) -> None:
    result = slow
    assert result.followed is not None
    request = result.followed.request
    assert request.overrides[1:], "slow links want a codec"
    assert result.advice.chosen is not None
    assert request.algorithm.name == result.advice.chosen.algorithm
    settings = as_overrides(result.advice.chosen.settings)
    assert request.overrides == ("batch_size=4", *settings)
    assert result.prediction is not None
    assert result.prediction.samples_per_s == result.advice.chosen.forecast.samples_per_s
    measured = LinkSpeed(up_bytes_s=3e6, down_bytes_s=3e6)
    assert result.prediction.links == {"pi5": measured, "win": measured}


def test_a_better_address_is_named(slow: Found) -> None:
    told = list(lines(slow))
    assert told[0] == "host_ip.win: 10.0.0.9 is better than 192.168.1.4 (fast)"
    assert "host_ip.pi5" not in "".join(told)


def test_the_document_has_all_of_it(slow: Found) -> None:
    document = json.loads(json.dumps(as_document(slow)))
    assert document["distribute"] is True
    assert {each["algorithm"] for each in document["options"]} >= {document["advice"]["algorithm"]}
    assert document["alone"]["machine"] == "mini1"
    assert document["links"]["pi5"]["crowd_up_mb_s"] == 2
    assert document["machines"]["pi5"]["num_params"] == 1_830_000


def test_the_tables_fit_a_terminal(slow: Found) -> None:
    printed = io.StringIO()
    console = SteadyConsole(file=printed, width=100)
    show(slow, console)
    text = printed.getvalue()
    assert "mini1 alone" in text
    assert "launch --auto, does it" in text


def test_a_machine_alone_is_no_slower_than_one_of_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured one after the other, on a machine that is busy only while it is measured alone."""

    def fake(computers: list[Computer], *_: object) -> dict[str, Speed]:
        seconds = 10.0 if computers[0].host.node == command.ALONE else 0.5
        return {computer.host.node: speed(seconds) for computer in computers}

    monkeypatch.setattr(command, "measure_all", fake)
    monkeypatch.setattr(command, "options_of", predicting := Mock(wraps=options_of))
    request = requests.request_of(
        local=True, num_workers=2, config=None, train_config="stdlib", overrides=["batch_size=4"]
    )
    found = find_advice(resolved(request, local=True), lambda _: None)
    assert found.advice.alone == (command.ALONE, 8.0)
    assert predicting.call_args.args[1].num_cores == os.cpu_count()


# What connects them


def test_links_are_shared_by_who_answered_elsewhere(
    request_of: Callable[..., Request],
) -> None:
    settings = load_settings(str(request_of().config), "stdlib", environ={})
    site = site_of(settings, FAST, {"pi5": way(50, 20), "win": way(80, 30)})
    assert [worker.via for worker in site.workers] == ["", "eth0", "eth0"]
    assert site.interfaces["eth0"].in_bytes_s == 80e6, "one alone has brought more than both"
    crowded = site_of(settings, FAST, {"pi5": way(80, 60), "win": way(80, 60)})
    assert crowded.interfaces["eth0"].in_bytes_s == 120e6
    ways = {"pi5": way(80, 40), "win": way(80, 40, address="fd00::1")}
    assert site_of(settings, FAST, ways).interfaces["eth0"].in_bytes_s == 80e6, "of two addresses"
    site = site_of(settings, {"win": speed(1)}, {"win": way(1)})
    assert ([worker.name for worker in site.workers], site.interfaces) == (["win"], {})


def test_an_algorithm_that_cannot_follow_the_files_is_left_out_with_a_line(
    request_of: Callable[..., Request],
) -> None:
    asked, said = request_of("global_batch_size=12"), list[str]()
    settings = load_settings(str(asked.config), "stdlib", None, asked.overrides, {})
    site = site_of(settings, FAST, {"pi5": way(5), "win": way(5)})
    options = list(options_of(resolved(asked, local=False), site, Job(1000), 4, said.append))
    assert [each.algorithm for each in options] == ["syncps"]
    assert said
    assert all("global_batch_size is 12" in line for line in said)


def test_overrides_are_as_they_are_typed() -> None:
    assert as_overrides({"codec": "int8", "elastic": False, "local_steps": 8}) == (
        "codec=int8",
        "elastic=false",
        "local_steps=8",
    )


# Machines


def test_a_machine_whose_speed_jumps_is_busy() -> None:
    jumping = speed(1).model_copy(update={"compute_s": (1.0, 1.7, 1.1)})
    line = busy("pi5", jumping)
    assert line is not None
    assert line.startswith("pi5 is busy: the same batch took 1.7 times as long")
    assert busy("pi5", speed(1)) is None


def test_who_cannot_be_measured_is_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(host: Host, _script: str, **_: object) -> Done:
        match host.node:
            case "far":
                raise host.unreachable("connect to host far port 22: No route to host")
            case "bare":
                return Done(9, "", "the project has no environment there")
            case "odd":
                return Done(0, "hello", "")
        return Done(0, f"welcome\n{speed(0.5).model_dump_json()}\n", "")

    monkeypatch.setattr(Host, "run", run)
    nodes = ("far", "bare", "odd", "ok")
    computers = [Computer(Host(node, node), "python", "~", b"") for node in nodes]
    said: list[str] = []
    assert measure_all(computers, said.append, SPEED) == {"ok": speed(0.5)}
    told = [line for line in said if line.endswith("it is left out")]
    assert len(told) == 3
    assert all("\n" not in line for line in told)


def test_what_is_measured_imports_nothing_of_the_folder_in_which_it_is_asked(
    tmp_path: Path,
) -> None:
    (tmp_path / "dataclasses.py").write_text("raise SystemExit(9)\n")
    question = packed({ASKED_FILE: b"{"})
    computer = Computer(Host("mini1"), sys.executable, str(tmp_path), question)
    said: list[str] = []
    assert measure_all([computer], said.append, SPEED) == {}
    assert "is damaged" in said[-1]


def test_a_machine_is_sent_all_that_it_needs_to_know(request_of: Callable[..., Request]) -> None:
    overrides = ("batch_size=4", "threads=2", "num_workers=2")
    request = replace(request_of(*overrides[1:]), without=("win",))
    packed = questions_of(resolved(request, local=False))(node="pi5")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert {each.mode for each in tar} == {0o600}
        asked = tar.extractfile(ASKED_FILE)
        assert asked is not None
        assert Asked.model_validate_json(asked.read()).overrides == overrides
        told = tar.extractfile(CLUSTER_FILE)
        assert told is not None
        assert parse_yaml(told.read().decode())["workers"] == ["mini1", "pi5"]


def test_a_batch_larger_than_an_epoch_is_measured_by_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speeds, "ROUND_S", 0.0)
    asked = ("batch_size=1000", "gradient_accumulation=3", "model.hidden=2", "threads=1")
    found = speeds.measure(load_settings("edp", "digits", overrides=asked, environ={}))
    assert found.batch_size == 3000
    assert found.num_samples < 3000
    assert all(seconds > 0 for seconds in found.compute_s)


def test_processes_meet(tmp_path: Path) -> None:
    (tmp_path / "another").touch()
    meet(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_measured_is_kept_where_the_report_and_the_page_are_made(
    slow: Found, tmp_path: Path
) -> None:
    prediction = slow.prediction
    assert prediction is not None
    here, there = (RunPaths(tmp_path / name) for name in ("here", "there"))
    here.root.mkdir()
    there.root.mkdir()
    server = LaunchedProcess(node="mini1", role="server", run_dir=str(there.root))
    keep_prediction(prediction, server, here)
    assert ADVICE.read(here.advice) == ADVICE.read(there.advice) == prediction
