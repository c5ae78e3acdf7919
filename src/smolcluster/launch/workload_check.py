"""A user's workload is called on this machine, in a process of its own, before anything is sent to others.

A machine that trains nothing itself may lack what the others have, such as a file, a package or a GPU: what
fails there is said, and keeps nobody from going on.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from smolcluster.errors import ConfigError, SmolclusterError, UserCodeError
from smolcluster.utils.units import format_duration

PATIENCE_S = 60.0
"""How long the call is waited for: the data of some take minutes to be read."""
Wait = Callable[[], None]


@contextmanager
def calling(
    name: str | None,
    args: Mapping[str, Any],
    seed: int,
    say: Callable[[str], None],
    env: Mapping[str, str] | None,
) -> Iterator[Wait]:
    """Call the function of that name (None: there is none) while the block runs; it is ended with the block.

    The block is given what waits for the call. `env` is what this machine's processes get besides, where it
    trains itself; None: it does not, and what is wrong is only said.

    Raises:
        UserCodeError, ConfigError: by that; the function raises an exception, or makes no workload.
    """
    if name is None:
        yield lambda: None
        return
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "smolcluster.launch.workload_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )
    assert child.stdin is not None  # noqa: S101 - it was asked for
    with suppress(BrokenPipeError), child.stdin as asks:
        json.dump({"name": name, "args": dict(args), "seed": seed}, asks)
    child.stdin = None  # `communicate` would write to it

    def wait() -> None:
        try:
            told, _ = child.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            say(
                f"the workload takes more than {format_duration(PATIENCE_S)} to be called: going on"
            )
        else:
            _judge(told, say, trains_here=env is not None)

    try:
        yield wait
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _judge(told: str, say: Callable[[str], None], *, trains_here: bool) -> None:
    wrong = json.loads(told or "{}")
    if not wrong:
        return
    sentence, frames = wrong["sentence"], wrong["frames"]
    if not trains_here:
        say(f"the workload cannot be called on this machine, which does not train it: {sentence}")
    elif frames is None:
        raise ConfigError(sentence)
    else:
        raise UserCodeError(sentence, frames)


def main() -> None:
    """In the child: call what standard input names, and tell on standard output what was wrong."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is for nobody
    wanted = json.load(sys.stdin)
    try:
        from smolcluster.training.named import load_named  # noqa: PLC0415 - PyTorch may be missing

        load_named(wanted["name"], wanted["args"], wanted["seed"])
    except (SmolclusterError, ImportError) as error:
        json.dump({"sentence": str(error), "frames": getattr(error, "frames", None)}, told)
    told.close()


if __name__ == "__main__":
    main()
