"""tmux: a session a process on its machine, and one local window with a pane attached to each.

A process goes on in its session when the launching machine sleeps or its network drops. A pane draws the
remote session with TERM=linux, which has no alternate screen: so what scrolls away lands in the local pane's
own history, where `Ctrl-B [` finds it. It is attached read-only: keys typed into it reach nobody. The remote
session takes the pane's size: of a larger one the pane would show the upper left corner, without the newest
lines. tmux's `-r` says "ignore the size", too, from version 3.2 on, which is the first one that knows `-f`.

A window in which all has ended shows the last lines to whoever looks at it. It closes when nobody does; one
that was opened to be shown, only after it has been. Each pane's command says itself that it ends: before
version 3.6 tmux may miss the death of a process while it ends the utmp record of a pane.
"""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Done, Host, run_here, shell_path
from smolcluster.runs.launched import LaunchedProcess

TMUX_TIMEOUT_S = 30.0
START_TRIES = 5
TRY_AGAIN_S = 0.1
RECONNECT_S = 3
KILLED = 128
"""An exit code above it says that ssh was killed, or, 255, that it lost the connection."""
KEY_TABLE = "smolcluster"
STOPPING = "@stopping"
"""The option of a window in which the user has stopped the run."""
FOLLOWED = "@followed"
"""The option of a window with the id of the process that waits for its user to leave it."""
SHOWING = "@showing"
"""The option of a window that is opened, or about to be shown, and may not close before; empty: it is not."""
ENDED = "@ended"
"""The option of a pane with the id of the process whose command has ended there."""
MAX_BELOW = 6
"""Panes that lie one below the other, as wide as the window, so that few lines wrap; more are tiles."""
COLUMNS, LINES = 200, 50
"""Of a session that nobody has attached to yet."""


def session_name(run_id: str, role: str, rank: int | None) -> str:
    """A process's session; tmux takes no dots and colons in names."""
    place = role if rank is None else f"{role}{rank + 1}"
    return f"{run_id}-{place}".replace(".", "_").replace(":", "_")


def target(session: str) -> str:
    """The session of exactly this name as a word of a script."""
    return shlex.quote(f"={session}")


def start(host: Host, process: LaunchedProcess, script_file: str) -> None:
    """Start a session that runs a shell script of that machine.

    Raises:
        LaunchError: tmux will not, for instance because there is such a session.
    """
    name, window = shlex.quote(process.session), f"{target(process.session)}:"
    # What a user's own tmux.conf may say: it must neither hide the end of a process nor be it.
    options = (
        f"set-option -t {window} status off",
        f"set-option -t {window} destroy-unattached off",
        f"set-option -w -t {window} remain-on-exit off",
    )
    begun = f"tmux new-session -d -s {name} -x {COLUMNS} -y {LINES} sh {shell_path(script_file)}"
    done = _started(partial(host.run, " \\; ".join((begun, *options))))
    if "duplicate session" in done.stderr:
        raise LaunchError(
            f"{process.title}: a tmux session {process.session} is already there: stop that run first"
        )
    # It may be over before its options are set: its exit code says why.
    ended_at_once = "can't find session" in done.stderr or "no server running" in done.stderr
    if not done.ok and not ended_at_once:
        raise LaunchError(f"{process.title}: tmux does not start a session: {done.stderr_tail}")


def _started(start_session: Callable[[], Done]) -> Done:
    """What a command says that starts tmux's server where there is none.

    A server whose last session has ended accepts connections until it is gone, and leaves without having read
    what they ask for.
    """
    done = start_session()
    for _ in range(START_TRIES - 1):
        if "server exited" not in done.stderr:
            break
        time.sleep(TRY_AGAIN_S)
        done = start_session()
    return done


def attach_script(session: str) -> str:
    return (
        "as=-r; tmux list-commands | grep -q '^attach-session .*-f flags' && as='-f read-only'; "
        f"unset TMUX; TERM=linux exec tmux -u attach-session $as -t {target(session)}"
    )


def last_screen_script(process: LaunchedProcess) -> str:
    """Prints what a process had on its screen at its end, which tmux clears, and how to leave."""
    run, stem = shell_path(process.run_dir), shlex.quote(process.stem)
    code = f'"exit code $(cat {run}/exits/{stem}); Ctrl-B d leaves this window"'
    return f"cat {run}/logs/{stem}.console.txt; echo {code}"


def pane_command(process: LaunchedProcess) -> str:
    """What a local pane runs: it shows a process, and finds it again when the connection was lost."""
    host = Host(process.node, process.ssh)
    shown = shlex.join(host.argv(attach_script(process.session), terminal=True))
    ended = shlex.join(host.argv(last_screen_script(process)))
    if process.ssh is None:
        return f"{shown}; {ended}"
    lost = f"echo 'no connection to {process.node}; trying again'; sleep {RECONNECT_S}"
    return f"while {shown}; code=$?; [ $code -gt {KILLED} ]; do {lost}; done; {ended}"


def window_commands(
    run_id: str, processes: Sequence[LaunchedProcess], stop: str, *, is_shown: bool = False
) -> list[list[str]]:
    """The calls of tmux that open a run's local window, one pane a process.

    Each is a sequence of commands, whose length tmux limits to 16 KiB. The first one also sees to it that
    panes stay whose command ends at once. `stop` is the shell command that stops the run, for who presses
    Ctrl-C in the window, and once more, while no launcher waits to do it. `is_shown`: somebody will look
    at it.
    """
    name = window_name(run_id)
    window = f"={name}:"
    layout = _layout(len(processes))
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    begin = [
        ["new-session", "-d", "-s", name, "-n", "smolcluster", *size, *_pane(window, processes[0])],
        ["set-option", "-w", "-t", window, "remain-on-exit", "on"],
        ["set-option", "-w", "-t", window, "pane-border-status", "top"],
        ["set-option", "-w", "-t", window, "pane-border-format", " #{@process} "],
        ["set-option", "-t", window, "@stop", stop],
        _showing(window, "yes"),
        ["set-option", "-t", window, "key-table", KEY_TABLE],
        ["set-option", "-p", "-t", window, "@process", pane_title(processes[0])],
    ]
    more = [_one_more(window, process, layout) for process in processes[1:]]
    close = _close_unseen(window)
    end = [
        ["select-pane", "-t", f"{window}.{{top-left}}"],
        _ask_on_ctrl_c(),
        ["set-hook", "-t", window, "pane-died", shlex.join(close)],
        ["set-hook", "-t", window, "client-detached", shlex.join(close)],
        # a session's client changes by attaching, too
        ["set-hook", "-t", window, "client-session-changed", shlex.join(_showing(window, ""))],
        _showing(window, "yes" if is_shown else ""),
        close,
    ]
    return [_sequence(commands) for commands in (begin, *more, end)]


def _showing(window: str, value: str) -> list[str]:
    return ["set-option", "-t", window, SHOWING, value]


def _close_unseen(window: str) -> list[str]:
    """The command that closes a window whose processes have all ended, unless somebody looks at it."""
    is_over = f"#{{||:#{{pane_dead}},#{{==:#{{{ENDED}}},#{{pane_pid}}}}}}"
    is_kept = f"#{{{SHOWING}}}#{{P:#{{?{is_over},,x}}}}"
    is_unseen = f"#{{&&:#{{==:#{{session_attached}},0}},#{{==:{is_kept},}}}}"
    return ["if-shell", "-F", "-t", window, is_unseen, f"kill-session -t {window}"]


def _layout(num_panes: int) -> str:
    return "even-vertical" if num_panes <= MAX_BELOW else "tiled"


def _one_more(window: str, process: LaunchedProcess, layout: str) -> list[list[str]]:
    """The commands that give a process a pane."""
    return [
        ["split-window", "-t", window, *_pane(window, process)],
        ["set-option", "-p", "-t", window, "@process", pane_title(process)],
        ["select-layout", "-t", window, layout],
    ]


def _sequence(commands: Sequence[Sequence[str]]) -> list[str]:
    """Commands as the arguments of one call of tmux, to which a word's last `;` is the end of a command."""
    words = [
        [f"{word[:-1]}\\;" if word.endswith(";") else word for word in command]
        for command in commands
    ]
    return [*words[0], *(word for command in words[1:] for word in (";", *command))]


def _pane(window: str, process: LaunchedProcess) -> list[str]:
    """A pane's command as words: tmux would have the user's own shell read a single one."""
    ended = f"set-option -p -t $TMUX_PANE {ENDED} $$"  # else it is the active pane's
    over = f"tmux {ended} ';' {shlex.join(_close_unseen(window))}"
    return ["sh", "-c", f"({pane_command(process)}\n)\n{over}"]


