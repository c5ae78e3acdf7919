"""From log files to a receiver that follows Loki's push API, whatever comes between."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loki import HANGS_UP, Fault, Receiver, receiving
from smolcluster.observability.shipping import shipper as shipping
from smolcluster.observability.shipping.loki import LokiClient, PushReply
from smolcluster.observability.shipping.shipper import Shipper
from smolcluster.observability.shipping.spool import STATE, Spool
from smolcluster.runs.files import LineWriter, utc_timestamp
from waiting import DEADLINE_S

STEMS = ("server-mini1", "worker-rank0-mini2")
START_S = 1_790_000_000


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(shipping, "MAX_DELAY_S", 0.05)
    monkeypatch.setattr(shipping, "POLL_S", 0.01)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


class Killed(Exception):
    """The shipper is no more."""


class Log:
    """A log file that is written as a run writes it."""

    def __init__(self, folder: Path, stem: str, max_nbytes: int | None = None) -> None:
        self.stem, self.count = stem, 0
        self._path, self._max_nbytes = folder / f"{stem}.log", max_nbytes

    def write(self, number: int) -> None:
        """Write so many lines; ten of each time."""
        writer = LineWriter(self._path, warn=pytest.fail, max_nbytes=self._max_nbytes)
        for _ in range(number):
            ts = utc_timestamp(START_S + self.count // 10 / 1000)
            level = ("INFO", "WARNING")[self.count % 7 == 0]
            message = f"line {self.count}"
            writer.append({"ts": ts, "level": level, "message": message})
            writer.flush()
            self.count += 1
        writer.close()

    def check(self, receiver: Receiver, count: int | None = None) -> None:
        """See that each line arrived, once, and in order."""
        messages = [f"line {n}" for n in range(self.count if count is None else count)]
        warnings = receiver.received.messages(host=self.stem, level="WARNING")
        infos = receiver.received.messages(host=self.stem, level="INFO")
        assert warnings == messages[::7]
        assert infos == [line for n, line in enumerate(messages) if n % 7]
        assert receiver.received.is_in_order
        assert receiver.invalid == []


@contextmanager
def running(
    folder: Path, receiver: Receiver, said: list[str], *, max_lines: int = 2000
) -> Iterator[Callable[[], bool]]:
    """A shipper in a thread, until the block ends or the yielded function ends it."""
    loki = LokiClient(receiver.url, timeout_s=DEADLINE_S)
    shipper = Shipper(Spool(folder, max_lines=max_lines), loki.push, said.append)
    asked = threading.Event()
    arrived: list[bool] = []
    thread = threading.Thread(target=lambda: arrived.append(shipper.run(asked, DEADLINE_S)))
    thread.start()

    def end() -> bool:
        asked.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        return arrived[0]

    try:
        yield end
    finally:
        end()
        loki.close()


def test_ten_thousand_lines_survive_a_receiver_that_is_down(
    tmp_path: Path, receiver: Receiver
) -> None:
    logs = [Log(tmp_path, stem) for stem in STEMS]
    said: list[str] = []
    down = threading.Event()

    def fall() -> None:
        receiver.wait_for(lambda: receiver.received.num_requests >= 3)
        receiver.down()
        down.set()

    falling = threading.Thread(target=fall)
    falling.start()
    with running(tmp_path, receiver, said, max_lines=300) as end:
        for _ in range(25):
            for log in logs:
                log.write(200)
        assert down.wait(DEADLINE_S)
        receiver.faults.extend([HANGS_UP] * 20)
        receiver.up()
        assert end()
    falling.join(DEADLINE_S)
    assert sum(log.count for log in logs) == 10_000
    for log in logs:
        log.check(receiver)
    assert receiver.received.largest_lines <= 300
    assert len(said) == 1
    assert "Loki does not take the logs, which wait in their files" in said[0]


@pytest.mark.parametrize(
    "fault",
    [
        HANGS_UP,
        Fault(500, body=b"oops"),
        Fault(503, {"Retry-After": "0.02"}),
        Fault(429, {"Retry-After": "nonsense"}, b"ingestion rate limit exceeded"),
        Fault(408),
        Fault(302, {"Location": "http://127.0.0.1:1/"}),
        Fault(200, body=b"<html>Please log in to this network</html>"),
        Fault(500, {"Content-Encoding": "gzip"}, b"\xff\x00 no gzip \x1b[2J"),
        Fault(raw=b"SSH-2.0-OpenSSH_9.2\r\n"),
        Fault(raw=b"HTTP/1.1 204 \r\nContent-Length: -5\r\n\r\n\xff\xfe"),
        Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 100_000),
        Fault(takes_it=True),
    ],
)
def test_what_is_no_answer_of_lokis_loses_nothing(
    tmp_path: Path, receiver: Receiver, fault: Fault
) -> None:
    log = Log(tmp_path, STEMS[0])
    said: list[str] = []
    log.write(50)
    receiver.faults.extend([fault] * 3)
    with running(tmp_path, receiver, said) as end:
        receiver.wait_for(lambda: receiver.received.num_requests >= 4)
        assert end()
    log.check(receiver)
    assert len(said) == 1
    assert said[0].isprintable()


def test_what_loki_refuses_is_said_with_its_own_words_and_stays(
    tmp_path: Path, receiver: Receiver
) -> None:
    log = Log(tmp_path, STEMS[0])
    said: list[str] = []
    log.write(100)
    body = b"entry with timestamp 2026-09-21 ignored, reason: 'entry too far behind'\n"
    receiver.faults.extend([Fault(400, body=body)] * 2)
    with running(tmp_path, receiver, said, max_lines=10) as end:
        receiver.wait_for(lambda: receiver.received.num_requests >= 10)
        assert not end()
    assert receiver.received.num_requests == 10
    assert len(receiver.received.texts()) == 80
    [sentence] = said
    assert "refuses some of 10 lines, which stay in their files: it answers 400: entry" in sentence
    assert Spool(tmp_path).left_nbytes() == (tmp_path / f"{STEMS[0]}.log").stat().st_size
    with running(tmp_path, receiver, []) as end:
        assert end()
    assert sorted(receiver.received.messages()) == sorted(f"line {n}" for n in range(100))
    assert receiver.received.num_repeated == 80
    assert Spool(tmp_path).left_nbytes() == 0


def test_a_shipper_that_starts_again_repeats_one_batch_at_most(
    tmp_path: Path, receiver: Receiver
) -> None:
    """It was killed when Loki had a batch and the offsets did not say so."""
    log = Log(tmp_path, STEMS[0])
    log.write(1000)
    loki = LokiClient(receiver.url)

    def push_and_die(body: bytes) -> PushReply:
        loki.push(body)
        raise Killed

    for life in range(1, 4):
        assert Shipper(Spool(tmp_path, max_lines=100), loki.push, pytest.fail).step() == 0.0
        with pytest.raises(Killed):
            Shipper(Spool(tmp_path, max_lines=100), push_and_die, pytest.fail).step()
        assert receiver.received.num_repeated == 100 * (life - 1)
    assert Shipper(Spool(tmp_path), loki.push, pytest.fail).flush(DEADLINE_S)
    loki.close()
    log.check(receiver)
    assert receiver.received.num_repeated == 300


def test_files_that_are_rotated_meanwhile_arrive_whole_and_in_order(
    tmp_path: Path, receiver: Receiver
) -> None:
    log = Log(tmp_path, STEMS[1], max_nbytes=20_000)
    said: list[str] = []
    with running(tmp_path, receiver, said) as end:
        for count in range(50, 1050, 50):
            log.write(50)
            receiver.wait_for(lambda count=count: len(receiver.received.texts()) == count)  # type: ignore[misc]
        assert end()
    assert len(list(tmp_path.glob("*.log*"))) == 3
    log.check(receiver)
    assert receiver.received.num_repeated == 0
    assert said == []


@pytest.mark.parametrize("patient", [True, False])
def test_who_is_patient_ends_when_loki_has_all_however_long_it_takes(
    tmp_path: Path, patient: bool
) -> None:
    now = [0.0]

    def push(_: bytes) -> PushReply:
        now[0] += 20.0
        return PushReply("accepted")

    Log(tmp_path, STEMS[0]).write(10)
    spool = Spool(tmp_path, max_lines=1)
    shipper = Shipper(spool, push, pytest.fail, clock=lambda: now[0])
    assert shipper.flush(30.0, patient=patient) is patient
    assert (shipper.spool.left_nbytes() == 0) is patient


def test_a_warning_a_minute_at_most(tmp_path: Path) -> None:
    now = [0.0]
    said: list[str] = []
    Log(tmp_path, STEMS[0]).write(1)
    loki = LokiClient("http://127.0.0.1:9")
    shipper = Shipper(Spool(tmp_path), loki.push, said.append, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0, 121.0):
        assert shipper.step() is not None
    loki.close()
    assert len(said) == 3
    assert said[1].endswith("(2 warnings since the last one)")


def test_offsets_that_cannot_be_stored_stop_nothing(tmp_path: Path, receiver: Receiver) -> None:
    log = Log(tmp_path, STEMS[0])
    said: list[str] = []
    log.write(30)
    (tmp_path / STATE).mkdir()
    loki = LokiClient(receiver.url)
    assert Shipper(Spool(tmp_path, max_lines=10), loki.push, said.append).flush(DEADLINE_S)
    loki.close()
    log.check(receiver)
    assert receiver.received.num_repeated == 0
    assert len(said) == 1
    assert "cannot write" in said[0]
