"""A group as a job of Slurm: the file that `sbatch` takes. Pure.

The run's folder, the environment and the data must be where all nodes see them at the same place, as is the
custom on such clusters. When Slurm has taken the nodes away, it begins the script again, and the run goes on
from its newest checkpoint.
"""

import shlex
import sys

from smolcluster.configs.schema import SlurmConfig
from smolcluster.errors import ConfigError
from smolcluster.launch.jobs.scheduler import Job
from smolcluster.utils.seed import HASH_SEED

OWN = ("job-name", "nodes", "ntasks", "ntasks-per-node", "output", "error", "requeue", "open-mode")
"""Options that a launch sets itself."""


def sbatch_script(job: Job, config: SlurmConfig) -> str:
    """The file, with all its options.

    Raises:
        ConfigError: an option is the launch's own, or the ranks cannot be shared equally.
    """
    for option in config.options:
        if option in OWN:
            raise ConfigError(
                f"slurm.options.{option} is what a launch sets itself: use slurm.nodes and mesh"
            )
    ranks, process = job.ranks_per_node(config.nodes), job.process
    output = f"{process.run_dir}/logs/{process.stem}.console.txt".replace("%", "%%")
    options = {
        "job-name": job.run_id,
        "nodes": config.nodes,
        "ntasks-per-node": ranks,
        "output": f'"{output}"',
        "open-mode": "append",
        "requeue": None,
        **config.options,
    }
    exits = shlex.quote(f"{process.run_dir}/exits/{process.stem}")
    lines = [
        "#!/bin/bash",
        *(
            f"#SBATCH --{key}" + ("" if value is None else f"={value}")
            for key, value in options.items()
        ),
        "set -uo pipefail",
        f"mkdir -p {shlex.quote(f'{process.run_dir}/exits')}; rm -f {exits}",
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        '[ -n "$MASTER_ADDR" ] || { echo "error: Slurm does not say which nodes the job has" >&2; exit 1; }',
        f"export MASTER_ADDR MASTER_PORT={job.port} {HASH_SEED}=${{{HASH_SEED}:-0}}",
        "export PYTHONSAFEPATH=1",  # the folder of the job brings no modules
        f"srun --kill-on-bad-exit=1 --nodes={config.nodes} --ntasks-per-node={ranks} \\",
        f"  {shlex.join([sys.executable, *job.command])}",
        "code=$?",
        f"echo $code > {exits}",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
