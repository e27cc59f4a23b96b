"""The workspace of a plain slot above frozen ones: overlayfs, mounted by the supervisor, with the slot's own id.

The kernel must show a tmpfs with other ids (6.3) and keep names of one file together when it is changed (``index``,
which needs file handles: CAP_DAC_READ_SEARCH). :func:`refusal` tries it; where it cannot be, workspaces are copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import mounts, syscalls
from agentenv.sandbox.supervisor.checkpoints import FrozenLayer
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.syscalls import MNT_DETACH, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REMOUNT
from agentenv.sandbox.supervisor.user_namespace import OneId, make_user_namespace

UPPER: Final = "u"
"""What a slot has written, in the file system that is frozen."""
_WRITABLE, _WORK = "rw", "w"
_OPTIONS: Final = "index=on,redirect_dir=on,xino=on,metacopy=off"
"""Names of one file stay that, renamed directories need not be copied, inode numbers are unique."""
_UNUSED_S, _UNUSED_PAUSE_S = 5.0, 0.001
"""The kernel ends the overlay of a slot that has ended a moment after its last process."""


@dataclass(frozen=True)
class LayeredWorkspace:
    """Where one is mounted (``target``), and the directory of its parts. ``program`` is slotroot. Each method raises
    OSError."""

    target: Path
    parts: Path
    program: Path
    reaper: Reaper

    @property
    def written(self) -> Path:
        """The file system with all that was written; below :data:`UPPER`."""
        return self.parts / _WRITABLE

    @property
    def has_changed_links(self) -> bool:
        """Whether a file with several names was changed. Only this overlay knows of such names that they are one file:
        frozen, they would be two."""
        index = self.written / _WORK / "index"
        return index.is_dir() and any(index.iterdir())

    async def mount(self, layers: tuple[FrozenLayer, ...], uid: int, *, size_bytes: int, inodes: int) -> None:
        """Mount it above these layers, the upmost first, each shown as of ``uid``, with so much room for what is
        written. Raises SandboxUnavailableError."""
        self.written.mkdir(parents=True, exist_ok=True)
        mounts.mount_tmpfs(self.written, size_bytes=size_bytes, mode=0o700, uid=uid, inodes=inodes)
        with syscalls.file_access_as(uid):
            for name in (UPPER, _WORK):
                (self.written / name).mkdir(mode=0o700)
        _copy_attributes(layers[0].files, self.written / UPPER, uid)
        lowers = [f"l{number}" for number in range(len(layers))]
        shown: list[Path] = []
        try:
            await self._show(layers, lowers, uid, shown)
            await self._mount_overlay(lowers)
        finally:
            for lower in shown:  # the overlay holds what it needs of them
                syscalls.umount(str(lower), MNT_DETACH)

    def unmount(self, *, written: bool = True) -> None:
        """Unmount it; and unless not ``written``, discard what was."""
        if _is_mount(self.target):
            syscalls.umount(str(self.target))
        if written and _is_mount(self.written):
            syscalls.umount(str(self.written))

    async def _show(self, layers: tuple[FrozenLayer, ...], lowers: list[str], uid: int, shown: list[Path]) -> None:
        own = OneId(uid)
        owners = dict.fromkeys(layer.ids for layer in layers if layer.ids != own)
        made = [make_user_namespace(self.program, own, self.reaper, shown=owner) for owner in owners]
        found = await asyncio.gather(*made, return_exceptions=True)
        mappings = {owner: fd for owner, fd in zip(owners, found, strict=True) if isinstance(fd, int)}
        try:
            if failed := next((one for one in found if isinstance(one, BaseException)), None):
                raise failed
            for layer, name in zip(layers, lowers, strict=True):
                (self.parts / name).mkdir(exist_ok=True)
                copied = syscalls.copy_mount(str(layer.files))
                try:
                    syscalls.restrict_mount(copied, mappings.get(layer.ids))
                    syscalls.attach_mount(copied, str(self.parts / name))
                finally:
                    os.close(copied)
                shown.append(self.parts / name)
        finally:
            for fd in mappings.values():
                os.close(fd)

    async def _mount_overlay(self, lowers: list[str]) -> None:
        """By names relative to the parts: a slot's ``/proc/mounts`` shows them, and 64 layers fit into the options."""
        options = f"lowerdir={':'.join(lowers)},upperdir={_WRITABLE}/{UPPER},workdir={_WRITABLE}/{_WORK},{_OPTIONS}"
        until_s = time.monotonic() + _UNUSED_S
        while True:
            try:
                with contextlib.chdir(self.parts):
                    return syscalls.mount("workspace", str(self.target), "overlay", MS_NOSUID | MS_NODEV, options)
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(_UNUSED_PAUSE_S)


def _copy_attributes(source: Path, target: Path, uid: int) -> None:
    """What overlayfs takes of the workspace itself from the upmost directory: attributes, mode and times."""
    seen = source.stat()
    attributes = {name: os.getxattr(source, name) for name in os.listxattr(source) if not name.startswith("trusted.")}
    with syscalls.file_access_as(uid):
        for name, value in attributes.items():
            os.setxattr(target, name, value)
        target.chmod(stat.S_IMODE(seen.st_mode))
        os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _is_mount(path: Path) -> bool:
    return path.exists() and path.stat().st_dev != path.parent.stat().st_dev


async def refusal(place: Path, program: Path, reaper: Reaper, uids: tuple[int, int]) -> str:
    """Why a workspace of one of two users cannot be another's lowest layer here; empty if it can. ``place`` is a new
    directory, which is removed."""
    base, target = place / "base", place / "workspace"
    above = LayeredWorkspace(target, place / "parts", program, reaper)
    try:
        for directory in (base, target):
            directory.mkdir(parents=True)
        mounts.mount_tmpfs(base, size_bytes=2**20, mode=0o700, uid=uids[0])
        with syscalls.file_access_as(uids[0]):
            (base / "one").write_text("a")
            (base / "other").hardlink_to(base / "one")
            (base / "folder").mkdir()
        syscalls.mount("none", str(base), flags=MS_REMOUNT | MS_RDONLY | MS_NODEV)
        layer = FrozenLayer(base, base, OneId(uids[0]), 0)
        await above.mount((layer,), uids[1], size_bytes=2**20, inodes=100)
        return _unlike(target, uids[1])
    except (OSError, SandboxUnavailableError) as error:
        return str(error)
    finally:
        above.unmount()
        if _is_mount(base):
            syscalls.umount(str(base), MNT_DETACH)


def _unlike(target: Path, uid: int) -> str:
    """What is not as it must be in a workspace above another user's."""
    with syscalls.file_access_as(uid):
        with (target / "one").open("a") as file:
            file.write("b")
        (target / "folder").rename(target / "renamed")
        seen = (target / "one").stat()
        same = (target / "other").samefile(target / "one") and (target / "other").read_text() == "ab"
    if (seen.st_uid, target.stat().st_uid) != (uid, uid):
        return "the overlay does not show files under the slot's uid"
    return "" if same else "changing a file breaks its hard links"
