"""A mesh of two machines, launched over SSH."""

import json

import pytest

from launching import LAUNCH_TIMEOUT_S, STORIES_TIMEOUT_S, Launching

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def test_a_mesh_of_two_machines_is_one_command(launching: Launching) -> None:
    words = (
        "launch",
        "mesh",
        "--config",
        "~/cluster.yaml",
        "--train-config",
        "digits",
        "--no-tmux",
    )
    keys = ("workers=[mini1, mini2]", "num_workers=2", "mesh.tp=2", "mesh.pp=1", "microbatches=2")
    options = ("--override", *keys, "num_epochs=30", "batch_size=64", "encryption=off")
    running = launching.popen(launching.command(*words, *options))
    assert running.wait(2 * LAUNCH_TIMEOUT_S) == 0, running.output
    assert "all ranks are there" in running.output
    summary = json.loads((launching.folder("mini1") / "summary.json").read_text())
    assert summary["final"]["val_loss"] < 2.4
    said = launching.run(launching.command("logs", launching.run_id)).stdout
    assert "training SimpleNN on 2 ranks" in said
    assert "rank 0 (mini1) |" in said
    # ranks tell of themselves once a second, so a shorter run would know its first one alone
    shown = launching.run(launching.command("status", launching.run_id)).stdout
    assert ["rank 0 (mini1)" in shown, "rank 1 (mini2)" in shown] == [True, True]
    assert launching.is_clean(), launching.left()
