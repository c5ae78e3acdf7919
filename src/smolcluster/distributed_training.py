"""`python -m smolcluster.distributed_training`: a mesh, by hand on each node, or under torchrun or srun.

Without a rank it starts all ranks on this machine. The first one that fails is named, and ends the others.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.algorithms.children import Children, how_ended
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh.ranks import (
    IN_POD,
    RANK_VARIABLES,
    Ranks,
    ranks_of,
)
from smolcluster.configs.spec import default_algorithm
from smolcluster.errors import ConfigError, LaunchError, PeerLost, Rejected, UserCodeError
from smolcluster.utils.addresses import free_port
from smolcluster.utils.replaced import BY_FLAGS, say_what_replaces
from smolcluster.utils.seed import HASH_SEED, with_hash_seed
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF, at_stdin_eof
from smolcluster.wire.security import GROUP_SECRET, new_secret

if TYPE_CHECKING:
    from smolcluster.algorithms.Mesh.watch import Failure
    from smolcluster.configs.schema import Settings

PASSED_ON = (Rejected.exit_code, UserCodeError.exit_code, ConfigError.exit_code)
"""Exit codes of ranks that say what to change, and are those of who has started them."""
RESOLVE_S = 3.0
"""How long a name may be unknown; a pod's, which others of its kind wait for, until all must be there."""
END_TIMEOUT_S = 60.0
"""How long rank 0 may save after a signal."""
ORPHANED_S = 30.0
"""How long rank 0 may take to leave a record once what has started it is gone."""
FOLLOW_TIMEOUT_S = 12.0
"""How long the others may take to see that one has failed."""
MOST_TOLD = 500
"""Bytes of a line about who has failed first: a pipe takes so much whole."""
NEEDS = "the flags of a rank must be what another process can be given"
NAMED_S = 15.0
"""How long a rank that says that another one has ended may be ahead of that one's own end."""
PROFILED = {"wait": 1}
"""What `--profile` sets where nothing says which steps; the rest are defaults, but one key has to be said."""
MODEL_FLAGS = {
    "hidden_size": "model.model_dim",
    "attention_heads": "model.num_heads",
    "layers": "model.num_layers",
    "max_seq_length": "model.max_seq_len",
    "epochs": "num_epochs",
    "learning_rate": "learning_rate",
    "gradient_clip_norm": "gradient_clipping.max_norm",
    "save_interval": "checkpoint_steps",
    "precision": "precision",
}
"""Flags, and the keys of the configuration that they set."""
MESH_KEYS = (
    *("mesh.dp", "mesh.fsdp", "mesh.tp", "mesh.pp", "mesh.sequence_parallel", "mesh.loss_parallel"),
    *("compile", "schedule", "microbatches", "activation_checkpointing", "instruction_log"),
    *("backend", "hang_timeout_s"),
)
"""Those of a mesh, each by the flag of its last name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = parser().parse_args(argv)
    say_what_replaces(os.environ, BY_FLAGS)
    return guarded(partial(_run, args), stop_on_stdin_eof=args.stop_on_stdin_eof)


def parser() -> argparse.ArgumentParser:
    # no abbreviations: torchrun takes those of its own flags out of a command
    made = argparse.ArgumentParser(
        "smolcluster.distributed_training", description=__doc__, allow_abbrev=False
    )
    ranks = made.add_argument_group("ranks")
    ranks.add_argument("--world-size", type=int, help="processes in all; default WORLD_SIZE, 1")
    ranks.add_argument(
        "--rank",
        type=int,
        help="the first rank here; default RANK, else a pod's place in its Job or StatefulSet; else "
        "all of --world-size are here",
    )
    ranks.add_argument(
        "--nproc-per-node",
        type=int,
        help="ranks here, from --rank on; default 1: a node of eight ranks needs --nproc-per-node 8",
    )
    ranks.add_argument("--master-addr", help="where rank 0 is; default MASTER_ADDR, localhost")
    ranks.add_argument("--master-port", type=int, help="its port; default MASTER_PORT, 29500")
    ranks.add_argument("--backend", choices=("auto", "nccl", "gloo", "mpi"), help="default auto")
    ranks.add_argument(
        "--no-nccl",
        dest="backend",
        action="store_const",
        const="gloo",
        help="the same as --backend gloo",
    )
    ranks.add_argument(
        "--start-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long ranks wait for each other at the start; default 300",
    )
    ranks.add_argument(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=float,
        metavar="SECONDS",
        help="how long no rank may get on before the mesh ends; default 300",
    )
    mesh = made.add_argument_group("mesh")
    for name in ("dp", "fsdp", "tp", "pp"):
        mesh.add_argument(f"--{name}", type=int, help="ranks along it; default 1, of dp the rest")
    mesh.add_argument("--schedule", help="default 1f1b")
    mesh.add_argument("--microbatches", type=int, help="default 1, or 2 x pp")
    mesh.add_argument("--sequence-parallel", action="store_true", help="GPT, with --tp")
    mesh.add_argument("--loss-parallel", action="store_true", help="GPT, with --tp")
    mesh.add_argument("--compile", action="store_true", help="torch.compile each layer")
    mesh.add_argument(
        "--use-gradient-checkpointing",
        dest="activation_checkpointing",
        action="store_const",
        const="full",
    )
    mesh.add_argument(
        "--activation-checkpointing", choices=("none", "full", "selective"), help="default none"
    )
    mesh.add_argument(
        "--cluster",
        metavar="FILE",
        help="cluster file, or a shipped name, whose mesh it is; flags win. Default: flags alone say it",
    )
    mesh.add_argument("--machine", help="this machine's name in it; default: its server's")
    mesh.add_argument(
        "--instruction-log",
        metavar="FOLDER",
        help="write down what each rank computes when; default: nowhere",
    )
    mesh.add_argument(
        "--profile",
        action="store_true",
        help="profile some steps of all ranks; which ones --override profile.wait=10 profile.active=3 says",
    )
    what = made.add_argument_group(
        "training",
        "What is not given here is what the training file says, such as gpt_config_stdlib.yaml.",
    )
    what.add_argument(
        "--config",
        metavar="FILE",
        help="training file, or a shipped name; default stdlib, a small GPT that needs no download, or "
        "gpt_config.yaml beside the cluster file or edited",
    )
    what.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    for name in ("hidden-size", "attention-heads", "layers", "vocab-size"):
        what.add_argument(f"--{name}", type=int)
    what.add_argument("--max-seq-length", "--seq-len", type=int)
    for name in ("batch-size", "epochs", "save-interval"):
        what.add_argument(f"--{name}", type=int)
    what.add_argument("--learning-rate", type=float)
    what.add_argument("--gradient-clip-norm", type=float)
    what.add_argument(
        "--mixed-precision",
        dest="precision",
        action="store_const",
        const="bf16",
        help="precision bf16",
    )
    what.add_argument("--run-id")
    what.add_argument("--resume", metavar="RUN", help="a run to go on with, latest, or auto")
    what.add_argument(
        "--workload", metavar="FILE:FUNCTION", help="a function that makes a Workload"
    )
    what.add_argument("--no-progress", action="store_true", help="leave it to who started this")
    made.add_argument(STOP_ON_STDIN_EOF, action="store_true", help=argparse.SUPPRESS)
    return made


def overrides_of(args: argparse.Namespace, num_shares: int) -> list[str]:
    """What the flags set of the configuration; the batch is of each rank along dp and fsdp."""
    flags = vars(args)
    said = [f"{key}={flags[flag]}" for flag, key in MODEL_FLAGS.items() if flags[flag] is not None]
    if args.hidden_size is not None:
        said.append(f"model.ff_dim={4 * args.hidden_size}")
    if args.batch_size is not None:
        said += [
            f"batch_size={args.batch_size}",
            f"global_batch_size={args.batch_size * num_shares}",
        ]
    return [*said, *args.override]


def mesh_keys(args: argparse.Namespace, world_size: int) -> dict[str, object]:
    """What the flags say of the mesh; without a cluster file they alone say it, and the number of ranks."""
    said = {key: getattr(args, key.rpartition(".")[2]) for key in MESH_KEYS}
    keys = {key: value for key, value in said.items() if value is not None and value is not False}
    if args.cluster:
        return keys
    num_stages = args.pp or 1
    rest = world_size // ((args.fsdp or 1) * (args.tp or 1) * num_stages)
    unsaid = {
        "mesh.dp": max(1, rest),
        "mesh.fsdp": 1,
        "mesh.tp": 1,
        "mesh.pp": 1,
        "mesh.sequence_parallel": False,
        "mesh.loss_parallel": False,
        "compile": False,
        "schedule": "1f1b",
        "microbatches": 2 * num_stages if num_stages > 1 else 1,
        "activation_checkpointing": "none",
        "backend": "auto",
    }
    return unsaid | keys


def configuration(args: argparse.Namespace, world_size: int | None) -> "Settings":
    """The settings of this machine, and of the mesh.

    Args:
        world_size: how many ranks there are; None: as many as the cluster file's mesh has.

    Raises:
        ConfigError: a file, key or value is wrong.
    """
    from smolcluster.algorithms.Mesh.config import MeshConfig  # noqa: PLC0415 - they take time
    from smolcluster.configs.meant import SMALL_GPT, training_source  # noqa: PLC0415
    from smolcluster.configs.overrides import workload_overrides  # noqa: PLC0415
    from smolcluster.configs.resolve import load_settings  # noqa: PLC0415

    keys = mesh_keys(args, world_size or 1)
    texts = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    train_file = training_source(args.config, args.cluster, default=SMALL_GPT)

    def settings_with(*more: str) -> "Settings":
        return load_settings(
            args.cluster or default_algorithm().name,
            train_file,
            args.machine if args.cluster else None,
            [*texts, *more, *workload_overrides(args.workload)],
            local=True,
            local_workers=1,
        )

    own = settings_with(*args.override).of(MeshConfig)
    if args.profile and own.profile is None:
        texts.append(f"profile={json.dumps(PROFILED)}")
    return settings_with(*overrides_of(args, own.mesh.num_shares))


def _run(args: argparse.Namespace) -> None:
    from smolcluster.algorithms.Mesh.config import MeshConfig  # noqa: PLC0415 - it takes time

    settings = configuration(args, None) if args.cluster else None
    size = args.world_size
    if settings and size is None and not any(rank in os.environ for rank, _ in RANK_VARIABLES):
        size = settings.of(MeshConfig).num_ranks
    ranks = ranks_of(
        os.environ,
        world_size=size,
        rank=args.rank,
        num_here=args.nproc_per_node,
        address=args.master_addr,
        port=args.master_port,
    )
    if ranks.world_size > 1:
        _check_address(ranks.address, args.start_timeout if IN_POD in os.environ else RESOLVE_S)
    # what is wrong is said once, by who starts the ranks, and not by each of them
    settings = settings or configuration(args, ranks.world_size)
    if not ranks.is_process:
        _start(replace(ranks, port=ranks.port or free_port()), args)
        return
    if args.stop_on_stdin_eof:
        at_stdin_eof(_end_late)
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's
    _be_rank(ranks, args, settings, launcher=agent)


def _be_rank(
    ranks: Ranks,
    args: argparse.Namespace,
    settings: "Settings",
    *,
    launcher: int | None,
    on_failure: Callable[["Failure"], None] = lambda _: None,
) -> None:
    from smolcluster.algorithms.Mesh.process import be_rank  # noqa: PLC0415 - it imports torch

    be_rank(
        ranks,
        settings,
        start_timeout_s=args.start_timeout,
        launcher=launcher,
        vocab_size=args.vocab_size,
        run_id=args.run_id,
        resume=args.resume,
        has_progress=not args.no_progress,
        node=_node(args),
        on_failure=on_failure,
    )


def _node(args: argparse.Namespace) -> str:
    """What this machine is called: its name in the cluster file where that is said, else its host name."""
    return args.machine if args.cluster and args.machine else platform.node()


def _check_address(address: str, patience_s: float) -> None:
    """See that the name of rank 0's machine is known: torch says so by a stack of C++.

    Raises:
        ConfigError: it is not, not even after `patience_s` seconds.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= end:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"MASTER_ADDR or --master-addr is {address}, which is no address or known name of a "
                    f"machine ({reason}): name the machine of rank 0"
                ) from error
            time.sleep(0.2)
        else:
            return


