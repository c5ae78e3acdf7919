"""smolcluster: train PyTorch models on the machines you already own, over plain TCP.

What is imported from here is loaded when it is asked for: `import smolcluster` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smolcluster.version import __version__ as __version__

if TYPE_CHECKING:
    from smolcluster import errors as errors
    from smolcluster.api.attach import attach as attach
    from smolcluster.api.config import DistributedConfig as DistributedConfig
    from smolcluster.api.network_worker import NetworkWorker as NetworkWorker
    from smolcluster.api.orchestrator import Orchestrator as Orchestrator
    from smolcluster.training.hooks import Hooks as Hooks
    from smolcluster.training.recipe import Training as Training
    from smolcluster.training.workload import Workload as Workload

__all__ = [
    "DistributedConfig",
    "Hooks",
    "NetworkWorker",
    "Orchestrator",
    "Training",
    "Workload",
    "attach",
    "errors",
]

_MODULES = {
    "DistributedConfig": "smolcluster.api.config",
    "Hooks": "smolcluster.training.hooks",
    "NetworkWorker": "smolcluster.api.network_worker",
    "Orchestrator": "smolcluster.api.orchestrator",
    "Training": "smolcluster.training.recipe",
    "Workload": "smolcluster.training.workload",
    "attach": "smolcluster.api.attach",
}
"""Where each name is; those that are not here are modules of that name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULES:
        return import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
