"""A test that is skipped for a reason that nobody has listed fails the run."""

import subprocess
import sys
from pathlib import Path

import pytest

import skips
from waiting import DEADLINE_S

TESTS = Path(skips.__file__).parent


@pytest.mark.parametrize(
    ("reason", "code", "num_processes"),
    [("nobody knows why", 1, "1"), ("MNIST is not in ../shared/data/MNIST/raw", 0, "0")],
)
def test_a_skip_that_is_not_on_the_list_fails_the_run(
    tmp_path: Path, reason: str, code: int, num_processes: str
) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from skips import pytest_addoption, pytest_sessionfinish\n"
    )
    (tmp_path / "test_it.py").write_text(
        f"import pytest\ndef test_a(): pytest.skip({reason!r})\ndef test_b(): pass\n"
    )
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", num_processes)
    done = subprocess.run(
        [*command, "--refuse-skips", str(tmp_path)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    line = f"skipped, and not on the list of tests/skips.py: test_it.py::test_a: Skipped: {reason}"
    assert (line in done.stdout) is bool(code)
