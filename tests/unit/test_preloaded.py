"""Programs that tests start are forked from a process that has loaded PyTorch, where the system can do it."""

import os
import sys
from pathlib import Path

import preloaded
from processes import Processes


def test_programs_of_tests_are_forked(tmp_path: Path) -> None:
    environ = Processes(tmp_path).environ
    program = [sys.executable, "-m", "smolcluster.cli"]
    assert preloaded.can_fork(program, environ) == hasattr(os, "pidfd_open")
    assert not preloaded.can_fork(program, environ | {"OMP_NUM_THREADS": "3"})
