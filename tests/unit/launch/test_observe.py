"""Grafana, Loki and Prometheus beside a run, with a `docker` that only writes down what it is asked."""

import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from harness import free_port, local_settings
from reading import fake_ssh, server, worker
from smolcluster.cli import main
from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError, TryAgain
from smolcluster.launch.observe import beside, commands, stack
from smolcluster.launch.observe.beside import (
    announce,
    beside_others,
    forget,
    stack_for,
    within_reach,
)
from smolcluster.launch.observe.stack import (
    Service,
    check_docker,
    compose,
    own_stack,
    services,
)
from smolcluster.launch.observe.targets import (
    STALE_AFTER_S,
    remove_stale,
    ssh_address,
    targets_of,
    write_targets,
)
from smolcluster.launch.run_of_children import RunOfChildren
from smolcluster.observability import exporter
from waiting import eventually

DOCKER = """#!/bin/sh
echo "$*" >>"{folder}/asked"
case "$*" in *" up --detach" | *" down") echo "$GRAFANA_PASSWORD" >>"{folder}/passwords" ;; esac
case "$*" in
  "version "*)
    if [ -f "{folder}/locked" ]; then echo "permission denied while trying to connect" >&2; exit 1; fi
    if [ -f "{folder}/down" ]; then echo "Cannot connect to the Docker daemon" >&2; exit 1; fi
    echo 28.0 ;;
  "compose version") if [ -f "{folder}/without-compose" ]; then exit 1; fi ;;
  "network inspect "*) cat "{folder}/bridge" ;;
  "ps "*) if [ ! -f "{folder}/without-containers" ]; then
    printf 'grafana\\tUp 3 minutes (healthy)\\nloki\\tExited (1) 2 minutes ago\\n'
  fi ;;
  *" up --detach") if [ -f "{folder}/broken" ]; then echo "port is already allocated" >&2; exit 1; fi ;;
esac
"""


class Docker:
    """A `docker` in the PATH; files in its folder say what is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "docker"
        program.write_text(DOCKER.replace("{folder}", str(folder)))
        program.chmod(0o755)

    def let(self, what: str, content: str = "") -> None:
        """Have it behave so."""
        (self.folder / what).write_text(content)

    @property
    def passwords(self) -> list[str]:
        """Grafana's, each time that Compose was called."""
        file = self.folder / "passwords"
        return file.read_text().splitlines() if file.exists() else [""]

    @property
    def asked(self) -> list[str]:
        """What it was called with."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a shell and nothing of Docker's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("GRAFANA_PASSWORD", raising=False)
    for name in ("sh", "cat"):
        path = shutil.which(name)
        assert path is not None
        (folder / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def docker(no_docker: Path) -> Docker:
    return Docker(no_docker)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stack's folder, which is not the checkout's."""
    made = tmp_path / "logging"
    made.mkdir()
    for module in (stack, beside):
        monkeypatch.setattr(module, "own_stack", lambda: made)
    return made


class Well(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"database": "ok"} ready Healthy')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def all_well(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three services that answer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Well) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        put_services_at(http.server_port, monkeypatch)
        yield
        http.shutdown()
        thread.join()


@pytest.fixture
def none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    put_services_at(free_port(), monkeypatch)


def put_services_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(
        Service(each.name, f"http://127.0.0.1:{port}/{each.name}", each.word) for each in services()
    )
    for module in (stack, beside):
        monkeypatch.setattr(module, "services", lambda *_: found)


def test_the_checkout_has_a_stack() -> None:
    found = own_stack()
    assert found is not None
    assert (found / "docker-compose.yml").is_file()


def test_a_page_of_somebody_else_is_not_grafana(all_well: None) -> None:
    [grafana, *_] = stack.services()
    assert stack.answers(grafana)
    assert not stack.answers(Service("grafana", grafana.url, "another word"))
    assert not stack.answers(Service("grafana", "http://[nonsense", "x"))


def test_docker_that_is_missing_locked_or_stopped_is_told_apart(no_docker: Path) -> None:
    with pytest.raises(LaunchError, match="not installed"):
        check_docker()
    fake = Docker(no_docker)
    check_docker()
    fake.let("locked")
    with pytest.raises(LaunchError, match="usermod"):
        check_docker()
    (no_docker / "locked").unlink()
    fake.let("down")
    with pytest.raises(TryAgain, match="not running"):
        check_docker()


