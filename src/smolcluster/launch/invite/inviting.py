"""`smolcluster invite`: machines are invited into a living run, by a code, until ten minutes are over.

A process of its own, on the machine that launched the run: its server knows nothing of it, and a machine that
has joined needs it no more. It listens at a port of its own and speaks `wire/invitation.py`, nothing else.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count

from smolcluster.algorithms.entry import guarded
from smolcluster.configs.machines import LOOPBACK
from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.spec import spec_of
from smolcluster.errors import AuthError, ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.invite.mdns import announcing
from smolcluster.launch.invite.start import CODE, check_invitable, invited
from smolcluster.launch.kept import request_again
from smolcluster.launch.places import own_secret_file
from smolcluster.launch.plan import CLUSTER_FILE, Request
from smolcluster.launch.requests import settings_of
from smolcluster.launch.sessions import exit_code
from smolcluster.launch.take_in import script_of
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import Launched, launched_of
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.server.listening import own_addresses
from smolcluster.utils.cadence import is_power_of_two
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_address
from smolcluster.wire.acceptor import Reception
from smolcluster.wire.connection import Connection, listen
from smolcluster.wire.invitation import (
    EXCHANGE_S,
    Handover,
    Invitation,
    handover,
    new_code,
    read_code,
)
from smolcluster.wire.security import load_secret

EVERYWHERE = "0.0.0.0"  # noqa: S104 - whoever has the code may come
LOOK_S, LOOK_FAR_S = 1.0, 15.0
"""How often a run is looked at: one whose server is here, and one elsewhere."""

Say = Callable[[str], None]


def invite(run: str, *, stop_on_stdin_eof: bool = False) -> int:
    """Invite machines into a run until the invitation or the run is over; returns the exit code."""
    return guarded(partial(_invite, run), stop_on_stdin_eof=stop_on_stdin_eof)


def _invite(run: str) -> None:
    told = os.environ.pop(CODE, None)
    paths = find(run, acts=True)
    launched = launched_of(paths)
    say = partial(print_line, SteadyConsole())
    is_over = partial(_is_over, paths, launched)
    files = (paths.config, paths.root / CLUSTER_FILE)
    while told is not None and not any(each.is_file() for each in files) and not is_over():
        time.sleep(LOOK_S)  # the launch has not written them yet
    if is_over():
        raise LaunchError(f"run {paths.run_id} is over, or has not begun: nobody can join it")
    gives = _gives(paths, launched, is_checked=told is not None)
    code = told or new_code()
    say(invited(code))
    if told is None:
        say("it is open while this runs; Ctrl-C ends it")
    invitation = Invitation(paths.run_id, read_code(code), gives)
    looks_s = LOOK_S if launched is None or launched.server.ssh is None else LOOK_FAR_S
    next_look = Deadline(looks_s)
    with announced_to_all(invitation, say):
        while (why := invitation.over) is None:
            time.sleep(LOOK_S)
            if next_look.expired:
                next_look = Deadline(looks_s)
                if is_over():
                    why = f"run {paths.run_id} is over"
                    break
    say(f"the invitation has ended: {why}")


def _gives(paths: RunPaths, launched: Launched | None, *, is_checked: bool) -> Handover:
    """What is handed over to who joins; `is_checked`: the launch of the run has seen that it can be joined.

    Raises:
        ConfigError: nobody can join the run.
    """
    if launched is not None and (paths.root / CLUSTER_FILE).is_file():
        request = request_again(paths, launched)
        cluster, file, local = settings_of(request, local=False).cluster, None, False
    else:
        settings = load_resolved(paths.config)
        cluster, file = settings.cluster, settings.node.secret_file
        local = set(cluster.host_ip.values()) == {LOOPBACK}
        status = read_snapshot(paths).status
        script = None if launched is None else script_of(launched.workers[0])
        request = Request(spec_of(status.algorithm if status else None), script=script)
    if not is_checked:
        if local and cluster.bind == (LOOPBACK,):
            raise ConfigError(
                f"run {paths.run_id} listens to this machine alone: launch or resume it with --invite"
            )
        check_invitable(request, cluster, local=local)
    port = launched.port if launched else cluster.port
    host = None if local else cluster.host_ip[cluster.server]
    return handover(load_secret(file or own_secret_file()), host, port)


def _is_over(paths: RunPaths, launched: Launched | None) -> bool:
    """Whether the run's server has ended; a machine out of reach does not say so."""
    if launched is None:
        return not is_held(paths.lock)
    with suppress(LaunchError):
        return exit_code(launched.server) is not None
    return False


@contextmanager
def announced_to_all(invitation: Invitation, say: Say) -> Iterator[None]:
    """Answer whoever comes while the block lasts, and announce where."""
    with serving(invitation, EVERYWHERE, say) as port, ExitStack() as stack:
        places = " or ".join(format_address(each, port) for each in own_addresses())
        say(f"where mDNS does not reach: `smolcluster join --invitation {places}`")
        try:
            stack.enter_context(announcing(invitation.run_id, own_addresses(), port))
        except (OSError, RuntimeError) as error:  # the second one without any interface
            say(f"it is not announced by mDNS: {error}")
        yield


class Inviter(Reception):
    """Answers whoever comes: one exchange may take 10 seconds.

    Each wrong code is said; of those who do not come so far the 1st, 2nd, 4th, 8th … is.
    """

    max_strangers = 16

    def __init__(self, invitation: Invitation, address: str, tell: Say) -> None:
        super().__init__(listen([address], 0))
        self._invitation, self._tell = invitation, tell
        self._num_odd = count(1)

    def say(self, trouble: str) -> None:
        self._tell(f"nobody can be answered at the moment: {trouble}")

    def greet(self, _session_id: int, connection: Connection) -> None:
        with closing(connection):
            try:
                self._invitation.answer(connection, Deadline(EXCHANGE_S))
                run_id = self._invitation.run_id
                self._tell(f"{connection.address} has the code, and joins run {run_id}")
            except SmolclusterError as error:
                if isinstance(error, AuthError) or is_power_of_two(next(self._num_odd)):
                    self._tell(f"not invited: {error}")


@contextmanager
def serving(invitation: Invitation, address: str, say: Say) -> Iterator[int]:
    """Answer whoever comes to an address while the block lasts; gives the port."""
    with closing(Inviter(invitation, address, say)) as inviter:
        inviter.open()
        [port] = inviter.ports
        yield port
