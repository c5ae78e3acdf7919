"""The shell scripts: clean, portable to macOS (bash 3.2, BSD tools), and at home in any folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [*PROJECT.glob("*.sh"), *(PROJECT / "scripts").glob("*.sh"), PROJECT / ".ci" / "run"]
)
NOT_PORTABLE = {
    "associative array": r"\b(declare|local|typeset)\s+-[a-zA-Z]*[An]",
    "mapfile": r"\b(mapfile|readarray|coproc)\b",
    "case conversion": r"\$\{\w+(,,?|\^\^?)",
    "parameter transformation": r"\$\{\w+@[A-Za-z]\}",
    "negative substring or index": r"\$\{\w+\[-\d+\]",
    "|&, &>> and ;&": r"\|&|&>>|;;?&",
    "BASHPID, EPOCH…": r"\$\{?(BASHPID|EPOCHSECONDS|EPOCHREALTIME|SRANDOM)\b",
    "wait -n": r"\bwait\s+-n\b",
    "printf %(date)T": r"%\([^)]*\)T",
    "test -v": r"\[\[?\s+-v\s",
    "an array that may be empty": r"\$\{\w+\[[@*]\]\}",
    "sed -i, -r": r"\bsed\s+(-\w+\s+)*-\w*[ir]",
    "readlink -f": r"\breadlink\s+-\w*[fem]",
    "realpath": r"\brealpath\b",
    "timeout": r"(^|[|;&(]\s*|\b(?:if|then|do|exec)\s+)timeout\s",
    "date -d, -I, %N": r"\bdate\s+.*(-d\b|--date|-I|%N)",
    "grep -P": r"\bgrep\s+(-\w+\s+)*-\w*P",
    "GNU find, xargs": r"-printf\b|\bxargs\s+.*(-r\b|-d\b)",
    "stat -c": r"\bstat\s+-c",
    "mktemp with options": r"\bmktemp\s+.*(--|-p\b)",
    "cp, ln with GNU options": r"\b(cp|ln)\s+(-\w+\s+)*(-\w*T|--)",
    "nproc, tac, setsid, sha256sum": r"\b(nproc|tac|setsid|sha256sum|md5sum)\b",
}


def code_lines(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if not line.lstrip().startswith("#")]


def run(command: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = run([str(shellcheck), "--external-sources", str(script)], PROJECT, dict(os.environ))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_only_what_bash_3_and_bsd_tools_have(script: Path) -> None:
    found = [
        f"{what}: {line.strip()}"
        for line in code_lines(script)
        for what, pattern in NOT_PORTABLE.items()
        if re.search(pattern, line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "declare -A table",
        "mapfile -t lines < file",
        "readarray lines",
        'echo "${name,,}"',
        'run "${arguments[@]}"',
        "sed -i s/a/b/ file",
        "here=$(readlink -f .)",
        "timeout 5 sleep 9",
        "if timeout 5 true; then",
        "date -d yesterday",
        "grep -oP x file",
        "wait -n",
    ],
)
def test_the_grep_finds_what_it_looks_for(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in NOT_PORTABLE.values())


def test_the_scripts_are_there() -> None:
    names = {str(path.relative_to(PROJECT)) for path in SCRIPTS}
    assert {"launch_edp.sh", "scripts/bootstrap.sh", "scripts/test.sh", ".ci/run"} <= names


FAKE_UV = """#!/bin/sh
echo "uv $*" >> "$CALLS"
mkdir -p "$VENV/bin"
cat > "$VENV/bin/smolcluster" <<'END'
#!/bin/sh
echo "in $PWD:"
for argument in "$@"; do echo "[$argument]"; done
exit 75
END
chmod +x "$VENV/bin/smolcluster"
"""


class Checkout:
    """A copy of the scripts in a folder with spaces, and a PATH with hardly anything in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "a clone's folder"
        self.bin = tmp_path / "bin"
        self.elsewhere = tmp_path / "else where"
        self.calls = tmp_path / "calls"
        for folder in (self.root / "scripts", self.bin, self.elsewhere):
            folder.mkdir(parents=True)
        shutil.copy(PROJECT / "launch_edp.sh", self.root)
        shutil.copy(PROJECT / "scripts" / "bootstrap.sh", self.root / "scripts")
        for tool in ("bash", "sh", "cat", "chmod", "dirname", "mkdir"):
            self.bin.joinpath(tool).symlink_to(shutil.which(tool) or tool)
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(tmp_path / "home"),
            "CALLS": str(self.calls),
            "VENV": str(self.root / ".venv"),
        }

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = str(self.root / "launch_edp.sh")
        return run(["bash", script, *arguments], self.elsewhere, self.env)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_arguments_and_working_directory_pass_through(checkout: Checkout) -> None:
    checkout.put(checkout.bin / "uv", FAKE_UV)
    done = checkout.launch("--local", "--override", "a=1", "dataset.root=../my data")
    assert done.stdout.splitlines() == [
        f"in {checkout.elsewhere}:",
        *("[launch]", "[edp]", "[--local]", "[--override]", "[a=1]", "[dataset.root=../my data]"),
    ]
    assert done.returncode == 75
    assert checkout.calls.read_text() == f"uv sync --project {checkout.root}\n"