def _start(ranks: Ranks, args: argparse.Namespace) -> None:
    """Be the parent of the ranks that are here; ends when all have.

    Raises:
        LaunchError: one failed; names the first. Its exit code is that of ranks which say what to change.
    """
    if not sys.flags.safe_path and sys.path[0] == str(Path.cwd()):
        del sys.path[0]  # by `python -m`: ranks take no modules from there
    here, size = ranks.here, ranks.world_size
    secret = new_secret() if len(here) == size else None
    children = Children(NEEDS, orphaned_s=ORPHANED_S)
    told, tells = multiprocessing.Pipe(duplex=False)
    failed: LaunchError | None = None
    try:
        for rank in here:
            own = replace(ranks, here=range(rank, rank + 1), is_process=True)
            environ = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - here.start),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "WORLD_SIZE": str(size),
                "MASTER_PORT": str(ranks.port),
                HASH_SEED: with_hash_seed(os.environ)[HASH_SEED],
            }
            # Ctrl-C is heard here: a rank that heard it twice would not save
            body = partial(_be_child, own, args, secret, tells)
            children.start(rank, body, environ, is_apart=True)
        reason = _first_to_fail(children, told, _node(args))
        if reason is not None:
            failed = LaunchError(reason)
            raise failed
    finally:
        _end(children, has_failed=failed is not None)
        codes = children.codes.values()
        if failed is not None:
            failed.exit_code = next((each for each in PASSED_ON if each in codes), failed.exit_code)
        told.close()
        tells.close()


