"""A run of three hosts in which a machine is down: it is left out, and joins later."""

import pytest

from launching import LAUNCH_TIMEOUT_S, PACED, STORIES_TIMEOUT_S, Launching

pytestmark = pytest.mark.timeout(STORIES_TIMEOUT_S)


@pytest.mark.slow
def test_a_machine_that_is_down_is_left_out_and_joins_later(launching: Launching) -> None:
    """At a launch, and once more as the run is resumed."""
    run, command = launching.run, launching.command
    launching.make_ready()
    launching.lab["mini2"].cut()
    launch = launching.launch("--detach", "--no-sync", "--override", *PACED)

    refused = run(launch)
    assert refused.returncode == 1
    assert "--without mini2 launches the others alone" in refused.stderr
    begun = run([*launch, "--without", "mini2"])
    assert begun.returncode == 0, begun.stderr
    run_id = launching.run_id
    assert [each["node"] for each in launching.status()["workers"]] == ["pi5"]
    launching.goes_on()

    launching.wait_for_ssh()
    launching.join_again(1, "mini2")
    launching.goes_on()
    stopped = run(command("stop"), timeout_s=LAUNCH_TIMEOUT_S)
    assert stopped.returncode == 0, stopped.stderr
    reached = launching.status()["step"]

    launching.lab["mini2"].cut()
    launching.cut_ssh()
    resumed = ["resume", run_id, "--detach", "--no-sync"]
    refused = run(command(*resumed))
    assert refused.returncode == 1
    assert "--without mini2 launches the others alone" in refused.stderr
    back = run(command(*resumed, "--without", "mini2"))
    assert back.returncode == 0, back.stderr
    assert [each["node"] for each in launching.status()["workers"]] == ["pi5"]
    assert launching.status()["step"] >= reached
    launching.goes_on()

    launching.wait_for_ssh()
    launching.join_again(1, "mini2")
    launching.goes_on()
    stopped = run(command("stop"), timeout_s=LAUNCH_TIMEOUT_S)
    assert stopped.returncode == 0, stopped.stderr
    assert launching.left_of(run_id) == []
