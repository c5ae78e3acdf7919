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
            "layers.\n\nThe training file is stdlib, a small GPT that needs no download, with 8 layers and "
            "128 samples a step.",
            train_config="stdlib",
            train_overrides=("model.num_layers=8", "batch_size=128", "eval_steps=100"),
        ),
    ),
    roles={"ranks": "process.py"},
    messages=frozenset(),
    serves_loops=False,
    is_synchronous=True,
    is_group=True,
)
