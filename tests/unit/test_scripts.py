"""The shell scripts: clean, portable to macOS (bash 3.2, BSD tools), and at home in any folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lab import find_uv
from smolcluster.configs.spec import algorithms
from smolcluster.launch.project import LOCAL_WHEELS

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


def test_the_scripts_are_there() -> None:
    names = {str(path.relative_to(PROJECT)) for path in SCRIPTS}
    assert {f"launch_{name}.sh" for name in algorithms()} <= names
    assert {"scripts/bootstrap.sh", "scripts/test.sh", ".ci/run"} <= names


# Stands for uv: notes what it is asked for; `run … smolcluster ARGUMENTS` shows where it is and what it got,
# `run` of a check fails when $BROKEN names it (pytest with 3). Its lock prefers wheels in the checkout, and
# PyTorch's $SERVER is `there`, not there (empty), or `breaks` amid a download.
FAKE_UV = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "uv $*" >> "$CALLS"
packages="$ROOT/.venv/lib/python3.11/site-packages"
lock() {
  source=https://pypi.org/simple
  for wheel in "$ROOT"/torch-*.whl; do [ ! -e "$wheel" ] || source=.; done
  echo "source = { registry = \\"$source\\" }" > "$ROOT/uv.lock"
}
case "$*" in
  lock*|sync*) [ -z "$OFFLINE" ] || { echo no network >&2; exit 2; } ;;
esac
case "$*" in
  lock*--upgrade-package*) lock ;;
  lock*) [ -e "$ROOT/uv.lock" ] || lock ;;
  export*) printf 'torch==2.15.0\ntorchmetrics==1.9.0\ntorchvision==0.29.2\nnvidia-ml-py==13.0\n' ;;
  venv*) mkdir -p "$ROOT/.venv" ;;
  --directory*) echo "pins $(cat)" >> "$CALLS"; [ -n "$SERVER" ] || exit 2 ;;
  tool*pip\\ download*)
    dest="${*#*--dest }"
    dest="${dest% -r *}"
    mkdir -p "$dest"
    cat > "$dest/torch-2.15.0+cpu-cp311.whl"
    [ "$SERVER" = there ] || exit 1
    : > "$dest/torchvision-0.29.2+cpu-cp311.whl" ;;
  sync*)
    [ -e "$ROOT/uv.lock" ] || lock
    mkdir -p "$packages/torch"
    cat "$ROOT/uv.lock" > "$packages/torch/installed" ;;
esac
[ "$1" = run ] || exit 0
while [ "$1" != smolcluster ] && [ $# -gt 1 ] && [ "$1" != --no-sync ] && [ "$1" != docs ]; do shift; done
[ "$2" = --project ] && shift 3 || shift
echo "$1 ran in $PWD"
tool="$1"
shift
for argument in "$@"; do echo "[$argument]"; done
[ "$tool" = smolcluster ] && exit 75
case " $BROKEN " in
  *" $tool "*) [ "$tool" = pytest ] && exit 3 || exit 1 ;;
esac
exit 0
"""
SIGNS_OF_A_GPU = ("/proc/driver/nvidia", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")


class Checkout:
    """A copy of the scripts in a folder with spaces, and a PATH with hardly anything in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "a clone's folder"
        self.bin = tmp_path / "bin"
        self.elsewhere = tmp_path / "else where"
        self.calls = tmp_path / "calls"
        for folder in (self.root / "scripts", self.root / ".ci", self.bin, self.elsewhere):
            folder.mkdir(parents=True)
        for script in SCRIPTS:
            shutil.copy(script, self.root / script.relative_to(PROJECT))
        self.system = tmp_path / "system"
        bootstrap = self.root / "scripts" / "bootstrap.sh"
        text = bootstrap.read_text()
        for sign in SIGNS_OF_A_GPU:
            assert sign in text
            text = text.replace(sign, f"{self.system}{sign}")
        bootstrap.write_text(text)
        for tool in (
            "bash",
            "sh",
            "cat",
            "chmod",
            "dirname",
            "grep",
            "id",
            "mkdir",
            "mktemp",
            "mv",
            "rm",
        ):
            self.bin.joinpath(tool).symlink_to(shutil.which(tool) or tool)
        self.put(self.bin / "uname", '#!/bin/sh\necho "$SYSTEM"\n')
        self.env = {
            "ROOT": str(self.root),
            "SYSTEM": "Darwin",
            "PATH": str(self.bin),
            "HOME": str(tmp_path / "home"),
            "HOMEBREW_PREFIX": str(tmp_path / "homebrew"),
            "CALLS": str(self.calls),
        }

    def put(self, path: Path, text: str = FAKE_UV) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def asked(self) -> list[str]:
        """What uv, python and pip were asked for, in order."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(["bash", str(self.root / script), *arguments], self.elsewhere, self.env)

    def launch(self, *arguments: str, algorithm: str = "edp") -> subprocess.CompletedProcess[str]:
        return self.run(f"launch_{algorithm}.sh", *arguments)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("algorithm", algorithms())
@pytest.mark.parametrize("flags", [[], ["--local", "--override", "a=1", "dataset.root=../my data"]])
def test_a_launch_script_hands_its_flags_on_and_stays_where_the_user_is(
    checkout: Checkout, algorithm: str, flags: list[str]
) -> None:
    checkout.put(checkout.bin / "uv")
    done = checkout.launch(*flags, algorithm=algorithm)
    assert done.stdout.splitlines() == [
        f"smolcluster ran in {checkout.elsewhere}",
        *("[launch]", f"[{algorithm}]", *(f"[{flag}]" for flag in flags)),
    ]
    assert done.returncode == 75
    assert any(call.startswith("uv sync ") for call in checkout.asked())
    assert os.access(PROJECT / f"launch_{algorithm}.sh", os.X_OK)


@pytest.mark.parametrize(
    "place", ["home/.local/bin", "home/.cargo/bin", "homebrew/bin", "a clone's folder/.uv/bin"]
)
def test_uv_is_found_where_it_is_usually_installed(
    checkout: Checkout, tmp_path: Path, place: str
) -> None:
    """One on the PATH that does not run is passed over."""
    checkout.put(checkout.bin / "uv", "#!/bin/sh\nexit 126\n")
    checkout.put(tmp_path / place / "uv")
    assert checkout.launch().returncode == 75


def test_uv_is_installed_with_pip_into_the_checkout_only(
    checkout: Checkout, tmp_path: Path
) -> None:
    template = tmp_path / "fake uv"
    checkout.put(template)
    pip = tmp_path / "fake pip"
    checkout.put(
        pip,
        f"#!/bin/sh\necho pip $* >> $CALLS\ncat '{template}' > \"${{0%/*}}/uv\"\n"
        'chmod +x "${0%/*}/uv"\n',
    )
    checkout.put(
        checkout.bin / "python3",
        f'#!/bin/sh\necho "python3 $*" >> $CALLS\nmkdir -p "$3/bin"\ncat \'{pip}\' > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"\n',
    )
    done = checkout.launch("--local")
    assert done.returncode == 75, done.stderr
    assert checkout.asked()[0] == f"python3 -m venv {checkout.root}/.uv"
    assert checkout.asked()[1].startswith("pip -m pip install ")
    assert not (tmp_path / "home").exists()


def test_without_venv_the_official_installer_is_used(checkout: Checkout, tmp_path: Path) -> None:
    template = tmp_path / "fake uv"
    checkout.put(template)
    checkout.put(checkout.bin / "python3", "#!/bin/sh\nexit 1\n")
    installer = tmp_path / "installer"
    installer.write_text(
        f'mkdir -p "$UV_UNMANAGED_INSTALL"\ncat \'{template}\' > "$UV_UNMANAGED_INSTALL/uv"\n'
        'chmod +x "$UV_UNMANAGED_INSTALL/uv"\n'
    )
    checkout.put(checkout.bin / "curl", f"#!/bin/sh\ncat '{installer}'\n")
    assert checkout.launch().returncode == 75
    assert (checkout.root / ".uv" / "bin" / "uv").is_file()
    assert not (tmp_path / "home").exists()


def test_what_to_do_is_said_when_uv_cannot_be_installed(checkout: Checkout) -> None:
    done = checkout.launch("--local")
    assert done.returncode == 1
    assert "error: uv could not be installed" in done.stderr
    assert "https://docs.astral.sh/uv" in done.stderr
    assert not (checkout.root / ".uv").exists()


def test_a_failing_sync_stops_the_launch(checkout: Checkout) -> None:
    checkout.put(
        checkout.bin / "uv",
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no space left >&2\nexit 2\n',
    )
    done = checkout.launch("--local")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no space left" in done.stderr
    assert "error: uv could not prepare the environment" in done.stderr


# PyTorch with and without CUDA


@pytest.fixture
def linux(checkout: Checkout) -> Checkout:
    """A checkout on Linux without a GPU, which reaches PyTorch's server."""
    checkout.put(checkout.bin / "uv")
    checkout.env |= {"SYSTEM": "Linux", "SERVER": "there"}
    return checkout


def torch_of(checkout: Checkout) -> str:
    packages = checkout.root / ".venv/lib/python3.11/site-packages"
    installed = (packages / "torch/installed").read_text()
    return "cpu" if LOCAL_WHEELS.decode() in installed else "cuda"


def wheels(checkout: Checkout) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in checkout.root.glob("*.whl"))


