"""The project on other machines: a folder named by its content, an environment named by its requirements.

    ~/.cache/smolcluster/projects/<hash>        what is sent, and .venv, a link to its environment
    ~/.cache/smolcluster/projects/latest        a link to the one that was wanted last
    ~/.cache/smolcluster/environments/<hash>    Python, PyTorch and the other requirements

Both are made beside and renamed when they are whole, and never changed afterwards. So a launch onto a machine
that has them sends nothing, and launches of different code run side by side. An environment holds no code of
the project: Python finds it as `src` beside the `.venv` by which it was started.
"""

import gzip
import hashlib
import io
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Done, Host, shell_path
from smolcluster.utils.words import condensed

CACHE = "~/.cache/smolcluster"
RUNS = "~/smolcluster/runs"
"""Where runs are kept on a machine that has no clone of its own."""
LATEST = f"{CACHE}/projects/latest"
SENT = ("pyproject.toml", "README.md", "LICENSE", "uv.lock", "logging", "src")
NOT_SENT = re.compile(r"__pycache__|.*\.py[co]|\..*|MNIST")
"""Names of files and folders below those."""
LOCAL_WHEELS = b'source = { registry = "." }'
"""What a lock says of wheels in the checkout: PyTorch without CUDA, which scripts/bootstrap.sh fetches."""
SEND_TIMEOUT_S = 600.0
ENVIRONMENT_TIMEOUT_S = 3600.0
"""PyTorch with CUDA is gigabytes."""
REGISTRY = "pypi"
_UV_ERROR = re.compile(r"\s*(×|error\b)", re.IGNORECASE)
_OWN_CODE = "../../../../src"
"""Seen from `.venv/lib/python3.x/site-packages`, whichever link `.venv` is."""


@dataclass(frozen=True)
class Project:
    """What is sent of the project: the content of its files, by their paths."""

    files: Mapping[str, bytes]

    @cached_property
    def version(self) -> str:
        """A digest of all of it."""
        return _digest(packed(self.files))

    def environment(self, torch: str) -> str:
        """The folder of its environment on a machine; `torch` is the build of PyTorch."""
        made_of = (self.files.get(name, b"") for name in ("pyproject.toml", "uv.lock"))
        return f"{CACHE}/environments/{_digest(torch.encode(), *made_of)}"

    def folder(self, torch: str) -> str:
        """The project's folder on a machine whose `.venv` is that environment."""
        made_of = (self.version, self.environment(torch))
        return f"{CACHE}/projects/{_digest(*map(str.encode, made_of))}"

    @property
    def sums(self) -> bytes:
        """Its code as `sha256sum --check` reads it."""
        names = (name for name in self.files if name.startswith("src/") and name.isprintable())
        lines = (f"{hashlib.sha256(self.files[name]).hexdigest()}  {name}\n" for name in names)
        return "".join(lines).encode()


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def read_project(root: Path) -> Project:
    """What is sent of the checkout at `root`.

    Raises:
        LaunchError: a file cannot be read.
    """
    try:
        files = {name: (root / name).read_bytes() for name in _sent_files(root)}
    except OSError as error:
        raise LaunchError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    if LOCAL_WHEELS in files.get("uv.lock", b""):
        del files["uv.lock"]
    return Project(files)


def _sent_files(root: Path) -> Iterator[str]:
    for first in SENT:
        if (root / first).is_file():
            yield first
        for folder, folders, files in os.walk(root / first):
            folders[:] = sorted(name for name in folders if not NOT_SENT.fullmatch(name))
            for name in sorted(files):
                path = Path(folder, name)
                if not NOT_SENT.fullmatch(name) and path.is_file():
                    yield path.relative_to(root).as_posix()


