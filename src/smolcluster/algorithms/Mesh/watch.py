"""What ranks of a mesh know of each other's end: who failed first, who has fallen silent, who hangs.

Backends only say that some connection broke, or wait. So a thread of each rank tells a key-value store each
second what its rank does and how often it has got on, and reads whether somebody has failed; rank 0's judges
all of them. The store is rank 0's and ends with it. Another thread sees by its own clock when that does not
answer any more, since a call of it has no timeout.

* A rank that raises an error writes it with its stack, if no other one has before.
* A rank whose thread has not been heard of for `silence_s` (stopped, killed, its machine gone) is named; when
  a rank has lost a connection, or no rank gets on, `GONE_S` is enough. If no rank is silent when a connection
  is lost, that connection is named.
* If no rank gets on for `hang_timeout_s`, or five times as long as one ever took, those are named that are
  not waiting for others. Of an order that ranks have done before, `LEAST_ORDER_S` is enough, or ten times as
  long as it ever took.
* A rank looks whether the processes that must be there are: its launcher, or the ranks that it has started.

Whatever it was, each rank has its stacks in its log and ends within `END_S`.
"""

import faulthandler
import json
import logging
import math
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from smolcluster.algorithms.Mesh.store import GroupStore
from smolcluster.errors import PeerLost, SmolclusterError, TryAgain

BEAT_S = 1.0
SILENCE_S = 60.0
GONE_S = 5.0
"""Silence of a rank that is believed to be gone when another has lost a connection, or no rank gets on."""
END_S = {True: 25.0, False: 8.0}
"""How long rank 0, which leaves a record, and the others have to end by themselves."""
SETUP_S = 1800.0
"""Before the first step, in which rank 0 may download a dataset."""
SLOWER = 5.0
LEAST_ORDER_S, ORDER_SLOWER = 30.0, 10.0
TAKES_LONGER = "; if a step may take longer, raise hang_timeout_s (--hang-timeout)"
MOST_STACK = 20_000
FAILED, LOST = "failed", "lost"
"""Who has failed first; and the first rank that has lost a connection, with what it says of it."""


@dataclass(frozen=True)
class Failure:
    """Why a mesh ends.

    Attributes:
        rank: the first that failed.
        reason: an end of a sentence.
        stack: of its error, else empty.
    """

    rank: int
    host: str
    reason: str
    stack: str = ""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} failed first: {self.reason}"


@dataclass(frozen=True)
class Beat:
    """What a rank says each second.

    Attributes:
        number: of its beats.
        num_done: how often it has got on.
        doing: what it does now.
        waits: whether that is waiting for others.
        counted: what its process has counted of its work by now.
    """

    number: int
    num_done: int
    doing: str
    waits: bool
    host: str
    counted: Mapping[str, Any] = field(default_factory=dict)


BEATS, FAILURES = TypeAdapter(Beat), TypeAdapter(Failure)
"""What is read from the store is looked at: another rank, of other code, may have written it."""
MOST_TOLD = 100_000
"""Bytes that a rank may tell of itself, or of a failure."""