def test_without_arguments_and_once_synced_there_is_no_chatter(checkout: Checkout) -> None:
    checkout.put(checkout.bin / "uv", FAKE_UV)
    checkout.launch()
    done = checkout.launch()
    assert done.stdout.splitlines()[1:] == ["[launch]", "[edp]"]
    assert done.stderr == ""
    assert checkout.calls.read_text().endswith(f"uv sync --project {checkout.root} --quiet\n")


@pytest.mark.parametrize("place", ["home/.local/bin/uv", "home/.cargo/bin/uv"])
def test_uv_is_found_where_its_installer_puts_it(
    checkout: Checkout, tmp_path: Path, place: str
) -> None:
    checkout.put(tmp_path / place, FAKE_UV)
    assert checkout.launch().returncode == 75


def test_uv_is_found_in_the_checkout(checkout: Checkout) -> None:
    checkout.put(checkout.root / ".uv" / "bin" / "uv", FAKE_UV)
    assert checkout.launch().returncode == 75


def test_uv_is_installed_with_pip_into_the_checkout(checkout: Checkout) -> None:
    fake_pip = f"""#!/bin/sh
echo "python $*" >> "$CALLS"
mkdir -p '{checkout.elsewhere}/bin'
cat > "$VENV/../.uv/bin/uv" <<'UV'
{FAKE_UV}
UV
chmod +x "$VENV/../.uv/bin/uv"
"""
    fake_venv = f"""#!/bin/sh
echo "python $*" >> "$CALLS"
mkdir -p "$3/bin"
cat > "$3/bin/python3" <<'PIP'
{fake_pip}
PIP
chmod +x "$3/bin/python3"
"""
    checkout.put(checkout.bin / "python3", fake_venv)
    done = checkout.launch("--local")
    assert done.returncode == 75
    calls = checkout.calls.read_text().splitlines()
    assert calls[0] == f"python -m venv {checkout.root}/.uv"
    assert calls[1].startswith("python -m pip install ")
    assert calls[2].startswith("uv sync")


def test_without_venv_the_official_installer_puts_uv_into_the_checkout(checkout: Checkout) -> None:
    checkout.put(checkout.bin / "python3", "#!/bin/sh\nexit 1\n")
    installer = f"""#!/bin/sh
cat > "$UV_UNMANAGED_INSTALL/uv" <<'UV'
{FAKE_UV}
UV
chmod +x "$UV_UNMANAGED_INSTALL/uv"
"""
    fake_curl = f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
cat > "$2" <<'INSTALLER'
{installer}
INSTALLER
"""
    checkout.put(checkout.bin / "curl", fake_curl)
    assert checkout.launch().returncode == 75
    assert (checkout.root / ".uv" / "bin" / "uv").is_file()


def test_when_everything_fails_it_says_what_to_do(checkout: Checkout) -> None:
    done = checkout.launch("--local")
    assert done.returncode == 1
    assert "error: uv is missing and could not be installed" in done.stderr
    assert "https://docs.astral.sh/uv" in done.stderr


def test_a_sync_that_fails_ends_the_launch(checkout: Checkout) -> None:
    checkout.put(checkout.bin / "uv", "#!/bin/sh\necho no space left >&2\nexit 2\n")
    done = checkout.launch("--local")
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "error: uv could not install" in done.stderr
