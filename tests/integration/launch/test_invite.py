"""Machines join runs by a code, over a network with mDNS, without SSH."""

import re
import signal
import stat
from pathlib import Path

import pytest

from integration.launch.test_join import without_pi5
from lab import Host, Running
from launching import LAUNCH_TIMEOUT_S, ODD, PROJECT, STORIES_TIMEOUT_S, Launching
from smolcluster.runs.status import read_status
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]

OWN = ("threads=1", "metrics_port=null")
SECRET = ".config/smolcluster/secret"


class Inviting:
    """The controller, which has a run, and pi5, which has its own clone of the project and joins."""

    def __init__(self, launching: Launching) -> None:
        self.launching = launching
        self.controller = launching.controller
        self.joiner = launching.lab["pi5"]
        self.program = f"{self.joiner.home}/{ODD}/.venv/bin/smolcluster"
        for name in (".config", f"{ODD}/runs"):
            self.joiner.output(["rm", "-rf", name])

    def launch(self, *words: str) -> tuple[Running, str]:
        """A run of the controller alone, of which other machines hear; returns the code too."""
        command = self.launching.command(
            *("launch", "diloco", "--local", "--no-tmux", "--workers", "1", "--invite", *words),
            *("--override", "num_epochs=100000", "eval_steps=100000", "local_steps=4", *OWN),
        )
        launched = self.launching.popen(command)
        launched.wait_for("where mDNS does not reach", LAUNCH_TIMEOUT_S)
        return launched, code_of(launched.output)

    def join(self, code: str, *words: str) -> Running:
        """Start to join by a code, which is typed; nothing of it is in the command line."""
        command = ["env", "WANDB_MODE=disabled", self.program, "join", *words]
        joining = self.joiner.popen([*command, "--override", *OWN])
        joining.type(f"{code}\n")
        return joining

    def cannot_join(self, code: str, *words: str) -> str:
        """What joining says that fails before anything is kept."""
        joining = self.join(code, *words)
        assert joining.wait() != 0, joining.output
        assert not self.joiner.path(SECRET).exists()
        assert "Traceback" not in joining.output
        return joining.output

    @property
    def folder(self) -> Path:
        return self.controller.path(f"{PROJECT}/runs/{self.launching.run_id}")

    def samples(self, node: str) -> int:
        """How many of a worker's samples have been applied."""
        found = read_status(self.folder / "status.json").workers
        return sum(each.samples for each in found if each.node == node)


def code_of(output: str) -> str:
    found = re.search(r"with the code ([0-9a-z]{4}-[0-9a-z]{4})", output)
    assert found, output
    return found[1]


@pytest.fixture
def inviting(launching: Launching) -> Inviting:
    return Inviting(launching)


def supervised(host: Host) -> list[int]:
    return [each.pid for each in host.processes() if "--supervised" in each.argv]


def test_a_machine_joins_by_the_code_alone_and_is_a_worker_like_any_other(
    inviting: Inviting,
) -> None:
    launched, code = inviting.launch()
    assert "127.0.0.1" not in launched.output.partition("where mDNS")[2].splitlines()[0]
    wrong = inviting.cannot_join("0000-0000")
    assert "the code is wrong; 2 more may be tried" in wrong
    joining = inviting.join(code, "--name", "laptop")
    eventually(lambda: inviting.samples("laptop") > 0, lambda: joining.output)
    secret = inviting.joiner.path(SECRET)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    assert secret.read_bytes() == inviting.controller.path(SECRET).read_bytes()
    for host in (inviting.controller, inviting.joiner):
        assert not any(code in word for each in host.processes() for word in each.argv)

    # It is supervised; it goes, and comes back by the code of another invitation.
    assert supervised(inviting.joiner)
    joining.signal(signal.SIGTERM)
    assert joining.wait() == 143, joining.output
    secret.unlink()
    before = inviting.samples("laptop")
    again = inviting.launching.popen(inviting.launching.command("invite"))
    again.wait_for("where mDNS does not reach")
    joining = inviting.join(code_of(again.output), "--name", "laptop")
    eventually(lambda: inviting.samples("laptop") > before, lambda: joining.output)

    # The run is stopped, and is announced no more; its inviter has ended, too.
    stopped = inviting.launching.run(inviting.launching.command("stop", inviting.launching.run_id))
    assert stopped.returncode == 0, stopped.stdout
    launched.wait()
    again.wait_for(f"the invitation has ended: run {inviting.launching.run_id} is over")
    joining.signal(signal.SIGTERM)
    joining.wait()
    secret.unlink()
    assert "no run that invites machines is announced" in inviting.cannot_join(code)


def test_a_machine_joins_a_run_of_other_machines_which_its_launcher_has_left(
    inviting: Inviting,
) -> None:
    launching = inviting.launching
    endless = ("num_epochs=100000", "eval_steps=100000", *OWN)
    words = ("--detach", "--invite", "--override", *endless)
    launched = launching.run(launching.launch(*words, config=without_pi5(launching)))
    assert launched.returncode == 0, launched.stderr
    joining = inviting.join(code_of(launched.stdout), "--name", "laptop")

    def takes_part() -> bool:
        found = [each for each in launching.status()["workers"] if each["node"] == "laptop"]
        return any(each["state"] == "joined" and each["samples"] > 0 for each in found)

    eventually(takes_part, lambda: joining.output)
    stopped = launching.run(launching.command("stop", launching.run_id))
    assert stopped.returncode == 0, stopped.stdout
    eventually(
        lambda: not any("invite" in each.argv for each in inviting.controller.processes()),
        lambda: str(inviting.controller.processes()),
    )
    joining.signal(signal.SIGTERM)
    joining.wait()
