"""`smolcluster init`: flags and answers, what is chosen, and the file that comes of it."""

import io
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from smolcluster.configs.load import parse_yaml
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import AlgorithmName, ClusterConfig
from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.host import Host
from smolcluster.launch.links import Way
from smolcluster.launch.setup import init as init_module
from smolcluster.launch.setup.cluster_file import cluster_text
from smolcluster.launch.setup.discover import Neighbour
from smolcluster.launch.setup.init import (
    NEEDED,
    InitOptions,
    Terminal,
    init,
    parse_machine,
    settings_of,
)
from tiers import at_night

TODAY = date(2026, 11, 22)
LOOPBACK = Way("127.0.0.1", "lo")


@dataclass
class Answers(Terminal):
    """A user who gives answers one after the other, and notes what was asked."""

    answers: list[str | bool]
    asked: list[tuple[str, str]] = field(default_factory=list)

    def text(self, question: str, default: str) -> str:
        self.asked.append((question, default))
        answer = self.answers.pop(0)
        assert isinstance(answer, str)
        return answer or default

    def confirm(self, question: str) -> bool:
        self.asked.append((question, ""))
        answer = self.answers.pop(0)
        assert isinstance(answer, bool)
        return answer


@pytest.fixture
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(printed: io.StringIO) -> Console:
    return Console(file=printed, width=200)


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's address is the loopback's, so that no network is needed."""
    monkeypatch.setattr(init_module, "addresses_of", lambda _host: [LOOPBACK])


@pytest.fixture
def measured_before(on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers' links are alike and known, which saves time."""

    def ways(_server: Host, workers: list[Host], *_: object, **__: object) -> dict[str, Way]:
        measured = Way("127.0.0.1", "lo", 0.3e-3, 117.5, 117.5, "118 MB/s, 0.3 ms")
        return {worker.node: measured for worker in workers}

    monkeypatch.setattr(init_module, "measure_ways", ways)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "my cluster.yaml"


def options(target: Path, **more: object) -> InitOptions:
    return InitOptions(**{"server": "mini1=local", "workers": ("pi5=local",), "to": target, **more})  # type: ignore[arg-type]


@dataclass
class Conversation:
    """What is asked of a user who has given few flags, and the file that comes of it."""

    target: Path
    console: Console

    def __call__(self, *answers: str | bool, **flags: Any) -> tuple[Answers, ClusterConfig]:
        user = Answers([*answers, True])
        assert init(InitOptions(to=self.target, **flags), user, console=self.console) == 0
        return user, load_settings(self.target, "nn", environ={}).cluster


@pytest.fixture
def talk(target: Path, console: Console, measured_before: None) -> Conversation:
    return Conversation(target, console)


