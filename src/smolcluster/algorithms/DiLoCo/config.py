"""What DiLoCo alone understands of a configuration."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from smolcluster.algorithms.DiLoCo.fragments import cut, filled, too_many_fragments
from smolcluster.configs.schema import AlgorithmConfig, CodecName, Settings, Wait
from smolcluster.errors import ConfigError

DEFAULT_FRAGMENTS, MAX_FRAGMENTS = 4, 4096

Mode = Literal["sync", "streaming", "async"]

ChangeCodecName = Literal[CodecName, "topk"]
"""What a worker has gathered over many steps may be sent sparsely, too."""


def gradient_codec(codec_up: str) -> str:
    """How gradients of a synchronous beginning are sent, where changes over many steps are sent so."""
    return "int4" if codec_up == "topk" else codec_up  # of a gradient topk leaves out too much


class DiLoCoConfig(AlgorithmConfig):
    """DiLoCo's own keys, all of the cluster file."""

    old_keys: ClassVar[frozenset[str]] = frozenset({"momentum_delay"})

    mode: Mode = Field(
        "streaming",
        description="DiLoCo: all exchange the whole at the end of a round, or a fragment at a time behind "
        "computation (2501.18512), or each worker the whole when it is ready (2401.09135).",
    )
    fragments: PositiveInt | None = Field(
        None, description="DiLoCo: parts that streaming exchanges one by one; null: 4."
    )
    local_steps: PositiveInt | None = Field(
        None,
        description="DiLoCo: mean number of batches that a worker computes between two exchanges; null: by "
        "measured times, and at first fewer.",
    )
    sync_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="DiLoCo: share of the run's samples with which it begins synchronously, exchanging "
        "gradients; hardly any where that is too slow. 0: rounds from the first sample on.",
    )
    outer_lr: PositiveFloat | None = Field(
        None,
        description="DiLoCo: learning rate of the outer step; null: 0.7, asynchronous 0.9, or 1 in a run of "
        "one round.",
    )
    outer_momentum: NonNegativeFloat | None = Field(
        None,
        lt=1,
        description="DiLoCo: Nesterov momentum of the outer step; null: 0.5, or 0.6 with muon, or 0 in a "
        "run of one round.",
    )
    codec_up: ChangeCodecName | None = Field(
        None, description="DiLoCo: how workers send what they have changed; null: as codec says."
    )
    codec_down: CodecName | None = Field(
        None, description="DiLoCo: how outer steps are sent to workers; null: as they are."
    )
    grace: Wait | None = Field(
        None,
        description="DiLoCo: seconds that a worker's step or change may take beyond what is expected; null: "
        "four times that, at least 30.",
    )

    def num_fragments(self, num_tensors: int) -> int:
        """Into how many fragments a model of so many trainable tensors, which have values, is cut."""
        if self.mode != "streaming":
            return 1
        return self.fragments or min(DEFAULT_FRAGMENTS, num_tensors)

    def check(self, settings: Settings) -> None:
        """Refuse keys that mean nothing to `mode`, and momentum beside that of `codec_up: topk`.

        What topk leaves out and sends later is momentum already (SparseLoCo, 2508.15706).

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        settings.cluster.check_average(settings.train.ema_decay)
        if self.codec_up == "topk" and self.outer_momentum:
            raise ConfigError(
                f"outer_momentum is {self.outer_momentum:g}, but codec_up is topk, which has momentum of its "
                "own; set outer_momentum to 0 or null, or codec_up to int4"
            )
        if self.fragments is None:
            return
        if self.mode != "streaming" and self.fragments > 1:
            raise ConfigError(
                f"fragments is {self.fragments}, but mode is {self.mode}, which exchanges the whole; set "
                "mode to streaming, or fragments to null"
            )
        if self.fragments > MAX_FRAGMENTS:
            raise ConfigError(f"fragments is {self.fragments}, must be at most {MAX_FRAGMENTS}")

    def check_model(self, num_tensors: int) -> None:
        """Refuse to cut a model of so many trainable tensors, which stay whole, into more fragments.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        if (num_fragments := self.num_fragments(num_tensors)) > num_tensors:
            raise too_many_fragments(num_fragments, num_tensors)

    def check_pieces(self, layers: Sequence[tuple[str, slice]], most: int) -> None:
        """Refuse to exchange these tensors, each with its place in flat weights, in more pieces than so many.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        num_fragments = self.num_fragments(len(filled(layers)))
        num_pieces = sum(len(each.places) for each in cut(layers, num_fragments))
        if num_pieces > most:
            raise ConfigError(
                f"the model's tensors are in {num_pieces} pieces in {num_fragments} fragments, but stages of "
                f"one worker take at most {most}: lower fragments, or set mode to sync"
            )

    @property
    def uplink_codec(self) -> str | None:
        return self.codec_up
