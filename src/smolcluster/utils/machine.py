"""What a process says of itself and its machine, for whoever reads its log."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil

import smolcluster


def machine_facts() -> dict[str, str | int]:
    """Versions, system, processor, cores and memory; imports nothing for it."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "smolcluster": smolcluster.__version__,
        "python": platform.python_version(),
        "torch": torch,
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }
