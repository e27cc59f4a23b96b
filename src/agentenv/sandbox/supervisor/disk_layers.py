"""Writable layers on a disk: for each an ext4 file system of its own, in a file that has its size reserved and no name.

The kernel bounds what a slot writes there, no slot can take the space of another one, and nothing is left of a layer
once it is mounted nowhere, however the supervisor ends: the loop device detaches itself, and the file is freed.

On a machine of its own the kernel names a free loop device, and makes one if there is none (``/dev/loop-control``). A
container of an engine has been given some by number instead, and uses those of them that are free: it can then reach
no other file system that its machine shows by a loop device.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import child, syscalls
from agentenv.sandbox.supervisor.attest import parse_mounts
from agentenv.sandbox.supervisor.reaper import Reaper, end_of

_ON_DISK: Final = ("ext4", "xfs")
"""File systems that are on a disk and can reserve what a file will need."""
_PROGRAM: Final = "mkfs.ext4"
_SBIN: Final = "/usr/sbin:/sbin"
_INODE_BYTES: Final = 256
_OWN_INODES: Final = 16
"""ext4 has 11 for itself."""
_OVERHEAD_BYTES: Final = 24 << 20
"""What ext4 reserves for itself: 4096 clusters of 4 KiB that no file gets, and its descriptors."""
_BITMAPS_SHARE: Final = 4096
"""Of what is written a further 1/4096: bitmaps are 1/16384, and as much is rounded up in each group of 128 MiB."""
_FILE_FD: Final = 3
_STDERR: Final = 2
_DEVICES: Final = Path("/dev")
_LOOP_CONTROL: Final = "loop-control"
# linux/loop.h
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C05
_LOOP_INFO64_BYTES: Final = 232
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_ATTEMPTS: Final = 64
"""Others may take the free loop device that was found."""
_TAKEN: Final = (errno.EBUSY, errno.EROFS)
"""The kernel's errors for a loop device that shows another file, or one that may not be written."""
# linux/fs.h, fs/ext4/ext4.h
_FITRIM, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH = 0xC0185879, 0x8004587D, 2


@dataclass(frozen=True)
class DiskLayers:
    """Layers whose files are on the disk of the directory ``place``."""

    place: Path

    async def mount(self, target: Path, *, size_bytes: int, inodes: int, uid: int, reaper: Reaper) -> None:
        """Mount a new, empty layer at ``target``, whose top belongs to ``uid`` and the group of the same number, for
        at least so many bytes and files. Raises SandboxUnavailableError: the disk has no room for it, or it cannot be
        made; OSError."""
        file = await asyncio.to_thread(self._reserve, size_bytes, inodes)
        try:
            await _make_file_system(file, inodes, uid, reaper)
            await asyncio.to_thread(_mount, file, target)
        finally:
            os.close(file)

    @property
    def most_bytes(self) -> int:
        """The size of the disk."""
        disk = os.statvfs(self.place)
        return disk.f_blocks * disk.f_frsize

    def lacking(self, size_bytes: int, inodes: int) -> str:
        """Why there is no room for one more such layer, or no loop device; empty if there are."""
        disk = os.statvfs(self.place)
        free_bytes, wanted_bytes = disk.f_bavail * disk.f_frsize, file_bytes(size_bytes, inodes)
        if free_bytes < wanted_bytes:
            return f"{wanted_bytes} bytes cannot be reserved: {free_bytes} are free at {self.place}"
        given = _given_devices()
        if given and not any(map(_is_free, given)):
            return f"all {len(given)} loop devices of this container are in use"
        return ""

    def _reserve(self, size_bytes: int, inodes: int) -> int:
        """A descriptor of a new file without a name. The request is compared with the disk's size first: to reserve
        more than there is would take all of it from the others for a moment."""
        if lacking := self.lacking(size_bytes, inodes):
            raise _no_room(lacking)
        file = _unnamed(self.place)
        try:
            os.posix_fallocate(file, 0, file_bytes(size_bytes, inodes))
        except OSError as error:
            os.close(file)
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise _no_room(f"{file_bytes(size_bytes, inodes)} bytes cannot be reserved at {self.place}") from error
            raise
        except BaseException:
            os.close(file)
            raise
        return file


def file_bytes(size_bytes: int, inodes: int) -> int:
    """The size of the file of a layer that has room for ``size_bytes``."""
    return size_bytes + inodes * _INODE_BYTES + size_bytes // _BITMAPS_SHARE + _OVERHEAD_BYTES


def shrink(layer: Path) -> None:
    """Give back what was reserved for a layer and not used: nothing writes to it any more. Blocks. Raises OSError."""
    with _opened(layer) as top:
        syscalls.syncfs(top)
        fcntl.ioctl(top, _FITRIM, struct.pack("=QQQ", 0, 2**63, 0))


def forget(layer: Path) -> None:
    """Let a layer that is unmounted next be thrown away, and not be written to the disk first. Raises OSError."""
    with _opened(layer) as top:
        fcntl.ioctl(top, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))


