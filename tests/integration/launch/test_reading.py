"""Runs on other machines, looked at from the one that launched them; nothing is trained here."""

import json
import shlex
import sys
import time
from collections.abc import Iterator

import pytest

from lab import Host, Lab, Running
from reading import log_line, status_of
from smolcluster.runs.launched import Launched, LaunchedProcess
from waiting import eventually

pytestmark = pytest.mark.nightly

RUN = "runs/r1"
THERE = "~/smolcluster/runs/r1"
KEPT = "smolcluster/runs/r1"


def processes() -> tuple[LaunchedProcess, ...]:
    def process(node: str, role: str, rank: int | None) -> LaunchedProcess:
        session = f"r1-{role}{'' if rank is None else rank + 1}"
        return LaunchedProcess(
            node=node, role=role, rank=rank, ssh=node, run_dir=THERE, session=session
        )

    return (
        process("mini1", "server", None),
        process("mini2", "worker", 0),
        process("pi5", "worker", 1),
    )


@pytest.fixture
def run(lab: Lab) -> Iterator[Lab]:
    """A run of a server and two workers, in tmux sessions that do nothing."""
    launched = Launched(run_id="r1", algorithm="edp", processes=processes())
    lab.controller.write(f"{RUN}/launch.json", launched.model_dump_json())
    for each in launched.processes:
        host = lab[each.node]
        host.write(f"{KEPT}/logs/{each.stem}.log", log_line(1, f"{each.node} begins"))
        host.output(["tmux", "new-session", "-d", "-s", each.session, "sleep 1000"])
    tell(lab)
    try:
        yield lab
    finally:
        for host in lab:
            host.join()
        wait_for_ssh(lab)
        for host in lab:
            host.run("tmux kill-server; rm -rf smolcluster")
        lab.controller.output("rm -rf runs")


def wait_for_ssh(lab: Lab) -> None:
    """Until all hosts answer again, which an address that nobody had takes a moment."""
    for host in lab:
        probe = ["ssh", "-o", "ConnectTimeout=1", host.name, "true"]
        eventually(lambda probe=probe: lab.controller.run(probe).returncode == 0, host.name)  # type: ignore[misc]


def tell(lab: Lab) -> None:
    """Let the server write its status now."""
    written = status_of(age_s=0.0, workers={0: ("mini2", "joined"), 1: ("pi5", "joined")})
    lab["mini1"].write(f"{KEPT}/status.json", written.model_dump_json(indent=2))


def python(call: str, module: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import sys; from smolcluster.launch.watch.{module} import {module}; sys.exit({call})",
    ]


def look(lab: Lab) -> tuple[dict[str, list[object]], float]:
    """What is said of each node, and how long the command took."""
    command = python(f"status({RUN!r}, as_json=True, watch=False)", "status")
    begin = time.monotonic()
    document = json.loads(lab.controller.output(command))
    taken_s = time.monotonic() - begin
    said = {
        each["node"]: [each["process"], each["exit_code"], each["presence"]]
        for each in document["processes"]
    }
    return said | {"run": [document["state"], document["step"]]}, taken_s


def test_status_is_right_with_one_machine_cut_off(run: Lab) -> None:
    everything_well = {
        "mini1": ["running", None, None],
        "mini2": ["running", None, "joined"],
        "pi5": ["running", None, "joined"],
        "run": ["training", 120],
    }
    assert look(run)[0] == everything_well
    tell(run)
    assert look(run)[0] == everything_well
    run["mini2"].write(f"{KEPT}/exits/worker-rank0-mini2", "137\n")
    run["mini2"].output(["tmux", "kill-session", "-t", "r1-worker1"])
    run["pi5"].cut()
    said, taken_s = look(run)
    assert said == everything_well | {
        "mini2": ["ended", 137, "joined"],
        "pi5": ["unreachable", None, "joined"],
    }
    assert taken_s < 30, "it does not wait until the system gives the connection up"
    run["pi5"].join()
    wait_for_ssh(run)
    run["mini1"].cut()
    said, _ = look(run)
    assert said["mini1"][0] == "unreachable"
    assert said["run"] == ["unknown", None]
    assert said["pi5"] == ["running", None, None]
    fetched = run.controller.run(python(f"fetch({RUN!r})", "fetch"))
    assert fetched.returncode == 1
    assert "error: mini1 (mini1): " in fetched.stdout
    assert "pi5 begins" in run.controller.path(f"{RUN}/logs/worker-rank1-pi5.log").read_text()


def test_logs_are_followed_across_a_cut(run: Lab) -> None:
    call = f"logs({RUN!r}, node=None, rank=None, level='INFO', follow=True, since=None)"
    following = run.controller.popen(python(call, "logs"), tty=True)
    try:
        for node in ("mini1", "mini2", "pi5"):
            following.wait_for(f"{node} begins")
        append(run["pi5"], "worker-rank1-pi5", log_line(2, "before the cut"))
        following.wait_for("before the cut")
        run["pi5"].cut()
        append(run["pi5"], "worker-rank1-pi5", log_line(3, "during the cut"))
        append(run["mini2"], "worker-rank0-mini2", log_line(4, "elsewhere"))
        following.wait_for("elsewhere")
        following.wait_for("trying again")
        run["pi5"].join()
        following.wait_for("connected again")
        following.wait_for("during the cut")
        append(run["pi5"], "worker-rank1-pi5", log_line(5, "after the cut"))
        following.wait_for("after the cut")
        following.type("\x03")
        assert following.wait(15) == 0
        shown = following.output
    finally:
        following.stop()
    for words in ("pi5 begins", "before the cut", "during the cut", "after the cut", "elsewhere"):
        assert shown.count(words) == 1, shown
    assert shown.count("trying again") == 1, shown
    assert "Traceback" not in shown

    def left() -> str:
        return commands(run["mini1"]) + commands(run["mini2"])

    # Nothing is left that reads for nobody.
    eventually(lambda: "tail" not in left() and "cat" not in left(), left)


def append(host: Host, stem: str, line: str) -> None:
    with host.path(f"{KEPT}/logs/{stem}.log").open("a") as file:
        file.write(line)


def commands(host: Host) -> str:
    return "\n".join(shlex.join(process.argv) for process in host.processes())


def test_a_real_terminal_is_watched_until_ctrl_c(run: Lab) -> None:
    watching: Running = run.controller.popen(
        python(f"status({RUN!r}, as_json=False, watch=True)", "status"), tty=True
    )
    try:
        watching.wait_for("training")
        run["mini2"].output(["tmux", "kill-session", "-t", "r1-worker1"])
        watching.wait_for("gone, without an exit code")
        watching.type("\x03")
        assert watching.wait(15) == 0
        assert "Traceback" not in watching.output
    finally:
        watching.stop()
