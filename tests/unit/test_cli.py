import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from pydantic_core import SchemaError

import smolcluster
from reading import fake_ssh
from smolcluster import cli
from smolcluster.cli import expand_overrides, main
from smolcluster.configs.spec import algorithms, get_algorithm
from smolcluster.errors import PortBusy
from smolcluster.launch.project import read_project

PROJECT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "torchvision", "wandb", "sklearn", "numpy", "pydantic", "ruamel"}
SERVED = [spec.name for spec in algorithms().values() if not spec.is_group]
"""Algorithms that have a server and workers."""


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error; nothing else may be printed."""
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["--override", "a=1"], ["--override", "a=1"]),
        (["--override", "a=1", "b=2"], ["--override", "a=1", "--override", "b=2"]),
        (
            ["--override", "a=1", "b=2", "--local", "--override", "c=3", "d=4"],
            [
                *("--override", "a=1", "--override", "b=2"),
                *("--local", "--override", "c=3", "--override", "d=4"),
            ],
        ),
        (["--override=a=1", "b=2"], ["--override=a=1", "--override", "b=2"]),
        (["--config", "a=1", "b=2"], ["--config", "a=1", "b=2"]),
        (["--override", "a=1", "word", "b=2"], ["--override", "a=1", "word", "b=2"]),
        (["--override", "a=", "b=-1"], ["--override", "a=", "--override", "b=-1"]),
        (["--override"], ["--override"]),
        ([], []),
    ],
)
def test_overrides_are_expanded(given: list[str], expanded: list[str]) -> None:
    assert expand_overrides(given) == expanded


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag"],
        ["lunch"],
        ["launch"],
        ["launch", "sync"],
        ["launch", "edp", "--local", "--workers", "many"],
        ["launch", "edp", "--local", "--workers", "0"],
        ["launch", "syncps", "--local", "--workers", "0"],
        ["launch", "edp", "--dry-run", "--workers", "2"],
        ["launch", "edp", "--local", "extra"],
        ["launch", "edp", "--auto"],
        ["launch", "edp", "--local", "--override"],
        ["launch", "edp", "--local", "--override", "port"],
        ["launch", "edp", "--local", "--override", "prot=6000"],
        ["launch", "edp", "--local", "--override", "port=70000"],
        ["launch", "edp", "--local", "--config", "no/such/file.yaml"],
        ["train", "--config", "no/such/file.yaml"],
        ["train", "--override", "num_epoch=5"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert last_error(capsys).startswith("error: ")


def test_a_misspelt_flag_names_itself_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["launch", "edp", "--locl"])
    line = last_error(capsys)
    assert "--locl" in line
    assert "--local" in line
    assert "`smolcluster launch edp --help`" in line


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the secret and runs would be made; no process can be started."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(subprocess, "Popen", None)
    return tmp_path


@pytest.mark.parametrize("flags", [["--local"], ["--local", "--dry-run"], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "override"), [("edp", "global_batch_size=96"), ("syncps", "global_batch_size=2")]
)
def test_what_the_algorithm_cannot_follow_is_told_before_anything_starts(
    name: str,
    override: str,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    nothing_starts: Path,
) -> None:
    assert main(["launch", name, *flags, "--override", override]) == 2
    assert last_error(capsys).startswith("error: global_batch_size is ")
    assert list(nothing_starts.iterdir()) == []


@pytest.mark.parametrize("name", SERVED)
def test_a_dry_run_prints_the_plan_and_starts_nothing(
    name: str, capsys: pytest.CaptureFixture[str], nothing_starts: Path
) -> None:
    overrides = ["--override", "port=6000", "threads=2"]
    assert main(["launch", name, "--local", "--workers", "2", "--dry-run", *overrides]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "nn_config_digits.yaml: SimpleNN on digits; to choose another: --train-config" in first
    assert lines[::2] == ["server mini1:", "worker 1:", "worker 2:"]
    assert f"{get_algorithm(name).server} --local --workers 2 --run-id {name}-" in lines[1]
    assert all(str(get_algorithm(name).worker) in line for line in lines[3::2])
    assert all("threads=2" in line and "threads=1" not in line for line in lines[1::2])
    assert list(nothing_starts.iterdir()) == []


@pytest.mark.parametrize("name", SERVED)
def test_a_dry_run_without_local_prints_the_plan_of_the_cluster_and_starts_nothing(
    name: str, capsys: pytest.CaptureFixture[str], nothing_starts: Path
) -> None:
    assert main(["launch", name, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    folder = f"src/smolcluster/algorithms/{get_algorithm(name).folder.name}"
    project = read_project(PROJECT).folder("auto").removeprefix("~")
    there = f'  cd "$HOME"{project} && .venv/bin/python'
    for part in (
        "192.168.50.1:65432",
        f"server mini1, in tmux session {name}-",
        f"{there} {folder}/server.py --run-id {name}-",
        f"{there} {folder}/worker.py 1 pi5 --run-id {name}-",
        *(["9,610 parameters"] if get_algorithm(name).costs else []),
        "```mermaid\n",
    ):
        assert part in captured.out
    assert list(nothing_starts.iterdir()) == []


def test_a_dry_run_of_a_mesh_prints_what_each_place_gets(
    capsys: pytest.CaptureFixture[str], nothing_starts: Path
) -> None:
    image = ("--override", "kubernetes.image=me/smolcluster")
    for options, told in (
        (["--local"], "-m smolcluster.distributed_training --run-id mesh-"),
        (
            ["--override", "encryption=off"],
            "--world-size 8 --rank 4 --nproc-per-node 4 --master-addr 10.10.0.1",
        ),
        (["--on", "slurm"], "#SBATCH --requeue"),
        (["--on", "kubernetes", *image], "completionMode: Indexed"),
    ):
        assert main(["launch", "mesh", "--dry-run", *options]) == 0
        printed = capsys.readouterr().out
        assert told in printed
        first = printed.splitlines()[1 if printed.startswith("#!") else 0]
        assert "gpt_config_stdlib.yaml: GPT on stdlib; to choose another: --train-config" in first
    assert list(nothing_starts.iterdir()) == []


def test_machines_that_are_not_reached_are_all_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    for name in ("XDG_CONFIG_HOME", "SMOLCLUSTER_RUNS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    machines = ("mini1", "pi5", "win", "macbook")
    stated = [f"nodes.{node}.ssh=cut-{node}" for node in machines]
    assert main(["launch", "edp", "--override", *stated]) == 1
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert f"{', '.join(f'{node} (cut-{node})' for node in machines)}: it does not answer" in line


def test_configurations_are_named_so_that_they_are_found_from_another_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = get_algorithm("edp").folder.parents[1] / "configs" / "cluster_config_edp.yaml"
    Path("mine.yaml").write_text(shipped.read_text())
    assert main(["launch", "edp", "--local", "--dry-run", "--config", "mine.yaml"]) == 0
    assert f"--config {tmp_path}/mine.yaml" in capsys.readouterr().out
    assert main(["launch", "edp", "--local", "--dry-run", "--config", "edp"]) == 0
    assert "--config edp" in capsys.readouterr().out


def test_threads_set_for_one_node_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["launch", "edp", "--local", "--dry-run", "--override", "nodes.win.threads=2"]) == 0
    lines = capsys.readouterr().out.splitlines()[2::2]
    assert ["threads=1" in line for line in lines] == [True, True, False, True]


def test_all_algorithms_are_launched_with_the_same_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []
    for name in SERVED:
        assert main(["launch", name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(part in text for part in ("Exit codes", "75 ", "77 ", "78 ", "130 "))
        shown.append(text.partition("Options:")[2].partition("Examples:")[0])
    assert set(shown) == {shown[0]}
    for flag in ("--local", "--workers", "--no-tmux", "--dry-run", "--config", "--train-config"):
        assert flag in shown[0]
    assert "--override" in shown[0]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["launch", "--help"]])
def test_help_is_everywhere(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: smolcluster" in capsys.readouterr().out


def test_a_flag_of_before_is_taken_and_said_to_be_without_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["launch", "edp", "--overwrite", "--dry-run"]) == 0
    said = "--overwrite has no effect: a launch replaces nothing on a machine\n"
    assert capsys.readouterr().err == said


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"smolcluster {smolcluster.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PortBusy("port 65432 is taken"), 75, "error: port 65432 is taken"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (typer.Abort(), 130, "error: interrupted"),
        (SchemaError("Error building:\n  KeyboardInterrupt: "), 130, "error: interrupted"),
    ],
)
def test_what_goes_wrong_is_one_line_with_its_code(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert main(["train"]) == code
    assert last_error(capsys) == line


def test_even_a_bug_is_one_line_and_its_traceback_is_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(**_: object) -> int:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["train"]) == 70
    line = last_error(capsys)
    [file] = tmp_path.iterdir()
    assert line == (
        f"error: this is a bug in smolcluster: ZeroDivisionError: two lines; see {file}"
    )
    assert "in fail" in file.read_text()


def modules_after(program: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running a program."""
    report = "\nimport json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", program + report], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


