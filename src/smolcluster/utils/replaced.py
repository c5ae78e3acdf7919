"""Variables of GT that a user may have set, and what does here what they did there; none is read."""

import sys
from collections.abc import Mapping

LOG = "nothing, for the run's log has all (`smolcluster logs`)"
BY_FLAGS = {
    "GT_INSTRUCTION_LOG": "--instruction-log FOLDER",
    "GT_CONFIG": "--override sharding=FILE, with --tp and --pp of its sizes",
    "GT_BACKEND": "--backend gloo, or --override device=cpu",
    "GT_VERBOSE": LOG,
    "GT_DEBUG_DISPATCHER": LOG,
}
"""Of `smolcluster.distributed_training`."""
BY_KEYS = {
    **BY_FLAGS,
    "GT_INSTRUCTION_LOG": "--override instruction_log=FOLDER of `smolcluster launch mesh`",
    "GT_CONFIG": "--override sharding=FILE mesh.tp=2 mesh.pp=4 of `smolcluster launch mesh`",
    "GT_BACKEND": "--override device=cpu, and backend=gloo of a mesh",
}
"""Of all commands that take `--override`."""


def say_what_replaces(environ: Mapping[str, str], instead: Mapping[str, str] = BY_KEYS) -> None:
    """Print a line for each of them that is set."""
    for name, here in instead.items():
        if name in environ:
            sys.stderr.write(f"{name} has no effect here; in its place: {here}\n")