def _ask_on_ctrl_c() -> list[str]:
    """Ctrl-C in a run's window asks what is meant; pressed again, it stops the run."""
    menu = ["display-menu", "-T", " Ctrl-C: and the run? "]
    menu += ["leave it running", "l", "detach-client"]
    # Who waits for the user to leave the window stops the run. The menu expands what it is given, and so
    # does run-shell: the options must be left for the second.
    alone = f"kill -0 ##{{{FOLLOWED}}} 2>/dev/null || ##{{@stop}}"
    stop = f"set-option {STOPPING} yes ; run-shell -b '{alone}' ; detach-client"
    menu += ["stop it", "C-c", stop]
    menu += ["go on watching", "q", ""]
    return ["bind-key", "-T", KEY_TABLE, "C-c", *menu]


def pane_title(process: LaunchedProcess) -> str:
    """What stands above a pane: the process, and what it computes on."""
    return f"{process.title} {process.device or ''}".rstrip()


def window_name(run_id: str) -> str:
    return session_name(run_id, "window", None)


def open_window(
    run_id: str, processes: Sequence[LaunchedProcess], stop: str, *, is_shown: bool = False
) -> str:
    """Open a run's local window, or find it, with a pane for each process; returns its session's name.

    `is_shown`: it stays until somebody has looked at it, even if the run ends before.

    Raises:
        LaunchError: tmux is not here, or will not.
    """
    name = window_name(run_id)
    window = f"={name}:"
    if _tmux(*(_showing(window, "yes") if is_shown else ["has-session", "-t", window])).ok:
        for process in processes:
            with suppress(LaunchError):  # a window without one pane is better than none
                show_in_window(run_id, process, is_new=False)
        return name
    for commands in window_commands(run_id, processes, stop, is_shown=is_shown):
        done = _started(partial(_tmux, *commands))
        if not done.ok:
            close_window(run_id)
            raise LaunchError(f"tmux {commands[0]}: {done.stderr_tail}")
    return name


def show_in_window(run_id: str, process: LaunchedProcess, *, is_new: bool = True) -> None:
    """Give a process a pane of its run's local window, if that is open: its old one, or one more.

    `is_new`: the process has been started again, so that what its old pane shows is over in any case;
    else that pane is left alone while its command runs.

    Raises:
        LaunchError: tmux is not here, or will not.
    """
    window = f"={window_name(run_id)}:"
    listed = _tmux("list-panes", "-t", window, "-F", "#{pane_id} #{pane_dead} #{@process}")
    if not listed.ok:
        return
    panes = [line.split(" ", 2) for line in listed.stdout.splitlines()]
    own = [pane for pane in panes if f"{pane[2]} ".startswith(f"{process.title} ")]
    if not own:
        commands = _one_more(window, process, _layout(len(panes) + 1))
    elif is_new or own[0][1] == "1":
        title = ["set-option", "-p", "-t", own[0][0], "@process", pane_title(process)]
        commands = [["respawn-pane", "-k", "-t", own[0][0], *_pane(window, process)], title]
    else:
        return
    done = _tmux(*_sequence(commands))
    if not done.ok:
        raise LaunchError(f"tmux {commands[0][0]}: {done.stderr_tail}")


def close_window(run_id: str) -> None:
    with suppress(LaunchError):  # without tmux there is none
        _tmux("kill-session", "-t", f"={window_name(run_id)}")


def is_stopping(run_id: str) -> bool:
    window = f"={window_name(run_id)}:"
    return _tmux("show-options", "-v", "-t", window, STOPPING).stdout.strip() == "yes"


def show_window(name: str) -> int:
    """Bring a window to this terminal; returns when the user has left it."""
    verb = "switch-client" if os.environ.get("TMUX") else "attach-session"
    if verb == "attach-session":  # the other one returns at once
        _tmux("set-option", "-t", f"={name}:", FOLLOWED, str(os.getpid()))
    return subprocess.call(["tmux", verb, "-t", f"={name}"])  # noqa: S603, S607 - as the user has it


def _tmux(*arguments: str) -> Done:
    try:
        return run_here(["tmux", *arguments], timeout_s=TMUX_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"tmux {arguments[0]} does not work here: {error}") from error
