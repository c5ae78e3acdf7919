"""What `launch NAME` means: the commands differ in what they fill in where the user says nothing."""

from collections.abc import Sequence

from smolcluster.algorithms.registry import get_algorithm
from smolcluster.launch.plan import Request

SMALL_GPT = "stdlib"
"""A GPT that needs no download."""


def request_of(
    name: str,
    algorithm: str,
    *,
    local: bool,
    num_workers: int | None,
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
) -> Request:
    if name == "edp-gpt":
        if train_config is None and not local:  # each Python has another library
            overrides = ["dataset.source=server", *overrides]
        train_config = train_config or SMALL_GPT
        if local:  # old gradients harm a GPT, and two cores compute no faster with three workers
            num_workers = 2 if num_workers is None else num_workers
            overrides = ["worker_update_interval=1", *overrides]
    if local and train_config == "gpt":
        train_config = SMALL_GPT
    return Request(
        algorithm=get_algorithm(algorithm),
        config=config,
        train_config=train_config,
        overrides=tuple(overrides),
        num_workers=num_workers,
    )
