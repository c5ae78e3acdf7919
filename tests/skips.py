"""Tests that a machine may skip, each with what it lacks; `--refuse-skips` has any other one fail the run."""

import os
import re
import shutil
import sys
from collections.abc import Iterable

import pytest

IS_LINUX = sys.platform.startswith("linux")
IS_ROOT = os.geteuid() == 0
HAS_LAB = IS_LINUX and IS_ROOT
HAS_PACKAGES = HAS_LAB and shutil.which("apt-get") is not None
"""Whether `scripts/test.sh` installs the programs that tests need."""

ALLOWED = {
    # what is said, by the machines on which it may be
    r"root may write anywhere": IS_ROOT,
    r"MNIST is not in .*|GPT-2's tokenizer is not in .*|there is no .*shakespeare.*": True,
    r"not a git checkout": True,
    r"no IPv6 here": True,
    r"uv's cache lacks the build backend, and nothing is downloaded here": True,
    r".* has no address in any network: .*|no systemd here to judge the unit": True,
    r"the system has no /dev/full|needs /proc and prlimit|of Linux": not IS_LINUX,
    r"Linux has abstract names|127\.0\.0\.2 is an address of Linux only": not IS_LINUX,
    r"(this machine has )?one loopback address only": not IS_LINUX,
    r"the lab needs .*|no lab on this machine: .*": not HAS_LAB,
    r"Slurm's nodes are namespaces, .*|no network namespace can be made here": not HAS_LAB,
    r"no small disk can be mounted here": not HAS_LAB,
    r"\S+ is not installed|needs tmux|no nginx|needs Chromium and its driver: .*": not HAS_PACKAGES,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "fail if a test is skipped that tests/skips.py does not allow"
    parser.addoption("--refuse-skips", action="store_true", help=said)


def is_allowed(reason: str) -> bool:
    said = reason.removeprefix("Skipped: ")
    return any(allowed and re.fullmatch(pattern, said) for pattern, allowed in ALLOWED.items())


def refused(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """A line for each test that was skipped for a reason that the list does not have on this machine."""
    lines = set()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not is_allowed(reason):
            lines.add(f"{report.nodeid}: {reason}")
    return sorted(lines)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have skips that are not on their list fail the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--refuse-skips"):
        return  # a process of pytest-xdist says nothing itself
    lines = refused(reporter.stats.get("skipped", []))
    for line in lines:
        reporter.write_line(f"\nskipped, and not on the list of tests/skips.py: {line}")
    if lines and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
