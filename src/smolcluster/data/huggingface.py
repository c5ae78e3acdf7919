"""The Hugging Face hub, or what was fetched from it before.

Its libraries try again for half a minute when there is no network, and each in its own words. So one
request tells first whether the hub can be reached; if not, they are kept to their caches.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from smolcluster.utils.words import condensed

TIMEOUT_S = 5.0
NOT_ALLOWED = "dataset.download is false"
_REFUSALS = frozenset({403, 407})
_SWITCHED = ("huggingface_hub.constants", "datasets.config")


@contextmanager
def hub(*, download: bool) -> Iterator[str | None]:
    """Let the libraries use the hub while the block lasts, or only what they fetched before.

    Yields:
        Why the hub is not asked; None when it is.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - seconds to import

    disable_progress_bars()
    problem = _problem() if download else NOT_ALLOWED
    with nullcontext() if problem is None else _offline():
        yield problem


@contextmanager
def _offline() -> Iterator[None]:
    """What the variable HF_HUB_OFFLINE does, of those libraries that are imported."""
    modules: list[Any] = [sys.modules[name] for name in _SWITCHED if name in sys.modules]
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _problem() -> str | None:
    """Why the hub cannot be reached; None: it answers."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # noqa: PLC0415

    place = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        status = get_session().head(place, timeout=TIMEOUT_S).status_code
    except httpx.HTTPError as error:
        return f"{place} cannot be reached: {reason_of(error)}"
    if status in _REFUSALS or status >= 500:
        return f"{place} cannot be reached: the answer is {status}"
    return None


def reason_of(error: BaseException) -> str:
    """What an error of somebody else's says, on one line."""
    return condensed(str(getattr(error, "strerror", None) or str(error) or type(error).__name__))
