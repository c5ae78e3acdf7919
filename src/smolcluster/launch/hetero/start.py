"""The processes of one machine of a `hetero_config.json`: found by its addresses, started, and followed.

python examples/demo_llama8b4bit_distributed.py --config hetero_config.json
    the coordinator's machine: a server, and a worker for the `local` stage
    any other: a worker for each entry with one of its addresses
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from smolcluster.configs.spec import algorithm_of_stages
from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.child import Child
from smolcluster.launch.diagram import drawn, of_hetero
from smolcluster.launch.hetero.file import (
    COORDINATOR,
    DEFAULT_FILE,
    HeteroConfig,
    read_hetero,
)
from smolcluster.launch.plan import by_hand, runs_dir_override
from smolcluster.observability.logs import console_logger
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.runs.events import num_resumed
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.runs.paths import LATEST, find_run
from smolcluster.runs.summary import read_summary
from smolcluster.wire.security import default_secret_path, ensure_secret, keep_secret

STOP_S = 60.0
"""What processes have to save and to end."""
POLL_S = 0.1


def main(
    program: Path,
    *,
    output_dir: str,
    training: Mapping[str, Any],
    arguments: list[str] | None = None,
) -> int:
    """Do this machine's part; returns the exit code.

    Args:
        program: the file whose function `workload` makes what is trained.
        output_dir: where runs are kept if the file does not say.
        training: keys of a cluster or training file; those of `hetero_config.json` win.
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(description="The same command on every machine of the file.")
    parser.add_argument("--config", type=Path, default=Path(DEFAULT_FILE), metavar="FILE")
    parser.add_argument("--resume_step", type=int, metavar="N", help="go on from this step")
    parser.add_argument("--checkpoint_dir", type=Path, metavar="DIR", help="instead of output_dir")
    args = parser.parse_args(arguments)
    try:
        config = read_hetero(args.config)
        folder = (args.checkpoint_dir or config.output_dir or Path(output_dir)).expanduser()
        nodes = own_nodes(config, own_addresses(), socket.gethostname())
        part = Part(config, program, folder.absolute(), training)
        part.write()
        if COORDINATOR in nodes and args.resume_step is not None:
            with part.going_on_from(args.resume_step):
                return part.run(nodes, resume=True)
        return part.run(nodes, resume=args.resume_step is not None)
    except SmolclusterError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def own_addresses() -> set[str]:
    """The addresses of this machine, the loopback's among them."""
    return {each.address for found in psutil.net_if_addrs().values() for each in found}


def own_nodes(config: HeteroConfig, addresses: Collection[str], hostname: str) -> list[str]:
    """The processes that are this machine's: the server first, then workers in the layers' order.

    Raises:
        ConfigError: the file does not know this machine.
    """

    def is_here(node: str) -> bool:
        machine = config.machine_of(node)
        return machine.ip in addresses or machine.hostname == hostname

    found = [node for node in (COORDINATOR, *config.nodes) if is_here(node)]
    if not found:
        known = ", ".join(dict.fromkeys(each.ip for each in (config.coordinator, *config.workers)))
        raise ConfigError(
            f"this machine ({hostname}) has none of the file's addresses ({known}): add it to workers and to "
            "shard_plan"
        )
    return found


