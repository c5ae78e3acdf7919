"""`smolcluster ship`: a process that pushes a run's logs until it is told to end."""

import signal
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import ConfigError, RunBusy, SmolclusterError, TryAgain
from smolcluster.observability.shipping.loki import LokiClient
from smolcluster.observability.shipping.shipper import Shipper
from smolcluster.observability.shipping.spool import Spool
from smolcluster.utils.locks import held
from smolcluster.utils.stopping import SIGNALS, at_stdin_eof
from smolcluster.utils.units import format_bytes
from smolcluster.utils.words import as_command

LOCK = ".shipped.lock"
FLUSH_S = 5.0
"""From being told to end to the end: what has not been pushed by then stays in its files."""
HURRY_S = 1.0
"""How much longer a push that is under way may take."""
ONCE_S = 30.0
"""How long `--once` tries while Loki takes nothing."""


def ship(
    logs: Path, base: str, only: Collection[str], *, once: bool, stop_on_stdin_eof: bool
) -> int:
    """Push the logs in a folder to Loki until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    Args:
        logs: the folder.
        base: Loki's address, such as `http://192.168.1.10:3100`.
        only: stems of logs; all when there are none.
        once: push what is there now, and end.
        stop_on_stdin_eof: end with the standard input, too.

    Raises:
        ConfigError: the address or the folder is wrong.
        RunBusy: another process ships these logs.
        TryAgain: with `once`: not all of it could be pushed.
        SmolclusterError: with `once`: Loki has refused some of it, or it cannot be read.
    """
    loki, lock = LokiClient(base), logs / LOCK

    def refuse(holder: str) -> None:
        raise RunBusy(f"{holder} ships the logs in {logs} already")

    with held(lock, refuse, lambda reason: ConfigError(f"{lock} cannot be made: {reason}")):
        shipper = Shipper(Spool(logs, only), loki.push, _warn)
        if once:
            arrived = shipper.flush(ONCE_S, patient=True)
            loki.close()
            if shipper.refusal or shipper.unreadable:
                raise SmolclusterError(_left(shipper, logs, base))
            if not arrived:
                raise TryAgain(f"{_left(shipper, logs, base)}: is Loki up?")
        elif not _until_told(shipper, stop_on_stdin_eof=stop_on_stdin_eof):
            _warn(f"{_left(shipper, logs, base)}; {as_command('ship', '--once')} does it later")
    return 0


def _left(shipper: Shipper, logs: Path, base: str) -> str:
    if shipper.refusal:
        return f"{base} has refused some of the logs in {logs}, which stay there: {shipper.refusal}"
    if shipper.unreadable:
        return shipper.unreadable
    return f"{format_bytes(shipper.spool.left_nbytes())} of logs have not been pushed to {base}"


def _until_told(shipper: Shipper, *, stop_on_stdin_eof: bool) -> bool:
    """Run it in a thread, so that a receiver which says nothing delays no end; whether all arrived."""
    asked, arrived = threading.Event(), threading.Event()

    def run() -> None:
        if shipper.run(asked, FLUSH_S):
            arrived.set()

    for signum in SIGNALS:
        signal.signal(signum, lambda *_: asked.set())
    if stop_on_stdin_eof:
        at_stdin_eof(asked.set)
    thread = threading.Thread(target=run, name="ship", daemon=True)
    thread.start()
    while thread.is_alive() and not asked.is_set():
        asked.wait(1.0)
    thread.join(FLUSH_S + HURRY_S)
    return arrived.is_set()


def _warn(sentence: str) -> None:
    with suppress(OSError):  # its terminal may have gone
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} warning: {sentence}\n")
        sys.stderr.flush()