def refusal(place: Path, mountinfo: str) -> str:
    """Why there can be no layers on the disk of this directory, and what to do about it; empty if there can. Tries it,
    but for the mount. ``mountinfo``: of ``/proc/self/mountinfo``."""
    if why := not_on_disk(mountinfo, str(place)):
        return why
    if not _program():
        return f"{_PROGRAM} is not installed: apt-get install e2fsprogs"
    try:
        file = _unnamed(place)
    except OSError as error:
        return f"cannot create a file in {place}: {error.strerror}"
    try:
        os.posix_fallocate(file, 0, 1 << 20)
        os.close(_attach(file)[0])
    except OSError as error:
        if error.errno in _TAKEN:
            return ""  # all in use now; a lease reports that
        return (
            f"no loop devices ({error.filename}: {error.strerror}): load the module loop, and give "
            "the container some (loop_devices of the Nomad job, docker run --device)"
        )
    finally:
        os.close(file)
    return ""


def not_on_disk(mountinfo: str, path: str) -> str:
    """Why the file system that ``path`` is on keeps no layers; empty if it does."""
    kind = _file_system(mountinfo, path)
    if kind in _ON_DISK:
        return ""
    named = kind or "no known file system"
    return f"{path} is on {named}: name a directory on {' or '.join(_ON_DISK)} (disk_dir of the container)"


def _file_system(mountinfo: str, path: str) -> str:
    """The kind of the file system that a path is on, by the longest mount point above it; the last one covers."""
    found, longest = "", -1
    for mount in parse_mounts(mountinfo):
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= longest:
            found, longest = mount.kind, len(point)
    return found


def _no_room(why: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"{why}: {os.strerror(errno.ENOSPC)}",
        next_step="free disk space, request less storage, use fewer slots and checkpoints on the disk at once, or give "
        "containers more loop devices",
    )


def _program() -> str | None:
    return shutil.which(_PROGRAM, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


def _unnamed(place: Path) -> int:
    return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


async def _make_file_system(file: int, inodes: int, uid: int, reaper: Reaper) -> None:
    program = _program()
    if program is None:
        raise SandboxUnavailableError(f"{_PROGRAM} is not installed", next_step="apt-get install e2fsprogs")
    # No journal: no layer outlives a crash. Tables of inodes are not cleared: the file reads as zeros.
    options = f"lazy_itable_init=1,nodiscard,root_owner={uid}:{uid}"
    arguments = [program, "-F", "-q", "-m", "0", "-b", "4096", "-I", str(_INODE_BYTES), "-N", str(inodes + _OWN_INODES)]
    arguments += ["-O", "^has_journal,^resize_inode", "-E", options, f"/proc/self/fd/{_FILE_FD}"]
    exited = reaper.watch(child.spawn(arguments, {_FILE_FD: file}, _STDERR))
    if status := await asyncio.shield(exited):
        raise SandboxUnavailableError(f"{_PROGRAM} failed ({end_of(status)}): see the container's log")


def _mount(file: int, target: Path) -> None:
    device, path = _attach(file)
    try:
        # Barriers only matter after a crash; and the kernel is not to clear what mkfs has not cleared.
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount(path, str(target), "ext4", flags, "noinit_itable,barrier=0")
    finally:
        os.close(device)


def _attach(file: int) -> tuple[int, str]:
    """A loop device that shows the file, as a descriptor and a path. It is free again when it is neither open nor
    mounted. Raises OSError: EBUSY when all are in use."""
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO  # else each page would be in memory twice
    # struct loop_config with a struct loop_info64, in which only the flags are not 0
    config = struct.pack("=II52xI176x64x", file, 0, flags)
    path = _DEVICES / _LOOP_CONTROL
    for path in _given_devices() or _named_devices():
        try:
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _TAKEN:
                continue
            raise
        try:
            fcntl.ioctl(device, _LOOP_CONFIGURE, config)
        except OSError as error:
            os.close(device)
            if error.errno not in _TAKEN:
                raise OSError(error.errno, error.strerror, str(path)) from error
        else:
            return device, str(path)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


def _given_devices() -> list[Path]:
    """The loop devices of a container that cannot create others, by number; none where it can."""
    if (_DEVICES / _LOOP_CONTROL).exists():
        return []
    return sorted(_DEVICES.glob("loop[0-9]*"), key=lambda path: int(path.name.removeprefix("loop")))


def _named_devices() -> Iterator[Path]:
    """Loop devices that are free according to the kernel, one after the other. Raises OSError."""
    for _ in range(_ATTEMPTS):
        control = os.open(_DEVICES / _LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        finally:
            os.close(control)
        yield _DEVICES / f"loop{number}"


def _is_free(path: Path) -> bool:
    """Whether a loop device shows no file now."""
    try:
        device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.ioctl(device, _LOOP_GET_STATUS64, bytes(_LOOP_INFO64_BYTES))
    except OSError as error:
        return error.errno == errno.ENXIO
    else:
        return False
    finally:
        os.close(device)


@contextmanager
def _opened(layer: Path) -> Iterator[int]:
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield top
    finally:
        os.close(top)
