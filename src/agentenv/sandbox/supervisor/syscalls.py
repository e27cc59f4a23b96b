"""Linux system calls missing in Python 3.11. Each raises OSError with a description of the attempt."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator
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
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522
_NS_GET_USERNS = 0xB701

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


def pivot_into(directory: str) -> None:
    """Make ``directory`` (a mount point) the root and drop the old one from this mount namespace."""
    os.chdir(directory)
    _check(_libc.pivot_root(b".", b"."), f"pivot_root to {directory}")
    umount(".", MNT_DETACH)
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Send the calling process ``signal`` when its parent dies; the caller checks for the race."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl(PDEATHSIG)")


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
    """Let the calling thread use files as ``uid`` does (needs CAP_SETUID unless it is our own)."""
    before = _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(before)


def setns(fd: int, kind: int) -> None:
    """Join the namespace ``fd`` refers to."""
    _check(_libc.setns(fd, kind), "setns")


def owning_user_namespace(namespace_fd: int) -> int:
    """A descriptor of the user namespace that owns this namespace (Linux 4.9)."""
    return _check(_libc.ioctl(namespace_fd, _NS_GET_USERNS), "ioctl(NS_GET_USERNS)")
