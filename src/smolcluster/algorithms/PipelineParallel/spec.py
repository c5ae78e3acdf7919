"""What PipelineParallel says of itself: see `configs/spec.py`."""

from pathlib import Path

from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

SPEC = AlgorithmSpec(
    name="pipeline",
    title="PipelineParallel",
    package=__package__,
    folder=Path(__file__).resolve().parent,
    config=f"{__package__}.config:PipelineConfig",
    commands=(
        LaunchCommand(
            "pipeline",
            "PipelineParallel: the layers of one model spread over unequal machines, which compute "
            "microbatches one behind the other.",
        ),
    ),
    messages=frozenset({"ps", "stages"}),
    serves_loops=False,
    has_whole_model=False,
)
