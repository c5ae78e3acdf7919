"""Bringing the project to a machine: its code with rsync, then its environment with uv.

The code is whole on a machine when `.smolcluster-version` there holds the digest of this tree: it is removed
before rsync begins and written after it has ended. The environment is left alone when neither the project's
requirements nor the wanted build of PyTorch have changed.
"""

import fnmatch
import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smolcluster.errors import LaunchError
from smolcluster.launch.host import PREAMBLE, Host, run_here, shell_path, ssh_options
from smolcluster.launch.watch.fetch import failure

MARKER = ".smolcluster-version"
SENDING = ".smolcluster"
"""Says that a folder is ours while the project is on its way there."""
ENVIRONMENT_MARKER = ".venv/.smolcluster-environment"
NOT_SENT = (
    *(".git", ".venv", ".uv", "/runs", "/wandb", "/data", "/dist", MARKER),
    *("__pycache__", "*.py[co]", ".*_cache", ".hypothesis", ".DS_Store"),
    "/src/smolcluster/data/MNIST",
)
"""Patterns in rsync's words: a leading / is the project's root."""
_CLEAN_CLONE = (
    'found=$(git status --porcelain --ignored 2>/dev/null) && [ -z "$(printf \'%s\\n\' "$found" | '
    "grep -vE '^$|^!! (\\.venv/|\\.uv/|runs/|wandb/|data/|dist/|uv\\.lock|.*__pycache__/|\\.[a-z]+_cache/|"
    "\\.hypothesis/|src/smolcluster/data/MNIST/)')\" ]"
)
"""Whether a clone holds nothing that git does not have, but for what is not sent."""
RSYNC_TIMEOUT_S = 600.0
ENVIRONMENT_TIMEOUT_S = 3600.0
"""PyTorch with CUDA is gigabytes."""
REGISTRY = "pypi"


def sent_files(root: Path) -> Iterator[str]:
    """The files that belong to the project at `root`, as relative paths in a fixed order."""
    for folder, folders, files in os.walk(root):
        place = os.path.relpath(folder, root)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not _left_out(place, name))
        for name in sorted((*files, *links)):
            if not _left_out(place, name):
                yield name if place == "." else f"{place}/{name}"


def _left_out(place: str, name: str) -> bool:
    path = f"/{name}" if place == "." else f"/{place}/{name}"
    return any(
        path == pattern if pattern.startswith("/") else fnmatch.fnmatchcase(name, pattern)
        for pattern in NOT_SENT
    )


