"""Runs on three hosts, launched over SSH from a fourth: real sshd, tmux, rsync and uv."""

import json
import os
import shlex
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lab import Host
from launching import (
    LAUNCH_TIMEOUT_S,
    PACED,
    PROJECT,
    STORIES_TIMEOUT_S,
    TINY,
    Launching,
    Screen,
    wait_until,
)

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


def test_an_interrupted_rsync_leaves_no_half_synced_node(launching: Launching) -> None:
    """Then the next launch makes it whole."""
    mini2 = launching.lab["mini2"]
    shutil.rmtree(mini2.path(f"{PROJECT}/src"), ignore_errors=True)  # of an earlier launch
    mini2.path(f"{PROJECT}/.smolcluster-sent").unlink(missing_ok=True)
    mini2.shape(0.5)
    try:
        running = launching.popen(launching.launch())
        wait_until(
            lambda: mini2.path(f"{PROJECT}/src").is_dir() or running.process.poll() is not None,
            lambda: running.output,
        )
        launching.controller.output("pkill -KILL -x rsync")
        assert running.wait(LAUNCH_TIMEOUT_S) == 1
    finally:
        mini2.unshape()
    assert "mini2: rsync failed" in running.output
    assert not mini2.path(f"{PROJECT}/.smolcluster-sent").exists()
    assert "starting the server" not in running.output


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

    wait_until(look_at_all, lambda: running.output, LAUNCH_TIMEOUT_S)
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


@pytest.mark.slow
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
    wait_until(lambda: launching.presence(0) == "lost", lambda: str(launching.status()))
    launching.goes_on()
    lab["mini2"].join()
    wait_until(lambda: launching.presence(0) == "joined", lambda: str(launching.status()))
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
    wait_until(lambda: launching.status(run_id)["step"] > step, lambda: terminal.text)
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


@pytest.mark.slow
@pytest.mark.parametrize("now", [(), pytest.param(("--now",), marks=pytest.mark.faults)])
def test_the_number_of_a_process_that_is_gone_is_nobodys_death(
    launching: Launching, now: tuple[str, ...]
) -> None:
    """Long after a run its numbers belong to others."""
    mini1 = launching.lab["mini1"]
    folder = f"{PROJECT}/runs/edp-old"
    server = {"node": "mini1", "role": "server", "rank": None, "ssh": "mini1"}
    server |= {"run_dir": f"~/{folder}", "session": "edp-old-server"}
    launched = {"run_id": "edp-old", "algorithm": "edp", "processes": [server]}
    launching.controller.write(f"{folder}/launch.json", json.dumps(launched))
    sleeper = mini1.popen("echo $$; exec sleep 1000")
    sleeper.wait_for("\n")
    mini1.write(f"{folder}/pids/server-mini1", sleeper.output)
    stopped = launching.run(launching.command("stop", "edp-old", *now))
    assert (stopped.returncode, "over already" in stopped.stdout) == (0, True)
    assert sleeper.process.poll() is None
    sleeper.stop()


@pytest.mark.slow
@pytest.mark.parametrize("has_python", [True, pytest.param(False, marks=pytest.mark.faults)])
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


@pytest.mark.slow
def test_names_are_never_executed(launching: Launching) -> None:
    odd = 'it\'s $(touch /tmp/pwned) "here"; touch pwned.yaml'
    launching.write_config(odd, {"mini2": {"project_dir": "~/$(touch /tmp/pwned)`touch pwned`"}})
    project = 'logging.project_name="$(touch /tmp/pwned) `touch /tmp/pwned`; touch /tmp/pwned"'
    done = launching.run(
        launching.launch("--override", *TINY, project, config=f"{launching.controller.home}/{odd}")
    )
    assert done.returncode == 0, done.stderr
    for host in (launching.controller, *launching.lab):
        assert host.run("find / -maxdepth 2 -name pwned; find ~ /tmp -name pwned").stdout == ""
    assert launching.is_clean(), launching.left()


def test_a_folder_of_something_else_is_refused_untouched(launching: Launching) -> None:
    mini2 = launching.lab["mini2"]
    mini2.write("thesis/chapter1.tex", "precious")
    launching.write_config("thesis.yaml", {"mini2": {"project_dir": "~/thesis"}})
    refused = launching.run(launching.launch(config="~/thesis.yaml"))
    assert refused.returncode == 1
    assert "mini2: ~/thesis holds something else" in refused.stderr
    assert os.listdir(mini2.path("thesis")) == ["chapter1.tex"]  # noqa: PTH208 - what is hidden, too
    assert launching.is_clean(), launching.left()


