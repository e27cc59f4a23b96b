"""Linux system calls missing in Python 3.11. Each raises OSError with a description of the attempt."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_MOVE = 8192
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522
_NS_GET_USERNS = 0xB701
# The same on every machine type since Linux 5.2.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NODEV = 1, 1, 1, 4
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x10_0000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Give the calling process (NEWPID: its future children) new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2). ``options`` is the comma-separated data of the file system."""
    made = _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    _check(made, f"mount {source} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2); without MNT_DETACH it fails with EBUSY while anything uses the mount."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def syncfs(fd: int) -> None:
    """Write what the file system of this file has in memory to its disk."""
    _check(_libc.syncfs(fd), "syncfs")


def pivot_into(directory: str) -> None:
    """Make ``directory`` (a mount point) the root and drop the old one from this mount namespace."""
    os.chdir(directory)
    _check(_libc.pivot_root(b".", b"."), f"pivot_root to {directory}")
    umount(".", MNT_DETACH)
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Send the calling process ``signal`` when its parent dies; the caller checks for the race."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl(PDEATHSIG)")


def parent_death_signal() -> int:
    """The signal of :func:`die_with_parent`; 0 if there is none."""
    number = ctypes.c_int()
    _check(_libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0), "prctl(GET_PDEATHSIG)")
    return number.value


def set_no_new_privileges() -> None:
    """No exec gains privileges from now on, for this process and all its descendants."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def drop_bounding_capabilities(keep: Collection[int] = ()) -> None:
    """Empty the bounding set but for ``keep`` (needs CAP_SETPCAP), so that no exec can ever bring one back."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if capability not in keep:
            _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(CAPBSET_DROP)")
        capability += 1


def clear_capabilities() -> None:
    """Drop every capability of the calling thread."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


@contextmanager
def file_access_as(uid: int) -> Iterator[None]:
    """Let the calling thread use files as ``uid``, of the group with the same number, does (needs CAP_SETUID and
    CAP_SETGID unless they are our own)."""
    death_signal = parent_death_signal()
    group_before = _libc.setfsgid(uid)
    before = _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(before)
        _libc.setfsgid(group_before)
        if death_signal:  # the kernel forgets it with each of these changes
            die_with_parent(death_signal)


def setns(fd: int, kind: int) -> None:
    """Join the namespace ``fd`` refers to."""
    _check(_libc.setns(fd, kind), "setns")


def owning_user_namespace(namespace_fd: int) -> int:
    """A descriptor of the user namespace that owns this namespace (Linux 4.9)."""
    return _check(_libc.ioctl(namespace_fd, _NS_GET_USERNS), "ioctl(NS_GET_USERNS)")


def copy_mount(path: str) -> int:
    """A descriptor of a copy of the mount at ``path``, attached nowhere yet (Linux 5.2)."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def make_mount(kind: str, options: Sequence[tuple[str, str]]) -> int:
    """A descriptor of a new read-only mount of a file system, without devices, attached nowhere yet (Linux 5.2).
    ``options`` in order, each of at most 255 bytes; ``source`` is one of them."""
    context = _check(_libc.syscall(_SYS_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC), f"fsopen {kind}")
    try:
        for name, value in options:
            set_string = (_FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
            _check(_libc.syscall(_SYS_FSCONFIG, context, *set_string), f"fsconfig {name}={value}")
        _check(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_FLAG, b"ro", None, 0), "fsconfig ro")
        _check(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0), f"create {kind}")
        attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NODEV
        return _check(_libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes), f"fsmount {kind}")
    finally:
        os.close(context)


def restrict_mount(mount_fd: int, user_namespace_fd: int | None) -> None:
    """Make an unattached mount read-only and without devices (Linux 5.12), and show its files with their ids mapped as
    in this user namespace, if one is given."""
    kept = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NODEV
    mapped = 0 if user_namespace_fd is None else _MOUNT_ATTR_IDMAP
    attributes = struct.pack("=QQQQ", kept | mapped, 0, 0, user_namespace_fd or 0)
    done = _libc.syscall(_SYS_MOUNT_SETATTR, mount_fd, b"", _AT_EMPTY_PATH, attributes, len(attributes))
    _check(done, "mount_setattr")


def attach_mount(mount_fd: int, target: str) -> None:
    """Attach an unattached mount at ``target``."""
    done = _libc.syscall(_SYS_MOVE_MOUNT, mount_fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(done, f"move_mount to {target}")
