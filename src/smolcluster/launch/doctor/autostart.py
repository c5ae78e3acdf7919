"""What lets a machine that has restarted join the run that lives: a job of systemd or launchd, as text.

`smolcluster doctor --autostart` prints it for each worker; its user puts it there. Both start the job also
when nobody logs in.
"""

import json
import plistlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from smolcluster.configs.load import find_config
from smolcluster.configs.meant import cluster_source
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.host import host_of
from smolcluster.launch.node_facts import Facts, facts_of
from smolcluster.launch.places import nodes_as_written
from smolcluster.launch.plan import MODULE
from smolcluster.launch.project import LATEST, RUNS
from smolcluster.observability.terminal import shown_text
from smolcluster.utils.units import format_address

WAIT_S = 120
"""How long a machine that has just started looks for a run: its network comes later than it."""
OF_THE_MACHINE = ("device", "threads", "microbatch", "dataset", "secret_file", "runs_dir")
NAME = "smolcluster-join"


def join_command(
    cluster: ClusterConfig, node: str, project: str, stated: Mapping[str, Any]
) -> list[str]:
    """What joins the run that lives, on the machine itself.

    Args:
        cluster: the run's.
        node: the machine.
        project: the project's folder there.
        stated: its settings, as `nodes_as_written`.
    """
    address = format_address(cluster.host_ip[node], cluster.port)
    command = [f"{project}/.venv/bin/python", *MODULE, "smolcluster.cli", "join", address]
    command += ["--name", node, "--wait", str(WAIT_S)]
    own = {key: stated[key] for key in OF_THE_MACHINE if stated.get(key) is not None}
    if stated.get("project_dir") is None:
        own = {"runs_dir": RUNS} | own
    flat = {f"dataset.{key}": value for key, value in own.pop("dataset", {}).items()}
    texts = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (own | flat).items()
    ]
    return [*command, *(["--override", *texts] if texts else [])]


def systemd_job(node: str, command: list[str], project: str) -> str:
    return f"""# {node} (Linux), once, on the machine:
mkdir -p ~/.config/systemd/user && cat > ~/.config/systemd/user/{NAME}.service <<'END'
[Unit]
Description=smolcluster: joins the run that lives when this machine starts
[Service]
WorkingDirectory={project.replace("%", "%%")}
ExecStart={" ".join(map(_systemd_word, command))}
[Install]
WantedBy=default.target
END
loginctl enable-linger && systemctl --user enable {NAME}"""


def launchd_job(node: str, command: list[str], project: str, user: str) -> str:
    job = {
        "Label": f"local.{NAME}",
        "UserName": user,
        "WorkingDirectory": project,
        "ProgramArguments": command,
        "RunAtLoad": True,
    }
    file = f"/Library/LaunchDaemons/local.{NAME}.plist"
    return f"""# {node} (macOS), once, on the machine:
sudo tee {file} >/dev/null <<'END'
{plistlib.dumps(job, sort_keys=False).decode().rstrip()}
END
sudo chown root:wheel {file} && sudo chmod 644 {file}"""


def _systemd_word(word: str) -> str:
    """A word of ExecStart, in which quotes, backslashes, % and $ mean something."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return word if escaped == word == shlex.quote(word) else f'"{escaped}"'


def autostart(config: str | None, overrides: list[str]) -> int:
    """Print the job of each worker's machine; returns 1 if one cannot be asked what it is.

    Raises:
        ConfigError: the cluster file or an override is wrong.
    """
    source = cluster_source(config)
    cluster = load_settings(source, "nn", None, overrides).cluster
    raw = nodes_as_written(find_config(source, "cluster"), overrides)
    failed = False
    for node in cluster.workers:
        folder = cluster.nodes.get(node, NodeConfig()).project_dir or LATEST
        try:
            facts = facts_of(host_of(cluster, node), "system", "user", "folder", folder=folder)
            text = _job(cluster, node, facts, folder, raw.get(node) or {})
        except LaunchError as error:
            failed, text = True, f"# {error}"
        sys.stdout.write(f"{shown_text(Console(), text).plain}\n\n")
    return int(failed)


def _job(
    cluster: ClusterConfig, node: str, facts: Facts, folder: str, stated: Mapping[str, Any]
) -> str:
    if not facts.has("folder"):
        raise LaunchError(f"{node}: has no {folder} yet: launch once, which makes it")
    project = facts.text("folder")
    command = join_command(cluster, node, project, stated)
    if facts.is_mac:
        return launchd_job(node, command, project, facts.text("user"))
    return systemd_job(node, command, project)