class Judge:
    """Says from all ranks' beats which one has failed; pure but for what it remembers of them."""

    def __init__(
        self, *, silence_s: float, hang_timeout_s: float, now: float, remedy: str = ""
    ) -> None:
        """`remedy`: against a hang that is none."""
        self._remedy = remedy
        self._silence_s, self._hang_timeout_s = silence_s, hang_timeout_s
        self._longest_orders: dict[str, float] = {}
        self._most_s = hang_timeout_s
        """How long it may be at least that no rank gets on."""
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
        self._moved, self._longest = now, 0.0
        self._looked = now
        self._lost_since: float | None = None

    def judge(self, beats: Mapping[int, Beat], now: float, lost: Failure | None) -> Failure | None:
        """Whether the mesh must end now.

        Args:
            beats: the newest one of each rank that has had any.
            lost: the rank that has lost a connection first.
        """
        if _stood_still(now - self._looked, self._silence_s):
            self._heard = dict.fromkeys(self._heard, now)
            self._moved = now
        self._looked = now
        for rank, beat in beats.items():
            before = self._beats.get(rank)
            if before is None or before.number != beat.number:
                self._heard[rank] = now
            if before is None or before.num_done != beat.num_done:
                has_begun = before is not None and before.num_done > 0
                if has_begun and self._beats.keys() == beats.keys():
                    self._longest = max(self._longest, now - self._moved)
                self._moved = now
        self._beats = dict(beats)
        silent = self._silent(now, is_trouble=lost is not None)
        return silent or self._broken(now, lost) or self._hanging(now)

    def ordered(self, order: str) -> None:
        """The ranks begin to do this. Any thread."""
        longest_s = self._longest_orders.get(order, math.inf)
        self._most_s = min(self._hang_timeout_s, max(LEAST_ORDER_S, ORDER_SLOWER * longest_s))

    def done(self, order: str, took_s: float) -> None:
        """The ranks have done it. Any thread."""
        self._longest_orders[order] = max(self._longest_orders.get(order, 0.0), took_s)

    def _silent(self, now: float, *, is_trouble: bool) -> Failure | None:
        allowed = min(GONE_S, self._silence_s) if is_trouble else self._silence_s
        for rank, heard in sorted(self._heard.items(), key=lambda each: each[1]):
            if now - heard > allowed:
                beat = self._beats[rank]
                return Failure(
                    rank,
                    beat.host,
                    f"nothing was heard of it for {now - heard:.0f} s, so that it was killed or stopped, "
                    f"or its machine is gone; it was last at: {beat.doing}",
                )
        return None

    def _broken(self, now: float, lost: Failure | None) -> Failure | None:
        """A rank that is gone would have been silent for `GONE_S` by now."""
        if lost is None:
            return None
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since <= GONE_S + 2 * BEAT_S:
            return None
        reason = f"{lost.reason}, but no rank is silent: check the network between their machines"
        return replace(lost, reason=reason)

    def _hanging(self, now: float) -> Failure | None:
        has_begun = any(beat.num_done for beat in self._beats.values())
        slow = SLOWER * self._longest if has_begun else SETUP_S
        if not self._beats or now - self._moved <= max(self._most_s, slow):
            return None
        if (silent := self._silent(now, is_trouble=True)) is not None:
            return silent
        busy = [rank for rank, beat in self._beats.items() if not beat.waits]
        rank = min(busy or self._beats, key=lambda each: (self._beats[each].num_done, each))
        told = "; ".join(f"rank {rank}: {beat.doing}" for rank, beat in sorted(self._beats.items()))
        return Failure(
            rank,
            self._beats[rank].host,
            f"no rank has got on for {now - self._moved:.0f} s ({told}){self._remedy}",
        )


