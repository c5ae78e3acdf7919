"""`smolcluster serve`: the server of processes that attach, which learns from the first what is trained."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from pydantic import ValidationError

from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.algorithms.process import process_log
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.keys import refused
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import (
    AlgorithmSpec,
    algorithms,
    default_algorithm,
    get_algorithm,
)
from smolcluster.errors import ConfigError
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.server.listening import check_port
from smolcluster.server.offering import Offer, optimizer_fields, wait_for_offer
from smolcluster.wire.handshake import introduce
from smolcluster.wire.node import Node
from smolcluster.wire.security import cluster_secret

ATTACHED = Path(__file__).parent / "attached.yaml"
"""The training file of runs of attached processes."""


def settings_for(settings: Settings, algorithm: AlgorithmSpec, offer: Offer) -> Settings:
    """The server's settings with what an offer says.

    Where workers do not wait for each other, the server applies the difference that a loop has made. Where
    they take local steps, it has the loop's optimizer for the time in which they do, if it has that kind.

    Raises:
        ConfigError: what it says cannot be trained with.
    """
    told = optimizer_fields(offer.model_dump())
    if not algorithm.is_synchronous:
        told["lr_schedule"] = None
    if not (algorithm.is_synchronous or (algorithm.has_local_steps and offer.optimizer)):
        told |= {
            "optimizer": "sgd",
            "optimizer_args": {},
            "learning_rate": 1.0,
            "weight_decay": 0.0,
        }
    try:
        train = type(settings.train).model_validate(dict(settings.train) | told)
    except ValidationError as error:
        raise refused(type(settings.train), error, "the process that attached") from None
    return replace(settings, train=train)


def serve_attached(
    config: str,
    algorithm: str | None = None,
    *,
    overrides: Sequence[str] = (),
    train_config: str | None = None,
    run_id: str | None = None,
    resume: str | None = None,
    local: bool = False,
    num_workers: int | None = None,
    has_progress: bool = True,
    named: bool = True,
) -> None:
    """Wait for the first process that attaches, then serve the run until it is over.

    Args:
        config: the cluster file, a path or a shipped name.
        algorithm: None: the cluster file's, else the default one.
        overrides: `key=value` texts.
        train_config: the training file with what no process tells; None: ATTACHED.
        run_id, resume: as of any server.
        local, num_workers: whether all is on this machine, and with how many workers.
        has_progress: whether it is shown how far the run is, and what came of it.
        named: whether console lines say whose they are.

    Raises:
        ConfigError: the cluster file or an override is wrong, or the algorithm cannot do that.
    """
    settings = load_settings(
        config,
        train_config or ATTACHED,
        None,
        overrides,
        local=local,
        local_workers=num_workers,
    )
    stated = algorithm or settings.cluster.algorithm
    spec = get_algorithm(stated) if stated else default_algorithm()
    check_algorithm(settings, spec.name)
    if not spec.serves_loops:
        able = ", ".join(name for name, each in algorithms().items() if each.serves_loops)
        raise ConfigError(
            f"algorithm is {spec.name}, which cannot serve processes that attach, allowed: {able}"
        )
    console = SteadyConsole(stderr=True)
    node = settings.cluster.server
    with process_log("server", node, console=console, named=named) as log:
        secret = cluster_secret(settings.node.secret_file, makes=True)
        check_port(settings.cluster)
        offered = wait_for_offer(
            settings.cluster,
            Node(
                hello=introduce(node),
                secret=secret,
                log=log.logger,
                encryption=settings.cluster.encryption,
            ),
            needs_optimizer=spec.is_synchronous,
            check=partial(settings_for, settings, spec),
        )
        own_run(
            Owner(
                spec.name,
                "server",
                node,
                settings_for(settings, spec, offered.offer),
                secret,
                offered.workload,
            ),
            log,
            import_module(f"{spec.package}.server").serve,
            run_id=run_id,
            resume=resume,
            progress=console if has_progress else None,
            output=console if has_progress else None,
        )
