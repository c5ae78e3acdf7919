"""`smolcluster plan --local`, and a diagram of what it says."""

from pathlib import Path

import pytest

from pretrained_models import LAYERS, saved
from smolcluster.algorithms.planning.plan_file import PLAN
from smolcluster.cli import main

pytestmark = pytest.mark.nightly


def test_a_model_is_measured_and_cut_on_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--local", "--workers", "2", "--train-config", "stdlib", "--override", "batch_size=8"]
    assert main(["plan", *words, "--microbatches", "4", "--json"]) == 0
    text = capsys.readouterr().out
    plan = PLAN.parse(text)
    assert plan is not None
    assert plan.num_microbatches == 4
    assert plan.stages[0].start == 0
    assert all(a.end == b.start for a, b in zip(plan.stages[:-1], plan.stages[1:], strict=True))
    assert plan.step_s > 0
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(["diagram", str(file), "--format", "mmd"]) == 0
    assert plan.stages[-1].machine in capsys.readouterr().out


def test_a_folder_of_hugging_face_is_measured_and_cut_by_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = ["batch_size=8", "workload_args.length=8", "workload_args.lora_rank=0"]
    words = ["plan", "--local", "--workers", "2", "--model", str(saved(tmp_path / "my model"))]

    assert main([*words, "--json", "--override", *overrides]) == 0
    plan = PLAN.parse(capsys.readouterr().out)
    assert plan is not None
    assert plan.stages[-1].end == LAYERS
    assert main([*words, "--workload", "train.py:workload"]) == 2
    assert "name one of them" in capsys.readouterr().err
