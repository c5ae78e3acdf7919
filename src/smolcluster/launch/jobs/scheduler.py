"""A run that a scheduler has as a job of the run's name: submitted, looked at and ended, by its own commands.

Each function gives shell text in the words of `launch/sessions.py`, so that status, stop and following a run
need not know who has it.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.host import Host
from smolcluster.runs.launched import LaunchedProcess, Scheduler

ACTIVE = (
    "PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED|STOPPED|SIGNALING|STAGE_OUT|REQUEUED|REQUEUE_HOLD|"
    "REQUEUE_FED|RESIZING|RESV_DEL_HOLD|SPECIAL_EXIT"
)
"""States of Slurm's jobs that are not over."""
LOOK = "look"
"""The function of `state_function` that prints how the process is."""
CANCELLED = 143
DELETED_S = 120
"""How long an object and its pods may take to be gone."""
SOON = ("--request-timeout", "10s")
SUBMIT_FILE = {"slurm": "launch/job.sh", "kubernetes": "launch/job.yaml"}
"""What is handed over, in the run's folder."""
KINDS = {
    "job": "job.batch",
    "jobset": "jobset.jobset.x-k8s.io",
    "trainjob": "trainjob.trainer.kubeflow.org",
}
"""What `kubectl` calls the object that is the run."""


@dataclass(frozen=True)
class Job:
    """What a scheduler is to run.

    Attributes:
        process: the job, as it is looked at and ended; its run's folder.
        command: of each rank, without the interpreter.
        port: where rank 0 listens.
        restarts: how often Kubernetes starts all ranks again when one has failed.
        files: of the configuration, by their names, where no node sees the run's folder.
    """

    process: LaunchedProcess
    command: Sequence[str]
    num_ranks: int
    port: int
    restarts: int
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return self.process.run_dir.rpartition("/")[2]

    def ranks_per_node(self, num_nodes: int) -> int:
        """As many on each node.

        Raises:
            ConfigError: that is not possible.
        """
        if self.num_ranks % num_nodes:
            raise ConfigError(
                f"{self.process.scheduler}.nodes is {num_nodes}, among which the {self.num_ranks} ranks of "
                "mesh cannot be shared equally: change one of them"
            )
        return self.num_ranks // num_nodes


def submission(cluster: ClusterConfig, run_id: str, on: Scheduler) -> tuple[tuple[str, ...], str]:
    """The command that takes the job's file by standard input, and what the scheduler then calls the run."""
    if on == "slurm":
        return ("sbatch", "--parsable"), run_id
    config = cluster.kubernetes
    argv = ("kubectl", "--namespace", config.namespace, "apply", "-f", "-")
    return argv, f"{KINDS[config.kind]}/{run_id}"


def submit(process: LaunchedProcess) -> None:
    """Hand the job over; its file, which lies in the run's folder, goes by standard input.

    Kubernetes keeps an object that is over as it is, so that one of the run's name is deleted before.

    Raises:
        LaunchError: the scheduler's command is not here, or refuses it.
    """
    host = Host(process.node)
    file = Path(process.run_dir, SUBMIT_FILE[str(process.scheduler)])
    if process.scheduler == "kubernetes":
        delete = ("delete", "--ignore-not-found", "--cascade=foreground", f"--timeout={DELETED_S}s")
        deleted = host.run(
            shlex.join((*kubectl(process), *delete, process.session)), timeout_s=DELETED_S + 20
        )
        if not deleted.ok:
            raise LaunchError(f"kubectl does not delete {process.session}: {deleted.stderr_tail}")
    done = host.run(shlex.join(process.argv), stdin=file.read_bytes())
    if not done.ok:
        raise LaunchError(f"{process.argv[0]} does not take the job: {done.stderr_tail}")


def state_function(process: LaunchedProcess) -> str:
    """Defines `state`, the scheduler's word, and `look FILE`: `running`, `ended CODE` or `gone`.

    Both fail where the scheduler does not answer. A job that is over is forgotten some minutes later; FILE is
    where its script has left its exit code.
    """
    cases = {
        "slurm": f"{ACTIVE}) echo running;; COMPLETED) echo ended 0;; CANCELLED) echo ended {CANCELLED};;",
        "kubernetes": "Active) echo running;; Complete) echo ended 0;;",
    }
    return (
        f"state() {{ {_state(process)}; }}\n"
        f'{LOOK}() {{ word=$(state) || return; case "$word" in {cases[str(process.scheduler)]}\n'
        '"") if [ -s "$1" ]; then echo ended "$(cat "$1")"; else echo gone; fi;;\n'
        '*) if [ -s "$1" ]; then echo ended "$(cat "$1")"; else echo ended 1; fi;; esac; }'
    )


def _state(process: LaunchedProcess) -> str:
    name = shlex.quote(process.session)
    if process.scheduler == "slurm":
        query = (
            f'squeue --noheader --states=all --name={name} --user="$(id -un)" --sort=i --format=%T'
        )
        return f'found=$({query}) || return; printf "%s\\n" "$found" | tail -n 1'
    # a condition that is true of the object, of which the last one tells; empty: there is no such object
    template = 'found {range .status.conditions[?(@.status=="True")]}{.type} {end}'
    get = ("get", process.session, "--ignore-not-found", "-o", f"jsonpath={template}")
    return (
        f"found=$({shlex.join((*kubectl(process), *SOON, *get))}) || return; "
        'case "$found" in "") ;; *" Failed "*) echo Failed;; '
        '*" Complete "*|*" Completed "*) echo Complete;; *) echo Active;; esac'
    )


def kubectl(process: LaunchedProcess) -> Sequence[str]:
    """`kubectl` and the namespace, as the command that makes the job has it."""
    namespace = process.argv[process.argv.index("--namespace") + 1]
    return ("kubectl", "--namespace", namespace)


def left_function(process: LaunchedProcess) -> str:
    """Defines `left`; who cannot be asked is not said to have ended."""
    look = f'looked=$({LOOK} /dev/null) || exit 1; [ "$looked" = running ]'
    return f"{state_function(process)}\nleft() {{ {look}; }}"


def end_lines(process: LaunchedProcess, signalling: Sequence[str]) -> list[str]:
    """The same with the scheduler's command in the place of signals; without any there is nothing to do."""
    if not signalling:
        return []
    note = signalling[0]
    is_kill = any("KILL" in line for line in signalling[1:])
    name = shlex.quote(process.session)
    if process.scheduler == "slurm":
        kill = f'scancel --signal=KILL --full --name={name} --user="$(id -un)"\n' * is_kill
        return [note, f'{kill}scancel --name={name} --user="$(id -un)"']
    own = process.session.partition("/")[2]
    targets = (process.session, f"service/{own}", f"configmap/{own}")
    how = ("--grace-period=0", "--force") if is_kill else ("--cascade=foreground",)
    delete = ("delete", "--wait=false", "--ignore-not-found", *how, *targets)
    return [note, shlex.join((*kubectl(process), *SOON, *delete))]
