"""What belongs to the project, what a node's folder has of it, and what of that may be replaced.

What is at a path is one string: `file` and the SHA-256 of its bytes, `link` and its target, or `folder`. A
manifest on the node says what was sent there last. What is neither that nor ours is the work of the node's
owner: it is never replaced unasked. Paths that were never sent are not looked at, and stay.
"""

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Done

SENT = ".smolcluster-sent"
"""The manifest of what was sent last."""
SENDING = ".smolcluster-sending"
"""The manifest of what is on its way, and of all that was broken off before."""
BACKUP = ".smolcluster-backup"
"""The folder of what `--overwrite` has replaced."""
NOT_SENT = (
    *(".git", ".venv", ".uv", "/runs", "/wandb", "/data", "/dist", ".smolcluster-*"),
    *("__pycache__", "*.py[co]", ".*_cache", ".hypothesis", ".DS_Store"),
    *("torch-*.whl", "torchvision-*.whl"),
    "/src/smolcluster/data/MNIST",
)
"""Patterns in rsync's words: a leading / is the project's root."""
LOCK = "uv.lock"
LOCAL_WHEELS = b'source = { registry = "." }'
"""What a lock says of wheels in the checkout: PyTorch without CUDA, which scripts/bootstrap.sh fetches."""
GENERATED = frozenset({LOCK})
"""What uv writes into the project: nobody's work."""
FOLDER, UNREADABLE = "folder", "unreadable"
SHOWN = 10
"""Names in a message."""

Tree = Mapping[str, str]
"""What is at each path, relative to the project's folder."""


def not_sent(root: Path) -> tuple[str, ...]:
    """NOT_SENT, and the lock if it names wheels that only this machine has."""
    try:
        is_local = LOCAL_WHEELS in (root / LOCK).read_bytes()
    except OSError:
        is_local = False
    return (*NOT_SENT, f"/{LOCK}") if is_local else NOT_SENT


def sent_files(root: Path) -> Iterator[str]:
    patterns = not_sent(root)
    for folder, folders, files in os.walk(root):
        place = os.path.relpath(folder, root)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not _left_out(place, name, patterns))
        for name in sorted((*files, *links)):
            if not _left_out(place, name, patterns):
                yield name if place == "." else f"{place}/{name}"


def _left_out(place: str, name: str, patterns: Sequence[str]) -> bool:
    path = f"/{name}" if place == "." else f"/{place}/{name}"
    return any(
        path == pattern if pattern.startswith("/") else fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
    )


def read_tree(root: Path) -> Tree:
    """What is sent of the project at `root`, its folders included.

    Raises:
        LaunchError: a file cannot be read.
    """
    tree: dict[str, str] = {}
    for name in sent_files(root):
        path = root / name
        tree |= dict.fromkeys(_parents(name), FOLDER)
        try:
            if path.is_symlink():
                tree[name] = f"link {_shown(str(path.readlink()))}"
            else:
                tree[name] = f"file {hashlib.sha256(path.read_bytes()).hexdigest()}"
        except OSError as error:
            raise LaunchError(f"{path} cannot be read: {error.strerror or error}") from error
    return tree


def _parents(name: str) -> Iterator[str]:
    return (str(parent) for parent in PurePosixPath(name).parents if parent.name)


def without(tree: Tree, kept: Sequence[str]) -> Tree:
    own = {path.strip("/") for path in kept}
    return {name: what for name, what in tree.items() if own.isdisjoint({name, *_parents(name)})}


def with_nuls(words: Iterable[str]) -> bytes:
    """Names, or names and what is there in turn, as shells read them: a NUL ends each."""
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def as_manifest(tree: Tree) -> bytes:
    return with_nuls(chain.from_iterable(tree.items()))


def version_of(root: Path) -> str:
    """A digest of what is sent."""
    return hashlib.sha256(as_manifest(read_tree(root))).hexdigest()