def tree_digest(root: Path) -> str:
    """SHA-256 over the names and contents of what is sent: the version of the code.

    Raises:
        LaunchError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in sent_files(root):
        path = root / name
        try:
            content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        except OSError as error:
            raise LaunchError(f"{path} cannot be read: {error.strerror or error}") from error
        digest.update(os.fsencode(name) + b"\0%d\0" % len(content))
        digest.update(content)
    return digest.hexdigest()


def environment_digest(root: Path, torch: str) -> str:
    """SHA-256 over what decides which packages an environment has."""
    digest = hashlib.sha256(torch.encode())
    for name in ("pyproject.toml", "uv.lock"):
        path = root / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    return digest.hexdigest()


def send_code(
    root: Path, host: Host, project_dir: str, version: str, kept: Sequence[str] = ()
) -> None:
    """Make the project's folder on a machine equal to `root`, but for what is not sent.

    `kept`: paths below that folder which are the machine's own, such as `/experiments`.

    Raises:
        LaunchError: the folder is something else's, or rsync fails.
    """
    folder = shell_path(project_dir)
    ready = host.run(
        f"mkdir -p {folder} && cd {folder} || exit 1; "
        f'[ "$(cat {MARKER} 2>/dev/null)" = {version} ] && exit 3; '
        f'if [ -n "$(ls -A | grep -vx runs)" ] && [ ! -e {SENDING} ] && '
        "! grep -qs 'name = \"smolcluster\"' pyproject.toml; then exit 4; fi; "
        f"if [ -e .git ] && [ ! -e {MARKER} ] && [ ! -e {SENDING} ] && ! {{ {_CLEAN_CLONE}; }}; "
        "then exit 5; fi; "
        f"rm -f {MARKER} && touch {SENDING}"
    )
    if ready.code == 3:
        return
    if ready.code == 4:
        raise LaunchError(
            f"{host.node}: {project_dir} holds something else than this project: set "
            f"nodes.{host.node}.project_dir to another folder"
        )
    if ready.code == 5:
        raise LaunchError(
            f"{host.node}: {project_dir} is a clone with files of its own, which would be lost, or git "
            f"there cannot tell: commit or move them, use --no-sync, or set nodes.{host.node}.project_dir "
            "to another folder"
        )
    if not ready.ok:
        raise LaunchError(f"{host.node}: {project_dir} cannot be used: {ready.last_words}")
    _rsync(root, host, project_dir, kept)
    marked = host.run(f"cd {folder} && printf %s {version} > {MARKER} && rm -f {SENDING}")
    if not marked.ok:
        raise LaunchError(f"{host.node}: {project_dir} cannot be written: {marked.last_words}")


def _rsync(root: Path, host: Host, project_dir: str, kept: Sequence[str]) -> None:
    try:
        done = run_here(rsync_command(root, host, project_dir, kept), timeout_s=RSYNC_TIMEOUT_S)
    except FileNotFoundError as error:
        raise LaunchError("rsync is not installed here: install it, or use --no-sync") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{host.node}: rsync took longer than {RSYNC_TIMEOUT_S:g} s") from error
    if not done.ok:
        raise failure(host, done.code, done.stderr.strip())


def rsync_command(root: Path, host: Host, project_dir: str, kept: Sequence[str] = ()) -> list[str]:
    """The command that makes a folder on a machine equal to `root`, but for what is `kept` there.

    What rsync's quoting could spoil is kept from it, as in `fetch`: folder and destination are named in the
    commands that start the other rsync and ssh, and to rsync itself the machine is called `env`.
    """
    there = f'{PREAMBLE}cd {shell_path(project_dir)} && exec rsync "$@"'
    excludes = [f"--exclude={pattern}" for pattern in (*NOT_SENT, SENDING, *kept)]
    return [
        *("rsync", "-rlptz", "--delete", *excludes),
        *("-e", shlex.join(["ssh", *ssh_options(), "--", host.destination or host.node])),
        f"--rsync-path={shlex.join(['sh', '-c', there, 'sh'])}",
        *("--", f"{root}/", "env:./"),
    ]


def make_environment(
    host: Host, project_dir: str, torch: str, digest: str, env: Mapping[str, str]
) -> None:
    """Make the project's environment on a machine what `digest` stands for, if it is not.

    Raises:
        LaunchError: uv fails.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    script = (
        f"{exports}cd {shell_path(project_dir)} || exit 1\n"
        f'[ "$(cat {ENVIRONMENT_MARKER} 2>/dev/null)" = {digest} ] && exit 0\n'
        f"rm -f {ENVIRONMENT_MARKER}\n{_install(torch)} && printf %s {digest} > {ENVIRONMENT_MARKER}\n"
    )
    done = host.run("sh -s", stdin=script.encode(), timeout_s=ENVIRONMENT_TIMEOUT_S)
    if not done.ok:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.lower().lstrip("× ").startswith("error")]
        reason = (errors or said or [f"exit code {done.code}"])[-1]
        raise LaunchError(
            f"{host.node}: uv cannot make the environment: {reason} (there: cd {project_dir} && uv sync)"
        )


def _install(torch: str) -> str:
    if torch == REGISTRY:
        return "uv sync --no-dev --quiet"
    return (
        "{ [ -x .venv/bin/python ] || uv venv --quiet .venv; } && "
        f"uv pip install --quiet --python .venv/bin/python --torch-backend={shlex.quote(torch)} -e ."
    )
