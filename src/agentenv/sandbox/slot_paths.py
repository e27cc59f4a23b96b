"""Paths as seen by programs in a slot. Pure, standard library only."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from agentenv.errors import UserUnsupportedError
from agentenv.file_names import meant_path

WORKSPACE: Final = "/workspace"
"""Name of a slot's workspace in all interfaces, wherever it is."""
TMUX_BUNDLE: Final = "/run/agentenv/tmux"
"""A tmux with libraries and a locale of its own, for images without one: see :func:`bundled_tmux`."""
_AS_USER: Final = "/run/agentenv/slotas"
_ROOT: Final = frozenset({"", "root", "0", "root:root", "root:0", "0:0", "0:root"})


def is_root(user: str) -> bool:
    """Whether this is the root of an image slot, as which its programs are started anyway."""
    return user in _ROOT


def as_user(user: str, argv: Sequence[str], program: str = "") -> list[str]:
    """The command that runs ``argv`` as this user of an image slot (``slotagent/as``); not for its root. If given,
    ``program`` is executed instead of ``argv[0]``."""
    return [_AS_USER, *(("-x", program) if program else ()), user, *argv]


def bundled_tmux(directory: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs the tmux in ``directory``, without arguments, and the variables it needs. It is started by
    its own dynamic linker: the image's, and the libraries that this finds, are of other versions or not there."""
    linker = [f"{directory}/ld.so", "--library-path", f"{directory}/lib", "--argv0", "tmux"]
    return [*linker, f"{directory}/tmux"], {"LOCPATH": f"{directory}/locale"}


@dataclass(frozen=True)
class SlotPaths:
    """Paths as the slot's own processes see them. The defaults are those of a slot with its own mounts."""

    workspace: str = WORKSPACE
    files: str = "/run/agentenv/slotfiles"
    tmux_socket: str = "/tmp/tmux.agentenv"  # noqa: S108 (the slot's own /tmp)
    home: str = WORKSPACE
    """What ``~`` stands for: the slot's ``$HOME``, even while it is sealed, so that a path keeps its meaning. Empty:
    the home of ``user``, which only the slot's own files tell."""
    beneath_workspace: bool = False
    """Whether file operations are kept in the workspace: where nothing else keeps them off this machine's files."""

    tar: str = "/run/agentenv/slottar"
    own_root: bool = False
    """Whether the slot has a root of its own, in which ``/workspace`` is a directory like any other."""
    user: str = ""
    """Whose programs run in a slot with a root of its own, if a call names nobody else."""
    dial: str = "/run/agentenv/slotdial"
    listen: str = "/run/agentenv/slotlisten"
    ripgrep: str = "/run/agentenv/rg"
    tmux: str = ""
    """Directory of the tmux to use (:data:`TMUX_BUNDLE`); empty: the one that PATH leads to."""
    workdir: str = ""
    """See :attr:`start`."""

    @property
    def start(self) -> str:
        """Where commands start, and what relative paths are below."""
        return self.in_slot(self.workdir) if self.workdir else self.workspace

    def in_slot(self, path: str) -> str:
        """``path`` as a process of the slot must name it: paths below ``/workspace`` become paths below the
        workspace."""
        if self.own_root:
            return path
        below = path == WORKSPACE or path.startswith(WORKSPACE + "/")
        return self.workspace + path.removeprefix(WORKSPACE) if below else path

    def named(self, path: str) -> str:
        """``path`` as a call names it: like :meth:`in_slot`, with ``~`` for the home, and bytes that are not UTF-8 as
        in :mod:`agentenv.file_names`."""
        path = meant_path(path)
        at_home = self.home and (path == "~" or path.startswith("~/"))
        return self.in_slot(self.home + path.removeprefix("~") if at_home else path)

    def directory(self, path: str | None) -> str:
        """The directory a call names for a command to run in; relative ones are below :attr:`start` (the
        default)."""
        return posixpath.join(self.start, self.named(path)) if path else self.start

    def of_user(self, user: str | None) -> SlotPaths:
        """The same for what a call does as this user (None: the slot's own). Raises UserUnsupportedError in a slot
        that has one user."""
        if user is None:
            return self
        if not self.own_root:
            raise UserUnsupportedError(
                f"a slot without an image has one user, and {user!r} cannot be another",
                next_step="leave user out, or use a slot with an image",
            )
        return replace(self, user=user, home="")

    def slotfiles(self, operation: str, path: str, *rest: str) -> list[str]:
        """The command of one file operation."""
        fence, top, path = [], self.start, self.named(path)
        if self.beneath_workspace:
            fence, top, path = ["--beneath"], self.workspace, posixpath.join(top, path) if self.workdir else path
        argv = [self.files, *fence, top, operation, path, *rest]
        return argv if is_root(self.user) else as_user(self.user, argv)


USUAL_PATHS: Final = SlotPaths()