def test_without_a_gpu_there_is_no_cuda(linux: Checkout) -> None:
    """What is fetched are the versions of the lock, once; the launch goes on as ever."""
    done = linux.launch("--local")
    assert (done.returncode, torch_of(linux)) == (75, "cpu")
    assert done.stdout.splitlines()[1:] == ["[launch]", "[edp]", "[--local]"]
    assert wheels(linux) == ["torch", "torchvision"]
    asked = "\n".join(linux.asked())
    assert "pins torch==2.15.0\ntorchvision==0.29.2\n" in asked
    assert (linux.root / "torch-2.15.0+cpu-cp311.whl").read_text() == (
        "torch==2.15.0\ntorchvision==0.29.2\n"
    )
    linux.calls.unlink()
    assert linux.launch("--local").stderr == ""
    assert [call.split()[1] for call in linux.asked()] == ["lock", "sync", "run"]
    assert torch_of(linux) == "cpu"


@pytest.mark.parametrize("sign", ["nvidia-smi", *SIGNS_OF_A_GPU])
def test_with_an_nvidia_gpu_there_is_cuda(linux: Checkout, sign: str) -> None:
    place = linux.bin / sign if sign == "nvidia-smi" else Path(f"{linux.system}{sign}")
    linux.put(place, "#!/bin/sh\n")
    assert linux.launch("--local").returncode == 75
    assert (torch_of(linux), wheels(linux)) == ("cuda", [])


