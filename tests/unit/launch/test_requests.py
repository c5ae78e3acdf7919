"""What a launch means that says little: it trains what needs no download, on one machine or many."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from smolcluster.cli import main
from smolcluster.configs.load import find_config
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import algorithms, get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.advise import run
from smolcluster.launch.plan import ATTACHED, Request
from smolcluster.launch.requests import cluster_line, request_of, resolved


def settings(name: str, *, local: bool, train_config: str | None = None) -> Settings:
    spec, command = next(
        (spec, command)
        for spec in algorithms().values()
        for command in spec.commands
        if command.name == name
    )
    request = request_of(
        spec,
        command,
        local=local,
        num_workers=None,
        config=None,
        train_config=train_config,
        overrides=(),
    )
    return resolved(request, local=local).settings


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("name", "dataset"), [("edp", "digits"), ("syncps", "digits"), ("edp-gpt", "stdlib")]
)
def test_what_a_launch_trains_needs_no_download(name: str, dataset: str, local: bool) -> None:
    assert settings(name, local=local).train.dataset.name == dataset


def test_what_is_named_is_trained() -> None:
    assert settings("edp", local=False, train_config="nn").train.dataset.name == "MNIST"
    assert settings("edp-gpt", local=False, train_config="gpt").train.dataset.name == "wikitext"


def test_on_a_cluster_all_train_on_the_library_of_the_servers_python() -> None:
    assert settings("edp-gpt", local=False).train.dataset.source == "server"
    assert settings("edp-gpt", local=True).train.dataset.source == "local"
    assert settings("edp-gpt", local=False, train_config="stdlib").train.dataset.source == "local"


def test_of_a_shipped_cluster_file_it_is_said_how_to_name_machines_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    syncps = Request(get_algorithm("syncps"))
    init = "an example; `uv run smolcluster init --algorithm syncps` writes one of your machines"
    said = cluster_line(resolved(syncps, local=False))
    assert said.endswith(f"cluster_config_syncps.yaml: {init}")
    own = Path("cluster_config_edp.yaml")
    own.write_bytes(find_config("edp", "cluster").read_bytes())
    said = cluster_line(resolved(syncps, local=False))
    assert said.endswith(f"{init}, or name {own} by --config")
    named = resolved(replace(syncps, config=str(own)), local=False)
    assert cluster_line(named) == f"cluster: {own.absolute()}"


@pytest.mark.parametrize("command", ["edp", "--auto"])
@pytest.mark.parametrize("place", [(), ("--local",)])
def test_each_launch_on_machines_says_which_cluster_file_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    place: tuple[str, ...],
) -> None:
    refuse = Mock(side_effect=LaunchError("no machine is needed here"))
    monkeypatch.setattr(run, "find_advice", refuse)
    monkeypatch.setattr(run, "launch", refuse)
    assert main(["launch", command, *place]) == LaunchError.exit_code
    said = [line for line in capsys.readouterr().out.split("\n") if line.startswith("cluster: ")]
    assert [Path(line.split(": ")[1]).name for line in said] == (
        [] if place else ["cluster_config_edp.yaml"]
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mesh.tp=2", "--override mesh has no effect: it is read by Mesh, not by EDP\n"),
        ("mesh={tp: 2, dp: 1}", "--override mesh has no effect: it is read by Mesh, not by EDP\n"),
        (
            "schedule=gpipe",
            "--override schedule has no effect: it is read by Mesh and PipelineParallel, not by EDP\n",
        ),
        ("edp.update_rule=gradient", ""),
        ("nodes.mini1.threads=2", ""),
    ],
)
def test_a_key_of_an_algorithm_that_does_not_run_is_named(
    capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert main(["launch", "edp", "--local", "--dry-run", "--override", override]) == 0
    assert capsys.readouterr().err == said


def in_fragments(number: int) -> Request:
    """DiLoCo with the perceptron of four tensors."""
    overrides = (f"fragments={number}",)
    return Request(get_algorithm("diloco"), train_config="digits", overrides=overrides)


@pytest.mark.parametrize("local", [True, False])
def test_more_fragments_than_tensors_are_refused_before_anything_is_started(local: bool) -> None:
    words = (
        "^fragments is 100, but the model has 4 trainable tensors, .* set fragments to 4 or less$"
    )
    with pytest.raises(ConfigError, match=words):
        resolved(in_fragments(100), local=local).checked()


def test_as_many_fragments_as_tensors_are_accepted() -> None:
    resolved(in_fragments(4), local=True).checked()


def test_of_a_script_the_model_is_not_known_before_it_runs() -> None:
    request = replace(in_fragments(100), script="train.py", train_config=str(ATTACHED))
    resolved(request, local=True).checked()
