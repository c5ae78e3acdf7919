"""The plan of a launch as people see it."""

import io
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.launch.estimate import cost_of
from smolcluster.launch.host import Host
from smolcluster.launch.plan import Machine, Request, plan
from smolcluster.launch.sessions import start_script
from smolcluster.launch.show_plan import commands, costs, mermaid, plan_table
from smolcluster.runs.launched import Launched

RUN_ID = "edp-20261122-033617-c682"


def settings_of(*overrides: str, train: str = "nn") -> Settings:
    return load_settings("edp", train, overrides=overrides, environ={})


def planned(settings: Settings, project_dir: str = "~/smolcluster") -> Launched:
    cluster = settings.cluster
    places = {
        node: Machine(
            Host(node, None if node == "mini1" else f"pi@{node}.local"),
            project_dir=project_dir,
            runs_dir=f"{project_dir}/runs",
        )
        for node in (cluster.server, *cluster.workers)
    }
    return plan(Request(get_algorithm("edp")), settings, places, RUN_ID)


def rows_of(settings: Settings, width: int = 80) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_table(planned(settings), settings, cost_of(settings, "edp")))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_the_table_has_a_row_a_process_at_80_columns() -> None:
    assert rows_of(settings_of()) == [
        ["server", "mini1", "this machine", "10.10.0.1:65432", "3.3 MB"],
        ["worker 1", "pi5", "pi@pi5.local", "192.168.50.1:65432", "2.4 MB"],
        ["worker 2", "win", "pi@win.local", "10.10.0.1:65432", "2.4 MB"],
        ["worker 3", "macbook", "pi@macbook.local", "10.10.0.1:65432", "2.4 MB"],
    ]


def test_an_ipv6_address_is_no_markup() -> None:
    rows = rows_of(settings_of("host_ip.pi5=fe80::1"))
    assert rows[1][3] == "[fe80::1]:65432"


def test_what_is_not_known_is_not_guessed() -> None:
    settings = settings_of("data.tokenizer=somebody/else", train="gpt")
    assert {row[-1] for row in rows_of(settings)} == {"?"}
    [line] = costs(cost_of(settings, "edp"))
    assert "not known" in line


def test_costs_are_told_for_usual_links_in_lines_that_fit() -> None:
    lines = list(costs(cost_of(settings_of(), "edp")))
    assert lines == [
        "101,770 parameters; memory is without PyTorch and activations",
        "a step of a worker sends 407.1 kB and receives 40.7 kB, which takes",
        "  33 ms at 12.5 MB/s, 3.3 ms at 125 MB/s, 0.33 ms at 1,250 MB/s",
    ]
    large = costs(cost_of(settings_of("model.model_dim=8192", train="gpt"), "edp"))
    assert all(len(line) <= 80 for line in large)


@pytest.mark.parametrize("project_dir", ["~/smolcluster", "~/my 'own'; $(touch oops)", "~"])
def test_the_commands_can_be_pasted_into_a_shell(tmp_path: Path, project_dir: str) -> None:
    """An interpreter that prints where it was started, and with what, stands in for Python."""
    launched = planned(settings_of(), project_dir)
    folder = Path(project_dir.replace("~", str(tmp_path), 1))
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\npwd\nfor word; do printf "%s\\n" "$word"; done\n')
    python.chmod(0o755)
    titles, lines = list(commands(launched))[::2], list(commands(launched))[1::2]
    for process, title, line in zip(launched.processes, titles, lines, strict=True):
        assert title == f"{process.title}, in tmux session {process.session}:"
        done = subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"HOME": str(tmp_path)},
            check=True,
        )
        assert done.stdout.splitlines() == [str(folder), *process.argv[1:]]
        assert line.strip() in start_script(process, {}), "it is what is run"
    assert not list(tmp_path.rglob("oops"))


def test_the_picture_has_every_process_and_its_way_to_the_server() -> None:
    settings = settings_of("host_ip.win=fe80::1")
    assert list(mermaid(planned(settings), settings)) == [
        "graph LR",
        '  p0["server<br/>mini1"]',
        '  p1["worker 1<br/>pi5"]',
        '  p2["worker 2<br/>win"]',
        '  p3["worker 3<br/>macbook"]',
        '  p1 -- "192.168.50.1:65432" --> p0',
        '  p2 -- "[fe80::1]:65432" --> p0',
        '  p3 -- "10.10.0.1:65432" --> p0',
    ]


def test_a_store_has_a_row_and_a_link_of_its_own() -> None:
    settings = settings_of("servers=[mini1, win]")
    assert rows_of(settings)[1] == ["store", "win", "pi@win.local", "10.10.0.1:65432", "?"]
    lines = list(mermaid(planned(settings), settings))
    assert '  p1["store<br/>win"]' in lines
    assert [line for line in lines if "-->" in line] == [
        '  p1 -- "10.10.0.1:65432" --> p0',
        '  p2 -- "192.168.50.1:65432" --> p0',
        '  p3 -- "10.10.0.1:65432" --> p0',
        '  p4 -- "10.10.0.1:65432" --> p0',
    ]