@pytest.mark.parametrize("flag", [["--torch", "{}"], ["--torch={}"]])
@pytest.mark.parametrize("asked", ["cpu", "cuda"])
def test_the_flag_decides_and_is_not_handed_on(
    linux: Checkout, flag: list[str], asked: str
) -> None:
    if asked == "cpu":
        linux.put(linux.bin / "nvidia-smi", "#!/bin/sh\n")
    words = [word.format(asked) for word in flag]
    done = linux.launch("--local", *words, "--override", "a=b c", "torch=cpu", algorithm="mesh")
    assert done.stdout.splitlines()[1:] == [
        *("[launch]", "[mesh]", "[--local]", "[--override]", "[a=b c]", "[torch=cpu]")
    ]
    assert (done.returncode, torch_of(linux)) == (75, asked)


def test_an_environment_keeps_its_torch_until_another_is_asked_for(linux: Checkout) -> None:
    for flags, kind in [
        (["--torch", "cuda"], "cuda"),
        ([], "cuda"),
        (["--torch", "cpu"], "cpu"),
        ([], "cpu"),
        (["--torch", "cuda"], "cuda"),
    ]:
        assert linux.launch("--local", *flags).returncode == 75
        assert torch_of(linux) == kind
        assert wheels(linux) == (["torch", "torchvision"] if kind == "cpu" else [])


@pytest.mark.parametrize("server", ["", "breaks"])
def test_a_server_that_is_not_reached_costs_a_sentence(linux: Checkout, server: str) -> None:
    linux.env["SERVER"] = server
    done = linux.launch("--local")
    assert done.stderr.count("PyTorch without CUDA cannot be fetched") == 1
    assert (done.returncode, torch_of(linux), wheels(linux)) == (75, "cuda", [])
    assert any("pip download" in call for call in linux.asked()) == (server == "breaks")
    linux.calls.unlink()
    linux.env["SERVER"] = "there"
    assert linux.launch("--local").stderr == ""
    assert [call.split()[1] for call in linux.asked()] == ["sync", "run"]


def test_wheels_are_fetched_again_when_the_lock_names_others(linux: Checkout) -> None:
    linux.launch("--local")
    (linux.root / "uv.lock").write_text("of new requirements")
    linux.launch("--local")
    assert sum("pip download" in call for call in linux.asked()) == 2
    assert torch_of(linux) == "cpu"


