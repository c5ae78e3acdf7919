"""Workers that come back, and one more of them, in a run on three hosts."""

import json
from pathlib import Path

import pytest

from lab import Host
from launching import LAUNCH_TIMEOUT_S, PACED, PROJECT, STORIES_TIMEOUT_S, Launching
from smolcluster.runs.events import WorkerJoined, read_events
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def supervised(host: Host) -> list[int]:
    """The workers' processes there, without their supervisors."""
    return [each.pid for each in host.processes() if "--supervised" in each.argv]


def without_pi5(launching: Launching) -> str:
    """A cluster file that does not know pi5."""
    launching.write_config("joining.yaml")
    file: Path = launching.controller.path("joining.yaml")
    config = json.loads(file.read_text())
    for key in ("host_ip", "nodes"):
        del config[key]["pi5"]
    file.write_text(json.dumps(config | {"workers": ["mini2"], "num_workers": 1}))
    return "~/joining.yaml"


def test_workers_come_back_and_a_new_one_joins_and_is_stopped(launching: Launching) -> None:
    lab, run = launching.lab, launching.run
    overrides = (*PACED, "heartbeat_timeout_s=3", "reconnect_timeout_s=300")
    words = launching.launch("--detach", "--override", *overrides, config=without_pi5(launching))
    launched = run(words)
    assert launched.returncode == 0, launched.stderr
    run_id = launching.run_id

    def joined(node: str) -> int:
        events = [each.event for each in read_events(launching.folder("mini1") / "events.jsonl")]
        return sum(isinstance(each, WorkerJoined) and each.node == node for each in events)

    # A worker is killed; its supervisor starts it again.
    [worker] = supervised(lab["mini2"])
    lab["mini2"].output(["kill", "-KILL", str(worker)])
    eventually(lambda: joined("mini2") == 2, lambda: str(launching.status()))

    # A name that is taken, and a machine that is out of reach.
    taken = run(launching.command("join", "--name", "mini2"))
    assert taken.returncode == 78
    assert "mini2 is taken" in taken.stderr
    lab["pi5"].cut()
    away = run(launching.command("join", run_id, "--name", "pi5"))
    assert (away.returncode, "pi5 (pi5): " in away.stderr) == (1, True)
    launching.wait_for_ssh()

    # Its machine starts anew, and is brought back.
    lab["mini2"].end_processes()
    back = run(launching.command("join"), timeout_s=LAUNCH_TIMEOUT_S)
    assert back.returncode == 0, back.stderr
    assert (joined("mini2"), launching.presence(0)) == (3, "joined")

    # Another machine joins.
    own = (f"project_dir={json.dumps('~/' + launching.projects['pi5'])}", "torch=pypi", "threads=1")
    new = run(
        launching.command("join", run_id, "--name", "pi5", "--override", *own),
        timeout_s=LAUNCH_TIMEOUT_S,
    )
    assert new.returncode == 0, new.stderr
    assert launching.presence(1) == "joined"
    launching.goes_on()
    shown = json.loads(run(launching.command("status", "--json")).stdout)
    processes = [(each["node"], each["process"]) for each in shown["processes"]]
    assert processes == [("mini1", "running"), ("mini2", "running"), ("pi5", "running")]
    assert "pi5" in run(launching.command("logs", run_id)).stdout

    # All of them are stopped, and would all go on.
    stopped = run(launching.command("stop", run_id))
    assert stopped.returncode == 0, stopped.stdout
    launching.wait_until_clean()
    over = run(launching.command("join", run_id, "--name", "pi5"))
    assert (over.returncode, "is over" in over.stderr) == (1, True)
    plan = run(launching.command("resume", run_id, "--dry-run"))
    assert "worker.py 2 pi5" in plan.stdout, plan.stderr
    assert not Path("/tmp/pwned").exists()  # noqa: S108 - of the folder's name
    assert launching.controller.path(f"{PROJECT}/runs/{run_id}/launch/cluster.yaml").exists()
