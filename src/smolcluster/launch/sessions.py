"""The processes of a launched run on their machines: started in tmux, looked at, and ended.

A child of the launcher is known by its process id, and leaves `exits` and `asked` only. In tmux a process
runs under a small shell script, which its machine gets by standard input (mode 0600, because it holds the
environment) and which removes itself before it does anything else. It leaves

    <run>/pids/<stem>    its process id, which is the process group's
    <run>/exits/<stem>   the exit code, once the process has ended
    <run>/asked/<stem>.<process id>   is there from when the process was asked to end, and may say why
    <run>/logs/<stem>.console.txt   what was on the screen at its end
"""

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.jobs.scheduler import (
    LOOK,
    end_lines,
    left_function,
    state_function,
    submit,
)
from smolcluster.launch.places import NOT_INHERITED
from smolcluster.launch.plan import RANKS
from smolcluster.launch.tmux import start, target
from smolcluster.observability.parsing import parse_log_line
from smolcluster.runs.asked import ASKED
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.runs.paths import log_stem
from smolcluster.runs.status import STATUS, RunStatus
from smolcluster.utils.seed import HASH_SEED, with_hash_seed

POLL_S = 0.2
SCREEN_LINES = 200
FULL_BELOW_NBYTES = 64 * 1024
"""A disk with less space takes no file of a run any more."""


class Ending(IntEnum):
    """What came of ending a process, as the script that does it exits."""

    ENDED = 0
    REMAINS = 3
    WAS_OVER = 4


def host_of(process: LaunchedProcess) -> Host:
    return Host(process.node, process.ssh)


def begin(process: LaunchedProcess, env: Mapping[str, str]) -> None:
    """Start a process in its session, with these variables added to its environment.

    Raises:
        LaunchError: the machine does not do it.
    """
    if process.scheduler is not None:
        submit(process)
        return
    host = host_of(process)
    file = f"{process.run_dir}/launch/{process.stem}.sh"
    try:
        put(host, file, start_script(process, env).encode(errors="surrogateescape"))
        start(host, process, file)
    except LaunchError:
        with suppress(LaunchError):  # nobody else removes it, and it holds the environment
            host.run(f"rm -f {shell_path(file)}")
        raise


def put(host: Host, path: str, content: bytes) -> None:
    """Write a file on a machine, by standard input, for its user's eyes only.

    Raises:
        LaunchError: it cannot be written.
    """
    file, folder = shell_path(path), shell_path(path.rpartition("/")[0])
    done = host.run(f"umask 077; mkdir -p {folder} && rm -f {file} && cat > {file}", stdin=content)
    if not done.ok:
        raise LaunchError(f"{host.node}: {path} cannot be written: {done.stderr_tail}")