# Flags


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("pi5", Host("pi5", "pi5")),
        ("pi5=pi@192.168.50.2", Host("pi5", "pi@192.168.50.2")),
        ("pi5=local", Host("pi5", None)),
    ],
)
def test_a_machine_is_a_name_and_where_ssh_finds_it(text: str, host: Host) -> None:
    assert parse_machine(text, "--worker") == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pi 5",
        "pi5;reboot",
        "$(touch /tmp/executed)",
        "`id`",
        "pi'5",
        'pi"5',
        "-oProxyCommand=id",
        "pi5\n",
        "pi5=",
        "pi5=a b",
        "pi5=-oProxyCommand=touch",
        "pi5=$(touch /tmp/executed)",
        "pi5=pi@pi5;reboot",
        "pi5='pi'",
        "pi5=pi@pi5\nport: 1",
        "pi5=pi@pi5 #",
    ],
)
@pytest.mark.parametrize("flag", ["--server", "--worker"])
def test_what_could_be_executed_is_refused_in_one_line(
    text: str, flag: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        pytest.fail("something was executed")

    monkeypatch.setattr(Host, "run", run)
    flags = {"server": text} if flag == "--server" else {"workers": ("mini2", text)}
    with pytest.raises(ConfigError) as caught:
        init(options(target, **flags))
    message = str(caught.value)
    assert message.startswith(f"{flag}: ")
    assert message.isprintable()
    assert not target.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 0}, r"^--port is 0, must be a whole number from 1 to 65535$"),
        (
            {"algorithm": "epd"},
            r"^unknown algorithm 'epd' \(known: edp, diloco, mesh, pipeline, syncps\)$",
        ),
        (
            {"project_dir": "smol"},
            r"^--project-dir is 'smol', must be a path that begins with / or",
        ),
        ({"project_dir": "/a\nb: c"}, r"^--project-dir is '/a\\nb: c', must"),
        ({"workers": ("pi5", "pi5=x")}, r"^--worker names 'pi5' twice"),
        ({"to": Path("/nowhere/x.yaml")}, r"^--to /nowhere/x\.yaml: there is no folder /nowhere$"),
        ({"to": Path("/")}, r"^--to /: is a folder"),
        ({"server": None}, "^" + NEEDED[:20]),
        ({"workers": ()}, "^" + NEEDED[:20]),
    ],
)
def test_wrong_flags_are_refused(flags: dict[str, object], message: str, target: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        init(options(target, **flags))


def test_a_file_that_is_there_is_kept_unless_forced(target: Path) -> None:
    target.write_text("mine")
    with pytest.raises(ConfigError, match="is there already: --force writes over it"):
        init(options(target))
    assert init(options(target), Answers([False])) == 1
    with pytest.raises(ConfigError, match="--force"):
        init(options(target, yes=True), Answers([]))
    assert target.read_text() == "mine"


# The whole


@pytest.mark.usefixtures("on_loopback")
@pytest.mark.parametrize("algorithm", ["syncps", *at_night("edp")])
def test_flags_alone_give_a_file_that_loads(
    algorithm: AlgorithmName, target: Path, console: Console, printed: io.StringIO
) -> None:
    workers = ("pi5=local", "123=local")
    assert (
        init(options(target, workers=workers, algorithm=algorithm, force=True), console=console)
        == 0
    )
    settings = load_settings(target, "nn", environ={})
    cluster, shipped = settings.cluster, load_settings(algorithm, "nn", environ={}).cluster
    assert cluster.server == "mini1"
    assert cluster.workers == ("pi5", "123")
    assert cluster.host_ip == dict.fromkeys(("mini1", *cluster.workers), "127.0.0.1")
    assert {node.ssh for node in cluster.nodes.values()} == {"local"}
    machines = {"host_ip", "workers", "num_workers", "server", "nodes"}
    assert cluster.model_dump(exclude=machines) == shipped.model_dump(exclude=machines)
    said = printed.getvalue()
    assert "measuring 1 way from pi5 to mini1 …" in said
    assert "pi5 reaches mini1 best at 127.0.0.1: " in said
    assert f"`uv run smolcluster doctor --config '{target}'` examines its machines" in said
    assert f"`uv run smolcluster launch {algorithm} --config '{target}'` starts it" in said
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.usefixtures("measured_before")
def test_the_file_is_commented_as_the_shipped_one(target: Path) -> None:
    assert init(options(target, port=6001)) == 0
    text = target.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("  pi5: ")]
    assert line == '  pi5: "127.0.0.1"            # 118 MB/s, 0.3 ms'
    assert "port: 6001\n" in text
    assert f"# smolcluster config check --config '{target}'\n" in text


@pytest.mark.usefixtures("measured_before")
def test_a_server_that_works_too_has_one_entry(target: Path) -> None:
    workers = ("mini1=somewhere", "pi5=local")
    assert init(options(target, workers=workers, algorithm="syncps")) == 0
    cluster = load_settings(target, "nn", environ={}).cluster
    assert cluster.workers == ("mini1", "pi5")
    assert list(cluster.host_ip) == ["mini1", "pi5"]


# Answers


