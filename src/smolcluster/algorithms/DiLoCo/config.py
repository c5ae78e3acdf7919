"""What DiLoCo alone understands of a configuration."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from smolcluster.configs.schema import AlgorithmConfig, CodecName, Wait

ChangeCodecName = Literal[CodecName, "topk"]
"""What a worker has gathered over many steps may be sent sparsely, too."""


class DiLoCoConfig(AlgorithmConfig):
    """DiLoCo's own keys, all of the cluster file."""

    local_steps: PositiveInt | None = Field(
        None,
        description="DiLoCo: mean number of batches that a worker computes between two exchanges; null: by "
        "measured times, and at first fewer.",
    )
    outer_lr: PositiveFloat | None = Field(
        None, description="DiLoCo: learning rate of the outer step; null: by the number of rounds."
    )
    outer_momentum: NonNegativeFloat | None = Field(
        None,
        lt=1,
        description="DiLoCo: Nesterov momentum of the outer step; null: by the number of rounds.",
    )
    codec_up: ChangeCodecName | None = Field(
        None, description="DiLoCo: how workers send what they have changed; null: as codec says."
    )
    codec_down: CodecName | None = Field(
        None, description="DiLoCo: how outer steps are sent to workers; null: as they are."
    )
    grace: Wait | None = Field(
        None,
        description="DiLoCo: seconds that a round waits for a worker beyond what was expected of it; null: "
        "by measured times.",
    )

    @model_validator(mode="after")
    def _sparse_changes_go_without_momentum(self) -> Self:
        """What is left out and comes later is momentum already (SparseLoCo, 2508.15706)."""
        if self.codec_up == "topk" and self.outer_momentum:
            raise ValueError(
                f"outer_momentum is {self.outer_momentum:g} with codec_up topk, which has momentum of "
                "its own; set outer_momentum to 0 or null"
            )
        return self

    @property
    def uplink_codec(self) -> str | None:
        return self.codec_up
