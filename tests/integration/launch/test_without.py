"""A run of three hosts in which a machine is down: it is left out, and joins later."""

import pytest

from launching import PACED, STORIES_TIMEOUT_S, Launching

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def test_a_machine_that_is_down_is_left_out_and_joins_later(launching: Launching) -> None:
    """At a launch, and once more as the run is resumed."""
    run, command = launching.run, launching.command
    launching.make_ready()

    def goes_without(*words: str, reached: int = 0) -> None:
        launching.lab["mini2"].cut()
        refused = run(command(*words))
        assert refused.returncode == 1
        assert "--without mini2 launches the others alone" in refused.stderr
        begun = run(command(*words, "--without", "mini2"))
        assert begun.returncode == 0, begun.stderr
        assert [each["node"] for each in launching.status()["workers"]] == ["pi5"]
        assert launching.status()["step"] >= reached
        launching.goes_on()
        launching.wait_for_ssh()
        launching.join_again(1, "mini2")
        launching.goes_on()
        stopped = run(command("stop"))
        assert stopped.returncode == 0, stopped.stderr

    how = ("--detach", "--no-sync")
    files = ("--config", "~/cluster.yaml", "--train-config", "digits")
    goes_without("launch", "edp", *files, *how, "--override", *PACED)
    run_id, reached = launching.run_id, launching.status()["step"]
    launching.cut_ssh()
    goes_without("resume", run_id, *how, reached=reached)
    assert launching.left_of(run_id) == []
