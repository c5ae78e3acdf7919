"""A worker that is a user's script: what `launch … --script train.py` starts on each machine.

The script runs as `python train.py` would, and is told by the environment who it is: `attach` finds its name,
its worker id, its run and its server there. When it is killed its supervisor starts it again.
"""

import argparse
import json
import os
import runpy
import shlex
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from smolcluster.algorithms.entry import guarded, supervise_process, worker_parser
from smolcluster.api.attached_process import Told
from smolcluster.configs.overrides import ATTACH_VARIABLE, NAME_VARIABLE, server_overrides
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, SmolclusterError

FAILED = 1


def main() -> int:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--script", required=True)
    first.add_argument("--algorithm", required=True)
    own, rest = first.parse_known_args()
    args = worker_parser(get_algorithm(own.algorithm)).parse_args(rest)
    supervised = args.supervised is not None
    if args.restarts and not supervised:
        return supervise_process("worker", args)
    return guarded(
        lambda: run_script(own.script, own.algorithm, args),
        stop_on_stdin_eof=args.stop_on_stdin_eof or supervised,
        supervised=supervised,
    )


def run_script(script: str, algorithm: str, args: argparse.Namespace) -> None:
    """Run a script, with its arguments, as the main module.

    Raises:
        ConfigError: there is no such file.
        SmolclusterError: what ended it; any other exception is shown as Python does: exit code 1.
    """
    stated, *arguments = shlex.split(script)
    file = str(Path(stated).expanduser())
    if not Path(file).is_file():
        raise ConfigError(f"--script is {file}: there is no such file")
    told = Told(
        config=args.config or algorithm,
        overrides=(*args.override, *server_overrides(args.server, args.node)),
        worker_id=args.worker_id,
        run_id=args.run_id,
        is_local=args.local,
        num_workers=args.workers,
        is_named=not args.stop_on_stdin_eof,
    )
    os.environ |= {NAME_VARIABLE: args.node, ATTACH_VARIABLE: json.dumps(asdict(told))}
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).resolve().parent)
    try:
        runpy.run_path(file, run_name="__main__")
    except SmolclusterError:
        raise
    except Exception:
        traceback.print_exc()
        raise SystemExit(FAILED) from None


if __name__ == "__main__":
    raise SystemExit(main())
