"""Runs on three hosts, launched over SSH from a fourth: real sshd, tmux and uv."""

import json
import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import Host
from launching import (
    CACHE,
    LAUNCH_TIMEOUT_S,
    ODD,
    PACED,
    PROJECT,
    STORIES_TIMEOUT_S,
    TINY,
    Launching,
    Screen,
)
from waiting import eventually

pytestmark = pytest.mark.timeout(STORIES_TIMEOUT_S)
SENTINEL = "sentinel" * 5
"""The form of a W&B key."""
SECRET = ".config/smolcluster/secret"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
ARGVS = "ssh-argv"
SPY = '#!/bin/sh\nprintf "%s\\n" "$*" >> ~/ssh-argv\nexec /usr/bin/ssh "$@"\n'


@contextmanager
def hidden(host: Host, program: str) -> Iterator[None]:
    """A host on which a program cannot be executed."""
    host.output(["mount", "--bind", "/dev/null", program])
    try:
        yield
    finally:
        host.output(["umount", program])


def pythons(host: Host) -> list[int]:
    """The server and the workers there."""
    programs = ("server.py", "worker.py")
    return [each.pid for each in host.processes() if " ".join(each.argv[:2]).endswith(programs)]


@pytest.mark.nightly
def test_a_transfer_that_is_cut_leaves_nothing_half(launching: Launching) -> None:
    mini2 = launching.lab["mini2"]
    mini2.output(f"rm -rf {CACHE}/projects")  # of an earlier launch
    projects = mini2.path(f"{CACHE}/projects")
    mini2.shape(0.5)
    try:
        running = launching.popen(launching.launch())
        eventually(
            lambda: list(projects.glob("*")) or running.process.poll() is not None,
            lambda: running.output,
        )
        launching.cut_ssh()
        assert running.wait(LAUNCH_TIMEOUT_S) == 1
    finally:
        mini2.unshape()
    assert "mini2" in running.output
    assert "starting the server" not in running.output
    eventually(lambda: not list(projects.glob("*")), lambda: str(list(projects.glob("*"))))


def test_the_script_trains_digits_and_leaves_nothing(launching: Launching) -> None:
    """Nor does anybody see a secret."""
    controller, lab = launching.controller, launching.lab
    controller.write("spy/ssh", SPY, mode=0o755)
    script = launching.script("edp", "--train-config", "digits", "--override", "num_epochs=30")
    keys = [f"WANDB_API_KEY={SENTINEL}", f"HF_TOKEN={SENTINEL}"]
    environment = [*keys, f"PATH={controller.home}/spy:/usr/bin:/bin"]
    learn = ["learning_rate=0.004", "eval_steps=100000", "dataset.tokenizer=gpt2"]
    running = launching.popen(["env", *environment, *script, *learn])
    seen: set[str] = set()

    looked_at: set[str] = set()

    def look_at_all() -> bool:
        for host in lab:
            seen.update(" ".join(each.argv) for each in host.processes())
            if host.name not in looked_at and (pids := pythons(host)):
                environ = host.run(f"tr '\\0' '\\n' < /proc/{pids[0]}/environ")
                if environ.returncode:
                    continue  # it was one of those that prepare, and has gone
                looked_at.add(host.name)
                assert f"HF_TOKEN={SENTINEL}" in environ.stdout.splitlines()
                assert "WANDB_API_KEY" not in environ.stdout, "nothing is reported online"
                assert host.run([*NOBODY, "cat", f"/proc/{pids[0]}/environ"]).returncode != 0
                seen.add(host.output([*NOBODY, "ps", "-A", "-ww", "-o", "args"]))
        return len(looked_at) == 3 or running.process.poll() is not None

    eventually(look_at_all, lambda: running.output, LAUNCH_TIMEOUT_S)
    assert looked_at == set(lab.hosts), running.output
    assert running.wait(LAUNCH_TIMEOUT_S) == 0, running.output
    seen.add(running.output)
    seen.add(controller.path(ARGVS).read_text())
    key = controller.path(SECRET).read_text().strip()
    for host in lab:
        assert stat.S_IMODE(host.path(SECRET).stat().st_mode) == 0o600
        assert host.path(SECRET).read_text().strip() == key
    for secret in (SENTINEL, key):
        assert not [text for text in seen if secret in text]
        for node, project in launching.projects.items():
            found = lab[node].run(["grep", "-rlF", "--exclude-dir=.venv", secret, project])
            assert found.stdout == ""
        assert controller.run(["grep", "-rlF", secret, f"{PROJECT}/runs"]).stdout == ""
    folder = launching.folder("mini1")
    assert json.loads((folder / "summary.json").read_text())["final"]["val_accuracy"] >= 0.95
    assert not list(folder.glob("launch/*.sh"))
    assert launching.is_clean(), launching.left()


