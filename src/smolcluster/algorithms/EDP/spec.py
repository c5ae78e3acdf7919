"""What EDP says of itself: see `configs/spec.py`."""

from pathlib import Path

from smolcluster.configs.spec import STALENESS, AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="edp",
    title="EDP",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    config=f"{__package__}.config:EDPConfig",
    commands=(
        LaunchCommand(
            "edp",
            "Elastic Distributed Parallelism: an asynchronous parameter server and its workers.",
        ),
        LaunchCommand(
            "edp-gpt",
            "Train a GPT language model with EDP.\n\nWith --local two workers pull the weights after each "
            "step: a GPT suffers more from old gradients than a perceptron, and two cores compute no faster "
            "with three. The training file is stdlib, a small GPT that needs no download, for 1,500 steps: "
            "two minutes on two cores.",
            train_config="stdlib",
            local_workers=2,
            local_overrides=("worker_update_interval=1",),
            train_overrides=("optimizer=auto", "learning_rate=3e-3", "num_steps=1500"),
            cluster_overrides=("dataset.source=server",),  # each Python has another library
        ),
    ),
    costs=f"{__package__}.costs",
    roles={"server": "server.py", "worker": "worker.py", "store": "store.py"},
    columns=frozenset({STALENESS}),
    is_default=True,
)
