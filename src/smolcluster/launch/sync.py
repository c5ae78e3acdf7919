"""Bringing the project to a machine: its code with rsync, then its environment with uv.

What is there is looked at first, by content; only what was sent before and has not changed since is replaced
or deleted. The environment is left alone when neither the project's requirements nor the wanted build of
PyTorch have changed.
"""

import hashlib
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from smolcluster.errors import LaunchError
from smolcluster.launch.host import PREAMBLE, Done, Host, run_here, shell_path, ssh_options
from smolcluster.launch.manifest import (
    BACKUP,
    FOLDER,
    SENDING,
    SENT,
    UNREADABLE,
    Difference,
    Tree,
    as_manifest,
    compare,
    not_sent,
    read_folder,
    refusal,
    with_nuls,
)
from smolcluster.launch.watch.fetch import failure
from smolcluster.utils.words import condensed

ENVIRONMENT_MARKER = ".venv/.smolcluster-environment"
LOOK_TIMEOUT_S = 60.0
RSYNC_TIMEOUT_S = 600.0
ENVIRONMENT_TIMEOUT_S = 3600.0
"""PyTorch with CUDA is gigabytes."""
REGISTRY = "pypi"
_UV_ERROR = re.compile(r"\s*(×|error\b)", re.IGNORECASE)
NOT_WRITABLE = 6
"""The exit code of a look at a folder in which no file can be made."""


def environment_digest(root: Path, torch: str) -> str:
    digest = hashlib.sha256(torch.encode())
    for name in ("pyproject.toml", "uv.lock"):
        path = root / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    return digest.hexdigest()


def look_script(project_dir: str) -> str:
    """Print for `read_folder` what is at paths that come by standard input, and at those that were sent.

    It ends with NOT_WRITABLE when no file can be made there, for the reason that `touch` gives.
    """
    return f"""folder={shell_path(project_dir)}; near=$folder
while [ ! -e "$near" ]; do near=$(dirname "$near"); done
touch "$near/.smolcluster-$$" || exit {NOT_WRITABLE}
rm -f "$near/.smolcluster-$$"
cd "$folder" 2>/dev/null && [ -n "$(ls -A | grep -vx runs)" ] ||
  {{ printf 'state\\0absent\\0'; exit 0; }}
[ -e {SENT} ] || [ -e {SENDING} ] || grep -qs 'name = "smolcluster"' pyproject.toml ||
  {{ printf 'state\\0foreign\\0'; exit 0; }}
if command -v sha256sum >/dev/null; then sum=sha256sum
elif command -v shasum >/dev/null; then sum='shasum -a 256'
else echo 'there is neither sha256sum nor shasum' >&2; exit 1; fi
export sum
printf 'state\\0project\\0'
[ ! -e {SENDING} ] || printf 'sending\\0yes\\0'
[ ! -e .git ] || {{ printf 'owner\\0a git clone'
  [ -z "$(git --no-optional-locks status --porcelain 2>/dev/null | head -n 1)" ] ||
    printf ' with uncommitted changes'
  printf '\\0'; }}
printf '\\0/sent\\0'; cat {SENT} {SENDING} 2>/dev/null; printf '\\0/there\\0'
cat - {SENT} {SENDING} 2>/dev/null | xargs -0 sh -c 'for name; do
  shift
  if [ -h "$name" ]; then printf "%s\\0link %s\\0" "$name" "$(readlink "./$name")"
  elif [ -d "$name" ]; then printf "%s\\0{FOLDER}\\0" "$name"
  elif [ -e "$name" ]; then printf "%s\\0{UNREADABLE}\\0" "$name"; set -- "$@" "./$name"; fi
done
printf "\\0"; [ $# -eq 0 ] || $sum "$@" 2>/dev/null; printf "\\0"' sh"""


def look(host: Host, project_dir: str, tree: Tree, *, overwrite: bool) -> Difference:
    """What is to be sent to a machine; nothing is changed there.

    Raises:
        LaunchError: the folder is something else's, cannot be written, or has files that would be lost, and
            they may not be overwritten.
    """
    done = host.run(look_script(project_dir), stdin=with_nuls(tree), timeout_s=LOOK_TIMEOUT_S)
    if done.code == NOT_WRITABLE:
        raise LaunchError(f"{host.node}: {'; '.join(not_writable(host.node, project_dir, done))}")
    try:
        folder = read_folder(done)
    except ValueError:
        raise LaunchError(
            f"{host.node}: {project_dir} cannot be used: {done.stderr_tail}"
        ) from None
    difference = compare(tree, folder)
    refused = refusal(folder, host.node, project_dir, () if overwrite else difference.edited)
    if refused:
        raise LaunchError(f"{host.node}: {': '.join(refused)}")
    return difference


