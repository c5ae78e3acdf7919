"""Loki on the machine that launches."""

import os
from collections.abc import Mapping

from smolcluster.launch.observe.stack import Service, answers, services

BUILD = "/loki/api/v1/status/buildinfo"
"""Answered from the start; `/ready` takes a quarter of a minute longer."""
ANSWER_S = 0.5


def own_loki(environ: Mapping[str, str] = os.environ) -> str:
    [url] = [service.url for service in services(environ) if service.name == "loki"]
    return url.removesuffix("/ready")


def loki_here(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where this machine has a Loki that answers; None: nowhere."""
    base = own_loki(environ)
    return base if is_loki(base) else None


def is_loki(base: str) -> bool:
    return answers(Service("loki", base + BUILD, "version"), ANSWER_S)
