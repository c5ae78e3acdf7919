"""`launch --on slurm` and `--on kubernetes`: from a request to a job that is followed or left."""

import os
import sys
from datetime import datetime
from pathlib import Path

from smolcluster.configs.checks import check_algorithm, check_unencrypted
from smolcluster.configs.load import find_config
from smolcluster.configs.meant import DEFAULT_TRAINING, cluster_source
from smolcluster.configs.overrides import public_overrides, without_workload, workload_overrides
from smolcluster.configs.schema import Settings
from smolcluster.errors import LaunchError
from smolcluster.launch.find import all_runs
from smolcluster.launch.group_plan import PROGRAM, ROLE, num_ranks, portable_request
from smolcluster.launch.host import Host
from smolcluster.launch.jobs.kubernetes import KubernetesJob, manifests, object_kind, to_yaml
from smolcluster.launch.jobs.scheduler import SUBMIT_FILE
from smolcluster.launch.jobs.slurm import SlurmJob, sbatch_script
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE, Request, option, override_options
from smolcluster.launch.prepare import Machine, settings_in
from smolcluster.launch.remote import (
    LaunchOptions,
    StoredOptions,
    go_on,
    keep,
    without_env,
)
from smolcluster.launch.requests import (
    naming_workload,
    settings_of,
    training_line,
)
from smolcluster.launch.run import Run
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import create_run, new_run_id
from smolcluster.wire.security import default_secret_path, ensure_secret


def launch_job(request: Request, how: LaunchOptions, *, run_id: str | None = None) -> int:
    """Hand a group over to a scheduler, or only print what it would get; returns the exit code.

    With the id of a run that was handed over before it goes on from its newest good checkpoint.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    settings = settings_of(request, local=False)
    request = naming_workload(request, settings)
    check_algorithm(settings, request.algorithm.name)
    num_ranks(request, settings)
    cluster = settings.cluster
    if (cluster.slurm if how.on == "slurm" else cluster.kubernetes).nodes > 1:
        check_unencrypted(cluster.encryption)
    request = portable_request(request, settings)
    run_id = run_id or new_run_id(request.algorithm.name, datetime.now().astimezone())
    here = all_runs()
    if how.on == "slurm":
        text, launched = slurm_job(request, settings, here / run_id)
    else:
        text, launched = kubernetes_job(request, settings, here / run_id)
    if how.dry_run:
        sys.stdout.write(commented(text, training_line(request, settings)))
        return 0
    tool = launched.server.argv[0]
    if not Host(launched.server.node).run(f"command -v {tool} >/dev/null").ok:
        raise LaunchError(f"{tool} is not on this machine: launch where {how.on} has its commands")
    if how.on == "slurm":  # before ranks on several nodes look for it
        ensure_secret(settings.node.secret_file or default_secret_path())
    cluster_file = find_config(cluster_source(request.config, request.algorithm.name), "cluster")
    train_file = find_config(request.train_config or DEFAULT_TRAINING, "training")
    overrides = (*request.overrides, *workload_overrides(request.workload))
    told = StoredOptions(environ=settings_in(os.environ), overrides=overrides)
    paths = create_run(here, run_id, newest=False)
    keep(paths, cluster_file.read_bytes(), train_file.read_bytes(), told)
    (paths.root / SUBMIT_FILE[how.on]).write_text(text, encoding="utf-8")
    paths.logs.mkdir(exist_ok=True)
    node = launched.server.node
    machines = {node: Machine(Host(node), str(paths.root.parent), "pypi", {})}
    run = Run(launched, paths, SteadyConsole(), machines)
    run.keep_what_waits()
    run.start()
    return go_on(run, launched, how)


def commented(text: str, line: str) -> str:
    """A file for a scheduler with a line that it does not read, below the one that names the shell."""
    at = text.index("\n") + 1 if text.startswith("#!") else 0
    return f"{text[:at]}# {line}\n{text[at:]}"


def _public(request: Request) -> tuple[str, ...]:
    return tuple(public_overrides(without_workload(request.overrides)))


def slurm_job(request: Request, settings: Settings, run_dir: Path) -> tuple[str, Launched]:
    """The file for `sbatch`, and what is launched by it.

    Raises:
        ConfigError: as `sbatch_script`.
    """
    node = "slurm"
    process = LaunchedProcess(
        node=node,
        role=ROLE,
        run_dir=str(run_dir),
        project_dir=str(run_dir.parent),
        session=run_dir.name,
        argv=("sbatch", "--parsable"),
        scheduler="slurm",
    )
    command = (
        *PROGRAM,
        *("--run-id", run_dir.name, "--resume", "auto"),
        *("--cluster", f"{run_dir}/{CLUSTER_FILE}", "--config", f"{run_dir}/{TRAIN_FILE}"),
        *option("--workload", request.workload),
        *override_options((*_public(request), f"runs_dir={run_dir.parent}")),
    )
    job = SlurmJob(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        stem=process.stem,
        python=sys.executable,
        command=command,
        num_ranks=num_ranks(request, settings),
        port=settings.cluster.port,
    )
    return sbatch_script(job, settings.cluster.slurm), _launched(request, settings, process)


def kubernetes_job(request: Request, settings: Settings, run_dir: Path) -> tuple[str, Launched]:
    """The objects as YAML, and what is launched by them.

    Raises:
        ConfigError: as `manifests`.
    """
    config = settings.cluster.kubernetes
    process = LaunchedProcess(
        node="kubernetes",
        role=ROLE,
        run_dir=str(run_dir),
        project_dir=str(run_dir.parent),
        argv=("kubectl", "--namespace", config.namespace, "apply", "-f", "-"),
        session=f"{object_kind(config)}/{run_dir.name}",
        scheduler="kubernetes",
    )
    cluster = find_config(cluster_source(request.config, request.algorithm.name), "cluster")
    train = find_config(request.train_config or DEFAULT_TRAINING, "training")
    job = KubernetesJob(
        run_id=run_dir.name,
        cluster_file=without_env(cluster).decode(),
        train_file=train.read_text(encoding="utf-8"),
        arguments=(*option("--workload", request.workload), *override_options(_public(request))),
        num_ranks=num_ranks(request, settings),
        port=settings.cluster.port,
    )
    return to_yaml(manifests(job, config)), _launched(request, settings, process)


def _launched(request: Request, settings: Settings, process: LaunchedProcess) -> Launched:
    return Launched(
        run_id=process.run_dir.rpartition("/")[2],
        algorithm=request.algorithm.name,
        port=settings.cluster.port,
        overrides=_public(request),
        processes=(process,),
    )