def packed(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """A tar archive; the same bytes for the same files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def bring(
    host: Host, project: Project, torch: str, env: Mapping[str, str], *, is_allowed: bool
) -> bool:
    """See that a machine has this project and its environment; whether anything was missing.

    `torch` is the build of PyTorch, `env` what uv has in its environment. With `is_allowed` false nothing is
    sent. A transfer or an installation that is cut leaves nothing.

    Raises:
        LaunchError: it cannot be done, or something is missing that must not be sent.
    """
    folder, environment = project.folder(torch), project.environment(torch)
    names = f"folder={folder}; environment={environment}\n{_FUNCTIONS}"
    looked = host.run(f"{names}{_LOOK}")
    if not looked.ok:
        raise LaunchError(f"{host.node}: {CACHE} cannot be used: {looked.stderr_tail}")
    missing = looked.stdout.split()
    if missing and not is_allowed:
        raise LaunchError(
            f"{host.node}: has not this {' nor this '.join(missing)} yet: launch without --no-sync, or set "
            f"nodes.{host.node}.project_dir to a clone there that has an environment"
        )
    if "code" in missing:
        content = gzip.compress(packed(project.files), mtime=0)
        done = host.run(f"{names}{_SEND}", stdin=content, timeout_s=SEND_TIMEOUT_S)
        if not done.ok:
            raise LaunchError(f"{host.node}: {folder} cannot be written: {done.stderr_tail}")
    if "environment" in missing:
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        script = f"{exports}{names}{_MAKE.format(install=_install(torch))}"
        done = host.run("sh -s", stdin=script.encode(), timeout_s=ENVIRONMENT_TIMEOUT_S)
        if not done.ok:
            raise LaunchError(_why_not_made(host, torch, done))
    return bool(missing)


_FUNCTIONS = """set -e
beside() { new=$1.$$; trap 'rm -rf "$new"' EXIT; trap 'exit 1' HUP INT TERM; mkdir -p "$new"; }
placed() { [ -d "$1" ] || mv "$new" "$1"; rm -rf "$1/${new##*/}"; }
wanted() { touch "$folder"; ln -sfn "${folder##*/}" "${folder%/*}/latest"; }
"""
"""Of two that are made at once the second is moved into the first, and removed there."""
_LOOK = """if [ -d "$folder" ]; then wanted; else echo code; fi
if [ -d "$environment" ]; then touch "$environment"; else echo environment; fi"""
_SEND = """beside "$folder"
tar -xzf - -C "$new"
ln -s "../../environments/${environment##*/}" "$new/.venv"
placed "$folder"
wanted"""
_MAKE = f"""cd "$folder"
beside "$environment"
uv venv --quiet --relocatable --allow-existing "$new"
{{install}}
for path in "$new"/lib/python*/site-packages/*smolcluster*.pth; do
  rm "$path"  # it may be a file of uv's cache
  echo {_OWN_CODE} > "$path"
done
placed "$environment"
"""


def _install(torch: str) -> str:
    if torch == REGISTRY:
        return 'UV_PROJECT_ENVIRONMENT="$new" uv sync --no-dev --quiet'
    backend = shlex.quote(torch)
    return f'uv pip install --quiet --python "$new"/bin/python --torch-backend={backend} -e .'


def _why_not_made(host: Host, torch: str, done: Done) -> str:
    reason = uv_reason(done.stderr) or f"exit code {done.code}"
    fix = f"set nodes.{host.node}.project_dir to a clone there that has an environment"
    if torch != REGISTRY and "torch" in reason:
        fix = f"or take PyTorch from the registry: set nodes.{host.node}.torch to {REGISTRY}"
    return f"{host.node}: uv cannot make the environment: {reason} ({fix})"


def uv_reason(said: str) -> str:
    """What uv says from its error on, with its causes and hints, without what it draws around them."""
    lines = [line.strip("│╰╭├─▶× \t") for line in said.splitlines()]
    errors = [number for number, line in enumerate(said.splitlines()) if _UV_ERROR.match(line)]
    return condensed(" ".join(lines[errors[0] if errors else 0 :]))


def compare_script(folder: str) -> str:
    """Print how many files of a project's folder differ from `Project.sums`, which it reads, or `absent`."""
    return f"""cd {shell_path(folder)} 2>/dev/null && [ -d src/smolcluster ] || {{ echo absent; exit 0; }}
if command -v sha256sum >/dev/null; then sum=sha256sum; else sum='shasum -a 256'; fi
LC_ALL=C $sum -c 2>/dev/null | grep -cv ': OK$'; true"""


def look_at_clone(host: Host, folder: str, project: Project) -> int:
    """How many files of our code differ in a clone of a machine's owner, which is used as it is.

    Raises:
        LaunchError: it is no clone, or has no environment.
    """
    script = f"[ -x {shell_path(folder)}/.venv/bin/python ] || exit 0\n{compare_script(folder)}"
    found = host.run(script, stdin=project.sums).stdout.strip()
    if not found.isdigit():
        raise LaunchError(
            f"{host.node}: {folder} is not a clone of this project with an environment in .venv: make one "
            f"there, or leave nodes.{host.node}.project_dir out, so that the launch brings both"
        )
    return int(found)
