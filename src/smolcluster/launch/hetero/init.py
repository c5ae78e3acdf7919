"""`smolcluster init --hetero`: from addresses and a number of layers to a `hetero_config.json`."""

import json
import os
import secrets
import sys
from pathlib import Path

from smolcluster.errors import ConfigError
from smolcluster.launch.hetero.file import DEFAULT_FILE, LOCAL, HeteroConfig, check_plan
from smolcluster.launch.setup.init import InitOptions, Terminal, may_write
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.server.listening import own_addresses

LAYERS = 32
"""Of Llama 3.1 8B."""


def init_hetero(options: InitOptions, layers: int | None, user: Terminal | None = None) -> int:
    """Write a file in which each machine has about as many layers; returns the exit code.

    `user` answers what the flags leave open; None: who is at the terminal, if there is one.

    Raises:
        ConfigError: a flag is wrong or missing, or the file is there already.
    """
    if user is None and sys.stdin.isatty() and sys.stdout.isatty():
        user = Terminal()
    target = options.to or Path(DEFAULT_FILE)
    if not may_write(target, options, user):
        return 1
    coordinator, workers = _machines(options, user)
    if layers is None:
        text = str(LAYERS) if user is None else user.text("Layers of the model", str(LAYERS))
        if not text.isdigit():
            raise ConfigError(f"the number of layers is {text!r}, must be a whole number")
        layers = int(text)
    config = hetero_of(coordinator, workers, layers, options.port)
    content = config.model_dump(mode="json", exclude_defaults=True) | {"version": config.version}
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # it has the secret
        file.write(json.dumps(content, indent=2) + "\n")
    print_line(
        SteadyConsole(),
        f"wrote {target}; copy it to all machines, which start with `python "
        f"examples/demo_llama8b4bit_distributed.py --config {target}`",
    )
    return 0


def hetero_of(coordinator: str, workers: list[str], layers: int, port: int) -> HeteroConfig:
    """The file for these addresses.

    Raises:
        ConfigError: there are more machines than layers.
    """
    ids = [LOCAL, *range(1, len(workers) + 1)]
    if layers < len(ids):
        raise ConfigError(
            f"--layers is {layers}, must be one at least for each of {len(ids)} machines"
        )
    ends = [round(layers * (place + 1) / len(ids)) for place in range(len(ids))]
    stages = [
        {"id": id_, "start": start, "end": end, "is_last": id_ == ids[-1]}
        for id_, start, end in zip(ids, [0, *ends], ends, strict=False)
    ]
    config = HeteroConfig.model_validate(
        {
            "coordinator": {"ip": coordinator, "port": port, "device": "auto"},
            "workers": [{"id": at, "ip": ip} for at, ip in enumerate(workers, start=1)],
            "shard_plan": stages,
            "secret": secrets.token_hex(32),
        }
    )
    check_plan(config, "init")
    return config


def _machines(options: InitOptions, user: Terminal | None) -> tuple[str, list[str]]:
    coordinator, workers = options.server, list(options.workers)
    if user is not None and coordinator is None:
        coordinator = user.text("Address of the coordinator", min(own_addresses(), default=""))
    while user is not None and not options.workers:
        answer = user.text(f"Address of worker {len(workers) + 1} (empty: no more)", "")
        if not answer:
            break
        workers.append(answer)
    if not coordinator or not workers:
        raise ConfigError(
            "init --hetero needs --server ADDRESS and at least one --worker ADDRESS: at these the others "
            "reach the machine"
        )
    return coordinator, workers