DRY_RUN = "from smolcluster.cli import main; main(['launch', 'edp', '--local', '--dry-run'])"
WATCHING = ["status", "logs", "listing", "fetch", "top.command"]
LIGHT = ["runs.paths", "runs.events", "runs.summary", "runs.launched", "observability.logs"]
LIGHT += [f"observability.{name}" for name in ("metrics", "sinks.console", "sinks.jsonl")]
LIGHT += ["observability.sinks.wandb", "observability.sinks.wandb_child"]
LIGHT += [
    "observability.shipping.command",
    *(f"utils.{name}" for name in ("device", "seed", "retry")),
]


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import smolcluster.cli", HEAVY),
        (DRY_RUN, {"torch", "torchvision", "wandb", "sklearn"}),
        (f"import {', '.join(f'smolcluster.launch.watch.{name}' for name in WATCHING)}", {"torch"}),
        (f"import {', '.join(f'smolcluster.{name}' for name in LIGHT)}", {"torch", "wandb"}),
    ],
    ids=["the command", "a dry run", "what looks at runs", "what a run writes"],
)
def test_what_takes_time_is_not_imported_before_it_is_needed(
    program: str, absent: set[str]
) -> None:
    assert modules_after(program) & absent == set()


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = "import sys; from smolcluster.cli import main; sys.exit(main(['launch', 'edp', '--dry-run']))"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert done.stderr == b""


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, str(PROJECT / "src" / "smolcluster" / "train.py")],
        [str(Path(sys.executable).with_name("smolcluster")), "train"],
    ],
    ids=["train.py", "smolcluster train"],
)
def test_the_shim_is_the_command(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "Usage: smolcluster train" in done.stdout
