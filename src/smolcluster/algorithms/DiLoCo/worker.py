"""A DiLoCo worker: takes many steps of its own between two exchanges with the server.

    lease -> forward, backward -> a local step -> what it cost and taught, in a small message
    ...
    request -> Δ = θ_start - θ -> new weights θ' -> θ = θ' + what was learnt since Δ was sent

In the synchronous beginning its steps move the optimizer's moments alone, and what it sends is their mean
gradient.
It reads one ordered stream and does what comes next; how many steps lie between two requests is the
server's to say. The local optimizer's moments stay through the run. Should its copy diverge, it says so and
begins again from the server's weights, and only when it fails on these as well the run must end.

Sources: DiLoCo (Douillard et al., 2311.08105); Streaming DiLoCo (Douillard et al., 2501.18512).
By hand: `uv run worker.py 1 macbook`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "worker"))


import math
import time
from collections import deque
from collections.abc import Callable

import torch

from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig, gradient_codec
from smolcluster.algorithms.DiLoCo.exchange import (
    Encoder,
    FragmentArrived,
    FragmentReceiver,
    Hosts,
    Layout,
    cannot_be_sent,
    delta_frames,
)
from smolcluster.algorithms.DiLoCo.fragments import cut, filled
from smolcluster.codec.base import NonFiniteValue
from smolcluster.codec.registry import lossless_for
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.assignment import Assigned
from smolcluster.server.buffers import buffer_frames
from smolcluster.server.link import Link, wait_until
from smolcluster.server.plausible import RefusedAgain, check_norm
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.kept import is_like
from smolcluster.training.local_copy import LocalCopy
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.scaler import ScaleFollower
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Ack,
    Collect,
    LeaseKey,
    Resumed,
    SameWeights,
    Saved,
    Skip,
    Stepped,
    StoreList,
    Welcome,
)

OWES_GRADIENTS = "owes_gradients"
"""What is kept under it says whether debts are of gradients: 1, or of changes: 0."""
BUFFERS_WITH = 0
"""The fragment whose change brings what was added to the model's buffers."""


