"""A rank of a mesh that waits half-way: `held_rank.py FOLDER HOLD_AT PROXY_PORT GROUP ARGUMENT...`.

The arguments are those of `smolcluster.distributed_training`. Before step HOLD_AT ranks wait until there is
a file `go_on` in FOLDER. Unless GROUP is 0, rank 1's connection of the GROUP-th Gloo group of two ranks leads
through a proxy, and where the proxy leads is in the file `gloo` then.
"""

import sys
import time
from pathlib import Path
from typing import Any

from smolcluster import distributed_training
from smolcluster.algorithms.Mesh import loop, store, watch
from smolcluster.algorithms.Mesh.store import GroupStore
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.training.loop import StepTaken

GO_ON, TARGET = "go_on", "gloo"
SETUP_S, END_S, ANSWER_S, SLOWER = 15.0, 2.0, 5.0, 1.0
"""How long ranks are silent or hang before they are given up: less than for users."""
OWN, LOWER, HIGHER = bytes([127, 0, 0, 1]), bytes(4), bytes([127, 0, 0, 2])
"""The rank with the higher address dials. 0.0.0.0 leads to this machine as well."""


def hold(folder: Path, hold_at: int) -> None:
    class Held(MeshTrainer):
        def step(self, samples_applied: int, version: int, *more: Any) -> StepTaken:
            while version == hold_at and not self.groups.total((folder / GO_ON).exists())[0]:
                self.groups.note("held back")
                time.sleep(0.02)
            return super().step(samples_applied, version, *more)

    vars(loop)["MeshTrainer"] = Held


def lead_through(proxy_port: int, group: int, folder: Path) -> None:
    """Let this rank, which is rank 1, dial a proxy instead of rank 0."""
    real_get, real_set = GroupStore.get, GroupStore.set
    groups: list[str] = []

    def told(store: GroupStore, key: str, value: str | bytes) -> None:
        prefix, _, name = key.rpartition("/")
        if isinstance(value, bytes) and name == "1" and OWN in value:
            groups.append(prefix)
            if len(groups) == group:
                value = value.replace(OWN, HIGHER, 1)
        real_set(store, key, value)

    def asked(store: GroupStore, key: str) -> bytes:
        value = real_get(store, key)
        if len(groups) < group or key != f"{groups[group - 1]}/0":
            return value
        place = value.index(OWN)
        before, port = value[: place - 2], value[place - 2 : place]
        (folder / TARGET).write_text(str(int.from_bytes(port)))
        return before + proxy_port.to_bytes(2) + LOWER + value[place + len(OWN) :]

    GroupStore.set = told  # type: ignore[method-assign,assignment]
    GroupStore.get = asked  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    folder, hold_at, proxy_port, group, *arguments = sys.argv[1:]
    hold(Path(folder), int(hold_at))
    if int(group):
        lead_through(int(proxy_port), int(group), Path(folder))
    watch.SETUP_S, watch.SLOWER, watch.END_S = SETUP_S, SLOWER, {True: END_S, False: END_S}
    store.ANSWER_S = ANSWER_S
    sys.exit(distributed_training.main(arguments))
