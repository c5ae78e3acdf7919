"""Diagrams of plans, cluster files and runs."""

import shutil
from pathlib import Path

import pytest

from smolcluster.algorithms.planning.plan_file import PLAN, PlanFile, PlanLink, PlanStage
from smolcluster.commands.diagram import diagram_of
from smolcluster.configs.resolve import load_settings, save_resolved
from smolcluster.errors import ConfigError, DataError
from smolcluster.launch import diagram as module
from smolcluster.launch.diagram import (
    Diagram,
    Line,
    dot_of,
    drawn,
    mermaid_of,
    of_cluster,
)

CLUSTER = {
    "server": "mini1",
    "workers": ["macbook", "pi5"],
    "port": 65432,
    "host_ip": {"macbook": "10.0.0.1", "pi5": "10.0.0.2"},
    "nodes": {"macbook": {"device": "mps"}},
}


def plan() -> PlanFile:
    stages = (
        PlanStage(machine="mini1", device="mps", start=0, end=5, seconds=0.02, memory_bytes=10**9),
        PlanStage(machine="pi5", start=5, end=6),
    )
    return PlanFile(
        schedule="1f1b",
        num_microbatches=8,
        step_s=0.25,
        bubble=0.2,
        bottleneck="pi5",
        stages=stages,
        links=(PlanLink(nbytes=262_144, forward_s=0.021, backward_s=0.02),),
    )


def test_a_plan_shows_machines_layers_links_and_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    PLAN.write(file, plan())
    text = mermaid_of(diagram_of(str(file)))
    assert 'title: "mine: 1f1b, 8 microbatches, step 250 ms, bubble 20%"' in text
    assert 'n0["mini1<br/>layers 0 to 4<br/>mps<br/>20 ms a microbatch<br/>1.0 GB"]' in text
    assert 'n1["pi5<br/>layer 5"]' in text
    assert 'n0 <-->|"262.1 kB, 21 ms"| n1' in text


def test_a_cluster_file_is_a_star_and_a_plan_by_hand_a_chain_beside_it() -> None:
    star = of_cluster(CLUSTER, "home")
    assert star.boxes[1] == ("macbook", "mps")
    assert star.lines == (Line(1, 0, "10.0.0.1"), Line(2, 0, "10.0.0.2"))
    by_hand = {"pi5": [4, 6], "macbook": [[0, 4], [6, 7]]}
    chain = of_cluster(CLUSTER | {"shard_plan": by_hand}, "home")
    assert [box[:2] for box in chain.boxes] == [
        ("mini1", "coordinator: no layers"),
        ("macbook", "layers 0 to 3"),
        ("pi5", "layers 4 to 5"),
        ("macbook", "layer 6"),
    ]
    assert [(line.source, line.target) for line in chain.lines if not line.is_dashed] == [
        (1, 2),
        (2, 3),
    ]


def test_a_plan_by_hand_is_seen_where_a_launch_sees_it(tmp_path: Path) -> None:
    file = tmp_path / "home.yaml"
    file.write_text(
        "{host_ip: {mini1: 10.0.0.1, pi5: 10.0.0.1}, server: mini1, workers: [pi5], num_workers: 1, "
        "pipeline: {shard_plan: {pi5: [0, 4]}}}"
    )
    assert diagram_of(str(file)).boxes[1] == ("pi5", "layers 0 to 3")
    file.write_text("{server: mini1, workers: [pi5], shard_plans: auto}")
    with pytest.raises(ConfigError, match="shard_plans"):
        diagram_of(str(file))


def test_a_run_shows_the_plan_that_it_keeps_or_else_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path))
    run = tmp_path / "pipeline-20260101-000000-abcd"
    run.mkdir()
    settings = load_settings("edp", "digits", environ={})
    save_resolved(settings, run / "config.yaml")
    server, *workers = diagram_of(run.name).boxes
    assert server == ("mini1", "server", "port 65432")
    assert workers == [(name,) for name in settings.cluster.workers]
    assert [(line.source, line.target) for line in diagram_of(run.name).lines] == [
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    PLAN.write(run / "plan.json", plan())
    assert diagram_of(run.name).boxes[1] == ("pi5", "layer 5")


def test_names_cannot_break_out_of_their_labels() -> None:
    evil = 'a"]; x<br/>\\'
    pictured = Diagram(evil, ((evil, "two"),), (Line(0, 0, evil),))
    [box] = [line for line in mermaid_of(pictured).splitlines() if line.startswith("    n0[")]
    assert box == '    n0["a#quot;]; x#lt;br/#gt;\\<br/>two"]'
    assert 'n0 [label="a\\"]; x<br/>\\\\\\ntwo"];' in dot_of(pictured)


def test_what_is_no_plan_and_no_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(DataError, match="is no plan of a pipeline"):
        diagram_of(str(tmp_path / "p.json"))
    with pytest.raises(ConfigError, match="names no server"):
        of_cluster({"port": 1}, "x")


def test_without_graphviz_there_is_mermaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    pictured = of_cluster(CLUSTER, "home")
    assert drawn(pictured, "mmd").startswith(b"---\ntitle: ")
    with pytest.raises(ConfigError, match="install graphviz"):
        drawn(pictured, "svg")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize(
    ("form", "begins"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
)
def test_graphviz_draws_it(form: module.Form, begins: bytes) -> None:
    assert drawn(of_cluster(CLUSTER, 'ho"me'), form).startswith(begins)
