"""A child process of a launch: started and listened to.

Each child has a session of its own, so that Ctrl-C at the terminal reaches the launcher only, which then ends
the children in order. Each child's standard input is a pipe that nobody writes to: when the launcher is gone,
however it went, the child reads its end and stops (`--stop-on-stdin-eof`).
"""

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from smolcluster.errors import LaunchError
from smolcluster.launch.sessions import SCREEN_LINES, words_of
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.utils.seed import with_hash_seed
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF, signal_name

OUTPUT_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 1 << 16


class Child:
    """One started process, whose lines of output go to `say`, from a thread; `env`: more variables.

    Raises:
        LaunchError: it cannot be started.
    """

    def __init__(
        self,
        process: LaunchedProcess,
        say: Callable[[str], None],
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - an argument list, no shell
                [*process.argv, STOP_ON_STDIN_EOF],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **with_hash_seed(os.environ),
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONIOENCODING": "utf-8",
                    **env,
                },
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {process.title}: {process.argv[0]}: {error.strerror or error}"
            ) from error
        assert self._popen.stdout is not None  # noqa: S101 - it was asked for
        self._exit_file = Path(process.run_dir, "exits", process.stem)
        self._shown = deque[str](maxlen=SCREEN_LINES)

        def hear(line: str) -> None:
            self._shown.append(line)
            say(line)

        self._reader = threading.Thread(
            target=_hand_on, args=(self._popen.stdout, hear), name=process.title, daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + the signal's number when a signal ended it."""
        code = self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        code = self._popen.poll()
        if code is None:
            return "still runs"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"

    def last_words(self) -> str:
        """The last line about an error that it has said; of one that has ended, all is heard first."""
        self._reader.join(OUTPUT_TIMEOUT_S)
        return words_of("\n".join(self._shown)) or "it left no word"

    def close(self) -> None:
        """End it at once if it runs; take what it still said, note its exit code, and free its pipes."""
        if self.exit_code is None:
            # It may end between the two lines; macOS then says that this is not permitted.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # its pipe may be closed before it can be reaped
            self._popen.wait(OUTPUT_TIMEOUT_S)
        self._reader.join(OUTPUT_TIMEOUT_S)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self.exit_code is None:
            return
        with suppress(OSError):
            self._exit_file.parent.mkdir(exist_ok=True)
            self._exit_file.write_text(f"{self.exit_code}\n")


def _hand_on(output: IO[bytes], say: Callable[[str], None]) -> None:
    with output:
        while line := output.readline(MAX_LINE_BYTES):
            say(line.decode("utf-8", "replace").rstrip("\r\n"))
