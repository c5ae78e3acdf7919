"""A first signal waits for a good moment, a second one for nothing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from pydantic_core import SchemaError, SchemaValidator, core_schema

from smolcluster.utils.stopping import (
    SIGNALS,
    Interrupted,
    StopRequest,
    heeded,
    interrupt,
    leave_signals,
    signals_as_raised,
)
from waiting import DEADLINE_S


def handlers() -> list[object]:
    return [signal.getsignal(signum) for signum in SIGNALS]


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)],
)
def test_a_signal_while_pydantic_builds_a_schema_is_no_error(
    raised: BaseException, code: int
) -> None:
    """What is raised meanwhile becomes text in an error of pydantic's."""

    class Value:
        def __repr__(self) -> str:
            raise raised

    schema = core_schema.list_schema(core_schema.literal_schema([Value()]))
    with pytest.raises(SchemaError):
        SchemaValidator(schema)
    with pytest.raises(Interrupted) as caught, signals_as_raised():
        SchemaValidator(schema)
    assert caught.value.exit_code == code
    with pytest.raises(ValueError, match="a KeyboardInterrupt is"), signals_as_raised():
        raise ValueError("a KeyboardInterrupt is no error")
    with pytest.raises(ValueError, match="a rank ended"), signals_as_raised():
        raise ValueError("a rank ended: KeyboardInterrupt: ")


@pytest.mark.parametrize(
    ("sent", "code", "is_orderly"),
    [
        ([signal.SIGINT], 130, True),
        ([signal.SIGTERM], 143, True),
        ([signal.SIGINT, signal.SIGINT], 130, False),
        ([signal.SIGINT, signal.SIGTERM], 143, False),
        ([signal.SIGHUP, signal.SIGHUP], 129, True),  # the kernel's, and a shell's: no impatience
    ],
)
def test_the_first_signal_waits_for_the_check_and_the_second_for_nothing(
    sent: list[signal.Signals], code: int, is_orderly: bool
) -> None:
    stop = StopRequest()
    stop.check()
    with stop.collecting():
        stop.check()
        with pytest.raises(Interrupted) as caught:
            for signum in sent:
                send(signum)
            stop.check()
    assert (caught.value.exit_code, caught.value.is_orderly) == (code, is_orderly)
    assert str(caught.value) == f"stopped by {sent[-1].name}"


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


def test_a_request_is_kept_until_somebody_listens_and_is_nobody_elses() -> None:
    stop, other = StopRequest(), StopRequest()
    with stop.collecting():
        send(signal.SIGTERM)
    other.check()
    thread = threading.Thread(target=other.note, args=(signal.SIGINT,))
    thread.start()
    thread.join()
    for each, name in ((stop, "SIGTERM"), (stop, "SIGTERM"), (other, "SIGINT")):
        with pytest.raises(Interrupted, match=name) as caught:
            each.check()
        assert caught.value.is_orderly


def terminated_fork() -> int | None:
    """The exit code of a busy process that was forked and sent SIGTERM, as a user's pool ends its own."""
    context = multiprocessing.get_context("fork")
    is_there = context.Event()

    def work() -> None:
        is_there.set()
        time.sleep(600)

    process = context.Process(target=work)
    process.start()
    assert is_there.wait(DEADLINE_S)
    process.terminate()
    process.join(DEADLINE_S)
    code = process.exitcode
    process.kill()
    return code


@pytest.fixture
def left_to_others() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    leave_signals(*SIGNALS)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_a_process_that_leaves_signals_to_another_one_can_end_those_that_it_starts(
    left_to_others: None,
) -> None:
    for signum in SIGNALS:
        send(signum)
    assert terminated_fork() == -signal.SIGTERM
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with program:
        program.terminate()
        assert program.wait(DEADLINE_S) == -signal.SIGTERM


def test_so_can_one_that_waits_for_a_good_moment() -> None:
    stop = StopRequest()
    with stop.collecting():
        assert terminated_fork() == -signal.SIGTERM
    stop.check()


@pytest.mark.parametrize("handler", [interrupt, signal.SIG_IGN, signal.SIG_DFL])
def test_afterwards_signals_do_what_they_did(handler: signal.Handlers) -> None:
    before = [signal.signal(signum, handler) for signum in SIGNALS]
    try:
        with StopRequest().collecting():
            taken = [signum for signum in SIGNALS if signal.getsignal(signum) != handler]
            ignores = handler is signal.SIG_IGN
            assert taken == [signum for signum in SIGNALS if not ignores or signum != signal.SIGHUP]
        assert handlers() == [handler] * len(SIGNALS)
    finally:
        for signum, was in zip(SIGNALS, before, strict=True):
            signal.signal(signum, was)


def fail() -> None:
    raise ValueError("a bug")


def interrupt_twice() -> None:
    for _ in range(2):
        send(signal.SIGINT)


@pytest.mark.parametrize(("body", "error"), [(fail, ValueError), (interrupt_twice, Interrupted)])
def test_an_error_in_the_block_puts_the_handlers_back(
    body: Callable[[], None], error: type[BaseException]
) -> None:
    before = handlers()
    with pytest.raises(error), StopRequest().collecting():
        body()
    assert handlers() == before


def test_without_a_request_a_signal_stops_in_the_middle() -> None:
    with pytest.raises(Interrupted) as caught:
        interrupt(signal.SIGTERM, None)
    assert (caught.value.exit_code, caught.value.is_orderly) == (143, False)


def test_no_handler_for_ordinary_errors_swallows_it() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)
