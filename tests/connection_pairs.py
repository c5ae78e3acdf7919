"""Two connected ends for tests, and samples of every message."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from smolcluster.configs.schema import DatasetConfig, RunConfig, TrainConfig
from smolcluster.utils.retry import Deadline
from smolcluster.wire import messages as m
from smolcluster.wire.connection import Connection
from smolcluster.wire.tls import client_context, new_identity
from waiting import Clock

BUCKET_BYTES = 64 * 1024
DEADLINE_S = 60.0
LEASE = m.LeaseKey(incarnation="0123abcd", epoch=0, start=0, stop=32, grant=1)
PART = m.PartKey(instance="0123456789abcdef", of=1)
RUN = RunConfig(
    run_id="edp-1",
    algorithm="edp",
    seed=42,
    worker_update_interval=10,
    codec="int8",
    heartbeat_timeout_s=10.0,
    reconnect_timeout_s=60.0,
    train=TrainConfig(dataset=DatasetConfig(name="digits")),
)


def tensor(nbytes: int) -> m.TensorSpec:
    return m.TensorSpec(codec="fp32", dtype="float32", shape=(nbytes // 4,), nbytes=nbytes)


def push(nbytes: int = 16, bucket: int = 0) -> m.Push:
    return m.Push(
        lease=LEASE,
        base_version=3,
        bucket=bucket,
        num_buckets=4,
        num_samples=32,
        num_terms=64,
        loss=0.5,
        compute_s=0.25,
        tensor=tensor(nbytes),
    )


def one_of_each() -> list[m.Message]:
    """By their numbers."""
    return [*handshake_and_steps(), *kept_stages(), *rounds(), *stores(), *stages(), *links()]


def handshake_and_steps() -> list[m.Message]:
    mac, nonce = "ab" * 32, "cd" * 32
    return [
        m.Hello(
            version="0.1.0",
            sets={"session": "ef" * 32, "ps": "01" * 32},
            node="mini1",
            worker_id=1,
            instance="0123456789abcdef",
        ),
        m.Challenge(nonce=nonce),
        m.Proof(mac=mac),
        m.Welcome(
            run_id="edp-1",
            incarnation="0123abcd",
            settings=RUN.model_dump(mode="json"),
            model_fingerprint=mac,
            bucket_bytes=BUCKET_BYTES,
            codec="int8",
            heartbeat_timeout_s=10.0,
        ),
        m.Ready(
            dataset_fingerprint=mac,
            model_fingerprint=mac,
            device="cpu",
            samples_per_s=1e4,
            unacknowledged=LEASE,
        ),
        m.Reject(code="busy", sentence="worker 1 is here already", retry_after_s=2.0),
        m.Assignment(lease=LEASE, version=3, learning_rate=1e-3, tensor=tensor(128)),
        push(),
        m.Ack(lease=LEASE, outcome="applied", version=4),
        m.Pull(),
        m.State(incarnation="0123abcd", version=4, bucket=0, num_buckets=1, tensor=tensor(64)),
        m.Heartbeat(sent_at=1.0),
        m.Goodbye(reason="done"),
        m.End(ok=True, sentence="the run is over"),
        m.Reduced(version=4, bucket=0, num_buckets=4, tensor=tensor(16)),
        m.Commit(version=4, num_samples=96, clip=0.5, learning_rate=1e-3, tensor=tensor(32)),
        m.Cancel(lease=LEASE, num_buckets=2),
        m.Skip(lease=LEASE, compute_s=0.25),
        telemetry(spans_at=1.7e9, spans=((7, 0, 900), (1, 20, 300))),
        m.Park(lease=LEASE, num_buckets=2),
        m.Accepted(bucket_bytes=BUCKET_BYTES, heartbeat_timeout_s=10.0),
        m.Buffers(
            lease=LEASE,
            version=3,
            numbers=(0, 2),
            bucket=0,
            num_buckets=1,
            tensor=m.TensorSpec(codec="fp64", dtype="float64", shape=(0,), nbytes=0),
        ),
        m.Logged(values={"val_loss": 0.25}),
        m.Served(
            lease=LEASE,
            offset=0,
            nbytes=64,
            tensor=m.TensorSpec(codec="raw", dtype="uint8", shape=(0,), nbytes=0),
        ),
    ]


def rounds() -> list[m.Message]:
    return [
        m.Stepped(lease=LEASE, loss=0.5, num_terms=32, grad_norm=1.5, compute_s=0.25),
        m.Collect(request=1, fragment=0, wait=True),
        m.Delta(request=1, fragment=0, bucket=0, num_buckets=1, tensor=tensor(16)),
        m.OuterStep(
            fragment=0, base_version=3, version=4, bucket=0, num_buckets=1, tensor=tensor(16)
        ),
        m.Saved(step=30, keep_last=3),
        m.Resumed(step=30),
        m.TakeMean(parts=(m.CountedPart(key=PART, weight=32.0),)),
        m.DeltaSent(request=1, fragment=2),
    ]


def stores() -> list[m.Message]:
    return [
        m.StoreList(
            stores=(
                m.StorePlace(
                    node="win", places=(m.HostPort(host="10.0.0.2", port=6000),), first=1, stop=2
                ),
            )
        ),
        m.Slice(
            run_id="run",
            incarnation="ab12",
            reconnect_timeout_s=60.0,
            num_params=1000,
            bucket_length=512,
            first=1,
            stop=2,
            contents=("weights", "exp_avg", "exp_avg_sq"),
            codec="int8",
            has_loss_scale=False,
            rule=m.SliceRule(
                optimizer="adam",
                optimizer_args={"betas": (0.9, 0.999), "eps": 1e-8},
                weight_decay=0.1,
                num_decayed=400,
                num_steps=20,
            ),
        ),
        m.Listening(places=(m.HostPort(host="10.0.0.2", port=6000),)),
        m.Arrived(key=PART, fragment=0, bucket=2, tensor=tensor(8)),
        m.TakeStep(
            version=4,
            parts=(m.CountedPart(key=PART, weight=0.25),),
            clip=0.5,
            learning_rate=0.1,
            bound=1.0,
            one_by_one=True,
            moves_by=0.75,
        ),
        m.Drop(key=m.PartKey(instance="0123456789abcdef", of=LEASE)),
        m.SendWeights(instance="0123456789abcdef", version=3),
        m.Gather(version=3, contents=("weights",)),
        m.WorkerGone(instance="0123456789abcdef"),
    ]


def kept_stages() -> list[m.Message]:
    spec = m.TensorSpec(codec="raw", dtype="uint8", shape=(4,), nbytes=4)
    return [
        m.KeepStages(attempt=1, step=20),
        m.WantState(attempt=2, content="exp_avg", names=("wte.weight",)),
        m.StageState(
            attempt=1, step=20, content="weights", name="wte.weight", offset=8, tensor=spec
        ),
        m.StageKept(attempt=1, step=20),
    ]


def stages() -> list[m.Message]:
    lease = m.LeaseKey(incarnation="i", epoch=0, start=0, stop=8, grant=1)
    places = (m.HostPort(host="10.0.0.2", port=4000),)
    neighbour = m.StageNeighbour(rank=1, node="pi5", instance="ab" * 16, places=places)
    return [
        m.Planned(
            attempt=1,
            rank=0,
            cuts=(0, 4, 8),
            ranks=(0, 1),
            neighbours=(neighbour,),
            turn=3,
            step=2,
        ),
        m.StageReady(attempt=1, reason="stage 1 (pi5) is lost"),
        m.StageDone(
            attempt=1,
            lease=lease,
            loss=1.5,
            num_terms=8,
            squared_norm=0.25,
            seconds={"F": 0.1, "B": 0.2},
            peak_bytes=1000,
        ),
        m.EvaluateStages(attempt=1, turn=4, lease=lease, batch_size=2, batch_nbytes=64),
        m.StageEvaluated(attempt=1, turn=4, totals={"loss": (2.5, 2.0)}),
        m.LayersMeasured(
            kinds=(
                m.MeasuredLayer(
                    forward_s=0.1,
                    input_s=0.2,
                    weight_s=0.3,
                    trained_bytes=40,
                    frozen_bytes=8,
                    activation_bytes=16,
                    output_bytes=16,
                ),
            ),
            layers=(0, 0, 0),
            memory_bytes=1000,
            device="cpu",
        ),
    ]


def links() -> list[m.Message]:
    piece = m.TransferPiece(
        attempt=1, step=3, direction="forward", stage=2, microbatch=0, offset=0, nbytes=64
    )
    return [
        m.CopyOrder(
            attempt=1,
            turn=4,
            order="begin",
            fragments=(((0, 6),), ((6, 8), (9, 12))),
            held=(1,),
        ),
        m.CopyPiece(attempt=1, turn=4, offset=6, tensor=tensor(16)),
        m.Transfer(piece=piece, tensor=tensor(16)),
        m.Relayed(instance="0123456789abcdef", piece=piece, tensor=tensor(16)),
        m.MeasureLink(
            attempt=1,
            rank=1,
            neighbour=m.StageNeighbour(
                rank=0,
                node="pi5",
                instance="0123456789abcdef",
                places=(m.HostPort(host="10.0.0.5", port=1),),
            ),
        ),
        m.LinkMeasured(attempt=1, bytes_s=1e6, latency_s=0.1),
        m.SameWeights(),
    ]


def telemetry(uptime_s: float = 2.0, steps: int = 0, **sums: Any) -> m.Telemetry:
    """What a worker reports that has done nothing but what is stated."""
    nothing: dict[str, Any] = {
        "samples": 0,
        "phase_s": (0.0,) * m.NUM_PHASES,
        **dict.fromkeys(("raw_bytes", "encoded_bytes", "memory_bytes", "queued"), 0),
        **dict.fromkeys(("sent_bytes", "received_bytes"), 0),
        "cpu_s": 0.0,
    }
    return m.Telemetry(uptime_s=uptime_s, steps=steps, **(nothing | sums))


def socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: "socketpair", or TCP for "tcp" and "tls"."""
    if kind == "socketpair":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