def _be_child(
    ranks: Ranks, args: argparse.Namespace, secret: str | None, tells: Connection
) -> None:
    """Be a rank that another process has started, and tell that who has failed first."""
    if secret is not None:
        os.environ[GROUP_SECRET] = secret

    def tell(failure: "Failure") -> None:
        with suppress(OSError):
            tells.send_bytes(" ".join(str(failure).split()).encode()[:MOST_TOLD])

    def body() -> None:
        settings = configuration(args, ranks.world_size)
        _be_rank(ranks, args, settings, launcher=os.getppid(), on_failure=tell)

    raise SystemExit(guarded(body))


def _first_to_fail(ranks: Children, told: Connection, node: str) -> str | None:
    """Wait until all ranks have ended, or one has failed: a sentence about it.

    `told`: where ranks write who has failed first. One that ends because another one has is no first one, if
    that is ours.
    """
    since = math.inf
    while True:
        codes = ranks.codes
        if told.poll():
            return told.recv_bytes().decode(errors="replace")
        failed = {rank: code for rank, code in codes.items() if code}
        own = [rank for rank, code in failed.items() if code != PeerLost.exit_code]
        if own or (failed and time.monotonic() > since + NAMED_S):
            rank = next(iter(own or failed))
            return f"rank {rank} on {node} failed first: {how_ended(failed[rank])}"
        if failed:
            since = min(since, time.monotonic())
        if None not in codes.values():
            return None
        time.sleep(0.05)


def _end(ranks: Children, *, has_failed: bool) -> None:
    """Let rank 0, which tells the others, end; kill what is left.

    When a rank has failed, those that do not notice are killed first: rank 0 waits for them, and has a record
    to leave. Others than rank 0 heed a signal until they have loaded what is trained.
    """
    try:
        if has_failed:
            ranks.end_but(0, FOLLOW_TIMEOUT_S)
            ranks.wait(FOLLOW_TIMEOUT_S)
        ranks.terminate()
        ranks.wait(END_TIMEOUT_S)
    finally:
        ranks.end()


def _end_late() -> None:
    """End this process some time after its parent: rank 0 saves meanwhile, the others wait for its word."""
    time.sleep(END_TIMEOUT_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from smolcluster.distributed_training import main as run  # ranks know this module by its name

    sys.exit(run())
