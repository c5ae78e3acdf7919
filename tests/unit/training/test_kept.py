"""What a worker keeps of a run: whole files, the newest ones, and nothing of a future that was taken back."""

import logging
from pathlib import Path

import pytest
import torch

from smolcluster.training.kept import KeptSteps


@pytest.fixture
def kept(tmp_path: Path) -> KeptSteps:
    return KeptSteps(tmp_path / "worker-rank0-pi5", logging.getLogger("test"))


def values(number: float) -> dict[str, torch.Tensor]:
    return {"exp_avg": torch.full((3,), number), "step": torch.tensor(number)}


def test_what_was_saved_is_what_is_loaded(kept: KeptSteps) -> None:
    kept.save(40, values(1.5), keep_last=2)
    found = kept.load(40)
    assert found is not None
    step, tensors = found
    assert step == 40
    assert tensors.keys() == values(1.5).keys()
    assert all(torch.equal(tensor, values(1.5)[name]) for name, tensor in tensors.items())


def test_the_last_ones_are_kept(kept: KeptSteps) -> None:
    for step in (20, 40, 60, 80):
        kept.save(step, values(step), keep_last=2)
    assert kept.steps() == [60, 80]


def test_a_run_that_goes_on_from_earlier_has_no_later_ones(kept: KeptSteps) -> None:
    for step in (20, 40, 60):
        kept.save(step, values(step), keep_last=3)
    found = kept.load(50)
    assert found is not None
    assert (found[0], found[1]["step"].item()) == (40, 40.0)
    assert kept.steps() == [20, 40]


def test_what_a_killed_process_has_not_finished_goes_with_the_next(kept: KeptSteps) -> None:
    kept.folder.mkdir()
    (kept.folder / ".step-00000020.safetensors.1a2b3c4d.tmp").touch()
    kept.save(40, values(40), keep_last=2)
    assert [path.name for path in kept.folder.iterdir()] == ["step-00000040.safetensors"]


def test_there_may_be_none(kept: KeptSteps) -> None:
    assert kept.load(10) is None
    kept.save(20, values(20), keep_last=1)
    assert kept.load(10) is None


def test_a_damaged_one_is_left_aside(kept: KeptSteps, caplog: pytest.LogCaptureFixture) -> None:
    for step in (20, 40):
        kept.save(step, values(step), keep_last=2)
    newest = kept.folder / "step-00000040.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    found = kept.load(40)
    assert found is not None
    assert found[0] == 20
    assert "step-00000040" in caplog.text


def test_a_full_disk_is_a_warning(kept: KeptSteps, caplog: pytest.LogCaptureFixture) -> None:
    kept.folder.parent.mkdir(exist_ok=True)
    kept.folder.write_text("a file where the folder should be")
    kept.save(20, values(20), keep_last=1)
    assert "step 20 is not saved" in caplog.text