def test_without_an_environment_the_wheels_are_taken_that_are_there(linux: Checkout) -> None:
    """It was removed, or its first sync was interrupted; PyTorch's server need not be reached."""
    linux.launch("--local")
    shutil.rmtree(linux.root / ".venv")
    linux.calls.unlink()
    linux.env["SERVER"] = ""
    done = linux.launch("--local")
    assert (done.returncode, torch_of(linux)) == (75, "cpu")
    assert wheels(linux) == ["torch", "torchvision"]
    assert "PyTorch without CUDA" not in done.stderr
    assert [call.split()[1] for call in linux.asked()] == ["lock", "sync", "run"]


@pytest.mark.parametrize("server", ["", "breaks"])
def test_wheels_stay_when_others_cannot_be_fetched(linux: Checkout, server: str) -> None:
    linux.launch("--local")
    (linux.root / "uv.lock").write_text("of new requirements")
    linux.env["SERVER"] = server
    done = linux.launch("--local")
    assert done.stderr.count("PyTorch without CUDA cannot be fetched") == 1
    assert wheels(linux) == ["torch", "torchvision"]


def test_wheels_stay_when_no_lock_can_be_made(linux: Checkout) -> None:
    linux.launch("--local")
    linux.env["OFFLINE"] = "yes"
    done = linux.launch("--local")
    assert (done.returncode, done.stderr.count("no network")) == (1, 1)
    assert "PyTorch without CUDA" not in done.stderr
    assert wheels(linux) == ["torch", "torchvision"]


def test_macos_has_one_torch(linux: Checkout) -> None:
    linux.env["SYSTEM"] = "Darwin"
    assert linux.launch("--local", "--torch", "cpu").returncode == 75
    assert [call.split()[1] for call in linux.asked()] == ["sync", "run"]


@pytest.mark.parametrize(
    "flags", [["--torch", "gpu"], ["--torch"], ["--torch="], ["--torch", "--local"]]
)
def test_a_torch_that_is_none_is_refused(linux: Checkout, flags: list[str]) -> None:
    done = linux.launch("--local", *flags)
    assert (done.returncode, done.stdout, linux.asked()) == (2, "", [])
    assert "error: --torch is cpu or cuda" in done.stderr


def test_help_names_the_flag_that_is_of_the_scripts(linux: Checkout) -> None:
    assert linux.launch("--help").stdout.startswith("--torch cpu|cuda ")


def test_uv_prefers_and_names_wheels_in_the_checkout(tmp_path: Path) -> None:
    """What bootstrap.sh stands on: the words of a lock, and versions with +cpu before those without."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["uv"]
    assert settings["find-links"] == ["."]
    for version in ("2.15.0", "2.15.0+cpu"):
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["torch<3"]\n'
        '[tool.uv]\nexclude-newer = "2020-01-01T00:00:00Z"\nfind-links = ["."]\n'
    )
    command = [str(find_uv()), "lock", "--offline", "--no-index", "--python", sys.executable]
    done = run(command, tmp_path, dict(os.environ))
    lock = (tmp_path / "uv.lock").read_bytes()
    assert done.returncode == 0, done.stderr
    assert b'version = "2.15.0+cpu"\n' + LOCAL_WHEELS in lock


@pytest.mark.parametrize(
    ("broken", "code"),
    [("", 0), ("mypy", 1), ("ruff", 1), ("mkdocs", 1), ("pytest", 3), ("mypy pytest", 3)],
)
def test_all_checks_run_pytest_last_and_a_failure_is_remembered(
    checkout: Checkout, broken: str, code: int
) -> None:
    checkout.put(checkout.bin / "uv")
    checkout.env["BROKEN"] = broken
    (checkout.root / "tests/unit/__pycache__").mkdir(parents=True)
    done = checkout.run("scripts/test.sh", "-k", "two words")
    ran = [line.split()[0] for line in done.stdout.splitlines() if " ran in " in line]
    assert ran == ["ruff", "ruff", "mkdocs", "pytest", "mypy"]
    assert "[--dist]\n[loadgroup]\n[-k]\n[two words]" in done.stdout
    assert done.returncode == code


def test_continuous_integration_runs_the_same_checks(checkout: Checkout) -> None:
    checkout.put(checkout.bin / "uv")
    done = checkout.run(".ci/run")
    ran = {line.split()[0] for line in done.stdout.splitlines() if " ran in " in line}
    assert ran == {"ruff", "mkdocs", "mypy", "pytest"}
    assert "[-m]\n[not nightly and not bench]\n[--refuse-skips]\n[--durations=10]" in done.stdout
    assert done.returncode == 0
