"""What an algorithm's server works with: everything that is the same for all algorithms.

Built once from a configuration, by `process.py` for real processes and by tests for threads of one process.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.configs.schema import MeshSizes, RunConfig, Settings, config_of
from smolcluster.configs.spec import spec_of
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.server.buffers import most_buffer_frames
from smolcluster.server.evaluator import Evaluator
from smolcluster.server.feed import Feed, HeldOutFeed, NoFeed
from smolcluster.server.hosted_stores import HostedStores
from smolcluster.server.listening import listening_addresses
from smolcluster.server.offering import OFFER, PlannedWorkload
from smolcluster.server.records import Records
from smolcluster.server.report import Report
from smolcluster.server.saver import CheckpointSource, Saver
from smolcluster.server.store_links import StoreLinks
from smolcluster.server.worker_pool import WorkerPool
from smolcluster.training.build import TrainingContext
from smolcluster.training.checkpoint import (
    Checkpoint,
    CheckpointState,
    CheckpointStore,
    check_same,
    restore,
)
from smolcluster.training.replica import Replica
from smolcluster.utils.words import a_few
from smolcluster.wire.acceptor import Acceptor, LetIn, ask_inbox
from smolcluster.wire.frames import MAX_HEADER_NBYTES
from smolcluster.wire.handshake import introduce
from smolcluster.wire.inbox import Inbox
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import (
    PS,
    STORE,
    Hello,
    ServedData,
    Welcome,
    encode,
    sets_of,
)
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Receiver

Links = TypeVar("Links", bound=StoreLinks[Any])
NO_CODEC = "none"
"""Of a run in which nothing travels."""
INDEX_NBYTES = 4
ANSWER_NBYTES = 1024
"""Room in a welcome for what is added for each worker."""
COPIES_QUEUED = 4
EXTRA_QUEUED = 64
"""Small messages that may wait for a worker, besides the tensors of a few transfers of the model."""


@dataclass(frozen=True, kw_only=True)
class PoolContext:
    """A run whose workers this process lets in: the server's, or that of a worker's stages."""

    settings: Settings
    run: RunConfig
    training: TrainingContext
    node: str
    secret: Secret | None
    """What workers prove themselves by; None: there are none."""
    incarnation: str
    """Names this start of the process."""
    log: logging.Logger
    inbox: Inbox = field(default_factory=Inbox)

    @property
    def codec(self) -> str:
        return codec_for(self.run, self.training.replica.params.dtype)

    @property
    def is_served(self) -> bool:
        """Whether workers are sent the samples that they compute."""
        return self.run.train.dataset.source == "server" or self.training.workload.is_stream

    @property
    def served_data(self) -> ServedData | None:
        """What workers must know of samples that are sent to them; None: they have them themselves."""
        workload = self.training.workload
        if not self.is_served:
            return None
        return ServedData(
            name=workload.name,
            fingerprint=workload.fingerprint,
            num_samples=self.training.num_samples,
            sizes=workload.sizes,
        )

    def listen(
        self,
        receiver_for: Callable[[int], Receiver],
        stores: StoreLinks[Any] | None = None,
        num_more: int = 0,
    ) -> Acceptor:
        """Listen from now on; who knocks waits until a pool is asked for events.

        `num_more`: frames that may wait for a worker besides those of weights.

        Raises:
            PortBusy: another process listens there.
            ConfigError: no address to listen on is this machine's, a batch does not fit in a bucket, or the
                settings do not fit in a message.
        """
        _check_batch_fits(self.run.train.samples_per_step, self.training.replica.bucket_bytes)
        if self.secret is None:
            raise RuntimeError("a server needs the cluster's secret")
        cluster, replica = self.settings.cluster, self.training.replica
        workload = self.training.workload
        addresses = listening_addresses(cluster)
        welcome = Welcome(
            run_id=self.run.run_id,
            settings=self.run.model_dump(mode="json"),
            incarnation=self.incarnation,
            model_fingerprint=replica.fingerprint,
            bucket_bytes=replica.bucket_bytes,
            codec=self.codec,
            heartbeat_timeout_s=self.run.heartbeat_timeout_s,
            data=self.served_data,
            plan=workload.plan.text if isinstance(workload, PlannedWorkload) else None,
        )
        _check_fits(welcome)
        admit_worker = ask_inbox(self.inbox, welcome, receiver_for)

        def admit(session_id: int, hello: Hello) -> LetIn | Refused:
            if stores is not None and STORE.name in hello.sets and PS.name not in hello.sets:
                return stores.admit(session_id, hello)
            if OFFER.name in hello.sets:
                return Refused("version", "the run has a model already: join it")
            return admit_worker(session_id, hello)

        sets = sets_of(self.run.algorithm)
        if stores is not None:
            sets = (*sets, STORE)
        node = Node(
            hello=introduce(self.node),
            secret=self.secret,
            log=self.log,
            encryption=cluster.encryption,
        )
        acceptor = node.listen(
            addresses,
            cluster.port,
            sets=sets,
            inbox=self.inbox,
            admit=admit,
            max_queued=_num_queued(replica) + EXTRA_QUEUED + num_more,
        )
        self.log.info("listening on %s, port %d", ", ".join(addresses), cluster.port)
        if cluster.encryption == "off":
            self.log.warning(
                "encryption is off: whoever reaches the network between can change what is said"
            )
        return acceptor


@dataclass(frozen=True, kw_only=True)
class ServerContext(PoolContext):
    """A run, on the server's side."""

    records: Records
    store: CheckpointStore | None = None
    """Where checkpoints are saved; None: nowhere."""
    checkpoint: Checkpoint | None = None
    """What the run goes on from; None: it begins."""
    initial: Path | None = None
    """A checkpoint's folder with the first weights, where the server has none; None: the seed makes them."""
    check_stop: Callable[[], None] = lambda: None
    """Raises Interrupted when a signal has asked this process to stop."""
    worker_command: str | None = None
    """Starts a worker, for a person who has to; None: workers are started by others."""

    @property
    def is_attached(self) -> bool:
        """Whether the workers are loops of a user's own."""
        return isinstance(self.training.workload, PlannedWorkload)

    @property
    def counts_samples(self) -> bool:
        """Whether workers draw their samples themselves, so that a lease says only how many there were."""
        workload = self.training.workload
        return isinstance(workload, PlannedWorkload) and workload.plan.is_counted

    def open_feed(self) -> Feed | NoFeed:
        """Where the samples that are handed out come from; close it."""
        if not self.is_served:
            return NoFeed()
        train, num_workers = self.run.train, self.settings.cluster.num_workers
        return Feed(
            self.training,
            self.inbox,
            self.log,
            num_ahead=2 * max(train.samples_per_step, num_workers * train.samples_per_push),
            num_epochs=train.num_epochs,
        )

    def open_held_out_feed(self, batch_size: int) -> HeldOutFeed | None:
        """Where samples that are evaluated come from, so many at once; None: workers have them, or nobody."""
        if not self.is_served or self.training.workload.validation is None:
            return None
        return HeldOutFeed(self.training, self.inbox, self.log, batch_size)

    def hosted_stores(self, *, mixes: bool = False) -> HostedStores:
        """The stores of the server's weights, in this process and on other hosts; `mixes`: see there.

        Raises:
            ConfigError: there are several hosts, and this run needs all weights in one place.
        """
        self.settings.cluster.check_average(self.training.replica.ema_decay)
        return self.store_links(partial(HostedStores, mixes=mixes))

    def store_links(self, make: Callable[..., Links]) -> Links:
        """The links to the stores on other hosts that `servers` names, if there are any.

        Raises:
            ConfigError: there are, and this run needs them in one place.
        """
        cluster = self.settings.cluster
        if len(cluster.store_nodes) > 1 and self.is_attached:
            raise ConfigError(
                "servers lists several, but loops of one's own push to one server only"
            )
        return make(
            self.training.replica,
            cluster.store_nodes,
            run=self.run,
            codec=self.codec,
            incarnation=self.incarnation,
            cluster=cluster,
            log=self.log,
            shares=cluster.store_shares,
        )

    def new_evaluator(self, report: Report) -> Evaluator:
        return Evaluator(
            self.training,
            self.inbox,
            report.evaluated,
            every=self.run.train.eval_steps,
            log=self.log,
            check_stop=self.check_stop,
        )

    def new_saver(
        self,
        source: CheckpointSource,
        report: Report,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Saver:
        """`on_progress` is called as the last checkpoint gets on, which the run waits for."""
        if unsaved := self.training.replica.buffers.unsaved:
            self.log.warning("sparse, and in no checkpoint: buffers %s", a_few(unsaved))
        every = self.settings.cluster.checkpoint_steps
        return Saver(self.store, every, source, report, self.log, on_progress=on_progress)

    def new_report(
        self,
        codec: str = NO_CODEC,
        bytes_moved: Callable[[], tuple[int, int]] = lambda: (0, 0),
        check_stop: Callable[[], None] | None = None,
        mesh: MeshSizes | None = None,
    ) -> Report:
        """What tells the world how the run goes on.

        Args:
            bytes_moved: counts bytes sent and received.
            check_stop: is called before each batch of the last evaluation, and each hook; None: `self`'s.
            mesh: of which this process is rank 0.
        """
        return Report(
            run=self.run,
            node=self.node,
            num_workers=self.settings.cluster.num_workers,
            codec=codec,
            training=self.training,
            records=self.records,
            log=self.log,
            bytes_moved=bytes_moved,
            check_stop=check_stop or self.check_stop,
            mesh=mesh,
        )

    def resume(self, source: CheckpointSource, report: Report) -> CheckpointState | None:
        """Fill the server with the checkpoint that it goes on from, and say where that stood.

        The checkpoint's own memory is given back.

        Raises:
            CheckpointError: its tensors are not the server's.
        """
        if self.checkpoint is None:
            return None
        state = self.checkpoint.state
        restore(source.replica, self.checkpoint, source.extra())
        self.checkpoint.release()
        report.resume(state)
        return state

    def open_pool(
        self,
        receiver_for: Callable[[int], Receiver],
        stores: StoreLinks[Any] | None = None,
        num_more: int = 0,
        check_stop: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> WorkerPool[Report]:
        """Listen from now on; workers are let in as soon as the pool is asked for events, and so are stores.

        `stores`, `num_more`: see `listen`. `check_stop`: raises when this process shall stop, whatever goes
        on; None: the context's. `clock`: how long workers are waited for goes by it, seconds.

        Raises:
            PortBusy, ConfigError: see `listen`.
            CheckpointError: what is to go on did not begin like this, see `check_resumable`.
        """
        if self.checkpoint is not None:
            check_resumable(self.checkpoint.state, self.run, self.training)
        acceptor = self.listen(receiver_for, stores, num_more)
        report = self.new_report(self.codec, acceptor.bytes_moved)
        acceptor.trouble = lambda: report.trouble
        return WorkerPool(
            cluster=self.settings.cluster,
            inbox=self.inbox,
            acceptor=acceptor,
            training=self.training,
            listener=report,
            log=self.log,
            check_stop=check_stop or self.check_stop,
            worker_command=self.worker_command,
            clock=clock,
            sends_results=self.is_attached,
        )


def _num_queued(replica: Replica) -> int:
    """How many frames may wait for a worker: some copies of the whole state, with the model's buffers."""
    num_frames = len(replica.buckets) + most_buffer_frames(replica.buffers, replica.bucket_bytes)
    return COPIES_QUEUED * (1 + len(replica.optimizer.moments)) * num_frames


def check_resumable(state: CheckpointState, run: RunConfig, training: TrainingContext) -> None:
    """See to it that a run goes on with what it began with.

    Raises:
        CheckpointError: another algorithm, seed, dataset or model, or fewer epochs or steps than it has done.
    """
    check_same(
        state,
        model_fingerprint=training.replica.fingerprint,
        dataset_fingerprint=training.workload.fingerprint,
        algorithm=run.algorithm,
        seed=run.seed,
    )
    total = run.train.total_samples(training.num_samples)
    if state.samples_applied > total:
        key = "num_epochs" if run.train.num_steps is None else "num_steps"
        raise CheckpointError(
            f"step {state.step} of run {state.run_id} has applied {state.samples_applied:,} samples, "
            f"{key} = {getattr(run.train, key)} has {total:,}: raise {key}"
        )


def codec_for(run: RunConfig, dtype: torch.dtype) -> str:
    """The codec of what workers send of a model whose parameters have this type.

    Raises:
        ConfigError: the codec that is asked for cannot hold them.
    """
    own = run.of(config_of(spec_of(run.algorithm)))
    name = own.uplink_codec or run.codec or lossless_for(dtype)
    check_codec("codec", name, dtype)
    return name


def check_codec(key: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a codec that cannot hold a model's parameters.

    Raises:
        ConfigError: one line with the key, its value and what to change.
    """
    own = get_codec(name).dtype
    if own != dtype:
        raise ConfigError(
            f"{key} {name} works on {str(own).removeprefix('torch.')}, the model's parameters are {dtype}: "
            f"leave {key} out, or train the model in float32"
        )


def _check_fits(welcome: Welcome) -> None:
    nbytes, most = len(encode(welcome)), MAX_HEADER_NBYTES - ANSWER_NBYTES
    if nbytes > most:
        raise ConfigError(
            f"the settings that every worker is told take {nbytes} bytes, must be at most {most}: give "
            "workload_args less, such as the name of a file with the rest"
        )


def _check_batch_fits(batch_size: int, bucket_bytes: int) -> None:
    most = bucket_bytes // INDEX_NBYTES
    if batch_size > most:
        raise ConfigError(
            f"a batch of {batch_size} samples is too large, must be at most {most}, whose indices fit in a "
            "bucket; lower batch_size or global_batch_size"
        )
