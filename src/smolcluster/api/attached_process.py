"""Who a process is that attaches: what a launcher has told it, what its command line says, or its host."""

import json
import os
import socket
import sys
from dataclasses import dataclass

from smolcluster.configs.overrides import ATTACH_VARIABLE, NAME_VARIABLE


@dataclass(frozen=True)
class Told:
    """What a launcher tells the processes of a script, in an environment variable."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    worker_id: int | None = None
    run_id: str | None = None
    is_local: bool = False
    num_workers: int | None = None
    is_named: bool = True
    """Whether lines on the console say whose they are."""


def told_by_launcher() -> Told:
    text = os.environ.get(ATTACH_VARIABLE)
    if text is None:
        return Told()
    values = json.loads(text)
    return Told(**(values | {"overrides": tuple(values.get("overrides", ()))}))


def own_name(stated: str | None) -> str:
    arguments = iter(sys.argv[1:])
    flagged = (
        next(arguments, "") if argument == "--name" else argument.removeprefix("--name=")
        for argument in arguments
        if argument == "--name" or argument.startswith("--name=")
    )
    host = socket.gethostname().partition(".")[0]
    launched = os.environ.get(NAME_VARIABLE) if ATTACH_VARIABLE in os.environ else None
    return launched or stated or next(flagged, "") or os.environ.get(NAME_VARIABLE) or host