@pytest.mark.slow
def test_a_launch_loses_nothing_of_what_others_have_on_a_node(launching: Launching) -> None:
    """On a node with edited files, and on one that its owner has made a clone; twice, and with a way out."""
    lab, folder, edited = launching.lab, "~/owned", "src/smolcluster/utils/seed.py"
    nodes = {node: {"project_dir": folder} for node in lab.hosts}
    launching.write_config("owned.yaml", nodes)
    launch = launching.launch("--override", *TINY, config="~/owned.yaml")
    own = {"mini2": "data_mine/samples", "pi5": "src/mine.py"}

    def held() -> dict[str, str]:
        """The files of the nodes, and the runs of the controller."""
        listed = "find . -name .venv -prune -o -name runs -prune -o -name .git -prune -o -type f"
        files = {host.name: host.output(f"cd owned && {listed} -exec ls -l {{}} +") for host in lab}
        return files | {"runs": launching.controller.run(f"ls {PROJECT}/runs").stdout}

    without = shutil.ignore_patterns(".venv", "runs", ".smolcluster-*")
    for host in lab:
        host.output("rm -rf owned")
        shutil.copytree(
            launching.controller.path(PROJECT), host.path("owned"), symlinks=True, ignore=without
        )
        host.link_environment("owned")
    added = launching.controller.path(f"{launching.root}/src/smolcluster/added.py")
    git = "git -c user.name=n -c user.email=e@example.org"
    lab["pi5"].output("cd owned && git init -q && git add -A -- src pyproject.toml")

    def edit(words: str) -> None:
        added.write_text(words)
        for node, extra in own.items():
            lab[node].output(f"cd owned && mkdir -p data_mine && echo '{words}' >> {edited}")
            lab[node].write(f"owned/{extra}", words)
        lab["pi5"].output(f"cd owned && {git} commit -qam mine")

    def is_refused() -> None:
        before = held()
        refused = launching.run(launch)
        assert refused.returncode == 1
        assert refused.stderr.count("has 1 file that is neither") == 2
        assert all(f"{node}: {folder}" in refused.stderr for node in own)
        assert edited in refused.stderr
        assert "a git clone with uncommitted changes" in refused.stderr
        assert held() == before, "nothing was sent, also to the node on which nothing is edited"

    edit(words := "# first")
    is_refused()
    examined = launching.run(launching.command("doctor", "--json", "--config", "~/owned.yaml"))
    checks = {
        n: found["checks"]["code"] for n, found in json.loads(examined.stdout)["nodes"].items()
    }
    assert [checks[node]["state"] for node in own] == ["fail", "fail"]
    assert all("--overwrite" in checks[node]["fix"] for node in own)
    overwritten = launching.run(
        launching.launch("--overwrite", "--override", *TINY, config="~/owned.yaml")
    )
    assert overwritten.returncode == 0, overwritten.stderr
    for node, extra in own.items():
        assert lab[node].path(f"owned/{extra}").read_text() == words
        assert words not in lab[node].path(f"owned/{edited}").read_text()
        found = lab[node].output(f"cat owned/.smolcluster-backup/*/{edited} | grep '^# '")
        assert found.endswith(words)
        backup = f"{node}: what was edited there is now in {folder}/.smolcluster-backup/"
        assert backup in overwritten.stdout
    edit("# second")
    is_refused()
    added.unlink()
    assert launching.is_clean(), launching.left()


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


def test_missing_tools_are_named_with_their_remedies(launching: Launching) -> None:
    lab = launching.lab
    uv = lab["pi5"].path(".local/bin/uv")
    uv.rename(uv.with_name("uv-moved"))
    try:
        with hidden(lab["mini1"], "/usr/bin/tmux"), hidden(lab["mini2"], "/usr/bin/rsync"):
            failed = launching.run(launching.launch())
    finally:
        uv.with_name("uv-moved").rename(uv)
    assert failed.returncode == 1
    for node, tool in (("mini1", "tmux"), ("mini2", "rsync"), ("pi5", "uv")):
        assert f"{node} ({node}): has no {tool} ({tool}: " in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
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


@pytest.mark.faults
def test_a_gpt_is_launched_and_stopped_by_a_signal(launching: Launching) -> None:
    """Where nobody can be asked, a signal stops the run."""
    small = ["model.model_dim=16", "model.num_layers=1", "model.num_heads=1", "model.ff_dim=32"]
    words = ["--train-config", "stdlib", "--override", *small, "model.max_seq_len=32"]
    running = launching.popen(launching.script("edp_gpt", *words))
    running.wait_for("all have joined", LAUNCH_TIMEOUT_S)
    launching.goes_on()
    running.signal(signal.SIGINT)
    assert running.wait(LAUNCH_TIMEOUT_S) == 130, running.output
    assert "nothing of it is left running" in running.output
    assert (launching.folder("mini1") / "checkpoints/latest").exists()
    assert launching.is_clean(), launching.left()


def test_a_dry_run_says_no_secret_and_touches_nobody(launching: Launching) -> None:
    """Though all machines are out of reach."""
    for host in launching.lab:
        host.cut()
    try:
        words = launching.launch("--dry-run")
        planned = launching.run(["env", f"WANDB_API_KEY={SENTINEL}", *words])
    finally:
        launching.wait_for_ssh()
    assert planned.returncode == 0, planned.stderr
    assert SENTINEL not in planned.stdout
    folder = shlex.quote(launching.projects["pi5"])
    assert f'  cd "$HOME"/{folder} && ' in planned.stdout
