"""What Mesh says of itself: see `configs/spec.py`."""

from pathlib import Path

from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="mesh",
    title="Mesh",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    config=f"{__package__}.config:MeshConfig",
    commands=(
        LaunchCommand(
            "mesh",
            "Mesh: equal machines as one group of torch.distributed, whose ranks share batch, weights and "
            "layers.\n\nThe training file is stdlib, a small GPT that needs no download, with 8 layers, for "
            "40 steps of 32 samples: two minutes on two cores.",
            train_config="stdlib",
            train_overrides=(
                *("model.num_layers=8", "batch_size=32", "num_steps=40", "eval_steps=100"),
                *("learning_rate=3e-3", "lr_schedule.warmup_iters=10"),
            ),
        ),
    ),
    roles={"ranks": "process.py"},
    messages=frozenset(),
    serves_loops=False,
    is_synchronous=True,
    is_group=True,
)