class Part:
    """One machine's part of a run, in a folder with the files that its processes read."""

    def __init__(
        self, config: HeteroConfig, program: Path, folder: Path, training: Mapping[str, Any]
    ) -> None:
        self._config, self._program, self._folder = config, program.absolute(), folder
        self._keys = {**training, **config.training.overrides}
        if config.workload_args:
            self._keys["workload_args"] = config.workload_args
        self._cluster_file = folder / "cluster.yaml"

    def write(self) -> None:
        """Write the cluster file, and the secret, if there is one.

        Raises:
            LaunchError, AuthError: the folder cannot be written, or others may read the secret there.
        """
        secret, file = self._config.secret, None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if secret is not None:
                file = keep_secret(self._folder / "secret", secret.encode()).path
            cluster = self._config.cluster(self._folder, file)
            write_whole(self._cluster_file, json.dumps(cluster, indent=2).encode())
        except OSError as error:
            raise LaunchError(
                f"cannot write to {self._folder}: {error.strerror or error}"
            ) from error

    @contextmanager
    def going_on_from(self, step: int) -> Iterator[None]:
        """Let the newest run go on from its checkpoint of that step, also where it had ended later.

        Its summary is there again afterwards, unless a server has gone on with it.

        Raises:
            ConfigError: there is no run.
            CheckpointError: it has no good checkpoint of that step.
            DataError: its summary cannot be read.
        """
        from smolcluster.training.checkpoint import CheckpointStore  # noqa: PLC0415 - loads PyTorch

        paths = find_run(self._folder, LATEST)
        CheckpointStore(paths.checkpoints, 1, console_logger()).make_latest(step)
        if not paths.summary.is_file() or step >= read_summary(paths.summary).steps:
            yield
            return
        before = num_resumed(paths.events)
        aside = paths.summary.with_suffix(".before")  # with a summary the run would have ended
        paths.summary.replace(aside)
        try:
            yield
        finally:
            if num_resumed(paths.events) > before:
                aside.unlink()
            else:
                aside.replace(paths.summary)

    def run(self, nodes: list[str], *, resume: bool) -> int:
        """Start this machine's processes and wait for their end; Ctrl-C ends them in order."""
        if COORDINATOR in nodes:
            if self._config.secret is None:
                ensure_secret(default_secret_path())
            self._draw()
        children: dict[str, Child] = {}
        try:
            for node in nodes:
                _say_of(node)(self._config.described(node))
                children[node] = Child(self.process(node, resume=resume), _say_of(node))
            return self._follow(children)
        except KeyboardInterrupt:
            return self._stop(children)
        finally:
            for child in children.values():
                child.close()

    def _draw(self) -> None:
        training = self._config.training
        if not training.visualize:
            return
        form = training.visualization_format
        try:
            content = drawn(of_hetero(self._config, self._program.stem), form)
            write_whole(self._folder / f"architecture.{form}", content)
        except (ConfigError, LaunchError, OSError) as error:
            _say_of(COORDINATOR)(f"no architecture.{form}: {error}")

    def process(self, node: str, *, resume: bool) -> LaunchedProcess:
        """A process of this machine, with its command; `resume`: a server goes on with the newest run."""
        algorithm = algorithm_of_stages()
        common = ("--config", str(self._cluster_file), "--workload", f"{self._program}:workload")
        here = runs_dir_override(str(self._folder))  # also where SMOLCLUSTER_RUNS_DIR is set
        folder = str(self._folder)
        if node == COORDINATOR:
            going_on = ("--resume", LATEST) if resume else ()
            keys = [f"{key}={json.dumps(value)}" for key, value in self._keys.items()]
            options = (*going_on, "--override", *keys, here, *common)
            return by_hand(algorithm, "server", node, None, *options, run_dir=folder)
        rank = self._config.nodes.index(node)
        options = ("--override", here, *common)
        return by_hand(algorithm, "worker", node, rank, *options, run_dir=folder)

    @staticmethod
    def _follow(children: Mapping[str, Child]) -> int:
        """Until the server has ended and its workers have followed it, or all workers have.

        Those of a server that has failed need not wait for another one.
        """
        until: float | None = None
        while any(child.exit_code is None for child in children.values()):
            server = children.get(COORDINATOR)
            if server is not None and server.exit_code is not None:
                until = until or time.monotonic() + STOP_S
                if server.exit_code or time.monotonic() > until:
                    break
            time.sleep(POLL_S)
        codes = {node: child.exit_code or 0 for node, child in children.items()}
        return codes.get(COORDINATOR, max(codes.values()))

    @staticmethod
    def _stop(children: Mapping[str, Child]) -> int:
        """The server first, which saves and lets its workers go."""
        until = time.monotonic() + STOP_S
        for child in children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
            while child.exit_code is None and time.monotonic() < until:
                time.sleep(POLL_S)
        return 128 + signal.SIGINT


def _say_of(node: str) -> Callable[[str], None]:
    console = SteadyConsole(file=sys.stdout)

    def say(line: str) -> None:
        print_line(console, f"[{node}] {line}")
        sys.stdout.flush()

    return say
