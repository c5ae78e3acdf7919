"""What SyncPS says of itself: see `configs/spec.py`."""

from pathlib import Path

from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="syncps",
    title="SyncPS",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    config=f"{__package__}.config:SyncPSConfig",
    commands=(
        LaunchCommand(
            "syncps",
            "Synchronous Parameter Server: exact synchronous training with a server and its workers.",
        ),
    ),
    costs=f"{__package__}.costs",
    roles={"server": "server.py", "worker": "worker.py", "store": "store.py"},
    is_synchronous=True,
)
