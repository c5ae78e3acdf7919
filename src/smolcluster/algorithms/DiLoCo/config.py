"""What DiLoCo alone understands of a configuration."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from smolcluster.configs.schema import AlgorithmConfig, CodecName, Wait


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
    codec_up: CodecName | None = Field(
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

    @property
    def uplink_codec(self) -> str | None:
        return self.codec_up