def test_either_compose_will_do(docker: Docker, no_docker: Path) -> None:
    words = ["--file", "/stack/docker-compose.yml"]
    assert compose(Path("/stack")) == ["docker", "compose", *words]
    docker.let("without-compose")
    with pytest.raises(LaunchError, match="docker-compose-plugin"):
        compose(Path("/stack"))
    (no_docker / "docker-compose").symlink_to(no_docker / "docker")
    assert compose(Path("/stack")) == ["docker-compose", *words]


def test_grafana_has_a_random_password_that_others_cannot_read(
    docker: Docker,
    folder: Path,
    all_well: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["observe", "up"]) == 0
    file = stack.password_file()
    assert f"compose --file {folder}/docker-compose.yml up --detach" in docker.asked
    assert capsys.readouterr().out == (
        f"Grafana: http://localhost:3000, user admin, password in {file}\n"
    )
    password = file.read_text().strip()
    assert len(password) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert docker.passwords == [password]
    assert main(["observe", "down"]) == 0
    assert docker.asked[-1] == f"compose --file {folder}/docker-compose.yml down"
    assert main(["observe", "up"]) == 0
    assert docker.passwords == [password] * 3, "the same from now on"
    assert password not in "\n".join(docker.asked), "everybody can read command lines"
    monkeypatch.setenv("GRAFANA_PASSWORD", "mine")
    stack.begin_up(folder)
    eventually(lambda: docker.passwords[-1] == "mine")


