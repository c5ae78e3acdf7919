"""Which file is trained where none is named: one beside the cluster file, else an edited shipped one."""

import shutil
from pathlib import Path

import pytest

from smolcluster.algorithms.entry import server_parser, worker_parser
from smolcluster.algorithms.process import server_settings, worker_settings
from smolcluster.cli import main
from smolcluster.configs import load
from smolcluster.configs.load import find_config
from smolcluster.configs.meant import AS_SHIPPED, content_digest, training_source
from smolcluster.configs.schema import Settings, TrainConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.distributed_training import configuration, parser
from smolcluster.errors import ConfigError

DEFAULTS = [("edp", "digits", "nn"), ("edp-gpt", "stdlib", "gpt")]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's configurations, which may be edited; this folder is an empty one."""
    folder = tmp_path / "configs"
    shutil.copytree(Path(load.__file__).parent, folder)
    monkeypatch.setattr(load, "_FOLDER", folder)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What a dry run says first, and the command of its server."""
    assert main(["launch", *words, "--dry-run"]) == 0
    first, _, server, *_ = capsys.readouterr().out.splitlines()
    return first, server


@pytest.mark.parametrize("name", AS_SHIPPED)
def test_what_the_shipped_files_say_is_known(name: str) -> None:
    """Whoever changes one of them changes this digest, too."""
    assert content_digest(find_config(name, "training")) == AS_SHIPPED[name]


@pytest.mark.parametrize(("launched", "default", "name"), DEFAULTS)
def test_an_edited_file_is_what_a_launch_trains(
    shipped: Path,
    capsys: pytest.CaptureFixture[str],
    launched: str,
    default: str,
    name: str,
) -> None:
    first, server = planned(capsys, launched, "--local")
    assert f"{name}_config_{default}.yaml: " in first
    assert f"--train-config {default} " in server

    file = shipped / f"{name}_config.yaml"
    with file.open("a", newline="") as text:
        text.write("# a note\r\n")  # which says nothing
    assert f"--train-config {default} " in planned(capsys, launched, "--local")[1]

    edit(file, "learning_rate: ", "learning_rate: 0.5  # ")
    first, server = planned(capsys, launched, "--local")
    assert f"{file}: " in first
    assert first.endswith("or edit it")
    assert f"--train-config {name} " in server


def test_a_command_s_own_settings_are_not_put_on_a_file_of_the_user_s(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "model.num_layers=8" in planned(capsys, "mesh", "--local")[1]
    edit(shipped / "gpt_config.yaml", "num_layers: 6", "num_layers: 4")
    assert "model.num_layers" not in planned(capsys, "mesh", "--local")[1]


@pytest.mark.parametrize("launched", ["edp-gpt", "diloco"])
def test_launches_train_with_what_is_best_unless_the_user_says_otherwise(
    shipped: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launched: str,
) -> None:
    own = "--override", "optimizer=sgd"
    assert "optimizer=auto" in planned(capsys, launched, "--local")[1]
    server = planned(capsys, launched, "--local", *own)[1]
    assert "optimizer=sgd" in server.partition("optimizer=auto")[2], "the later one holds"
    assert "optimizer=auto" not in planned(capsys, launched, "--local", "--train-config", "gpt")[1]
    monkeypatch.setenv("SMOLCLUSTER_OPTIMIZER", "sgd")
    assert "optimizer=auto" not in planned(capsys, launched, "--local")[1]


def test_the_steps_of_a_demonstration_give_way_to_epochs_that_are_wanted(
    shipped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def server_of(*overrides: str) -> str:
        wanted = ("--override", *overrides) if overrides else ()
        return planned(capsys, "mesh", "--local", *wanted)[1]

    assert "num_steps=40" in server_of()
    assert "num_steps" not in server_of("num_epochs=2")
    assert "num_steps" not in server_of("training.epochs=2")
    monkeypatch.setenv("SMOLCLUSTER_NUM_EPOCHS", "2")
    assert "num_steps" not in server_of()


def test_what_is_named_is_trained_whatever_is_edited(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(shipped / "nn_config.yaml", "hidden: 128", "hidden: 64")
    assert (
        "--train-config digits " in planned(capsys, "edp", "--local", "--train-config", "digits")[1]
    )
    assert "--train-config gpt " in planned(capsys, "edp", "--local", "--train-config", "gpt")[1]


@pytest.mark.parametrize("file", ["nn_config.yaml", "nn_config_digits.yaml"])
def test_a_file_beside_the_cluster_file_is_trained(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """Also as it was shipped: somebody has put it there."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(shipped / "cluster_config_edp.yaml", folder / "cluster.yaml")
    cluster = ("--local", "--config", "../mine/cluster.yaml")
    assert "--train-config digits " in planned(capsys, "edp", *cluster)[1]
    shutil.copy(shipped / file, folder)
    first, server = planned(capsys, "edp", *cluster)
    assert f"mine/{file}: SimpleNN on " in first
    assert f"mine/{file} " in server


def test_a_file_in_this_folder_is_beside_a_cluster_file_that_is_not_named(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(shipped / "nn_config.yaml", ".")
    assert f"{Path.cwd()}/nn_config.yaml" in planned(capsys, "edp", "--local")[1]


def test_who_stands_among_the_shipped_files_has_written_none(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shipped)
    assert training_source(None) == "digits"
    assert training_source(None, "cluster_config_edp.yaml") == "digits"
    edit(shipped / "nn_config.yaml", "hidden: 128", "hidden: 64")
    assert training_source(None, "cluster_config_edp.yaml") == "nn"


def test_by_hand_the_same_files_are_meant(shipped: Path) -> None:
    def by_hand(*words: str) -> Settings:
        return server_settings("edp", server_parser(get_algorithm("edp")).parse_args(words))

    assert by_hand("--local").train.dataset.name == by_hand().train.dataset.name == "digits"
    edit(shipped / "nn_config.yaml", "learning_rate: 0.001", "learning_rate: 0.25")
    assert by_hand("--local").train.learning_rate == by_hand().train.learning_rate == 0.25
    own = (shipped / "cluster_config_edp.yaml").read_text().replace("port: 65432", "port: 6000")
    Path("cluster_config_edp.yaml").write_text(own)
    assert by_hand("--local").cluster.port == by_hand().cluster.port == 6000
    of_worker = worker_parser(get_algorithm("edp")).parse_args(["1", "pi5"])
    assert worker_settings("edp", of_worker).cluster.port == 6000


def test_ranks_by_hand_train_the_gpt_that_is_edited(shipped: Path) -> None:
    def by_hand() -> TrainConfig:
        return configuration(parser().parse_args([]), None).train

    assert by_hand().dataset.name == "stdlib"
    edit(shipped / "gpt_config.yaml", "learning_rate: 6e-4", "learning_rate: 0.25")
    assert (by_hand().dataset.name, by_hand().learning_rate) == ("wikitext", 0.25)


def test_a_workload_is_trained_with_the_file_for_those(shipped: Path) -> None:
    edit(shipped / "nn_config.yaml", "hidden: 128", "hidden: 64")
    assert training_source(None, workload="mine.py:make") == "workload"
    shutil.copy(shipped / "workload_config.yaml", ".")
    assert training_source(None, workload="mine.py:make") == "workload_config.yaml"


def test_an_edit_that_is_no_yaml_is_told(shipped: Path) -> None:
    edit(shipped / "nn_config.yaml", "hidden: 128", "hidden: [")
    with pytest.raises(ConfigError, match=r"nn_config\.yaml, line \d+"):
        training_source(None)
