"""Shipping the logs of a launched run to Loki: one shipper a machine, which ends with the run.

Promtail where it is installed and has a configuration for each role, else Grafana Alloy, else our own
`smolcluster ship`. A shipper is started in
a tmux session like the processes of the run, and ends by itself when those of its machine have ended: a run
that was left alone leaves nothing behind. Whatever fails here is said, and disturbs no run.
"""

import ipaddress
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.host import PREAMBLE, shell_path
from smolcluster.launch.observe.stack import (
    EVERYWHERE,
    LOKI_PORT,
    answers,
    is_loki,
    loki_bind,
    own_loki,
    services,
)
from smolcluster.launch.plan import MODULE, RANKS
from smolcluster.launch.sessions import ask_to_end, begin, host_of, look_script
from smolcluster.launch.stop import LAST_LINES_S
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.at_once import at_once
from smolcluster.utils.folders import checkout
from smolcluster.utils.units import format_address
from smolcluster.utils.words import as_command

ROLE = "shipper"
OUTPUT = RunPaths(Path()).shipper_log.name
"""In a run's folder: what troubles its shipper."""
LOOPBACK = "http://127."
END_S = 8.0
"""How long an old shipper of the same run may take to end."""
LOOK_EVERY_S = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class LokiAddress:
    """Where logs go.

    Attributes:
        url: Loki's address; of one on the machine that launches as that machine sees it.
        is_ours: whether it is on that machine.
    """

    url: str
    is_ours: bool


def loki_of(cluster: ClusterConfig, stack: Path | None) -> LokiAddress | None:
    """Where the logs of a run go; None: nowhere.

    Where this machine has one that answers it is that; with a `stack` that was just begun the one that is to
    come: until it is there the log files wait.
    """
    if cluster.loki_url is not None:
        return LokiAddress(cluster.loki_url, is_ours=False)
    url = own_loki()
    is_to_come = stack is not None and not answers(services()[0])
    return LokiAddress(url, is_ours=True) if is_loki(url) or is_to_come else None


def with_shippers(launched: Launched, loki: LokiAddress | None, say: Say) -> Launched:
    """The same run with what ships its logs."""
    if loki is None:
        return launched
    if not launched.has_sessions:
        words = (*MODULE, "smolcluster.cli", "ship", launched.server.run_dir, "--loki", loki.url)
        own = {"role": ROLE, "argv": (sys.executable, *words)}
        return launched.model_copy(update={"shippers": (launched.server.model_copy(update=own),)})
    places: dict[tuple[str | None, str], list[LaunchedProcess]] = {}
    for process in launched.processes:
        places.setdefault((process.ssh, process.run_dir), []).append(process)

    def planned(processes: Sequence[LaunchedProcess]) -> LaunchedProcess | None:
        first = processes[0]
        try:
            url = url_for(first, loki)
        except LaunchError as error:
            say(f"the logs of {first.node} are not shipped: {error}")
            return None
        return first.model_copy(
            update={
                "role": ROLE,
                "rank": None,
                "session": session_name(launched.run_id, f"{ROLE}-{first.node}", None),
                "argv": ("sh", "-c", ship_script(processes, url)),
                "device": None,
            }
        )

    shippers = tuple(filter(None, at_once(planned, places.values())))
    return launched.model_copy(update={"shippers": shippers})


def url_for(process: LaunchedProcess, loki: LokiAddress) -> str:
    """Loki's address as the machine of a process sees it.

    Raises:
        LaunchError: the machine cannot be asked, does not say how it sees this one, or must not reach Loki.
    """
    if process.ssh is None or not (loki.is_ours and loki.url.startswith(LOOPBACK)):
        return loki.url
    seen = host_of(process).run("echo ${SSH_CONNECTION%% *}").stdout.strip()
    try:
        address = str(ipaddress.ip_address(seen.removeprefix("::ffff:")))
    except ValueError as error:
        raise LaunchError("it does not say how it sees this machine: set loki_url") from error
    if "%" in address:
        raise LaunchError(f"it sees this machine at {address}, which no URL can say: set loki_url")
    url = f"http://{format_address(address, LOKI_PORT)}"
    if loki_bind() not in EVERYWHERE and not is_loki(url):
        raise LaunchError(
            f"Loki is open to this machine alone: LOKI_BIND={address} in logging/.env, then "
            f"{as_command('observe', 'up')}, opens it to who pushes logs"
        )
    return url


def ship_script(processes: Sequence[LaunchedProcess], url: str) -> str:
    """What ships the logs of these processes of one machine, until they have ended or it is told to end."""
    first = processes[0]
    project = (
        shell_path(first.project_dir) if first.ssh else shlex.quote(str(checkout() or "/dev/null"))
    )
    roles = dict.fromkeys(process.role for process in processes)
    configs = [f"logging/promtail-{role}-remote.yaml" for role in roles]
    looks = "\n".join(f"{{ {look_script(process)}; }}" for process in processes)
    has_configs = " && ".join(f"[ -f {config} ]" for config in configs)
    only = [  # ranks have logs of their own, which that of what starts them does not name
        word for process in processes if process.role != RANKS for word in ("--only", process.stem)
    ]
    own = (
        f"{shlex.join([first.argv[0], *MODULE, 'smolcluster.cli', 'ship'])} {shell_path(first.run_dir)} "
        f"{shlex.join(['--loki', url, *only])}"
    )
    return "\n".join(
        [
            PREAMBLE,
            "trap : INT TERM HUP",  # who is told to end tells all of us: the others are waited for
            f"here=$(pwd); umask 077; out={shell_path(first.run_dir)}/{OUTPUT}; pids=",
            '(: >> "$out") 2>/dev/null || out=/dev/null',
            f"export LOKI_URL={shlex.quote(url.rstrip('/'))}",
            f"export SMOLCLUSTER_RUNS_DIR={shell_path(first.run_dir.rpartition('/')[0])}",
            f"cd {project} 2>/dev/null",
            f"if command -v promtail >/dev/null && {has_configs}; then",
            *(
                f'promtail -config.expand-env=true -config.file={file} >> "$out" 2>&1 & pids="$pids $!"'
                for file in configs
            ),
            "elif command -v alloy >/dev/null && [ -f logging/config.alloy ]; then",
            "alloy run --disable-reporting --server.http.listen-addr=127.0.0.1:0 "
            '--storage.path="$HOME/.cache/smolcluster-alloy" logging/config.alloy >> "$out" 2>&1 & pids=$!',
            "else",
            f'cd "$here"; {own} >> "$out" 2>&1 & pids=$!',  # in the folder in which the processes start
            "fi",
            f'running() {{ case "$({looks}\n)" in *running*) ;; *) return 1; esac; }}',
            "alive() { for each in $pids; do kill -0 $each 2>/dev/null && return; done; return 1; }",
            f"while alive && running; do sleep {LOOK_EVERY_S}; done",
            f"alive && sleep {LAST_LINES_S:g}; kill $pids 2>/dev/null",
            "while alive; do wait; done",  # a signal ends a wait
        ]
    )


def begin_shippers(
    shippers: Sequence[LaunchedProcess], env: Mapping[str, Mapping[str, str]], say: Say
) -> None:
    def start(shipper: LaunchedProcess) -> None:
        try:
            ask_to_end(shipper, END_S)  # one of before, when a run goes on at once
            begin(shipper, env[shipper.node])
        except LaunchError as error:
            say(f"the logs of {shipper.node} are not shipped: {error}")

    at_once(start, shippers)