def start_script(process: LaunchedProcess, env: Mapping[str, str]) -> str:
    """What a process's session runs; on this machine `env` is all that the process has in its environment."""
    run, stem = shell_path(process.run_dir), shlex.quote(process.stem)
    stated = with_hash_seed({**os.environ, **env})[HASH_SEED]
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in {**env, HASH_SEED: stated}.items()
    ]
    lines = [
        'rm -f -- "$0"; _smolcluster_asked=',  # a name that nobody exports
        *(_unset_others(env) if process.ssh is None else ()),
        *exports,
        f"(umask 077; mkdir -p {run}/pids {run}/exits {run}/logs)",
        f"rm -f {run}/exits/{stem} {run}/{ASKED}/{stem}.*",
        f"echo $$ > {run}/pids/{stem}",
        "trap _smolcluster_asked=1 INT TERM HUP",
        f'[ -z "$_smolcluster_asked" ] && cd {shell_path(process.project_dir)} && '
        f"{shlex.join(process.argv)}",
        "code=$?",
        f'tmux capture-pane -p -J -S -{SCREEN_LINES} -t "$TMUX_PANE" '
        f"> {run}/logs/{stem}.console.txt 2>/dev/null",
        f"echo $code > {run}/exits/{stem}",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _unset_others(env: Mapping[str, str]) -> list[str]:
    """Tmux gives a session the environment of the launch that has started its server, however long ago."""
    kept = " ".join(("PATH", *NOT_INHERITED, *env))
    return [
        "for _smolcluster_name in $(env | LC_ALL=C sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do",
        f"case ' {kept} ' in *\" $_smolcluster_name \"*) ;;",
        '*) command unset "$_smolcluster_name" 2>/dev/null ;; esac; done',  # it may be readonly
    ]


def look_script(process: LaunchedProcess) -> str:
    """Prints `running`, `ended CODE`, or `gone` when it was killed or never started."""
    exits = f"{shell_path(process.run_dir)}/exits/{shlex.quote(process.stem)}"
    if process.scheduler is not None:
        return f"{state_function(process)}\n{LOOK} {exits}"
    session = f"tmux has-session -t {target(process.session)} 2>/dev/null ||" * bool(
        process.session
    )
    return (
        f"{_left(process)}; {_pid(process)}\n"
        f'if {session} left; then echo running; elif [ -s {exits} ]; then echo ended "$(cat {exits})"; '
        "else echo gone; fi"
    )


def _left(process: LaunchedProcess) -> str:
    """A shell function that says whether `$pid`, or its process group, runs commands of a run.

    Numbers are used again; a small Linux has no `ps`.
    """
    run_id = re.sub(r"[][.*^$+?(){}|\\]", r"\\\g<0>", process.run_dir.rpartition("/")[2])
    ours = shlex.quote(f"[ /]{run_id}( |/launch/|$)")
    return (
        "lines() { tr '\\0' ' ' < \"/proc/$pid/cmdline\"; echo; ps -A -ww -o pgid= -o pid= -o args= | "
        'grep -E "^ *([0-9]+ +)?$pid "; }\n'
        f'left() {{ [ -n "$pid" ] && lines 2>/dev/null | grep -qE -- {ours}; }}'
    )


def _pid(process: LaunchedProcess) -> str:
    if process.pid is not None:
        return f"pid={process.pid}"
    file = f"{shell_path(process.run_dir)}/pids/{shlex.quote(process.stem)}"
    return f"pid=$(cat {file} 2>/dev/null)"


def free_script(server: LaunchedProcess) -> str:
    """Prints how many KiB the disk of a run's folder has left for its user."""
    return f"df -Pk {shell_path(server.run_dir)} 2>/dev/null | awk 'NR == 2 {{print $4}}'"


def is_full_disk(said: str) -> bool:
    """Whether so few KiB are left that nothing more is written."""
    return said.strip().isdigit() and 1024 * int(said) < FULL_BELOW_NBYTES


def text_of(process: LaunchedProcess, name: str) -> str:
    """A file of a run's folder on the machine of a process; empty: there is none.

    Raises:
        LaunchError: the machine cannot be asked.
    """
    file = shell_path(f"{process.run_dir}/{name}")
    return host_of(process).run(f"cat {file} 2>/dev/null").stdout


def status_of(server: LaunchedProcess) -> RunStatus | None:
    """What a server last wrote of itself; None: nothing yet.

    Raises:
        LaunchError: its machine cannot be asked.
    """
    return STATUS.parse(text_of(server, "status.json"))


def exit_code(process: LaunchedProcess) -> int | None:
    """The exit code of a process; None while it runs, 1 if it went without leaving one.

    Raises:
        LaunchError: its machine cannot be asked.
    """
    done = host_of(process).run(look_script(process))
    word, _, code = done.stdout.strip().partition(" ")
    if word == "running":
        return None
    if word not in (
        "ended",
        "gone",
    ):  # ssh itself has ended, for instance by Ctrl-C at the terminal
        raise LaunchError(f"{process.title}: cannot be looked at: {done.stderr_tail}")
    return int(code) if code.isdigit() else 1


def stderr_tail(process: LaunchedProcess) -> str:
    """The last line that a process which ended badly had on its screen."""
    shown = text_of(process, f"logs/{process.stem}.console.txt")
    return words_of(shown) or "it left no word"


def newest_line(process: LaunchedProcess) -> str:
    """The message of the newest line that a process has logged since it was started; empty: there is none.

    The log may end with lines of an earlier start. Of one that has started the ranks of a group it is rank
    0's.
    """
    stem = log_stem("rank", process.node) if process.role == RANKS else process.stem
    log = f"{shell_path(process.run_dir)}/logs/{shlex.quote(stem)}.log"
    pid = f"{shell_path(process.run_dir)}/pids/{shlex.quote(process.stem)}"
    script = f"[ -e {pid} ] && [ ! {log} -nt {pid} ] || tail -n 1 {log} 2>/dev/null"
    shown = host_of(process).run(script).stdout
    line = parse_log_line(shown.encode(), 0.0)
    return line.message if line else ""


def words_of(shown: str) -> str | None:
    """The last line about an error of what was on a screen, else the last line; None: it is empty."""
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return next(reversed(errors or lines), None)


def ask_to_end(process: LaunchedProcess, wait_s: float, why: str | None = None) -> Ending:
    """Send a process SIGTERM, and wait for its end; who has been asked before is only waited for.

    A second SIGTERM would cut a server's last checkpoint. `why`: how the run has failed, for its server;
    None: it is stopped.

    Raises:
        LaunchError: its machine cannot be asked.
    """
    note, file = _asked(process, why)
    return _signal(
        process,
        # Of two who ask at the same time one makes the file; where nobody can make it, all ask.
        [note, f"if [ $? = 0 ] || [ ! -e {file} ]; then {_send('TERM')}; fi"],
        wait_s,
    )


def _asked(process: LaunchedProcess, why: str | None = None) -> tuple[str, str]:
    """What notes that a process is asked to end, unless somebody has noted it; and the file that says so."""
    said = shlex.quote((why or "").encode(errors="replace").decode())
    folder = f"{shell_path(process.run_dir)}/{ASKED}"
    file = f'{folder}/{shlex.quote(process.stem)}."$pid"'
    return f"mkdir -p {folder} 2>/dev/null; (set -C; printf %s {said} > {file}) 2>/dev/null", file


def _send(name: str) -> str:
    return f'kill -s {name} -- "-$pid" 2>/dev/null || kill -s {name} "$pid" 2>/dev/null'


def wait_to_end(process: LaunchedProcess, wait_s: float) -> Ending:
    """Wait for a process's end, and do nothing to it.

    Raises:
        LaunchError: its machine cannot be asked.
    """
    return _signal(process, [], wait_s)


def kill(process: LaunchedProcess, wait_s: float = 5.0) -> Ending:
    """End a process, and all that it started, at once.

    Raises:
        LaunchError: its machine cannot be asked.
    """
    return _signal(process, [_asked(process)[0], _send("KILL")], wait_s)


def _signal(process: LaunchedProcess, signalling: list[str], wait_s: float) -> Ending:
    """Signal a process's group, `$pid`, and wait until nothing of it is left.

    The group is a child's, or that of a tmux session, or, if tmux has gone, the number that it left; all are
    believed only while commands of the run are in that group.
    """
    find = [_pid(process)]
    if process.session:
        pane = f"tmux list-panes -s -t {target(process.session)}: -F '#{{pane_pid}}' 2>/dev/null"
        find = [
            f"pid=$({pane} | head -n 1)",
            # A session that has just been made may not have come to its command yet.
            f'if [ -n "$pid" ]; then n=0; until left || [ $n -ge 5 ]; do sleep {POLL_S}; n=$((n+1)); done',
            f"else {_pid(process)}; fi",
        ]
    if process.scheduler is not None:
        left, find, signalling = left_function(process), ["pid=job"], end_lines(process, signalling)
    else:
        left = _left(process)
    lines = [
        left,
        *find,
        f"left || exit {Ending.WAS_OVER}",
        *signalling,
        f"n=0; while left && [ $n -lt {round(wait_s / POLL_S)} ]; do sleep {POLL_S}; n=$((n+1)); done",
        f"left && exit {Ending.REMAINS}",
        f"exit {Ending.ENDED}",
    ]
    done = host_of(process).run("\n".join(lines), timeout_s=wait_s + 20, shielded=True)
    if done.code not in list(Ending):
        raise LaunchError(f"{process.title}: cannot be ended: {done.stderr_tail}")
    return Ending(done.code)
