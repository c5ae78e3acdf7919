"""What `import smolcluster` gives."""

import subprocess
import sys

import pytest

import smolcluster


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, smolcluster\n"
        "assert smolcluster.errors.ConfigError.exit_code == 2\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "smolcluster.Workload\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", smolcluster.__all__)
def test_each_public_name_is_there(name: str) -> None:
    thing = getattr(smolcluster, name)
    assert getattr(smolcluster, name) is thing
    assert name in dir(smolcluster)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="'Worklod'"):
        smolcluster.Worklod  # noqa: B018
