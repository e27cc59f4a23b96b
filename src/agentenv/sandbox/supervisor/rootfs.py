"""Builds the tree that every slot of a container starts from: read-only system, minimal /etc, agent."""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentenv.errors import ConfigError
from agentenv.sandbox.slot_env import PATH, PROGRAMS
from agentenv.sandbox.slot_paths import TMUX_BUNDLE
from agentenv.sandbox.supervisor import mounts
from agentenv.sandbox.supervisor.isolation import ETC_COPIES, ROOT_DIRECTORIES, ROOT_LINKS
from agentenv.wire.spec import Bind

_COPY_LIMIT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Tree:
    """The container's private directory: the template ``root`` and a mount point per slot."""

    root: Path
    workspaces: Path
    image_roots: Path
    terminals: Path
    """An empty directory for each slot, where its ``/dev/pts`` is mounted while it starts."""
    jail: Path
    """An empty directory in which a slot's network stack builds its own small root."""
    empty: Path
    """A directory that stays empty."""
    image_programs: Path
    """What image slots have as ``/run/agentenv``."""
    image_etc: Path
    """Files that replace those of an image's /etc in image slots."""
    has_tmux: bool
    """Whether ``image_programs`` has a tmux with its libraries."""

    def workspace(self, slot: int) -> Path:
        """The mount point of one slot's workspace."""
        return self.workspaces / str(slot)

    def workspace_parts(self, slot: int) -> Path:
        """A directory for the parts of one slot's workspace, where it has some."""
        return self.workspaces / f"{slot}.parts"

    def image_root(self, slot: int) -> Path:
        """The mount point of what the root of one slot's image is made from: a plain slot may wait in its workspace."""
        return self.image_roots / str(slot)

    def slot_terminals(self, slot: int) -> Path:
        """The mount point of one slot's ``/dev/pts`` while it starts."""
        return self.terminals / str(slot)


def build(
    private: Path,
    *,
    etc: dict[str, str],
    programs: Mapping[str, Path],
    tmux: Sequence[tuple[str, Path]] = (),
    binds: Sequence[Bind],
    slots: int,
) -> Tree:
    """Fill ``private`` (our own tmpfs); ``programs`` by their names in ``/run/agentenv``, ``tmux`` the files of
    :func:`~agentenv.sandbox.supervisor.preparation.tmux_bundle`, for image slots.

    Raises ConfigError for a bind that fails, OSError when the machine has no ``/usr`` or memory for it.
    """
    tree = Tree(
        private / "root",
        private / "ws",
        private / "roots",
        private / "pts",
        private / "jail",
        private / "empty",
        private / "image-run",
        private / "image-etc",
        has_tmux=bool(tmux),
    )
    for name in ROOT_DIRECTORIES:
        (tree.root / name).mkdir(parents=True, exist_ok=True)
    (tree.root / "var/tmp").symlink_to("/tmp")  # noqa: S108  (one sized place for temporary files)
    _copy_programs(programs, tree.root / "run/agentenv")
    tree.image_programs.mkdir()
    _copy_programs(programs, tree.image_programs)
    # No process of an image slot may read the agent: the kernel then keeps its /proc files from the slot's root too.
    (tree.image_programs / "slotagent").chmod(0o711)
    for name, source in tmux:
        copied = tree.image_programs / posixpath.basename(TMUX_BUNDLE) / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copied)
        copied.chmod(0o755)
    link_programs(tree.root / PROGRAMS.lstrip("/"))
    tree.empty.mkdir()
    tree.image_etc.mkdir()
    for name in ("hosts", "hostname", "resolv.conf"):
        (tree.image_etc / name).write_text(etc.get(name, ""))
    show = partial(mounts.show_read_only, empty=str(tree.empty))
    show("/usr", str(tree.root / "usr"))
    for name in ROOT_LINKS:
        root_entry(Path("/") / name, tree.root / name, show)
    _fill_etc(tree.root / "etc", etc)
    for index, bind in enumerate(binds):
        _bind(tree, bind, f"binds[{index}]")
    tree.workspaces.mkdir()
    tree.image_roots.mkdir()
    tree.terminals.mkdir()
    tree.jail.mkdir()
    for slot in range(slots):
        tree.workspace(slot).mkdir()
        tree.image_root(slot).mkdir()
        tree.slot_terminals(slot).mkdir()
    return tree


def _copy_programs(programs: Mapping[str, Path], directory: Path) -> None:
    for name, source in programs.items():
        shutil.copyfile(source, directory / name)
        (directory / name).chmod(0o755)


def root_entry(source: Path, target: Path, show: Callable[[str, str], None] = mounts.bind_read_only) -> None:
    """``/bin`` and similar: a symlink into /usr if the machine has that, else the directory."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
        show(str(source), str(target))


def link_programs(directory: Path) -> None:
    """Make the directory that comes last on PATH: models type ``python``, which many machines only have as
    ``python3``. The link leads to the machine's, which has the same path in a slot."""
    directory.mkdir()
    if python := shutil.which("python3", path=PATH):
        (directory / "python").symlink_to(python)


def _fill_etc(etc: Path, written: dict[str, str]) -> None:
    for pattern in ETC_COPIES:
        for source in sorted(Path("/etc").glob(pattern)):
            _copy(source, etc / source.relative_to("/etc"))
    for name, text in written.items():
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)
    (etc / "mtab").symlink_to("/proc/self/mounts")


def _copy(source: Path, target: Path) -> None:
    """Copy what everybody may read; symlinks stay symlinks, unless they lead out of /etc and /usr."""
    kind = source.lstat()
    if stat.S_ISLNK(kind.st_mode):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.readlink())
    elif stat.S_ISDIR(kind.st_mode) and kind.st_mode & stat.S_IXOTH and os.access(source, os.R_OK):
        target.mkdir(parents=True, exist_ok=True)
        for entry in source.iterdir():
            _copy(entry, target / entry.name)
    elif stat.S_ISREG(kind.st_mode) and kind.st_mode & stat.S_IROTH and kind.st_size <= _COPY_LIMIT_BYTES:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _bind(tree: Tree, bind: Bind, where: str) -> None:
    source, target = Path(bind.source), tree.root / bind.target.lstrip("/")
    try:
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            mounts.show_read_only(str(source), str(target), str(tree.empty))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch(exist_ok=True)
            mounts.bind_read_only(str(source), str(target))
    except OSError as error:
        raise ConfigError(where, f"cannot mount {source} at {bind.target}: {error.strerror}") from error
