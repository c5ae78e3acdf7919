"""What a DiLoCo server begins with: outer optimizer, stores, and a checkpoint's rounds."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from smolcluster.algorithms.context import ServerContext, check_codec
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.algorithms.DiLoCo.exchange import Layout
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.ledger import Ledger
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer, outer_defaults
from smolcluster.algorithms.DiLoCo.outer_links import OuterLinks
from smolcluster.algorithms.DiLoCo.rounds import SyncBeginning
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.training.muon import MuonOptimizer
from smolcluster.training.optimizer import CLASSES
from smolcluster.wire.messages import MAX_CHANGES


def why_none(num_hosts: int, optimizer: str | None) -> str:
    """Why a run with this optimizer has no synchronous beginning on so many hosts; empty: it may have one."""
    if num_hosts > 1 and optimizer not in CLASSES:
        return f"the weights lie on several hosts, and {optimizer} steps them in one place only"
    return ""


CHANGES_PER_DELAY = 2
"""Of each worker, after which momentum acts where workers do not wait for each other."""


class RoundsState(BaseModel):
    """Where a run stands between two rounds, for a checkpoint."""

    model_config = ConfigDict(extra="forbid")

    version: NonNegativeInt
    """Outer steps."""
    num_fragments: PositiveInt
    outer_lr: PositiveFloat
    outer_momentum: NonNegativeFloat
    partly_applied: list[tuple[int, int, int, list[int]]]
    """Samples that have been applied in some fragments: epoch, start, stop, and these fragments."""
    momentum_order: Literal["fragments", "weights"] = "fragments"
    """How momentum is laid; earlier versions, which do not say it, have laid it fragment by fragment."""
    local_steps: PositiveInt | None = None
    """H; earlier versions do not say it."""
    sync_steps: NonNegativeInt | None = None
    """Steps of the synchronous beginning, in which the run still is; null: it is over."""
    sync_waited_s: NonNegativeFloat = 0.0

    @classmethod
    def of(
        cls,
        stores: OuterLinks,
        outer: OuterOptimizer,
        ledger: Ledger,
        local_steps: int,
        beginning: SyncBeginning,
    ) -> Self:
        return cls(
            version=stores.version,
            num_fragments=len(stores.versions),
            outer_lr=outer.learning_rate,
            outer_momentum=outer.momentum,
            partly_applied=ledger.partly_applied,
            momentum_order="weights",
            local_steps=local_steps,
            sync_steps=None if beginning.is_over else beginning.num_steps,
            sync_waited_s=beginning.waited_s,
        )

    def check(self, num_fragments: int) -> None:
        """Refuse to go on with another number of fragments, or with momentum that is laid otherwise.

        Raises:
            CheckpointError: one line with what differs and what to do.
        """
        if self.num_fragments != num_fragments:
            raise CheckpointError(
                f"the run has {self.num_fragments} fragments, {num_fragments} are asked for now: "
                "resume with its own mode and fragments"
            )
        if num_fragments > 1 and self.momentum_order != "weights":
            raise CheckpointError(
                "an earlier version of smolcluster has saved this streaming run, with its momentum in "
                "another order: resume with that version, or begin a new run"
            )


def warn_of_long_rounds(context: ServerContext, epoch_batches: int) -> None:
    """Say that a round has more batches than an epoch, if it has."""
    local_steps = context.run.of(DiLoCoConfig).local_steps
    if local_steps is None:
        return
    round_batches = local_steps * context.settings.cluster.num_workers
    if round_batches > epoch_batches:
        context.log.warning(
            "local_steps is %d: a round has %d batches, an epoch %d; lower it, or set it to null",
            *(local_steps, round_batches, epoch_batches),
        )


def new_beginning(context: ServerContext, total_batches: int) -> SyncBeginning:
    """The synchronous beginning, which ends before its first step where there is to be none."""
    config, cluster = context.run.of(DiLoCoConfig), context.settings.cluster
    total = context.settings.train.total_samples(context.training.num_samples)
    beginning = SyncBeginning(round(config.sync_fraction * total), total_batches)
    optimizer = context.training.replica.optimizer.name
    beginning.end(why_none(len(cluster.store_nodes), optimizer))
    return beginning


def new_outer(context: ServerContext, total_batches: int) -> OuterOptimizer:
    """The outer optimizer; γ and β, where nothing is said, are those that suit the inner optimizer."""
    num_workers, config = context.settings.cluster.num_workers, context.run.of(DiLoCoConfig)
    replica = context.training.replica
    num_rounds = total_batches // num_workers // (config.local_steps or 1)
    is_sparse = config.codec_up == "topk"
    has_muon = isinstance(replica.optimizer, MuonOptimizer)
    is_async = config.mode == "async"
    defaults = outer_defaults(num_rounds, has_muon=has_muon, is_async=is_async)
    rate, momentum = (1.0, 0.0) if is_sparse else defaults
    make: Callable[..., OuterOptimizer] = OuterOptimizer
    if is_async:
        make = partial(DelayedNesterov, momentum_delay=CHANGES_PER_DELAY * num_workers)
    return make(
        replica.num_params,
        rate if config.outer_lr is None else config.outer_lr,
        momentum if config.outer_momentum is None else config.outer_momentum,
        device=replica.device,
        dtype=replica.params.dtype,
    )


def new_stores(context: ServerContext, outer: OuterOptimizer, num_fragments: int) -> OuterLinks:
    """Where the weights lie: here, and on the other hosts of `servers`.

    Raises:
        ConfigError: there are several, and this run needs all weights in one place, or has more workers
            than stores can be told of; or `codec_down` cannot hold the weights.
    """
    cluster, replica = context.settings.cluster, context.training.replica
    cluster.check_average(replica.ema_decay)
    if len(cluster.store_nodes) > 1 and cluster.num_workers > MAX_CHANGES:
        raise ConfigError(
            f"servers lists several, but num_workers is {cluster.num_workers}, more than the "
            f"{MAX_CHANGES} whose changes stores add up; set servers to null"
        )
    layout = Layout.of(replica, cut(replica.layers, num_fragments))
    codec_down = context.run.of(DiLoCoConfig).codec_down
    if codec_down is not None:
        check_codec("codec_down", codec_down, replica.params.dtype)
    return context.store_links(
        partial(OuterLinks, outer=outer, layout=layout, codec_down=codec_down)
    )