def not_writable(node: str, project_dir: str, done: Done) -> tuple[str, str]:
    reason = done.stderr_tail.rpartition(": ")[2]
    return (
        f"{project_dir} cannot be written ({reason})",
        f"give it to the user who logs in there, or set nodes.{node}.project_dir to another folder",
    )


def send_code(
    root: Path, host: Host, project_dir: str, difference: Difference, kept: Sequence[str] = ()
) -> str:
    """Bring to the project's folder on a machine what it lacks; where replaced files are, or nothing.

    `kept`: paths below that folder which are the machine's own, such as `/experiments`.

    Raises:
        LaunchError: it cannot be written, or rsync fails.
    """
    if difference.is_none and difference.is_recorded:
        return ""
    manifest, folder = as_manifest(difference.tree), shell_path(project_dir)

    def do(script: str, stdin: bytes) -> str:
        done = host.run(f"mkdir -p {folder} && cd {folder} || exit 1\n{script}", stdin=stdin)
        if not done.ok:
            raise LaunchError(f"{host.node}: {project_dir} cannot be written: {done.stderr_tail}")
        return done.stdout.strip()

    before = f"$([ ! -e {SENDING} ] || echo {SENDING})"
    do(f"cat - {before} > {SENDING}-new && mv {SENDING}-new {SENDING}", manifest)
    backup = do(_MOVE_AWAY, with_nuls(difference.edited)) if difference.edited else ""
    if difference.gone:
        folders = {name for name in difference.gone if difference.folder.tree[name] == FOLDER}
        files = (name for name in difference.gone if name not in folders)
        do("xargs -0 rm -f --", with_nuls(files))
        do(_REMOVE_FOLDERS, with_nuls(sorted(folders, reverse=True)))
    if difference.edited or difference.outdated:
        _rsync(root, host, project_dir, kept)
    do(f"cat > {SENT}-new && mv {SENT}-new {SENT} && rm -f {SENDING}", manifest)
    return backup and f"{project_dir}/{backup}"


_MOVE_AWAY = f"""mkdir -p {BACKUP} && backup={BACKUP}/$(date +%Y%m%d-%H%M%S)
mkdir "$backup" 2>/dev/null || {{ backup=$backup.$$; mkdir "$backup"; }} || exit 1
export backup; echo "$backup"
xargs -0 sh -c 'for name; do
  [ -h "$name" ] || [ -e "$name" ] || continue
  mkdir -p "$backup/$(dirname "./$name")" && mv "./$name" "$backup/$name" || exit 255
done' sh"""
_REMOVE_FOLDERS = """xargs -0 sh -c 'for name; do
  rm -rf "./$name/__pycache__"; rmdir "./$name" 2>/dev/null; done; true' sh"""


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
    """The command that brings to a folder on a machine what it lacks of `root`, but for what is `kept` there.

    Contents are compared: a file may have changed within a second, and have kept its size.

    What rsync's quoting could spoil is kept from it, as in `fetch`: folder and destination are named in the
    commands that start the other rsync and ssh, and to rsync itself the machine is called `env`.
    """
    there = f'{PREAMBLE}cd {shell_path(project_dir)} && exec rsync "$@"'
    excludes = [f"--exclude={pattern}" for pattern in (*not_sent(root), *kept)]
    return [
        *("rsync", "-rlptz", "--checksum", *excludes),
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
        reason = uv_reason(done.stderr) or f"exit code {done.code}"
        fix = f"there: cd {project_dir} && uv sync"
        if torch != REGISTRY and "torch" in reason:
            fix = f"or take PyTorch from the registry: set nodes.{host.node}.torch to {REGISTRY}"
        raise LaunchError(f"{host.node}: uv cannot make the environment: {reason} ({fix})")


def uv_reason(said: str) -> str:
    """What uv says from its error on, with its causes and hints, without what it draws around them."""
    lines = [line.strip("│╰╭├─▶× \t") for line in said.splitlines()]
    errors = [number for number, line in enumerate(said.splitlines()) if _UV_ERROR.match(line)]
    return condensed(" ".join(lines[errors[0] if errors else 0 :]))


def _install(torch: str) -> str:
    if torch == REGISTRY:
        return "uv sync --no-dev --quiet"
    return (
        "{ [ -x .venv/bin/python ] || uv venv --quiet .venv; } && "
        f"uv pip install --quiet --python .venv/bin/python --torch-backend={shlex.quote(torch)} -e ."
    )
