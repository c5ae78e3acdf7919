from pathlib import Path

from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="dummy",
    title="Dummy",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    commands=(
        LaunchCommand(
            "dummy",
            "Plain SGD in the order in which gradients arrive.",
            local_overrides=("optimizer=sgd", "learning_rate=0.1"),
        ),
    ),
)
