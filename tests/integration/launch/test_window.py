"""The tmux window of a run, as a user at the launching machine's terminal sees and uses it."""

import time
from collections.abc import Callable

import pytest

from launching import (
    LAUNCH_TIMEOUT_S,
    PACED,
    PROJECT,
    STORIES_TIMEOUT_S,
    Launching,
    Screen,
)
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]
MENU = "Ctrl-C: and the run?"
CTRL_B = "C-b"


def active_pane(launching: Launching) -> str:
    window = f"={launching.run_id}-window:"
    return launching.controller.output(["tmux", "display", "-p", "-t", window, "#{pane_index}"])


def left_the_window(terminal: Screen) -> None:
    terminal.wait_for("goes on: `", "code=0")


def test_the_window_of_a_run_on_three_machines(
    launching: Launching, screen: Callable[[list[str]], Screen]
) -> None:
    terminal = screen(launching.launch("--override", *PACED))
    shown = terminal.wait_for(
        "server mini1",
        "worker 1 (mini2) cpu",
        "worker 2 (pi5) cpu",
        timeout_s=LAUNCH_TIMEOUT_S,
    )
    assert "Pane is dead" not in shown
    run_id = launching.run_id

    # One can go from pane to pane; what is typed there reaches nobody.
    panes = {active_pane(launching)}
    for arrow in ("Down", "Up", "Right", "Left", "Down"):
        terminal.press(CTRL_B, arrow)
        terminal.press("q", "C-d", "C-z", "C-\\", "x", "Enter", "Escape")
        panes.add(active_pane(launching))
    assert len(panes) > 1
    launching.goes_on()
    assert [launching.presence(rank) for rank in (0, 1)] == ["joined", "joined"]

    # What has scrolled away is found again.
    mini2 = launching.lab["mini2"]
    tty = mini2.output(["tmux", "display", "-p", "-t", f"={run_id}-worker1:", "#{pane_tty}"])
    mini2.output(f"for n in $(seq 5); do printf '\\r\\nearly line %s\\r\\n' $n > {tty}; done")
    for number in range(8):  # as a process does: a few lines at a time
        mini2.output(f"for n in $(seq 10); do printf 'filler {number}%s\\r\\n' $n > {tty}; done")
    eventually(lambda: "filler 7" in terminal.text, lambda: terminal.text)
    assert "early line" not in terminal.text
    name = f"={run_id}-window:.1"
    launching.controller.output(["tmux", "select-pane", "-t", name])
    terminal.press(CTRL_B, "[")

    def is_found() -> bool:
        """However high the pane is: a page further up each time."""
        if "early line" in terminal.text:
            return True
        terminal.press("PageUp")
        time.sleep(0.2)  # until it is drawn
        return False

    eventually(is_found, lambda: terminal.text)
    terminal.press("q")

    # Ctrl-B d leaves, attach comes back.
    terminal.press(CTRL_B, "d")
    left_the_window(terminal)
    launching.goes_on()
    terminal = screen(launching.command("attach", run_id))
    terminal.wait_for("server mini1", "worker 2 (pi5) cpu")

    # Connections that are lost come back by themselves.
    launching.cut_ssh()
    terminal.wait_for("no connection to mini1; trying again")
    eventually(lambda: "no connection" not in terminal.text, lambda: terminal.text)
    terminal.wait_for("server mini1", "worker 2 (pi5) cpu")

    # Ctrl-C asks: on with it, leave it, or stop it.
    terminal.press("C-c")
    terminal.wait_for(MENU, "leave it running", "stop it")
    terminal.press("q")
    eventually(lambda: MENU not in terminal.text, lambda: terminal.text)
    terminal.press("C-c")
    terminal.wait_for(MENU)
    terminal.press("l")
    left_the_window(terminal)
    launching.goes_on()
    terminal = screen(launching.command("attach"))
    terminal.wait_for("server mini1")
    terminal.press("C-c")
    terminal.wait_for(MENU)
    terminal.press("C-c")
    terminal.wait_for("stopping the run", "nothing of it is left running", "code=130")
    launching.wait_until_clean()
    assert (launching.folder("mini1", run_id) / "checkpoints/latest").exists()
    sessions = launching.controller.run("tmux list-sessions -F '#S'").stdout
    assert run_id not in sessions

    # Of what is over there is no window.
    over = screen(launching.command("attach", run_id))
    over.wait_for("is over", "code=1")


def test_a_window_that_stays_open_shows_the_end(
    launching: Launching, screen: Callable[[list[str]], Screen]
) -> None:
    """Here of a server that somebody has ended on its machine."""
    terminal = screen(launching.launch("--override", *PACED))
    terminal.wait_for("server mini1", "worker 2 (pi5) cpu", timeout_s=LAUNCH_TIMEOUT_S)
    launching.lab["mini1"].output("pkill -TERM -f '[s]erver.py --run-id'")
    dead = ["tmux", "list-panes", "-a", "-F", "#{pane_dead}"]
    eventually(lambda: launching.controller.output(dead).count("1") == 1, lambda: terminal.text)
    terminal.wait_for("exit code 143", "trying to reconnect")
    terminal.press(CTRL_B, "d")
    terminal.wait_for("stopped: nothing of it is left running", "brings its files here", "code=143")
    launching.wait_until_clean()


def test_a_local_run_has_the_same_window(
    launching: Launching, screen: Callable[[list[str]], Screen]
) -> None:
    local = ["launch", "edp", "--local", "--workers", "2"]
    terminal = screen(launching.command(*local, "--override", *PACED, "port=6011"))
    terminal.wait_for("server", "worker 1 cpu", "worker 2", timeout_s=LAUNCH_TIMEOUT_S)
    run_id = launching.run_id
    terminal.press(CTRL_B, "d")
    left_the_window(terminal)
    stopped = launching.run(launching.command("stop"))
    assert stopped.returncode == 0, stopped.stderr
    assert "nothing of it is left running" in stopped.stdout
    assert launching.controller.path(f"{PROJECT}/runs/{run_id}/checkpoints/latest").exists()
    assert not [each for each in launching.controller.processes() if run_id in str(each.argv)]