@pytest.mark.nightly
def test_a_run_outlives_what_happens_to_its_machines(
    launching: Launching, screen: Callable[[list[str]], Screen]
) -> None:
    """It is followed on a terminal without a window; then stopped beside another run, and resumed."""
    lab, controller = launching.lab, launching.controller
    overrides = [*PACED, "heartbeat_timeout_s=3", "reconnect_timeout_s=300"]
    terminal = screen(launching.launch("--no-tmux", "--override", *overrides))
    terminal.wait_for("all have joined", " samples/s", timeout_s=LAUNCH_TIMEOUT_S)
    run_id = launching.run_id

    # All connections of the controller are cut.
    controller.cut()
    launching.cut_ssh()
    terminal.wait_for("no contact with mini1, where the run goes on")
    launching.goes_on()
    controller.join()
    terminal.wait_for("mini1 is back")

    # A worker's machine loses its network.
    lab["mini2"].cut()
    eventually(lambda: launching.presence(0) == "lost", lambda: str(launching.status()))
    launching.goes_on()
    lab["mini2"].join()
    eventually(lambda: launching.presence(0) == "joined", lambda: str(launching.status()))
    launching.wait_for_ssh()

    # The port is the run's; nothing is started there.
    busy = launching.run(launching.launch("--override", *TINY))
    assert busy.returncode == 75
    assert "port 6000 is in use" in busy.stderr
    assert "--override port=6001" in busy.stderr
    goes_on = launching.run(launching.command("resume", run_id, "--override", "port=6007"))
    assert goes_on.returncode == 75
    assert f"run {run_id} is not over" in goes_on.stderr

    # The user leaves it, and starts another one.
    terminal.press("C-c")
    terminal.wait_for("leave the run going (l), or stop it")
    terminal.press("l", "Enter")
    terminal.wait_for("code=0", f"attach {run_id}")
    other = launching.run(launching.launch("--detach", "--override", *PACED, "port=6001"))
    assert other.returncode == 0, other.stderr
    other_id = launching.run_id
    assert f"attach {other_id}" in other.stdout
    lab["mini2"].output("tmux new-session -d -s foreign 'sleep 1000'")

    # The first one is stopped, and again.
    stopped = launching.run(launching.command("stop", run_id))
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert "nothing of it is left running" in stopped.stdout
    checkpoint = (launching.folder("mini1", run_id) / "checkpoints/latest").readlink().name
    step = int(checkpoint.rpartition("-")[2])
    assert step == launching.status(run_id)["step"] > 0
    events = (launching.folder("mini1", run_id) / "events.jsonl").read_text()
    assert "worker_left" not in events, "the workers were stopped before the server"
    assert not launching.left_of(run_id)
    again = launching.run(launching.command("stop", run_id))
    assert again.returncode == 0
    assert "over already" in again.stdout
    launching.goes_on(other_id)

    # The other one is killed; what is the user's stays.
    killed = launching.run(launching.command("stop", other_id, "--now"))
    assert killed.returncode == 0, killed.stdout
    assert not (launching.folder("mini1", other_id) / "exits/server-mini1").exists()
    assert launching.status(other_id)["reason"] == "it was stopped"
    left = launching.left()
    assert [left["mini1"], left["pi5"]] == [[], []]
    assert lab["mini2"].output("tmux list-sessions -F '#S'") == "foreign"
    lab["mini2"].end_processes()

    # The first one goes on where it was.
    terminal = screen(launching.command("resume", run_id, "--no-tmux", "--no-sync"))
    terminal.wait_for("all have joined", timeout_s=LAUNCH_TIMEOUT_S)
    eventually(lambda: launching.status(run_id)["step"] > step, lambda: terminal.text)
    events = (launching.folder("mini1", run_id) / "events.jsonl").read_text()
    assert events.count('"run_started"') == 2

    # Its server is killed; started again, it finds its workers waiting.
    terminal.press("C-c")
    terminal.wait_for("leave the run going (l), or stop it")
    terminal.press("l", "Enter")
    terminal.wait_for("code=0")
    workers = [pythons(lab[node]) for node in ("mini2", "pi5")]
    lab["mini1"].run(["kill", "-KILL", *map(str, pythons(lab["mini1"]))])
    terminal = screen(launching.command("resume", run_id, "--no-tmux", "--no-sync"))
    terminal.wait_for("still there", "all have joined", timeout_s=LAUNCH_TIMEOUT_S)
    assert [pythons(lab[node]) for node in ("mini2", "pi5")] == workers
    launching.goes_on(run_id)

    # A stop that does not reach a machine says so, and stops the others.
    lab["pi5"].cut()
    partly = launching.run(launching.command("stop", run_id))
    assert partly.returncode == 1
    assert "worker 2 (pi5): pi5 (pi5)" in partly.stdout
    assert lab["mini1"].processes() == lab["mini2"].processes() == []
    assert pythons(lab["pi5"])
    terminal.wait_for("code=143")
    launching.wait_for_ssh()
    last = launching.run(launching.command("stop", run_id))
    assert last.returncode == 0, last.stdout
    launching.wait_until_clean()


