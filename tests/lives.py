"""The life of a worker process whose server is a door by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from harness import SECRET, Outcome, local_settings
from peers import DEADLINE_S, Hand, HandledDoor, hello, logger
from smolcluster.configs.schema import NodeConfig, RunConfig
from smolcluster.server.link import Participant, WorkerSetup, follow
from smolcluster.training.build import TrainingContext
from smolcluster.wire.dialling import Address
from smolcluster.wire.messages import End, Goodbye, LeaseKey, Pull, Ready, Welcome

P = TypeVar("P", bound=Participant)

LEASE = LeaseKey(incarnation="0123abcd", epoch=0, start=0, stop=32, grant=1)


@dataclass
class Life(Generic[P]):
    """A worker that follows a door, and what it made."""

    door: HandledDoor
    participant: Callable[[Welcome, TrainingContext], P]
    lines: list[str] = field(default_factory=list)
    made: list[P] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def begin(
        self,
        participant: Callable[[Welcome, TrainingContext], P] | None = None,
        *,
        node: NodeConfig | None = None,
        start_timeout_s: float = DEADLINE_S,
        whom: str = "the server",
    ) -> Outcome:

        def make(welcome: Welcome, training: TrainingContext) -> P:
            self.made.append((participant or self.participant)(welcome, training))
            return self.made[-1]

        place = WorkerSetup(
            node=node or NodeConfig(device="cpu"),
            hello=hello(),
            address=Address("127.0.0.1", self.door.port),
            secret=SECRET,
            start_timeout_s=start_timeout_s,
            log=logger(self.lines),
            whom=whom,
            on_run_known=lambda run: self.runs.append(run.run_id),
        )
        return Outcome("worker", lambda: follow(place, make))

    def taken_part(
        self,
        run: RunConfig | None = None,
        incarnation: str = LEASE.incarnation,
        bucket_bytes: int = 1 << 20,
    ) -> tuple[Hand, Ready]:
        """The next session: the worker is let in, and works."""
        run = run or run_config()
        hand = self.door.admit(run, incarnation=incarnation, bucket_bytes=bucket_bytes)
        ready = hand.hear_a(Ready)
        hand.hear_a(Pull)
        return hand, ready


def run_config(run_id: str = "run-1", *overrides: str) -> RunConfig:
    """A run whose workers have time to come back."""
    settings = local_settings(f"reconnect_timeout_s={DEADLINE_S}", *overrides)
    return settings.run_config(run_id, "edp")


def end(hand: Hand, ok: bool = True, sentence: str = "every sample has been applied") -> None:
    """Say that the run is over, and wait until the worker has closed."""
    hand.say(End(ok=ok, sentence=sentence))
    hand.hear_a(Goodbye)
    hand.hear_the_end()
    hand.leave()