class Worker:
    """A worker's part in a run, over all its sessions."""

    unacknowledged: LeaseKey | None = None
    """Samples of changes that were lost are handed out again."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        config = welcome.run.of(DiLoCoConfig)
        self.training = training
        self.train = training.recipe.applied_to(welcome.run.train)
        self.replica = training.replica
        num_fragments = config.num_fragments(len(filled(self.replica.layers)))
        self.layout = Layout.of(self.replica, cut(self.replica.layers, num_fragments))
        self.codec_up = welcome.codec
        self.encoder = Encoder(self.codec_up, self.layout)
        self.codec_down = config.codec_down or lossless_for(self.replica.params.dtype)
        self.hosts = Hosts(
            self.layout,
            len(self.replica.buckets),
            lambda span: FragmentReceiver(self.codec_down, self.layout, training, span),
        )
        self.scale = ScaleFollower()
        self.stream: deque[Assigned | Collect | Saved | Resumed] = deque()
        """What the server wants next, in order."""
        self.copy = LocalCopy(training.executor, [each.places for each in self.layout.fragments])
        """The weights: θ, which local steps change, and θ_start, that changes are counted from."""
        self.versions = [0] * len(self.layout.fragments)
        self.num_terms = [0.0] * len(self.layout.fragments)
        """Loss terms of the steps since a fragment's change was sent last, but for those that overflowed.

        Without any the change weighs nothing, and pays no debts.
        """
        self.is_void = True
        """Whether it waits for whole weights, and all that comes before them is for nothing."""
        self.is_fresh = False
        """Whether its copy has failed, and nothing that it computed since has been applied."""
        self.sends_gradients = False
        """Whether it is in the run's synchronous beginning."""
        self.newest_lease: LeaseKey | None = None
        self.newest_request: int | None = None
        """Requests count up."""
        self.link: Link

    def new_receiver(self) -> FragmentReceiver:
        return FragmentReceiver(self.codec_down, self.layout, self.training)

    def take_part(self, link: Link) -> None:
        """Train until the link raises. The server sends its weights first."""
        self.link, self.is_void = link, True
        self.hosts.begin(link)
        for number in self.copy.sent:  # over the session before
            self.encoder.forget(number)
        self.copy.sent.clear()
        while True:
            try:
                self.wait_until(lambda: self.can_go_on)
                self.do(self.stream.popleft())
            except RefusedAgain:
                raise
            except NonFiniteLoss as error:
                self.give_up(error)
            except ProtocolError as error:
                link.cut(str(error))  # of which the next wait hears

    @property
    def can_go_on(self) -> bool:
        """Whether something is wanted, and may be done now.

        Where several hosts hold the weights, some of a fragment's may still be on their way when it is asked
        for again, or when a gradient of the new weights is wanted.
        """
        if self.is_void or not self.stream:
            return False
        wanted = self.stream[0]
        is_early = isinstance(wanted, Collect) and wanted.fragment in self.copy.sent
        if isinstance(wanted, Assigned) and wanted.assignment.is_gradient:
            # each fragment's step has made one version
            first = wanted.assignment.version - len(self.versions) + 1
            is_early = any(own < first + number for number, own in enumerate(self.versions))
        return not (self.hosts.is_several and is_early)

    def do(self, wanted: Assigned | Collect | Saved | Resumed) -> None:
        """Do what the server wants next.

        Raises:
            NonFiniteLoss: it came to NaN or infinity.
            ProtocolError: it could not be wanted.
        """
        match wanted:
            case Assigned():
                self.step(wanted)
            case Collect():
                self.send_change(wanted)
            case Saved():
                self.keep(wanted)
            case Resumed():
                self.take_up(wanted)

    def step(self, lease: Assigned) -> None:
        """Take one local step.

        Raises:
            NonFiniteLoss: it came to NaN or infinity.
        """
        self.newest_lease = lease.lease
        started = time.perf_counter()
        self.replica.loss_scale = self.scale.after(lease.assignment.loss_scale)
        fragments = lease.assignment.fragments or range(len(self.versions))
        is_repeat = BUFFERS_WITH not in fragments  # what the samples do to buffers has been applied
        buffers = self.replica.buffers.values() if is_repeat else {}
        loss = self.compute(lease)
        self.scale.note(loss.overflow)
        self.replica.buffers.find()
        lease.examine(self.training, loss=False, buffers=True)
        if is_repeat:
            self.replica.buffers.put(buffers)
        is_gradient = lease.assignment.is_gradient
        if is_gradient != self.sends_gradients:
            self.begin_to_send(gradients=is_gradient)
        # in the others, what another worker has done with these samples is applied
        others = set(range(len(self.versions))).difference(fragments)
        if is_gradient and loss.overflow is None:
            self.copy.add_gradient(loss.num_terms, others)
        grad_norm = 0.0
        if loss.overflow is None:  # else the executor's gradient may be infinite
            grad_norm = self.copy.clip(self.train.gradient_clipping)
            if not self.train.gradient_clipping.enabled:
                check_norm(grad_norm)
            held = range(len(self.versions)) if is_gradient else others
            self.copy.step(lease.assignment.learning_rate, held)
            for number in fragments:
                self.num_terms[number] += loss.num_terms
        self.link.send(
            Stepped(
                lease=lease.lease,
                loss=None if math.isnan(loss.mean) else loss.mean,
                num_terms=loss.num_terms,
                grad_norm=grad_norm,
                learning_rate=loss.learning_rate,
                overflow=loss.overflow,
                compute_s=time.perf_counter() - started,
            )
        )
        self.replica.meter.step_done(lease.num_samples)

    def compute(self, lease: Assigned) -> BatchLoss:
        return lease.compute(self.training)

    def send_change(self, collect: Collect) -> None:
        """Send what a fragment has changed by, and if it is so wanted wait for its new weights.

        Raises:
            NonFiniteLoss: it holds NaN or infinity.
        """
        number, replica = collect.fragment, self.replica
        is_old = self.newest_request is not None and collect.request <= self.newest_request
        if is_old or number >= len(self.layout.fragments) or number in self.copy.sent:
            raise ProtocolError(f"the server asks for fragment {number} out of turn")
        self.newest_request = collect.request
        with replica.meter("encode"):
            try:
                change = self.copy.change(number, is_gradient=self.sends_gradients)
                counts = self.num_terms[number] > 0
                encoded = self.encoder.encode(number, change, counts=counts)
            except NonFiniteValue as error:
                self.encoder.settle(number, is_applied=False)
                fragment = self.layout.fragments[number]
                raise cannot_be_sent(error, fragment, replica) from error
            buffers = replica.buffers.difference() if number == BUFFERS_WITH else {}
        if number == BUFFERS_WITH:
            replica.buffers.mark()
        self.copy.mark_sent(number)
        self.num_terms[number] = 0.0
        frames = delta_frames(self.layout, collect, encoded, self.encoder.codec)
        version = self.versions[number]
        self.hosts.send(
            collect, buffer_frames(buffers, replica.bucket_bytes, version=version), frames
        )
        replica.meter.raw_bytes += self.layout.nbytes(number)
        replica.meter.encoded_bytes += sum(each.nbytes for each in encoded)
        if collect.wait:
            # of the fragments before it other hosts may have sent less yet
            self.wait_until(lambda: self.is_void or not self.copy.sent)

    def begin_to_send(self, *, gradients: bool) -> None:
        """What is sent is of another kind from now on: debts of the old kind are given up."""
        self.sends_gradients = gradients
        codec = gradient_codec(self.codec_up) if gradients else self.codec_up
        self.encoder = Encoder(codec, self.layout)

    def give_up(self, error: NonFiniteLoss) -> None:
        """Its own copy is not to be trusted any more: begin again from the server's weights.

        Raises:
            NonFiniteLoss: they are what it has failed on.
        """
        if self.is_fresh or self.newest_lease is None:
            raise NonFiniteLoss(
                f"{error} (again, now on the server's weights of version {max(self.versions)})"
            ) from error
        self.link.send(Skip(lease=self.newest_lease, compute_s=0.0, reason=str(error)))
        self.copy.reset()
        self.is_void = self.is_fresh = True

    def keep(self, saved: Saved) -> None:
        """Save what nobody else has of this moment of the run: moments, and what the codec owes."""
        if self.link.kept is not None:
            is_gradient = torch.tensor(float(self.sends_gradients))
            more = {**self.encoder.tensors, OWES_GRADIENTS: is_gradient}
            self.copy.save(self.link.kept, saved.step, more, saved.keep_last)

    def take_up(self, resumed: Resumed) -> None:
        """Go on with what was saved then; of an earlier moment only with the moments, which hardly differ."""
        if self.link.kept is None or self.newest_lease is not None:
            return  # else it has been in the run since
        found = self.copy.take_up(self.link.kept, resumed.step)
        if found is None:
            return
        step, tensors = found
        if step == resumed.step:
            self.begin_to_send(gradients=bool(tensors.get(OWES_GRADIENTS, False)))
            if is_like(self.encoder.tensors, tensors):
                self.encoder.resume(tensors)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Take in all that has arrived, and go on until `condition` holds."""
        wait_until(self.link, condition, self.handle, self.replica.meter)

    def handle(self, event: Event) -> None:
        for each in self.hosts.take(event):
            self.follow(each)

    def follow(self, event: Event) -> None:
        """Take what hosts have sent, in order."""
        match event:
            case Assigned() | MessageReceived(message=Collect() | Saved()) if self.is_void:
                pass  # what comes next is the whole weights, and other samples
            case Assigned():
                self.stream.append(event)
            case MessageReceived(message=Saved() as saved) if not self.hosts.is_several:
                # at once: what the steps before it in the stream owe is of later versions
                self.keep(saved)
            case MessageReceived(message=Collect() | Saved() | Resumed() as wanted):
                self.stream.append(wanted)
            case FragmentArrived() if not self.is_void:
                self.take_fragment(event)
            case WeightsArrived():
                self.begin_with(event)
            case MessageReceived(message=SameWeights()):
                replica = self.replica
                own = [replica.params[place] for place in replica.buckets]
                self.begin_with(WeightsArrived(0, own, replica.buffers.values()))
            case MessageReceived(message=StoreList() as stores):
                self.is_void = True
                self.hosts.reach(stores)
            case MessageReceived(message=Ack(outcome="non_finite")) if not self.is_void:
                self.was_refused()

    def begin_with(self, arrived: WeightsArrived) -> None:
        """Take the server's whole weights for one's own: what was computed before them is void."""
        for number in self.copy.sent:  # whether they have been applied is not known
            self.encoder.forget(number)
        self.copy.load(arrived.weights)
        self.replica.buffers.load(arrived.buffers)
        self.stream.clear()
        self.versions = [arrived.version] * len(self.versions)
        self.num_terms = [0.0] * len(self.num_terms)
        self.is_void = False

    def take_fragment(self, arrived: FragmentArrived) -> None:
        """Take a fragment's new weights, and keep what was learnt since the change was sent.

        Raises:
            ProtocolError: it does not follow on the weights that are here.
        """
        number = arrived.fragment
        base_version = arrived.base_version
        own_version = self.versions[number]
        is_newer = arrived.version > own_version
        # of whole weights all fragments have the newest version, so a base may be older
        if not is_newer or (base_version is not None and base_version > own_version):
            raise ProtocolError(
                f"fragment {number} of version {arrived.version} does not follow on version "
                f"{own_version} here"
            )
        was_sent = number in self.copy.sent
        with self.replica.meter("apply"):
            is_difference = base_version is not None
            self.copy.follow(number, arrived.values, is_difference=is_difference)
        self.take_buffers(arrived)
        if was_sent:
            self.encoder.settle(number, is_applied=True)
            self.is_fresh = False
        self.versions[number] = arrived.version

    def take_buffers(self, arrived: FragmentArrived) -> None:
        """The model's buffers follow in the same way."""
        if arrived.buffers:
            since = self.replica.buffers.difference()
            self.replica.buffers.load(arrived.buffers)
            self.replica.buffers.put(
                {
                    number: values + since[number] if number in since else values
                    for number, values in arrived.buffers.items()
                }
            )

    def was_refused(self) -> None:
        """The server has refused a change, and will send whole weights.

        Raises:
            RefusedAgain: it was computed on such weights already.
        """
        if self.is_fresh:
            raise RefusedAgain(
                f"the server has refused its change (again, now of its weights of version "
                f"{max(self.versions)}); {DIVERGENCE_REMEDY}"
            )
        self.copy.reset()
        self.is_void = self.is_fresh = True