@pytest.mark.parametrize(("code", "is_said"), [(200, False), (401, True)])
def test_a_grafana_that_keeps_an_older_password_is_told_of(
    *,
    code: int,
    is_said: bool,
    docker: Docker,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def answer(url: str, auth: tuple[str, str], **_: object) -> httpx.Response:
        asked.append((url, auth))
        return httpx.Response(code)

    monkeypatch.setattr(stack, "answers", lambda *_: True)
    monkeypatch.setattr(httpx, "get", answer)
    assert main(["observe", "up"]) == 0
    password = stack.password_file().read_text().strip()
    assert asked == [("http://localhost:3000/api/org", ("admin", password))]
    assert ("reset-admin-password" in capsys.readouterr().out) is is_said


def test_up_that_fails_says_so(
    docker: Docker, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    docker.let("broken")
    assert main(["observe", "up"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "port is already allocated"
    assert lines[1].startswith("error: `docker compose ")
    assert lines[1].endswith("ended with exit code 1; it says why above")


def test_up_does_not_wait_for_ever(
    docker: Docker,
    folder: Path,
    none_answers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "READY_S", 0.0)
    assert main(["observe", "up"]) == 1
    assert "Exited (1) 2 minutes ago" in capsys.readouterr().out


def test_status_tells_of_each_service(
    docker: Docker, folder: Path, all_well: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", "status"]) == 0
    shown = capsys.readouterr().out
    for word in ("grafana", "loki", "prometheus", "Up 3 minutes (healthy)", "no container"):
        assert word in shown
    assert f"working_dir={folder}" in docker.asked[-1]


def test_status_of_what_does_not_run(
    docker: Docker, folder: Path, none_answers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", "status"]) == 1
    assert "yes" not in capsys.readouterr().out
    docker.let("down")
    assert main(["observe", "status"]) == TryAgain.exit_code


def test_loki_is_asked_where_it_is_published() -> None:
    assert services({})[1].url == "http://127.0.0.1:3100/ready"
    for bound in ("::", "0.0.0.0"):  # noqa: S104
        assert services({"LOKI_BIND": bound})[1].url == "http://127.0.0.1:3100/ready"
    assert services({"LOKI_BIND": "10.0.0.1"})[1].url == "http://10.0.0.1:3100/ready"


def test_where_loki_is_published_may_stand_in_the_stacks_env_file(folder: Path) -> None:
    assert services({})[1].url == "http://127.0.0.1:3100/ready", "there is no such file"
    for line in ("LOKI_BIND=10.0.0.2", 'LOKI_BIND="10.0.0.2"  # the cable'):
        (folder / ".env").write_text(f"# LOKI_BIND=10.0.0.3\nCOMPOSE_PROJECT_NAME=x\n{line}\n")
        assert services({})[1].url == "http://10.0.0.2:3100/ready"
        assert services({"LOKI_BIND": "10.0.0.1"})[1].url == "http://10.0.0.1:3100/ready"
        assert services({"LOKI_BIND": ""})[1].url == "http://127.0.0.1:3100/ready"


@pytest.mark.parametrize(
    ("asked", "cluster"),
    [(True, local_settings().cluster), (None, local_settings("observe=true").cluster)],
)
def test_a_launch_that_is_asked_to_starts_the_stack_and_does_not_wait(
    docker: Docker, folder: Path, none_answers: None, asked: bool | None, cluster: ClusterConfig
) -> None:
    said: list[str] = []
    assert stack_for(asked, cluster, said.append) == folder
    [line] = said
    assert line.startswith("Grafana is starting: http://localhost:3000")
    command = f"compose --file {folder}/docker-compose.yml up --detach"
    eventually(lambda: docker.asked[-1] == command)


@pytest.mark.parametrize("asked", [True, None])
def test_a_launch_uses_a_stack_that_runs_and_leaves_it_alone(
    docker: Docker, folder: Path, all_well: None, asked: bool | None
) -> None:
    said: list[str] = []
    assert stack_for(asked, local_settings().cluster, said.append) == folder
    assert said == ["Grafana shows the run: http://localhost:3000"]
    assert not any("up" in words.split() for words in docker.asked)


def test_who_has_the_port_of_grafana_and_is_not_ours_is_left_alone(
    docker: Docker, folder: Path, all_well: None
) -> None:
    docker.let("without-containers")
    said: list[str] = []
    assert stack_for(True, local_settings().cluster, said.append) is None
    [line] = said
    assert line.endswith("port 3000 is used by another program; nothing was started")
    assert not any("up" in words.split() for words in docker.asked)


def test_a_local_run_is_served_where_containers_reach_it(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    cluster = local_settings().cluster
    docker.let("bridge", "127.0.0.9\n")
    assert within_reach(cluster) == ("metrics_bind=127.0.0.9",)
    docker.let("bridge", "192.0.2.1\n")
    assert within_reach(cluster) == (), "Docker is in a virtual machine"
    docker.let("bridge", "")
    assert within_reach(cluster) == ()
    docker.let("bridge", "127.0.0.9\n")
    for stated in ("metrics_bind=127.0.0.1", "metrics_port=null"):
        assert within_reach(local_settings(stated).cluster) == ()
    monkeypatch.setattr("sys.platform", "darwin")
    assert within_reach(cluster) == ()


def test_a_second_run_of_this_machine_has_ports_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cluster = local_settings("metrics_port=9500", workers=2).cluster
    monkeypatch.setattr(exporter, "is_free", lambda *_: True)
    assert beside_others(cluster, said.append) == ()
    monkeypatch.setattr(exporter, "is_free", lambda _, port: port != 9502)
    assert beside_others(cluster, said.append) == ("metrics_port=9503",)
    [line] = said
    assert "9500" in line
    assert "9503" in line


HERE = (server(None), worker(0, "pi5", None), worker(1, "win", None))
APART = (server(None), worker(0, "pi5", "pi@192.168.50.2"), worker(1, "win", "fd00::2"))


def test_prometheus_is_told_of_every_process() -> None:
    cluster = local_settings("metrics_port=9000").cluster
    assert targets_of("r1", APART, cluster) == [
        {
            "targets": ["127.0.0.1:9000"],
            "labels": {"run": "r1", "role": "server", "node": "mini1"},
        },
        {
            "targets": ["192.168.50.2:9001"],
            "labels": {"run": "r1", "role": "worker", "node": "pi5"},
        },
        {"targets": ["[fd00::2]:9002"], "labels": {"run": "r1", "role": "worker", "node": "win"}},
    ]
    assert targets_of("r1", HERE, local_settings("metrics_port=null").cluster) == []
    far = local_settings("metrics_port=65534").cluster
    assert [each["targets"] for each in targets_of("r1", HERE, far)] == [
        ["127.0.0.1:65534"],
        ["127.0.0.1:65535"],
    ]


def test_the_address_of_a_node_is_what_ssh_says_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    assert ssh_address("pi@127.0.0.5") == "127.0.0.5"
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(
        '#!/bin/sh\n[ "$1" = -G ] && printf "user pi\\nhostname localhost\\nport 22\\n"\n'
    )
    assert ssh_address("pi5") in ("127.0.0.1", "::1")
    ssh.write_text('#!/bin/sh\necho "hostname no-such-host.invalid"\n')
    assert ssh_address("pi5") == "no-such-host.invalid"


def test_a_run_is_announced_and_forgotten(folder: Path) -> None:
    file = folder / "targets" / "r1.json"
    for bind, where in (("172.17.0.1", "172.17.0.1"), ("0.0.0.0", "127.0.0.1")):  # noqa: S104
        cluster = local_settings("metrics_port=9000", f"metrics_bind={bind}").cluster
        announce(folder, "r1", HERE, cluster, pytest.fail)
        first, *others = json.loads(file.read_text())
        assert (first["targets"], len(others)) == ([f"{where}:9000"], 2)
    assert file.stat().st_mode & 0o777 == 0o644, "Prometheus is another user"
    forget("r1")
    forget("r1")
    assert list((folder / "targets").iterdir()) == []


def test_prometheus_is_not_sent_to_machines_that_do_not_let_it_in(folder: Path) -> None:
    said: list[str] = []
    announce(folder, "r1", APART, local_settings().cluster, said.append)
    file = folder / "targets" / "r1.json"
    assert [each["labels"]["node"] for each in json.loads(file.read_text())] == ["mini1"]
    [line] = said
    assert line.startswith("Prometheus does not see pi5, win: ")
    assert "metrics_bind=0.0.0.0" in line
    open_to_all = local_settings("metrics_bind=0.0.0.0").cluster
    announce(folder, "r1", APART, open_to_all, pytest.fail)
    assert len(json.loads(file.read_text())) == 3


def test_a_folder_that_cannot_be_written_is_one_line(folder: Path) -> None:
    (folder / "targets").write_text("in the way")
    said: list[str] = []
    announce(folder, "r1", HERE, local_settings().cluster, said.append)
    assert len(said) == 1
    assert said[0].endswith("; Prometheus does not see the run")


def run_id(suffix: str) -> str:
    return f"edp-20261120-135025-{suffix}"


def test_runs_that_ended_unseen_are_cleared_away(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        port = alive.getsockname()[1]
        for name, targets in {
            run_id("aaaa"): [f"127.0.0.1:{port}"],
            run_id("bbbb"): [f"127.0.0.1:{free_port()}"],
            run_id("cccc"): [f"127.0.0.1:{free_port()}"],
        }.items():
            write_targets(folder, name, [{"targets": targets, "labels": {}}])
        mine = folder / "targets" / "node_exporter.json"
        mine.write_text("[]")
        os.utime(mine, (0, 0))
        later = (folder / "targets" / f"{run_id('cccc')}.json").stat().st_mtime + STALE_AFTER_S + 60
        os.utime(folder / "targets" / f"{run_id('cccc')}.json", (later, later))
        remove_stale(folder, now=lambda: later)
    assert {file.stem for file in (folder / "targets").iterdir()} == {
        run_id("aaaa"),
        run_id("cccc"),
        "node_exporter",
    }


@pytest.fixture
def runs_seen(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For each run that is launched what Prometheus is told while it lasts; none is really started."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    seen: list[list[str]] = []

    def follow(self: RunOfChildren) -> int:
        files = (folder / "targets").glob("*.json")
        seen.append([each["targets"][0] for file in files for each in json.loads(file.read_text())])
        self._end()
        return 0

    monkeypatch.setattr(RunOfChildren, "start", lambda *_: None)
    monkeypatch.setattr(RunOfChildren, "follow", follow)
    return seen


def launch(*words: str) -> int:
    return main(
        [
            *("launch", "edp", "--local", "--no-tmux", "--workers", "2", *words),
            *("--override", f"port={free_port()}", "metrics_port=9000"),
        ]
    )


def test_a_local_run_is_told_to_prometheus_while_it_lasts(
    docker: Docker,
    folder: Path,
    all_well: None,
    runs_seen: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    docker.let("bridge", "")
    assert launch() == 0
    assert runs_seen == [["127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002"]]
    assert list((folder / "targets").iterdir()) == []
    [_, line] = capsys.readouterr().out.splitlines()  # below what is trained
    assert line == "Grafana shows the run: http://localhost:3000"


def test_a_launch_goes_on_alone_without_docker_or_where_nobody_asked_for_grafana(
    no_docker: Path,
    none_answers: None,
    runs_seen: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch("--observe") == 0
    [_, line] = capsys.readouterr().out.splitlines()  # below what is trained
    assert "Docker is not installed" in line
    fake = Docker(no_docker)
    assert launch() == 0
    [_, line] = capsys.readouterr().out.splitlines()
    assert "--observe" in line
    assert launch("--no-observe") == 0
    assert "Grafana" not in capsys.readouterr().out
    assert fake.asked == []
    assert runs_seen == [[], [], []]
