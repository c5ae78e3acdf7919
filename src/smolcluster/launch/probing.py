"""`link_probe` on machines: a listener on one, questions from the others.

Its text goes by standard input to whatever Python a machine has.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from smolcluster.errors import LaunchError
from smolcluster.launch import link_probe
from smolcluster.launch.host import HAS_PYTHON3, Done, Host, shell_path
from smolcluster.utils.words import one_line

END_SCRIPT = """\
kill {pid} 2>/dev/null
n=0; while kill -0 {pid} 2>/dev/null && [ $n -lt 20 ]; do sleep 0.1; n=$((n+1)); done"""
RELEASE_S = 60.0
"""The longest time until a port is released: uv may have to fetch a Python."""


class Place(BaseModel):
    """What came of an address; `port`: that on which it listens there, 0: none."""

    state: Literal["listening", "busy", "foreign", "refused"]
    port: int
    why: str = ""


class Listener(BaseModel):
    """What the probe says that listens.

    Attributes:
        places: what came of each address.
        own: its machine's addresses.
        holder: who else listens on the wanted port; empty: unknown.
        free: the next port in which nobody listens; 0: none is near.
        pid: its process; 0: it has found nowhere to listen.
    """

    places: dict[str, Place]
    own: tuple[str, ...]
    holder: str = ""
    free: int = 0
    pid: int

    @property
    def ports(self) -> dict[str, int]:
        return {address: place.port for address, place in self.places.items() if place.port}

    def end(self, host: Host) -> None:
        """Stop it before its time, and wait until its port is free; where that fails it ends by itself."""
        if self.pid:
            with suppress(LaunchError):
                host.run(END_SCRIPT.format(pid=self.pid))


def probe_source() -> bytes:
    return Path(link_probe.__file__).read_bytes()


def python_lines(own: str = "") -> str:
    """Shell lines that let `python` be any Python there: best the one at `own`, which a run uses too.

    uv may fetch one only where there is no such environment yet.
    """
    python = shell_path(own)
    first = f'if [ -x {python} ]; then python() {{ {python} "$@"; }}\nel' if own else ""
    uv = "uv run --no-project" + " --no-python-downloads" * bool(own)
    return f"""
{first}if {HAS_PYTHON3} &&
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 </dev/null
then python() {{ python3 "$@"; }}
elif command -v uv >/dev/null 2>&1; then python() {{ {uv} --quiet python "$@"; }}
else echo 'there is neither python3 (3.9 or newer) nor uv' >&2; exit 69; fi"""


def probe_script(own: str, *words: object) -> str:
    """What asks the probe; it reads its text from standard input."""
    return f"{python_lines(own)}\npython - {' '.join(shell_path(str(word)) for word in words)}"


def read_listener(done: Done) -> Listener | None:
    """The listener that was started; None: none was."""
    try:
        return Listener.model_validate_json(done.stdout)
    except ValidationError:
        return None


@contextmanager
def listening(host: Host, script: str, limit_s: float) -> Iterator[Listener]:
    """Let a machine be measured until the block ends; `script` asks the probe to listen.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    done = host.run(script, stdin=probe_source(), timeout_s=limit_s)
    listener = read_listener(done)
    if listener is None:
        raise _unmeasured(host, done)
    try:
        yield listener
    finally:
        listener.end(host)


def release(host: Host, port: int) -> bool:
    """End the listeners of this port that cut launchers have left on a machine; whether there were any."""
    with suppress(LaunchError):
        return ask(host, probe_script("", "release", port), RELEASE_S).get("released") is True
    return False


def ask(host: Host, script: str, limit_s: float) -> dict[str, Any]:
    """What the probe says on a machine: the last line that it prints, after any words of welcome.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    done = host.run(script, stdin=probe_source(), timeout_s=limit_s)
    with suppress(ValueError, IndexError):
        found = json.loads(done.stdout.splitlines()[-1])
        if done.ok and isinstance(found, dict):
            return found
    raise _unmeasured(host, done)


def _unmeasured(host: Host, done: Done) -> LaunchError:
    why = one_line(done.stderr_tail)
    return LaunchError(f"{host.node} ({host.shown}): its links cannot be measured: {why}")