@contextmanager
def encrypting(server: Connection) -> Iterator[None]:
    """Meanwhile the server's end begins TLS, as the other one must."""
    deadline = Deadline(DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(
            server.encrypt, new_identity().context, server_side=True, deadline=deadline
        )
        yield
        begun.result(DEADLINE_S)


@contextmanager
def raw_and_connection(
    kind: str = "socketpair", stall_timeout_s: float = DEADLINE_S, *, proved: bool = True
) -> Iterator[tuple[socket.socket, Connection]]:
    """A bare socket that can say anything, and the connection that hears it."""
    raw, other = socket_pair(kind)
    connection = Connection(other, "peer", stall_timeout_s)
    if kind == "tls":
        with encrypting(connection):
            raw = client_context().wrap_socket(raw)
    if proved:
        connection.proved(BUCKET_BYTES, stall_timeout_s)
    try:
        yield raw, connection
    finally:
        connection.close()
        raw.close()


@contextmanager
def connection_pair(
    kind: str = "socketpair", stall_timeout_s: float = DEADLINE_S, *, proved: bool = True
) -> Iterator[tuple[Connection, Connection]]:
    one, other = (Connection(sock, None, stall_timeout_s) for sock in socket_pair(kind))
    if kind == "tls":
        with encrypting(other):
            one.encrypt(client_context(), server_side=False, deadline=Deadline(DEADLINE_S))
    if proved:
        one.proved(BUCKET_BYTES, stall_timeout_s)
        other.proved(BUCKET_BYTES, stall_timeout_s)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def speak_when_waited_for(connection: Connection, say_next: Callable[[], object]) -> None:
    """Have the peer speak each time the connection has waited for half of its stall timeout."""
    arm, heard, silent_s = connection._arm, 0, 0.0

    def armed(option: int, deadline: Deadline | None) -> float:
        nonlocal heard, silent_s
        if connection.bytes_received > heard:
            heard, silent_s = connection.bytes_received, 0.0
        elif silent_s >= connection.stall_timeout_s / 2:
            say_next()
        wait_s = arm(option, deadline)
        silent_s += wait_s
        return wait_s

    connection._arm = armed  # type: ignore[method-assign]


@contextmanager
def dripping(
    raw: socket.socket, data: bytes, connection: Connection, clock: Clock
) -> Iterator[None]:
    """Meanwhile byte after byte is sent, each when the one before has come and 0.1 s have passed."""
    stop = threading.Event()

    def drip() -> None:
        for number, byte in enumerate(data):
            while connection.bytes_received < number:
                if stop.wait(0.005):
                    return
            clock.now += 0.1
            with suppress(ConnectionError):  # who was given up on is sent nothing any more
                raw.sendall(bytes([byte]))

    with ThreadPoolExecutor(1) as pool:
        dripped = pool.submit(drip)
        try:
            yield
        finally:
            stop.set()
        dripped.result(DEADLINE_S)