class Watch:
    """This rank's watch.

    Attributes:
        failure: who has failed first, once that is known.
    """

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        world_size: int,
        log: logging.Logger,
        *,
        node: str,
        hang_timeout_s: float,
        silence_s: float = SILENCE_S,
        hang_remedy: str = "",
        look: Callable[[], Failure | None] = lambda: None,
        on_failure: Callable[[Failure], None] = lambda _: None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Begin to watch.

        Args:
            node: this rank's machine, by which others name it.
            hang_remedy: what to do, in a message, where ranks that need longer are taken for a hang.
            look: says of a process that must be there that it has ended; a thread calls it each second.
            on_failure: hears once who has failed first.
            leave: ends the process at once.
        """
        self.rank, self.world_size, self.node = rank, world_size, node
        self.store, self._log, self._leave = store, log, leave
        self._on_failure = on_failure
        self._silence_s = min(silence_s, hang_timeout_s)
        self._look = look
        self._judge = Judge(
            silence_s=self._silence_s,
            hang_timeout_s=hang_timeout_s if rank == 0 else math.inf,
            now=time.monotonic(),
            remedy=hang_remedy,
        )
        self._num_done, self._doing, self._is_waiting = 0, "the beginning", False
        self._is_resting = False
        self._count: Callable[[], Mapping[str, Any]] = dict
        self._newest: dict[int, Beat] = {}
        self._numbers: dict[int, int] = {}
        self._store_answered_at = time.monotonic()
        self._own_failure: Failure | None = None
        self._lost_peer: Failure | None = None
        self._closing = threading.Event()
        self.failure: Failure | None = None
        self._failure_known = threading.Event()
        self._threads = [
            threading.Thread(target=each, name=each.__name__.strip("_"), daemon=True)
            for each in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def note(self, doing: str, *, waits: bool = False) -> None:
        """The rank has got on, and now does this; `waits`: it is for other ranks."""
        self._doing, self._is_waiting, self._is_resting = doing, waits, False
        self._num_done += 1

    def rest(self) -> None:
        """The ranks have nothing to do until the next `note`, however long that is."""
        self.note("waiting for what is to be done", waits=True)
        self._is_resting = True

    @contextmanager
    def ordered(self, order: str) -> Iterator[None]:
        """The ranks do this together, and `rest` when it has come to a good end."""
        began = time.monotonic()
        self._judge.ordered(order)
        self.note(order)
        yield
        self._judge.done(order, time.monotonic() - began)
        self.rest()

    def tell(self, count: Callable[[], Mapping[str, Any]]) -> None:
        """Tell rank 0 what `count` returns, values of JSON; a thread calls it each second."""
        self._count = count

    def take_newest(self) -> Iterator[tuple[int, Beat]]:
        """On rank 0: the newest beat of each other rank that has had one since the last call."""
        while self._newest:
            yield self._newest.popitem()

    def close(self) -> None:
        """The rank ends as it should."""
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell others of an error that ends the block; one that they caused says which of them did.

        Raises:
            PeerLost: another rank has failed, which is named.
        """
        try:
            yield
        except PeerLost as error:
            failure = self.first_failed(error)
            self._let_others_read()
            if failure is None:
                raise
            raise PeerLost(str(failure)) from error
        except Exception as error:
            self._own_failure = failure_of(error, self.rank, self.node)
            self._failure_known.wait(3 * BEAT_S)  # until it is written
            self._let_others_read()
            raise
        finally:
            self.close()

    def first_failed(self, error: PeerLost) -> Failure | None:
        """Who has failed first where this rank has lost another one; None: nobody knows."""
        self._lost_peer = Failure(self.rank, self.node, str(error))
        self._failure_known.wait(2 * GONE_S)
        return self.failure

    def _let_others_read(self) -> None:
        """The store may end with rank 0."""
        if self.rank == 0:
            time.sleep(2 * BEAT_S)

    def _beat(self) -> None:
        """Talk to the store until the rank is over, or the store lost, as it is after a good end."""
        with suppress(RuntimeError):
            self._talk()

    def _talk(self) -> None:
        number = 0
        while True:
            number += 1
            self._num_done += self._is_resting
            doing = self._num_done, self._doing, self._is_waiting
            beat = Beat(number, *doing, self.node, self._count())
            self.store.set(_beat_key(self.rank), json.dumps(asdict(beat)))
            if self._lost_peer is not None:
                self.store.compare_set(LOST, "", json.dumps(asdict(self._lost_peer)))
            if (failure := self._own_failure or self._judged()) is not None:
                self.store.compare_set(FAILED, "", json.dumps(asdict(failure)))
            if self.store.check([FAILED]):
                self._fail(told_failure(self.store.get(FAILED)))
                return
            self._store_answered_at = time.monotonic()
            has_news = self._own_failure or self._lost_peer
            is_over = self._closing.wait(0.2 if has_news else BEAT_S)
            if is_over and self._own_failure is None:  # an error is told while this process lives
                return

    def _judged(self) -> Failure | None:
        ranks = range(self.world_size) if self.rank == 0 else range(1)
        beats = {
            rank: beat
            for rank in ranks
            if self.store.check([_beat_key(rank)])
            and (beat := told_beat(self.store.get(_beat_key(rank)))) is not None
        }
        for rank, beat in beats.items():
            if rank and beat.counted and beat.number != self._numbers.get(rank):
                self._numbers[rank] = beat.number
                self._newest[rank] = beat
        lost = told_failure(self.store.get(LOST)) if self.store.check([LOST]) else None
        return self._judge.judge(beats, time.monotonic(), lost)

    def _guard(self) -> None:
        """See by our own clock that the store answers, and that the processes live that must be there."""
        looked = time.monotonic()
        while not self._closing.wait(BEAT_S):
            now = time.monotonic()
            if _stood_still(now - looked, self._silence_s):
                self._store_answered_at = now
            looked = now
            if (ended := self._look()) is not None:
                self._own_failure = ended
                # until it is written, unless a rank has said why it ends
                self._failure_known.wait(3 * BEAT_S)
                self._fail(ended)
            elif now - self._store_answered_at > self._patience_s:
                self._fail(Failure(0, "", "the store, which is rank 0's, does not answer"))
            if self._failure_known.is_set():
                self._end()
                return

    @property
    def _patience_s(self) -> float:
        """How long the store may be silent."""
        has_lost_it = not self._threads[0].is_alive()
        return GONE_S if self._lost_peer is not None or has_lost_it else self._silence_s

    def _fail(self, failure: Failure) -> None:
        """Let it be known here; with the stack of its error, or what this rank does where there is none."""
        if self._failure_known.is_set():
            return
        self.failure = failure
        # with its own error this process ends
        if failure != self._own_failure or not failure.stack:
            told = {"stack": failure.stack} if failure.stack else {"stacks": stacks()}
            self._log.debug("%s", failure, extra=told)  # what ends the process says it aloud
        self._on_failure(failure)
        self._failure_known.set()

    def _end(self) -> None:
        """Let the process end by itself if it can."""
        if not self._closing.wait(END_S[self.rank == 0]):
            self._log.error("%s; rank %d waits still, and is ended", self.failure, self.rank)
            time.sleep(BEAT_S / 2)  # for the log
            self._leave(TryAgain.exit_code)