@dataclass(frozen=True)
class NodeFolder:
    """The project's folder on a node.

    Attributes:
        state: `project`; `absent`, also when it is empty; `foreign`: it holds something else.
        owner: whose work it may be, such as `a git clone`; empty: nobody's.
        tree: what is there at paths that are ours or were sent.
        sent: what was sent to a path; several contents, where sending was broken off.
    """

    state: str
    owner: str = ""
    is_half_sent: bool = False
    tree: Tree = field(default_factory=dict)
    sent: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """What distinguishes a node's `folder` from our `tree`, as paths.

    Attributes:
        edited: neither ours nor what was sent: to replace it loses somebody's work.
        outdated: missing, or as it was sent before.
        gone: not ours any more, or of another kind now, and still as it was sent.
    """

    tree: Tree
    folder: NodeFolder
    edited: tuple[str, ...]
    outdated: tuple[str, ...]
    gone: tuple[str, ...]

    @property
    def is_none(self) -> bool:
        return not (self.edited or self.outdated or self.gone)

    @property
    def is_recorded(self) -> bool:
        """Whether the node's manifest is of our tree alone."""
        ours = {_shown(name): {what} for name, what in self.tree.items()}
        return self.folder.sent == ours and not self.folder.is_half_sent


def read_folder(done: Done) -> NodeFolder:
    """What the script of `sync.look_script` says.

    Raises:
        ValueError: it does not say that, or not all of it.
    """
    text = done.stdout
    if not done.ok:  # a path that it has not looked at would seem to be missing
        raise ValueError(text)
    head, found, rest = text.partition("\0/sent\0")
    facts = dict(_pairs(head.lstrip("\n")))
    state = facts.get("state")
    if state in ("absent", "foreign"):
        return NodeFolder(state)
    if state != "project" or not found:
        raise ValueError(text)
    before, _, now = rest.partition("\0/there\0")
    sent: dict[str, frozenset[str]] = {}
    for name, what in _pairs(before):
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(name)
        sent[name] = sent.get(name, frozenset()) | {what}
    return NodeFolder(state, facts.get("owner", ""), "sending" in facts, _read_tree(now), sent)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    words = text.split("\0")
    return zip(words[::2], words[1::2], strict=False)


def _read_tree(text: str) -> Tree:
    tree, sums = {}, ""
    for name, what in _pairs(text):
        if name:
            tree[name] = what
        else:
            sums += what
    for line in sums.splitlines():
        digest, _, name = line.removeprefix("\\").partition(" ")
        name = name[1:].removeprefix("./")
        if line.startswith("\\"):
            name = name.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")
        if tree.get(name) == UNREADABLE:
            tree[name] = f"file {digest}"
    return tree


def compare(tree: Tree, folder: NodeFolder) -> Difference:
    """What has to be sent to a node, and what must not be replaced there."""
    ours = {_shown(name): what for name, what in tree.items()}
    edited, outdated = [], []
    for name, what in ours.items():
        there, sent = folder.tree.get(name), folder.sent.get(name, frozenset())
        if name in GENERATED and there is not None:
            if what not in sent:
                outdated.append(name)
        elif there is None or (there != what and there in sent):
            outdated.append(name)
        elif there != what:
            edited.append(name)
    gone = [
        name
        for name, sent in folder.sent.items()
        if (there := folder.tree.get(name)) in sent and _kind(there) != _kind(ours.get(name))
    ]
    return Difference(tree, folder, tuple(edited), tuple(outdated), tuple(gone))


def _kind(what: str | None) -> str:
    return (what or "nothing").partition(" ")[0]


def _shown(name: str) -> str:
    """A path as it comes back from a node: what is not UTF-8 is lost on the way."""
    return os.fsencode(name).decode("utf-8", "replace")


def refusal(
    folder: NodeFolder, node: str, project_dir: str, edited: Sequence[str]
) -> tuple[str, str] | None:
    """Why nothing is sent to a node whose folder holds somebody's work, and the ways out; None: it may be."""
    if folder.state == "foreign":
        what = f"{project_dir} holds something else than this project"
        return what, f"set nodes.{node}.project_dir to another folder"
    if not edited:
        return None
    shown, more = ", ".join(edited[:SHOWN]), len(edited) - SHOWN
    names = f"{shown} and {more} more" if more > 0 else shown
    count = "1 file that is" if len(edited) == 1 else f"{len(edited)} files that are"
    owner = f", {folder.owner}," if folder.owner else ""
    return (
        f"{project_dir}{owner} has {count} neither of this version nor of what was sent last: {names}",
        "copy what you need of it into this checkout, or move it away there; or launch with --overwrite, "
        f"which moves it to {project_dir}/{BACKUP} there",
    )