@pytest.mark.nightly
@pytest.mark.parametrize("has_python", [True, False])
def test_a_start_that_fails_is_taken_back(launching: Launching, has_python: bool) -> None:
    """Of a worker that refuses its device, and of one whose interpreter is broken."""
    launching.make_ready()
    words = ["--no-sync", "--override", *PACED]
    python = launching.lab["pi5"].path(f"{launching.projects['pi5']}/.venv/bin/python")
    moved = python.with_name("python-moved")
    if has_python:
        words.append("nodes.pi5.device=cuda:7")
    else:
        python.rename(moved)
        launching.lab["pi5"].write(f"{ODD}/.venv/bin/python", "#!/bin/sh\nexit 3\n", mode=0o755)
    try:
        failed = launching.run(launching.launch(*words))
    finally:
        if not has_python:
            moved.rename(python)
    assert failed.returncode == 1, failed.stdout
    assert failed.stderr.count("worker 2 (pi5) ended with exit code") == 1
    assert "Traceback" not in failed.stdout + failed.stderr
    assert "stopping what was started" in failed.stdout
    assert launching.is_clean(), launching.left()


@pytest.mark.nightly
def test_names_are_never_executed(launching: Launching) -> None:
    odd = 'it\'s $(touch /tmp/pwned) "here"; touch pwned.yaml'
    clone = "$(touch /tmp/pwned)`touch pwned`"
    launching.lab["mini2"].checkout(clone)
    launching.lab["mini2"].prepare(clone)
    launching.write_config(odd, {"mini2": {"project_dir": f"~/{clone}"}})
    project = 'logging.project_name="$(touch /tmp/pwned) `touch /tmp/pwned`; touch /tmp/pwned"'
    done = launching.run(
        launching.launch("--override", *TINY, project, config=f"{launching.controller.home}/{odd}")
    )
    assert done.returncode == 0, done.stderr
    for host in (launching.controller, *launching.lab):
        assert host.run("find / -maxdepth 2 -name pwned; find ~ /tmp -name pwned").stdout == ""
    assert launching.is_clean(), launching.left()


