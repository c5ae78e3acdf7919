"""What DiLoCo says of itself: see `configs/spec.py`."""

from pathlib import Path

from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="diloco",
    title="DiLoCo",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    config=f"{__package__}.config:DiLoCoConfig",
    commands=(
        LaunchCommand(
            "diloco",
            "Distributed Low-Communication training: workers take many steps of their own between two "
            "exchanges with the server.",
            train_config="digits",
            train_overrides=("optimizer=auto",),
        ),
    ),
    costs=f"{__package__}.costs",
    messages=frozenset({"ps", "rounds"}),
    roles={
        "server": "server.py",
        "worker": "worker.py",
        "store": "store.py",
        "stage": "stage.py",
    },
    has_local_steps=True,
)
