"""A first signal waits for a good moment, a second one for nothing."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from smolcluster.utils.stopping import SIGNALS, Interrupted, StopRequest, heeded, interrupt

EACH = pytest.mark.parametrize(
    ("signum", "code", "name"), [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM")]
)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    after = [signal.getsignal(signum) for signum in SIGNALS]
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)
    assert after == before


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@EACH
def test_the_first_signal_waits_for_the_check(signum: int, code: int, name: str) -> None:
    stop = StopRequest()
    with stop.collecting():
        stop.check()
        send(signum)
        with pytest.raises(Interrupted) as caught:
            stop.check()
    assert (caught.value.exit_code, caught.value.is_orderly) == (code, True)
    assert str(caught.value) == f"stopped by {name}"


@EACH
def test_the_second_signal_counts_at_once(signum: int, code: int, name: str) -> None:
    stop = StopRequest()
    with stop.collecting():
        send(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            send(signum)
    assert (caught.value.exit_code, caught.value.is_orderly) == (code, False)
    assert str(caught.value) == f"stopped by {name}"


def test_a_terminal_that_goes_is_a_request_but_no_impatience() -> None:
    stop = StopRequest()
    with stop.collecting():
        send(signal.SIGHUP)
        send(signal.SIGHUP)  # the kernel's, and a shell's
        with pytest.raises(Interrupted) as caught:
            stop.check()
    assert (caught.value.exit_code, caught.value.is_orderly) == (129, True)


def test_under_nohup_a_terminal_that_goes_is_not_heard_of() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heeded() == (signal.SIGINT, signal.SIGTERM)
        stop = StopRequest()
        with stop.collecting():
            send(signal.SIGHUP)
            stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_check_says_it_again_until_somebody_listens() -> None:
    stop = StopRequest()
    stop.note(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(Interrupted, match="SIGTERM"):
            stop.check()


def test_without_a_signal_nothing_stops() -> None:
    stop = StopRequest()
    stop.check()
    with stop.collecting():
        stop.check()
    stop.check()
    stop.note(signal.SIGTERM)
    with pytest.raises(Interrupted):
        stop.check()


def test_a_signal_is_remembered_after_the_block() -> None:
    stop = StopRequest()
    with stop.collecting():
        send(signal.SIGTERM)
    with pytest.raises(Interrupted):
        stop.check()


@pytest.mark.parametrize("handler", [interrupt, signal.SIG_IGN, signal.SIG_DFL])
def test_afterwards_signals_do_what_they_did(handler: signal.Handlers) -> None:
    before = [signal.signal(signum, handler) for signum in SIGNALS]
    try:
        with StopRequest().collecting():
            taken = [signum for signum in SIGNALS if signal.getsignal(signum) != handler]
            ignores = handler is signal.SIG_IGN
            assert taken == [signum for signum in SIGNALS if not ignores or signum != signal.SIGHUP]
        assert [signal.getsignal(signum) for signum in SIGNALS] == [handler] * len(SIGNALS)
    finally:
        for signum, was in zip(SIGNALS, before, strict=True):
            signal.signal(signum, was)


@pytest.mark.parametrize("error", [ValueError("a bug"), Interrupted(signal.SIGINT)])
def test_also_an_error_in_the_block_puts_the_handlers_back(error: BaseException) -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with pytest.raises(type(error)) as caught, StopRequest().collecting():
        raise error
    assert caught.value is error
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_an_interrupted_block_puts_the_handlers_back() -> None:
    stop = StopRequest()
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with pytest.raises(Interrupted), stop.collecting():
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_two_requests_know_nothing_of_each_other() -> None:
    one, other = StopRequest(), StopRequest()
    one.note(signal.SIGINT)
    other.check()
    other.note(signal.SIGTERM)
    for stop, name in ((one, "SIGINT"), (other, "SIGTERM")):
        with pytest.raises(Interrupted, match=name):
            stop.check()


def test_a_request_may_come_from_another_thread() -> None:
    stop = StopRequest()
    thread = threading.Thread(target=stop.note, args=(signal.SIGTERM,))
    thread.start()
    thread.join()
    with pytest.raises(Interrupted) as caught:
        stop.check()
    assert caught.value.is_orderly


@EACH
def test_without_a_request_a_signal_stops_in_the_middle(signum: int, code: int, name: str) -> None:
    with pytest.raises(Interrupted) as caught:
        interrupt(signum, None)
    assert (caught.value.exit_code, caught.value.is_orderly) == (code, False)


def test_no_handler_for_ordinary_errors_swallows_it() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)
