"""`smolcluster join` without a run or an address: by an invitation's code, for which it asks."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import psutil

from smolcluster.errors import AuthError, ConfigError, LaunchError, SmolclusterError, WrongCode
from smolcluster.launch.find import asked
from smolcluster.launch.invite.mdns import Announced, find_invitations
from smolcluster.launch.join import address_of, join
from smolcluster.launch.places import own_secret_file
from smolcluster.launch.take_in import JoinOptions
from smolcluster.launch.watch.listing import living
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.runs.paths import LATEST, all_runs
from smolcluster.utils.retry import Deadline
from smolcluster.utils.words import as_command
from smolcluster.wire.connection import ConnectFailed, Connection, connect
from smolcluster.wire.dialling import Address
from smolcluster.wire.invitation import EXCHANGE_S, MOST_WRONG, Handover, ask, read_code
from smolcluster.wire.security import keep_secret

CONNECT_S = 3.0
MOST_ALIKE = 3
"""So many that invite into a run of one name are asked; each of them can try one code by that."""
ETHERNET_MTU = 1500


def come(wanted: JoinOptions, run_id: str | None, place: str | None) -> int:
    """Join the run that lives on this machine, else one by an invitation; returns the exit code.

    Args:
        wanted: what the user says of this machine.
        run_id: the run; None: the one that is announced, or of several the one that the user chooses.
        place: the invitation's `HOST:PORT`, where mDNS does not reach it.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    is_by_ssh = wanted.address is not None or any(
        each.startswith("ssh=") for each in wanted.overrides
    )
    if run_id is None and place is None and (is_by_ssh or living(all_runs())):
        return join(LATEST, wanted)
    say = partial(print_line, SteadyConsole())
    found = find_invitations() if place is None else [_at(place, run_id)]
    for each in found:
        say(f"{'an invitation' if each.run_id is None else f'run {each.run_id}'} at {each}")
    alike = chosen(found, run_id)
    handed = _by_typed_code(alike, say)
    gives, own_file = handed.gives, wanted.secret_file or own_secret_file()
    file = keep_secret(own_file, bytes.fromhex(gives.secret)).path
    server = str(Address(gives.host or handed.host, gives.port))
    option = () if file == own_secret_file() else ("--secret-file", file)
    say(f"run {handed.run_id}: the secret of its cluster is kept in {file}")
    say(f"from now on {as_command('join', server, *option)} needs no code")
    if (note := _small_packets(handed.own_address)) is not None:
        say(note)
    return join(server, replace(wanted, secret_file=file))


def chosen(found: Sequence[Announced], run_id: str | None) -> list[Announced]:
    """All that say they invite into one run: the one of this name, the only one, or the user's choice.

    Raises:
        LaunchError: there is none.
        ConfigError: nobody can say which, or too many say that they are it.
    """
    names = list(dict.fromkeys(str(each.run_id) for each in found if run_id in (None, each.run_id)))
    if not names:
        what = (
            "no run that invites machines" if run_id is None else f"no invitation into run {run_id}"
        )
        raise LaunchError(
            f"{what} is announced in this network: `smolcluster invite` there announces one for 10 minutes; "
            "where mDNS does not reach: --invitation HOST:PORT"
        )
    unclear = f"{len(names)} runs invite machines, name one of them with --run: {', '.join(names)}"
    name = names[0] if len(names) == 1 else asked(names, unclear)
    alike = [each for each in found if str(each.run_id) == name]
    if len(alike) > MOST_ALIKE:
        raise ConfigError(
            f"{len(alike)} machines say that they invite into run {name}: name yours, "
            "--invitation HOST:PORT"
        )
    return alike


@dataclass(frozen=True)
class HandedOver:
    """What came of the right code: the run, what was handed over, and the addresses of both sides."""

    run_id: str
    gives: Handover
    host: str
    own_address: str


def _by_typed_code(alike: Sequence[Announced], say: Callable[[str], None]) -> HandedOver:
    """Ask for the code; on a terminal again where it is wrong, as often as an invitation allows.

    Raises:
        SmolclusterError: it is wrong, or nobody could be asked.
    """
    num_wrong = 0
    while True:
        sys.stderr.write("its code: ")
        sys.stderr.flush()
        typed = sys.stdin.readline()
        try:
            return handed_over(alike, read_code(typed), say)
        except (WrongCode, ConfigError) as error:
            num_wrong += isinstance(error, WrongCode)
            if not (typed and sys.stdin.isatty()) or num_wrong == MOST_WRONG:
                raise
            say(str(error))


def handed_over(alike: Sequence[Announced], code: bytes, say: Callable[[str], None]) -> HandedOver:
    """Ask each machine that says it invites into one run, until one proves that it has the code.

    Raises:
        AuthError: none has it; a WrongCode where one takes another try.
        SmolclusterError: none could be asked.
    """
    errors: list[SmolclusterError] = []
    for each in alike:
        try:
            with closing(_connected(each)) as connection:
                own_address, host = connection.own_address, connection.address
                run_id, gives = ask(connection, code, each.run_id, Deadline(EXCHANGE_S))
                return HandedOver(run_id, gives, host, own_address)
        except SmolclusterError as error:
            errors.append(error)
            if len(alike) > 1:
                say(f"not the one at {each}: {error}")
    kinds = (WrongCode, AuthError, SmolclusterError)
    raise next(each for kind in kinds for each in reversed(errors) if isinstance(each, kind))


def _connected(announced: Announced) -> Connection:
    """A connection by the first of its addresses that answers.

    Raises:
        LaunchError: none does.
    """
    problems = []
    for address in announced.addresses:
        try:
            return connect(address, announced.port, CONNECT_S)
        except ConnectFailed as error:
            problems.append(error.reason)
    raise LaunchError(
        f"the invitation at {announced} does not answer ({', '.join(problems)}): it may be over, or a "
        "firewall between"
    )


def _at(place: str, run_id: str | None) -> Announced:
    address = address_of(place) if re.search(r":\d+$", place) else None
    if address is None:
        raise ConfigError(
            f"--invitation is {place!r}, must be HOST:PORT, as `smolcluster invite` says it"
        )
    return Announced(run_id, (address.host,), address.port)


def _small_packets(own_address: str) -> str | None:
    """A remark on the network that an address of this machine is in; None: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in {each.address for each in addresses}:
            mtu = psutil.net_if_stats()[name].mtu
            if 0 < mtu < ETHERNET_MTU:
                return (
                    f"the way there goes by {name}, whose packets hold {mtu} bytes (a VPN?): if the worker "
                    "hangs before its first step, lower the MTU on both ends"
                )
    return None