def test_what_flags_leave_open_is_asked(talk: Conversation, target: Path) -> None:
    user, cluster = talk("mini1", "local", "pi5", "local", "mini2", "local", "")
    assert [question for question, _ in user.asked] == [
        "Server: its name",
        "Where ssh finds mini1 (local: this machine)",
        "Worker 1: its name",
        "Where ssh finds pi5 (local: this machine)",
        "Worker 2: its name, empty: no more",
        "Where ssh finds mini2 (local: this machine)",
        "Worker 3: its name, empty: no more",
        f"Write {target}?",
    ]
    assert cluster.workers == ("pi5", "mini2")


def test_a_server_is_asked_for_where_flags_name_only_workers(talk: Conversation) -> None:
    user, cluster = talk("", "pi5", "local", workers=("pi5=local", "mini2=local"))
    assert (cluster.server, cluster.workers) == ("pi5", ("pi5", "mini2"))
    assert len(user.asked) == 4


def test_a_wrong_answer_is_asked_again(
    talk: Conversation, printed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_in(host: Host) -> None:
        if host.destination is not None:
            raise host.unreachable("ssh: connect to host x port 22: Connection refused")

    monkeypatch.setattr(init_module, "log_in", log_in)
    names = ["", "my server", "mini1", "pi@far", "local", "pi5", "local", "pi5", "pi 5", ""]
    user, cluster = talk(*names)
    said = printed.getvalue()
    assert "Server: 'my server' is no name of a node" in said
    assert "mini1 (pi@far): it answers, but no SSH server listens there" in said
    assert ("Where ssh finds mini1 (local: this machine)", "pi@far") in user.asked
    assert "pi5 is a worker already" in said, "before it is asked where that is"
    assert "Worker 2: 'pi 5' is no name of a node" in said
    assert cluster.workers == ("pi5",)


def test_one_can_go_back_to_the_question_before(talk: Conversation, printed: io.StringIO) -> None:
    server = ["<", "mini9", "<", "mini8", "local"]  # its name, where it is
    worker = ["<", "mini1", "local", "pi5", "local"]  # from the first one
    _, cluster = talk(*server, *worker, "pi6", "local", "<", "mini2", "local", "mini1", "")
    assert (cluster.server, cluster.workers) == ("mini1", ("pi5", "mini2", "mini1"))
    said = printed.getvalue()
    assert "letters, digits" in said.splitlines()[0]
    assert "pi6 is left out again" in said
    assert "mini8" not in said


def test_one_cannot_go_back_behind_what_a_flag_says(talk: Conversation) -> None:
    _, cluster = talk("<", "pi5", "local", "", server="mini1=local")
    assert cluster.server == "mini1"


def test_machines_that_were_found_are_offered(
    talk: Conversation, printed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Neighbour("mini2", "10.0.0.2"), Neighbour("pi5", "10.0.0.5")]
    monkeypatch.setattr(init_module, "discover", lambda: found)
    monkeypatch.setattr(Neighbour, "destination", "local")
    user, cluster = talk("2", "", "mini2", "", "", discover=True)
    assert "  1  mini2  10.0.0.2\n  2  pi5  10.0.0.5\n" in printed.getvalue()
    assert user.asked[0] == ("Server: its name, or its number", "")
    assert (cluster.server, cluster.workers) == ("pi5", ("mini2",))


@pytest.mark.usefixtures("measured_before")
def test_nothing_is_written_without_consent(target: Path) -> None:
    assert init(options(target), Answers([False])) == 1
    assert not target.exists()
    assert init(options(target, yes=True), Answers([])) == 0
    assert target.exists()


# Machines and links


def test_all_machines_that_cannot_be_reached_are_told(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(host: Host, _script: str) -> None:
        raise host.unreachable("ssh: Could not resolve hostname x: Name or service not known")

    monkeypatch.setattr(Host, "run", run)
    with pytest.raises(LaunchError) as caught:
        init(options(target, server="mini1", workers=("pi5=pi@far",)))
    assert "mini1 (mini1): its name has no address: use its address (nodes.mini1.ssh" in str(
        caught.value
    )
    assert "pi5 (pi@far): its name has no address" in str(caught.value)
    assert not target.exists()


def test_a_shell_that_is_none_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Host, "argv", lambda *_, **__: ["sh", "-c", "echo \"'sh' is not recognized\" >&2; exit 1"]
    )
    with pytest.raises(
        LaunchError, match=r"mini1 \(m\): its shell does not .* 'sh' is not recognized$"
    ):
        init(options(target, server="mini1=m"))


def test_all_workers_without_a_way_are_told(
    target: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = [Way("192.0.2.200", "eth7"), Way("192.0.2.201", "eth8")]
    monkeypatch.setattr(init_module, "addresses_of", lambda _host: foreign)
    why = "192.0.2.200 (eth7): nobody may listen there; 192.0.2.201 (eth8): nobody may listen there"
    with pytest.raises(LaunchError) as caught:
        init(options(target, workers=("pi5=local", "win=local")), console=console)
    assert str(caught.value) == (
        f"pi5, win: no way to mini1 ({why}): let port 65432 through its firewall, or connect them to one "
        "network"
    )
    assert not target.exists()


def test_the_server_has_the_address_that_most_workers_use(
    target: Path, on_loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {name: Way(f"127.0.0.{end}", "lo") for name, end in (("a", 2), ("b", 3), ("c", 3))}
    monkeypatch.setattr(init_module, "measure_ways", lambda *_, **__: best)
    assert init(options(target, workers=tuple(f"{name}=local" for name in best))) == 0
    assert load_settings(target, "nn", environ={}).cluster.host_ip["mini1"] == "127.0.0.3"


def test_settings_that_are_the_default_are_left_out() -> None:
    hosts = [Host("mini1", None), Host("pi5", "pi@pi5"), Host("mini2", "mini2")]
    assert settings_of(hosts, None) == {"mini1": {"ssh": "local"}, "pi5": {"ssh": "pi@pi5"}}
    assert settings_of(hosts[2:], None) == {}
    assert settings_of(hosts, "~/s") == {
        "mini1": {"ssh": "local"},
        "pi5": {"ssh": "pi@pi5", "project_dir": "~/s"},
        "mini2": {"project_dir": "~/s"},
    }


# The file


YAML_MISREADS = [
    "1",
    "1.5",
    "1e3",
    "0x1F",
    "null",
    "true",
    "2026-11-22",
    "2026-99-99",
    "yes",
    "a.b-c_d",
]


def text_of(
    algorithm: str, server: str, workers: list[str], host_ip: dict[str, str], **more: Any
) -> str:
    own = {"port": 1, "host_ip": host_ip, "remarks": {}, "nodes": {}, **more}
    return cluster_text("x", TODAY, algorithm=algorithm, server=server, workers=workers, **own)


@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_odd_names_and_paths_survive(algorithm: AlgorithmName, tmp_path: Path) -> None:
    names = YAML_MISREADS
    host_ip = dict.fromkeys(names, "fd00::1")
    folder = '~/my "smol" $(reboot) #1: é 🚀'
    nodes = {name: {"ssh": "pi@[fd00::2%25eth0]", "project_dir": folder} for name in names}
    path = tmp_path / "cluster.yaml"
    path.write_text(
        text_of(algorithm, names[0], names[1:], host_ip, remarks={"1": "Server"}, nodes=nodes)
    )
    cluster = load_settings(path, "nn", environ={}).cluster
    assert cluster.host_ip == host_ip
    assert (cluster.server, *cluster.workers) == tuple(names)
    assert {(node.ssh, node.project_dir) for node in cluster.nodes.values()} == {
        ("pi@[fd00::2%25eth0]", folder)
    }
    again = parse_yaml(load_settings(path, "nn", environ={}).to_yaml())["cluster"]
    assert again["host_ip"] == host_ip


def test_a_wrong_file_is_not_written() -> None:
    with pytest.raises(SmolclusterError, match="must be a node of host_ip"):
        text_of("edp", "a", ["b"], {"a": "x"})
