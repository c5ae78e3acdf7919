"""Slurm as Debian has it, with two nodes, on one Linux machine, as root.

The controller and each node are a network and a UTS namespace, joined by a bridge in the controller's; all
share a mount namespace, where the names of the nodes are known. Everything dies with the first process of the
controller's PID namespace.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

TOOLS = ("unshare", "nsenter", "ip", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2")
ADDRESSES = {"ctl": "10.83.0.10", "n1": "10.83.0.1", "n2": "10.83.0.2"}
COMMAND_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0
IDLE = "while :; do sleep 3600 & wait $!; done"
"""What a host's first process does: it reaps whom others have left, or Slurm would wait for them."""
SLURM_CONF = """
ClusterName=lab
SlurmctldHost=ctl({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
ReturnToService=2
KillWait=60
MinJobAge=300
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeAddr={n1} CPUs=4
NodeName=n2 NodeAddr={n2} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def obstacle() -> str | None:
    """Why there can be no Slurm on this machine, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "Slurm's nodes are namespaces, which need Linux and root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"Slurm is not installed here: no {', '.join(missing)}"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "true"],
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


class SlurmLab:
    """A controller and two nodes; a context manager. `folder` must be seen by all at the same place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def command(self, *argv: str, host: str = "ctl") -> list[str]:
        """A command as that host runs it."""
        controller = self._pid("ctl")
        own = self._pid(host)
        inside = [
            "nsenter",
            f"--mount=/proc/{controller}/ns/mnt",
            f"--pid=/proc/{controller}/ns/pid",
        ]
        return [*inside, f"--net=/proc/{own}/ns/net", f"--uts=/proc/{own}/ns/uts", *argv]

    def run(
        self,
        *argv: str,
        host: str = "ctl",
        env: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv, host=host),
            env={**self.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def output(self, *argv: str, host: str = "ctl") -> str:
        done = self.run(*argv, host=host)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"{file.name}: {file.read_text()[-2000:]}" for file in self.folder.glob("*.log")
        )

    def _pid(self, host: str) -> int:
        """Of the first process in a host's namespaces, which is the child of its `unshare`."""
        holder = self._holders[host].pid
        children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
        return int(children[0]) if children else holder

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        values = {"folder": self.folder, **ADDRESSES}
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(**values))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        self._hold("ctl", ["--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc"])
        self.output("mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
        self.output("ip", "link", "add", "lab", "type", "bridge")
        self.output("ip", "address", "add", f"{ADDRESSES['ctl']}/24", "dev", "lab")
        for device in ("lo", "lab"):
            self.output("ip", "link", "set", device, "up")
        for node in NODES:
            self._hold(node, ["--net", "--uts", "--fork"])
            self._join(node)
        self.output("slurmctld", "-c")
        for node in NODES:
            self.output("slurmd", "-N", node, host=node)
        end = time.monotonic() + START_TIMEOUT_S
        while "idle" not in (states := self.run("sinfo", "-h", "-N", "-o", "%t").stdout) or (
            states.split() != ["idle", "idle"]
        ):
            assert time.monotonic() < end, f"{states}{self.logs()}"
            time.sleep(0.2)

    def _hold(self, host: str, namespaces: Sequence[str]) -> None:
        argv = ["unshare", *namespaces, "--kill-child", "bash", "-c", IDLE]
        self._holders[host] = subprocess.Popen(argv, start_new_session=True)
        end = time.monotonic() + START_TIMEOUT_S
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._pid(host)}/ns/net").readlink() == own or (
            Path(f"/proc/{self._pid(host)}/comm").read_text().strip() != "bash"
        ):
            assert time.monotonic() < end, f"{host} does not begin"
            time.sleep(0.02)
        self.output("hostname", host, host=host)

    def _join(self, node: str) -> None:
        """Connect a node with the bridge. The device is made in the node, and its other end handed over."""
        controller, own = self._pid("ctl"), self._pid(node)
        enter = ["nsenter", f"--net=/proc/{own}/ns/net"]
        link = ["link", "add", "eth0", "type", "veth", "peer", "name", f"to-{node}"]
        for words in (
            [*link, "netns", str(controller)],
            ["address", "add", f"{ADDRESSES[node]}/24", "dev", "eth0"],
            ["link", "set", "lo", "up"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run([*enter, "ip", *words], check=True, timeout=COMMAND_TIMEOUT_S)
        self.output("ip", "link", "set", f"to-{node}", "master", "lab", "up")

    def _end(self) -> None:
        for holder in reversed(list(self._holders.values())):
            for pid in self._children(holder.pid):
                os.kill(pid, signal.SIGKILL)
            holder.kill()
            holder.wait(COMMAND_TIMEOUT_S)

    @staticmethod
    def _children(pid: int) -> list[int]:
        file = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(each) for each in file.read_text().split()] if file.is_file() else []