@pytest.mark.nightly
def test_launches_of_different_code_run_side_by_side_and_change_no_clone(
    launching: Launching,
) -> None:
    """On a node with a clone that nobody has named, and on one whose clone is named and edited."""
    lab, added = launching.lab, Path(f"{launching.root}/src/smolcluster/added.py")
    clones = {"mini1": "smolcluster", "pi5": ODD}
    lab["mini1"].checkout("smolcluster")
    edited = lab["pi5"].path(f"{ODD}/src/smolcluster/utils/seed.py")
    original = edited.read_text()
    edited.write_text(f"{original}# mine\n")

    def held() -> dict[str, str]:
        left_out = " -o ".join(f"-name {name} -prune" for name in (".venv", "runs", "__pycache__"))
        command = f"find . {left_out} -o -type f -exec ls -l {{}} +"
        return {n: lab[n].output(f"cd {shlex.quote(at)} && {command}") for n, at in clones.items()}

    before = held()
    first = launching.run(launching.launch("--detach", "--override", *PACED))
    assert first.returncode == 0, first.stderr
    assert f"pi5: uses its own ~/{ODD}, which differs in 1 file" in " ".join(first.stdout.split())
    old, first_run = lab["mini1"].path(f"{CACHE}/projects/latest").readlink(), launching.run_id
    launching.controller.path(added).write_text("# other code")
    try:
        second = launching.run(launching.launch("--detach", "--override", *PACED, "port=6001"))
        assert second.returncode == 0, second.stderr
        new = lab["mini1"].path(f"{CACHE}/projects/latest").readlink()
        assert new != old
        for run_id in (first_run, launching.run_id):
            launching.goes_on(run_id)

        # Code that a process uses is not cleaned away, however old it is.
        for node in launching.brought:
            lab[node].output(f"touch -d '2 days ago' {CACHE}/projects/* {CACHE}/environments/*")
        clean = launching.command("clean", "--yes")
        assert "no run uses it" not in launching.run(clean).stdout
        assert launching.run(launching.command("stop", first_run)).returncode == 0
        assert launching.run(clean).stdout.count("no run uses it") == 2
        for node in launching.brought:
            left = [path.name for path in lab[node].path(f"{CACHE}/projects").iterdir()]
            assert sorted(left) == sorted(["latest", new.name])
        launching.goes_on()
        assert launching.run(launching.command("stop")).returncode == 0
    finally:
        launching.controller.path(added).unlink()
    assert held() == before
    edited.write_text(original)
    launching.wait_until_clean()


@pytest.mark.nightly
def test_a_way_that_loses_large_packets_is_named_before_the_run(launching: Launching) -> None:
    launching.make_ready()
    pi5, server = launching.lab["pi5"], launching.lab["mini1"]
    pi5.lose_large(server, 1)
    way = f"host_ip.pi5={server.addresses[1]}"
    try:
        failed = launching.run(launching.launch("--no-sync", "--override", *PACED, way))
    finally:
        for host in (pi5, server):
            host.disconnect(1)
    assert failed.returncode == 1
    assert "pi5: small packets pass, but large ones to mini1" in failed.stderr
    assert "mini2" not in failed.stderr
    assert launching.is_clean(), launching.left()


@pytest.mark.nightly
def test_a_controller_without_tmux_follows_syncps_until_ctrl_c_comes_twice(
    launching: Launching,
) -> None:
    script = launching.script("syncps", "--override", *PACED)
    with hidden(launching.controller, "/usr/bin/tmux"):
        running = launching.controller.popen(script, tty=True)
        running.wait_for(" samples/s", LAUNCH_TIMEOUT_S)
        running.type("\x03")
        running.wait_for("leave the run going (l), or stop it")
        running.type("\x03")
        assert running.wait(LAUNCH_TIMEOUT_S) == 130, running.output
        assert "nothing of it is left running" in running.output
        assert launching.is_clean(), launching.left()
        again = launching.run(launching.command("stop", launching.run_id))
    assert (again.returncode, "over already" in again.stdout) == (0, True)
    assert (launching.folder("mini1") / "checkpoints/latest").exists()
