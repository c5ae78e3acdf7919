"""A training loop of one's own in a cluster: `with smolcluster.attach(model, optimizer, "cluster.yaml"):`.

Inside the block `optimizer.step()` is a step of the cluster. The algorithm's worker, the same as in any other
process, runs in a greenlet of the loop's own thread, so that nothing touches the model beside the loop:

    loop:    next batch        forward, backward, optimizer.step()           next batch
    worker:  waits in compute ────────────────────────────────────> pushes, hears of steps, waits in compute

EDP: the optimizer steps, and what the loop has changed of the weights since the step before is pushed. The
server applies it as a gradient with a learning rate of 1, weighed by its staleness, or with
`update_rule: mixing` averages the weights in; so any optimizer and schedule will do.
SyncPS: the gradients are pushed, and server and workers alike take the optimizer's step with their mean. The
server has an optimizer of the same kind, so it takes adam, adamw and sgd, without amsgrad; the
learning rate is the one that the loop's schedule has come to.
DiLoCo: the optimizer steps this process's own copy of the weights, and the worker sends what that has changed
by when the server asks for it, which is between two steps. In a synchronous beginning the optimizer's steps
move its state alone, the gradients are pushed, and the server steps as in SyncPS, where it can.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import GreenletExit, greenlet
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import Sampler

from smolcluster.algorithms.observed import WorkerRun, metrics_served
from smolcluster.algorithms.serving import ATTACHED
from smolcluster.api.attached_optimizer import (
    LoopOptimizer,
    check_optimizer,
    innermost,
    stepping,
    unscale,
)
from smolcluster.api.attached_process import Told, own_name, told_by_launcher
from smolcluster.api.loop_watch import LoopWatch
from smolcluster.api.synchronous_optimizer import check_rule, describe_optimizer
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import RunConfig, Settings, TrainConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.data.dataset import Place
from smolcluster.data.marks import Mark, chosen, marks_of
from smolcluster.errors import ConfigError, NonFiniteLoss, Rejected
from smolcluster.observability.logs import NodeLog
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import runs_root
from smolcluster.server.link import Participant, WorkerSetup, follow
from smolcluster.server.offering import (
    NO_MODEL,
    Offer,
    Plan,
    PlannedWorkload,
    make_offer,
    values_of,
)
from smolcluster.training.buffers import plain_name
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss, lone_sample
from smolcluster.training.optimizer import STEP_COUNT, LocalOptimizer
from smolcluster.training.recipe import Training
from smolcluster.training.replica import DIVERGENCE_REMEDY, Replica
from smolcluster.training.scaler import LEAST_SCALE
from smolcluster.utils.device import use_threads
from smolcluster.utils.meter import Meter
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Logged, Welcome
from smolcluster.wire.security import Secret, cluster_secret


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cluster: str | Path = "cluster.yaml",
    *,
    name: str | None = None,
    num_samples: int | None = None,
    batch_size: int | None = None,
    num_epochs: int | None = None,
    secret: Secret | None = None,
    overrides: tuple[str, ...] = (),
) -> "Cluster":
    """Make a training loop a worker of the server that `smolcluster serve` runs, for a `with` block.

    Args:
        model: what is trained, on the device where it is computed.
        optimizer: the one whose `step` is a step of the cluster.
        cluster: the cluster file, a path or a shipped name.
        name: this process's, a key of `host_ip`; None: --name of the command line, SMOLCLUSTER_NAME, or the
            host's name. What `smolcluster launch` calls a process stands above all of these.
        num_samples: samples of an epoch, where the loop draws them itself and the run counts how many; None:
            they come from `Cluster.sampler`.
        batch_size: samples of a step, `num_epochs`: passes; None: as the server is configured. Those of the
            process that comes first hold.
        secret: the cluster's; None: that of the configuration.
        overrides: `key=value`, what belongs to this machine.

    Raises:
        ConfigError: the optimizer is attached already, or a file or name is wrong.
    """
    told, own = told_by_launcher(), own_name(name)
    settings = load_settings(
        told.config or cluster,
        ATTACHED,
        own,
        [*told.overrides, *overrides],
        local=told.is_local,
        local_workers=told.num_workers,
    )
    if settings.node.spread is not None:
        key, value = settings.node.spread
        raise ConfigError(
            f"nodes.{own}.{key} is {value}, but a loop that attaches is one process: set it to null"
        )
    wanted = _Wanted(num_samples, num_samples is not None, batch_size, num_epochs)
    return Cluster(model, optimizer, settings, name=own, told=told, wanted=wanted, secret=secret)


@dataclass(frozen=True)
class _Wanted:
    """How long is trained, as far as a loop has said it."""

    num_samples: int | None
    is_counted: bool
    batch_size: int | None
    num_epochs: int | None
    samples: tuple[Mark, ...] = ()
    """What some samples are known by."""


@dataclass(eq=False)
class _Lease:
    """Samples that the worker waits for."""

    indices: Tensor
    num_undrawn: int


class Cluster:
    """A loop's place in a run; made by `attach`.

    Attributes:
        running: whether the run goes on. After its end `optimizer.step()` changes nothing any more.
        run_id: the run's name; empty before it is known.
        rank: this process's, from 0; those of a run differ.
        epoch: from 0, of the samples of now.
        progress: from 0 to 1, how far the run has come with the samples of now, whoever had those before. A
            schedule that follows it is right in a process that comes late, and in a run that was resumed.
        loss: the mean loss of the batch, a number or tensor, to be told before each `optimizer.step()`; None:
            not told, and shown nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        *,
        name: str,
        told: Told,
        wanted: "_Wanted",
        secret: Secret | None,
    ) -> None:
        self._model = model
        self._optimizer = innermost(optimizer)
        self._settings, self._name, self._told, self._wanted = settings, name, told, wanted
        self._secret = secret
        self.running = False
        self.run_id = ""
        self.rank = (told.worker_id or 1) - 1
        self.epoch = 0
        self.progress = 0.0
        self.loss: Tensor | float | None = None
        self._num_terms: float | None = None
        self._overflow: float | None = None
        """The loss scale with which a gradient of this step has overflowed; 1: it is not known."""
        self._lease: _Lease | None = None
        self._participant: Participant | None = None
        self._training: AttachedContext | None = None
        self._places: list[tuple[nn.Parameter, slice]] = []
        """Of each trained parameter, where it is in the replica's flat tensors."""
        self._sampler: LeaseSampler | None = None
        self._has_said_end = self._has_said_dropped = False
        self._before: Tensor | None = None
        """EDP: the weights that the loop was lent, (num_params,)."""
        self._watch: LoopWatch | None = None
        self._meter = Meter()
        self._exit = ExitStack()
        self._log: logging.Logger = logging.getLogger("smolcluster")

    def __enter__(self) -> Self:
        """Join the run, or offer the server this model.

        Raises:
            ConnectTimeout: there is no server.
            ConfigError: the optimizer is attached already, or the model differs from the run's.
            Rejected, AuthError: the server refuses this process.
        """
        check_optimizer(self._model, self._optimizer)
        use_threads(self._settings.num_threads())
        with ExitStack() as exits:
            self._node_log = NodeLog(
                "worker",
                self._name,
                self.rank if self._told.worker_id else None,
                named=self._told.is_named,
            )
            exits.callback(self._node_log.close)
            self._log = self._node_log.logger
            labels = Process(node=self._name, role="worker", rank=self.rank)
            exits.enter_context(
                metrics_served(
                    self._settings, labels, self._meter, self._log, run_id=lambda: self.run_id
                )
            )
            self._original_step = exits.enter_context(stepping(self._optimizer, self._step))
            self.running = True
            self._greenlet = greenlet(self._live)
            exits.callback(self._leave)
            self._switch()
            self._exit = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the run; what others have not been given goes back to them."""
        self._exit.__exit__(kind, error, trace)

    # What the loop calls.

    def sampler(self, dataset: Sized, batch_size: int | None = None) -> "LeaseSampler":
        """A `batch_sampler` for a `DataLoader` of `dataset`: its batches are what this process is to compute.

        Every sample of every epoch counts exactly once in the run, whoever computes it; the loop ends when
        the run does. With `batch_size` a batch has at most so many samples, and `optimizer.step()` follows on
        as many batches as make up what the run wants at a time (`is_step_due`). The loader must not read
        ahead: num_workers=0.

        Raises:
            ConfigError: `attach` was given `num_samples`, or the dataset is not as long as the run's.
        """
        if self._wanted.is_counted:
            raise ConfigError(
                "attach was given num_samples, so the loop draws its samples itself; leave num_samples out "
                "to have cluster.sampler hand them out"
            )
        if not len(dataset):
            raise ConfigError("cluster.sampler: the dataset has 0 samples, must have at least 1")
        known = self._wanted.num_samples
        if known is not None and known != len(dataset):
            raise ConfigError(
                f"cluster.sampler: the dataset has {len(dataset)} samples, the run {known}; give it the same"
            )
        self._sampler = LeaseSampler(self, batch_size)
        if known is None:
            marks = marks_of(dataset, chosen(len(dataset)))
            self._wanted = replace(self._wanted, num_samples=len(dataset), samples=marks)
            self._log.info("samples are handed out by the server: each counts exactly once")
            self._switch()
        return self._sampler

    @property
    def is_step_due(self) -> bool:
        """Whether all samples that the run wants at a time have been drawn from `sampler`."""
        return self._lease is not None and self._lease.num_undrawn == 0

    def log(
        self, loss: Tensor | float | None = None, *, num_terms: float | None = None, **values: float
    ) -> None:
        """Tell the mean loss of the batch, over `num_terms` terms, or other values by name.

        With `val_loss` among them they are an evaluation of the run: best checkpoint and patience follow it.
        Of several processes that evaluate it is the first one's. What is told after the run is not kept.
        Each record has the run's own `step` and `epoch`, and the process's `rank` and `node`; values under
        these names, or under `ts`, `kind` or `incarnation`, are left out.

        Raises:
            ConfigError: a value is NaN or infinite, a name has spaces, or there are more than 64.
        """
        if loss is not None:
            self.loss, self._num_terms = loss, num_terms
        if not values:
            return
        message = _logged({name: float(value) for name, value in values.items()})
        link = getattr(self._participant, "link", None)
        if self.running and link is not None:
            link.send(message)
        elif not self._has_said_dropped:
            self._has_said_dropped = True
            when = (
                "before the first optimizer.step()" if self.running else "after the end of the run"
            )
            self._log.warning(
                "cluster.log: %s is not kept, because it came %s", ", ".join(values), when
            )

    # What takes the place of `optimizer.step`.

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """One step of the cluster, with the gradients of now.

        Raises:
            ConfigError: nobody has said what the run's samples are, or a gradient is sparse.
            RunFailed, PeerLost, ConnectTimeout: the run is over, or cannot be reached any more.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if self.loss is None and isinstance(result, (Tensor, float)):
                self.loss = result
        setattr(self._optimizer, "_opt_called", True)  # noqa: B010 - schedulers ask it
        if self.running:
            self._check_step()
            self._overflow = unscale(self._optimizer)
            self._switch()
        elif not self._has_said_end:
            self._has_said_end = True
            self._log.info("the run is over: optimizer.step() changes nothing any more")
        self.loss = self._num_terms = None
        return result

    def _check_step(self) -> None:
        if self._lease is None:
            raise ConfigError(
                "attach does not know the run's samples: draw them from cluster.sampler(dataset), or give "
                "attach num_samples, the length of an epoch"
            )
        if self._sampler is not None and self._lease.num_undrawn:
            raise ConfigError(
                f"optimizer.step() came when {self._lease.num_undrawn} of {len(self._lease.indices)} samples "
                "that the run wants at a time had not been drawn; call it when cluster.is_step_due"
            )
        if self._watch is not None:
            self._watch.end()

    def _switch(self) -> None:
        """Let the worker go on until it waits for the loop, or the run is over."""
        self._greenlet.parent = greenlet.getcurrent()
        self._lease = None
        try:
            self._greenlet.switch()
        finally:
            self.running = not self._greenlet.dead

    # The worker's life, in a greenlet of its own.

    def _live(self) -> None:
        """Take part in the run until it is over; raises what `follow` does."""
        cluster = self._settings.cluster
        secret = self._secret or cluster_secret(
            self._settings.node.secret_file, makes=self._told.is_local
        )
        server = None if self._told.config else cluster.server  # a launcher tells only where it is
        address = Address(cluster.host_ip[cluster.node_of(self._name)], cluster.port, server)
        place = WorkerSetup(
            node=self._settings.node,
            hello=introduce(self._name),
            address=address,
            secret=secret,
            start_timeout_s=cluster.start_timeout_s,
            encryption=cluster.encryption,
            log=self._log,
            meter=self._meter,
            build=self._build,
        )
        worker_id = self._told.worker_id
        while True:
            try:
                if worker_id is None:
                    worker_id = place.ask().worker_id or 1
                self._follow(worker_id, place)
            except Rejected as error:
                if error.code != NO_MODEL:
                    raise
                self._offer(place)
            else:
                return

    def _follow(self, worker_id: int, place: WorkerSetup) -> None:
        rank = worker_id - 1
        root = runs_root(self._settings.node.runs_dir)

        def begin(run: RunConfig) -> None:
            self.run_id, self.rank = run.run_id, rank
            own.begin(run)

        with closing(WorkerRun(self._name, rank, self._node_log, root)) as own:
            place = replace(
                place,
                hello=introduce(self._name, worker_id),
                own_folder=own.own_folder,
                on_run_known=begin,
                on_stats=own.take,
            )
            follow(place, self._make_participant)

    def _make_participant(self, welcome: Welcome, training: TrainingContext) -> Participant:
        make = get_algorithm(welcome.run.algorithm).module("worker").Worker
        participant: Participant = make(welcome, training)
        self._participant = participant
        return participant

    def _pause(self) -> None:
        parent = self._greenlet.parent
        assert parent is not None  # noqa: S101 - set by `_switch`
        parent.switch()

    def _plan(self) -> Plan:
        """What this process would train; waits for the loop to say how many samples there are."""
        while (num_samples := self._wanted.num_samples) is None:
            self._pause()
        wanted = self._wanted
        return Plan.of(
            self._model, num_samples, is_counted=wanted.is_counted, samples=wanted.samples
        )

    def _offer(self, place: WorkerSetup) -> None:
        plan, wanted = self._plan(), self._wanted
        try:
            rule = describe_optimizer(self._model, self._optimizer)
        except ConfigError as error:  # only SyncPS minds
            rule = {"obstacle": str(error)}
        make_offer(
            place,
            Offer(
                plan=plan.text,
                batch_size=wanted.batch_size,
                num_epochs=wanted.num_epochs,
                **rule,
            ),
            values_of(self._model, plan),
        )

    def _build(self, welcome: Welcome) -> "AttachedContext":
        """Lay the model out as the run has it.

        Raises:
            ConfigError: this is no run of attached processes, or its model is another one.
            Rejected: its samples are others.
        """
        if welcome.plan is None:
            raise ConfigError(
                f"run {welcome.run_id} trains a model of its own: attach to a server that was started by "
                "`smolcluster serve`"
            )
        plan, theirs = self._plan(), Plan.parse(welcome.plan)
        if difference := plan.difference(theirs):
            raise ConfigError(f"{difference}; give all processes of a run the same model and data")
        if difference := plan.sample_difference(theirs):
            raise Rejected(difference, "dataset")
        run = welcome.run
        spec = get_algorithm(run.algorithm)
        differs = self._difference_of_optimizers(run)
        if spec.is_synchronous and differs:
            raise differs
        self._detach()
        replica = Replica(
            self._model,
            Training().optimizer_for(run.train) if spec.is_synchronous else "sgd",
            weight_decay=run.train.weight_decay,
            device=next(self._model.parameters()).device,
            bucket_bytes=welcome.bucket_bytes,
            meter=self._meter,
            keeps_modes=True,
        )
        named = {plain_name(name): param for name, param in self._model.named_parameters()}
        self._places = [(named[plain_name(name)], place) for name, place in replica.layers]
        for parameter, _ in self._places:
            parameter.grad = None  # `grads` is what is pushed
        trained = [
            (name, parameter)
            for (name, _), (parameter, _) in zip(replica.layers, self._places, strict=True)
        ]
        self._watch = LoopWatch(
            self._model, self._optimizer, trained, is_synchronous=spec.is_synchronous
        )
        replica.fingerprint = welcome.model_fingerprint  # the plans have been compared
        workload = PlannedWorkload(plan, lambda: self._model)
        own_optimizer = None
        take: Callable[[Replica], float | None] = self._difference
        if spec.is_synchronous:
            take = self._gradient
        elif spec.has_local_steps:
            take = self._share_gradient
            own_optimizer = LoopOptimizer(self._optimizer, self._original_step, trained)
        self._training = AttachedContext(
            workload,
            replica,
            run.seed,
            lend=partial(self._lend, replica, take, run.train),
            is_synchronous=spec.is_synchronous,
            own_optimizer=own_optimizer,
            steps_alone=differs is not None,
        )
        if self._wanted.is_counted:
            self._log.info(
                "samples are drawn by this loop: %d are counted for each optimizer.step(); "
                "cluster.sampler(dataset) would make each count exactly once",
                run.train.samples_per_push,
            )
        return self._training

    def _difference_of_optimizers(self, run: RunConfig) -> ConfigError | None:
        """Why the run's optimizer is not one of the loop's kind; None: it is."""
        try:
            check_rule(describe_optimizer(self._model, self._optimizer), run)
        except ConfigError as error:
            return error
        return None

    def _lend(
        self,
        replica: Replica,
        take: Callable[[Replica], float | None],
        train: TrainConfig,
        indices: Tensor,
        place: Place,
    ) -> BatchLoss:
        """Let the loop compute these samples, and take over what came of its `optimizer.step()`.

        Raises:
            NonFiniteLoss: loss or gradient is NaN or infinite; the optimizer has not stepped.
        """
        self._note_place(place, train)
        self._lease = _Lease(indices, len(indices))
        assert self._watch is not None  # noqa: S101 - made as the model was laid out
        self._watch.begin(place.epoch)
        if take == self._difference:
            if self._before is None or self._before.shape != replica.params.shape:
                self._before = torch.empty_like(replica.params)
            self._before.copy_(replica.params.detach())
        at_once = (self._sampler and self._sampler._batch_size) or len(indices)
        num_last = (len(indices) - 1) % at_once + 1
        with lone_sample(self._model) if num_last == 1 else nullcontext():
            self._pause()
        told = self.loss.detach() if isinstance(self.loss, Tensor) else self.loss
        loss = math.nan if told is None else float(told)
        if self.loss is not None and not math.isfinite(loss):
            raise NonFiniteLoss(f"loss is {loss}; {DIVERGENCE_REMEDY}")
        if self._overflow is None:
            self._check_gradients(replica)
        elif self._overflow <= LEAST_SCALE:
            raise NonFiniteLoss(f"the gradient is NaN or infinite; {DIVERGENCE_REMEDY}")
        rate = take(replica)
        terms = self._num_terms
        if terms is None:
            terms = train.batch_size if self._wanted.is_counted else len(indices)
        return BatchLoss(loss, terms, rate, self._overflow)

    def _note_place(self, place: Place, train: TrainConfig) -> None:
        num_samples = self._wanted.num_samples
        assert num_samples is not None  # noqa: S101 - the run has as many
        in_step = 0 if self._wanted.is_counted else place.start % train.samples_per_step
        num_before = place.epoch * num_samples + place.start - in_step
        self.epoch = place.epoch
        self.progress = num_before / train.total_samples(num_samples)

    def _check_gradients(self, replica: Replica) -> None:
        """Refuse gradients that cannot be used.

        Raises:
            ConfigError: one is sparse.
            NonFiniteLoss: one is NaN or infinite.
        """
        for (parameter, _), (name, _) in zip(self._places, replica.layers, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigError(
                    f"model: the gradient of parameter {name} is sparse; make its embedding with sparse=False"
                )
        gradients = [each.grad for each, _ in self._places if each.grad is not None]
        norms = torch._foreach_norm(gradients) if gradients else ()
        if norms and not bool(torch.isfinite(torch.stack(norms)).all()):
            raise NonFiniteLoss(f"the gradient is NaN or infinite; {DIVERGENCE_REMEDY}")

    @torch.no_grad()
    def _difference(self, replica: Replica) -> None:
        """EDP: let the optimizer step, put what the loop has taken from the weights into `grads`, undo it.

        The worker then steps by that difference, as does the server. It is 0 where a gradient has overflowed.
        """
        assert self._before is not None  # noqa: S101 - noted as the loop was lent the weights
        if self._overflow is None:
            self._original_step()
            torch.sub(self._before, replica.params, out=replica.grads)
        else:
            replica.grads.zero_()
        replica.params.copy_(self._before)

    @torch.no_grad()
    def _gradient(self, replica: Replica) -> float:
        """SyncPS: put the gradients into `grads`; returns the optimizer's learning rate."""
        for parameter, place in self._places:
            if parameter.grad is None or self._overflow is not None:
                replica.grads[place].zero_()
            else:
                replica.grads[place].copy_(parameter.grad.reshape(-1))
        return float(self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def _share_gradient(self, replica: Replica) -> float:
        """DiLoCo: let the gradients lie in `grads`, where the worker clips them, if it is to."""
        rate = self._gradient(replica)
        for parameter, place in self._places:
            if parameter.grad is not None:
                parameter.grad = replica.grads[place].view(parameter.shape)
        return rate

    # The end.

    def _leave(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.parent = greenlet.getcurrent()
            self._greenlet.throw(GreenletExit)
        self.running = False
        if self._training is not None and self._training.is_synchronous:
            self._hand_state_back(self._training.replica)
        self._detach()

    def _detach(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter, _ in self._places:
            parameter.data = parameter.data.clone()
        self._places = []

    def _hand_state_back(self, replica: Replica) -> None:
        """Give the optimizer the state that the cluster has kept for it."""
        state = replica.optimizer.state
        for parameter, place in self._places if state else ():
            moments = {
                key: flat[place].view(parameter.shape).clone()
                for key, flat in replica.optimizer.moments.items()
            }
            if not isinstance(self._optimizer, torch.optim.SGD):
                moments[STEP_COUNT] = state[STEP_COUNT].clone().cpu()
            self._optimizer.state[parameter] = moments


def _logged(values: dict[str, float]) -> Logged:
    try:
        return Logged(values=values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = first["loc"][1] if len(first["loc"]) > 1 else None
        if name is None:
            raise ConfigError(f"cluster.log: {len(values)} values, must be 1 to 64") from None
        raise ConfigError(
            f"cluster.log: {name!r} is {values.get(str(name))}, must be a finite number, under a name of at "
            "most 128 letters without spaces"
        ) from None


@dataclass(frozen=True, kw_only=True)
class AttachedContext(TrainingContext):
    """What an attached process trains with: its loop computes."""

    lend: Callable[[Tensor, Place], BatchLoss]
    is_synchronous: bool
    own_optimizer: LoopOptimizer | None
    """The loop's, where it steps this process's copy of the weights."""

    @property
    def optimizer(self) -> LocalOptimizer:
        return self.own_optimizer or self.replica.optimizer

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        return self.lend(indices, Place(self.seed, epoch, start))

    def rehearse(self, num_samples: int) -> bool:  # noqa: ARG002
        """Nothing: only the loop knows how to compute."""
        return False


class LeaseSampler(Sampler[list[int]]):
    """What this process is to compute, a list of indices at a time, until the run is over."""

    def __init__(self, cluster: Cluster, batch_size: int | None) -> None:
        self._cluster = cluster
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        cluster = self._cluster
        while cluster.running:
            lease = cluster._lease
            if lease is None or not lease.num_undrawn:
                raise ConfigError(
                    "cluster.sampler was asked for more before optimizer.step(): pass it to the DataLoader "
                    "as batch_sampler, with num_workers=0, and step once for what it gives, without skipping "
                    "a step; or give attach num_samples"
                )
            undrawn = lease.indices[-lease.num_undrawn :]
            piece = undrawn[: self._batch_size or len(undrawn)]
            lease.num_undrawn -= len(piece)
            yield piece.tolist()
