import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smolcluster.observability.terminal import SteadyConsole, displayable, print_line


def test_a_console_whose_reader_is_gone_falls_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as file:
        console = SteadyConsole(file=file)
        print_line(console, "one")
        print_line(console, "two")
        assert console.quiet


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_console_that_cannot_be_written_falls_silent() -> None:
    with Path("/dev/full").open("w", buffering=1) as file:
        console = SteadyConsole(file=file)
        console.print("one")
        assert console.quiet


def test_a_reader_that_leaves_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from smolcluster.observability.logs import NodeLog; "
        "from smolcluster.observability.terminal import SteadyConsole, print_line; "
        "log = NodeLog('server', 'a', console=SteadyConsole(file=sys.stdout)); "
        "sys.stdin.readline(); [log.logger.info('line') for _ in range(3)]"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 0


def test_a_closed_console_falls_silent() -> None:
    file = io.StringIO()
    console = SteadyConsole(file=file)
    file.close()
    print_line(console, "one")
    assert console.quiet


def test_what_the_console_cannot_encode_is_replaced() -> None:
    raw = io.BytesIO()
    console = SteadyConsole(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    print_line(console, "τ · 3")
    assert raw.getvalue() == b"? ? 3\n"
    assert not console.quiet


def test_emoji_names_and_markup_are_printed_as_they_are() -> None:
    console = SteadyConsole(file=io.StringIO())
    assert displayable(console, ":smile: [bold]x\t1") == r":smile: [bold]x\t1"
    print_line(console, ":smile: [bold]x[/bold]")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ":smile: [bold]x[/bold]\n"
