"""What ranks must agree on."""

from pathlib import Path

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.process import told
from smolcluster.configs.resolve import load_settings

SHARDING = "pp_stage0: {shard: {axis: 0, workers: [0, 1]}}\n"


def of_rank(folder: Path, *overrides: str, sharding: str = SHARDING) -> dict[str, str]:
    """As a machine says it that keeps all its files in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "sharding.yaml").write_text(sharding)
    (folder / "mine.py").write_text("")
    places = (f"instruction_log={folder}/log", f"sharding={folder}/sharding.yaml")
    own = (f"dataset.root={folder}", f"workload={folder}/mine.py:make")
    settings = load_settings("mesh", "digits", None, (*places, *own, *overrides), environ={})
    return told(settings, settings.of(MeshConfig))


def test_where_a_machine_keeps_its_files_is_its_own(tmp_path: Path) -> None:
    assert of_rank(tmp_path / "a") == of_rank(tmp_path / "b")


def test_what_would_be_trained_differently_is_told(tmp_path: Path) -> None:
    first = of_rank(tmp_path / "a")
    for own in (
        of_rank(tmp_path / "a", "seed=7"),
        of_rank(tmp_path / "a", "batch_size=48"),
        of_rank(tmp_path / "a", "mesh.tp=1"),
        of_rank(tmp_path / "a", sharding=SHARDING.replace("0, 1", "0, 1, 2")),
    ):
        assert own != first