def _stood_still(pause_s: float, silence_s: float) -> bool:
    """Whether this process was stopped between two looks, so that others' silence means nothing."""
    return pause_s > max(silence_s / 2, 2 * BEAT_S)


def told_beat(text: bytes) -> Beat | None:
    """What a rank has said of itself; None: nothing that a rank says, as if it were silent."""
    try:
        return BEATS.validate_json(text[:MOST_TOLD])
    except ValueError:
        return None


def told_failure(text: bytes) -> Failure:
    """Who has failed first, as far as what was said of it can be read."""
    try:
        return FAILURES.validate_json(text[:MOST_TOLD])
    except ValueError:
        return Failure(0, "", "what the rank that failed has said of it cannot be read")


def failure_of(error: BaseException, rank: int, node: str) -> Failure:
    """What others are told of an error."""
    stack = "".join(traceback.format_exception(error))[-MOST_STACK:]
    kind = "" if isinstance(error, SmolclusterError) else f"{type(error).__name__}: "
    return Failure(rank, node, kind + " ".join(str(error).split()), stack)


def launcher_gone(launcher: int | None, rank: int, node: str) -> Failure | None:
    """Whether the process `launcher`, which has started this rank, has ended; None: nobody must be there."""
    if launcher is None or os.getppid() == launcher:
        return None
    return Failure(rank, node, "the process that had started it has ended")


def stacks() -> str:
    """Of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"
