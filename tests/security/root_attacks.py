"""What a root in an image slot tries: each attempt by name, and what became of it, as one JSON object on stdout.

Runs inside a slot, under the system's python, with nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DONE: Final = "done"
_libc = ctypes.CDLL(None, use_errno=True)
_CALLS: Final = {
    "x86_64": {
        "add_key": 248, "request_key": 249, "keyctl": 250, "mount": 165, "umount2": 166, "pivot_root": 155,
        "unshare": 272, "clone": 56, "setns": 308, "process_vm_readv": 310, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "kcmp": 312, "init_module": 175, "swapon": 167, "reboot": 169, "acct": 163,
        "settimeofday": 164, "iopl": 172, "syslog": 103, "quotactl": 179, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "ptrace": 101, "mknodat": 259, "io_setup": 206, "personality": 135,
        "mincore": 27, "io_submit": 209, "fanotify_mark": 301, "remap_file_pages": 216, "vmsplice": 278, "seccomp": 317,
        "syncfs": 306,
    },
    "aarch64": {
        "add_key": 217, "request_key": 218, "keyctl": 219, "mount": 40, "umount2": 39, "pivot_root": 41,
        "unshare": 97, "clone": 220, "setns": 268, "process_vm_readv": 270, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "kcmp": 272, "init_module": 105, "swapon": 224, "reboot": 142, "acct": 89,
        "settimeofday": 170, "syslog": 116, "quotactl": 60, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "ptrace": 117, "mknodat": 33, "io_setup": 0, "personality": 92,
        "mincore": 232, "io_submit": 2, "fanotify_mark": 263, "remap_file_pages": 234, "vmsplice": 75, "seccomp": 277,
        "syncfs": 267,
    },
}[platform.machine()]  # fmt: skip
_ALIKE: Final = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438,
    "mount_setattr": 442, "clone3": 435, "pidfd_open": 434, "memfd_secret": 447, "cachestat": 451,
    "map_shadow_stack": 453,
}  # fmt: skip
_NUMBERS: Final = {**_CALLS, **_ALIKE}
_NEW: Final = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000,
               "net": 0x40000000, "cgroup": 0x2000000}  # fmt: skip
_AT_FDCWD: Final = -100
_CHARACTER, _BLOCK = 0o020600, 0o060600
_AGENT: Final = 1


def call(name: str, *arguments: Any) -> int:
    """A system call. Raises OSError."""
    words = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    result = int(_libc.syscall(ctypes.c_long(_NUMBERS[name]), *words))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def write(path: str, text: str = "0") -> None:
    Path(path).write_text(text)


def clone_user() -> None:
    if call("clone", _NEW["user"] | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)


def steal_descriptor() -> None:
    call("pidfd_getfd", call("pidfd_open", _AGENT, 0), 3, 0)


def peek() -> None:
    """Eight bytes of the agent's memory, by process_vm_readv."""
    page = ctypes.create_string_buffer(8)
    mine = (ctypes.c_size_t * 2)(ctypes.addressof(page), 8)
    its = (ctypes.c_size_t * 2)(0x400000, 8)
    call("process_vm_readv", _AGENT, mine, 1, its, 1, 0)


def old_call() -> None:
    """getpid by ``int 0x80``, as a 32-bit program does it."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, "there is no such way")
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\x48\x98\xc3")  # mov eax, 20; int 0x80; cdqe; ret
    run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    if (result := run()) < 0:
        raise OSError(-result, os.strerror(-result))


def send_to(kind: int, family: int) -> None:
    socket.socket(family, kind, 0).close()


def _set_option(option: int) -> None:
    """An option of SOL_SOCKET, with the shortest program that there is where it takes one."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    value = struct.pack("HxxxxxxQ", 1, ctypes.addressof(program))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.SOL_SOCKET, option, value)


def opaque_by_hand() -> None:
    """What overlay itself writes to hide a directory of a lower layer."""
    os.setxattr("/usr", "user.overlay.opaque", b"y")


def attempts() -> dict[str, Callable[[], object]]:
    """Every attempt by its name."""
    buffer = ctypes.create_string_buffer(64)
    made: dict[str, Callable[[], object]] = {
        "read the agent's memory": lambda: Path("/proc/1/mem").open("rb").close(),
        "read the agent's environment": lambda: Path("/proc/1/environ").read_bytes(),
        "read the agent's maps": lambda: Path("/proc/1/maps").read_bytes(),
        "list the agent's descriptors": lambda: os.listdir("/proc/1/fd"),  # noqa: PTH208
        "open the agent's program": lambda: Path("/proc/1/exe").open("rb").close(),
        "read the agent's program": lambda: Path("/run/agentenv/slotagent").read_bytes(),
        "raise the agent's oom score": lambda: write("/proc/1/oom_score_adj", "1000"),
        "lower my oom score": lambda: write("/proc/self/oom_score_adj", "0"),
        "trace the agent": lambda: call("ptrace", 0x4206, _AGENT, 0, 0),
        "read the agent's memory by a call": peek,
        "steal the agent's descriptor": steal_descriptor,
        "limit the agent": lambda: resource.prlimit(_AGENT, resource.RLIMIT_NOFILE, (1, 1)),
        "slow the agent": lambda: os.setpriority(os.PRIO_PROCESS, _AGENT, 19),
        "write /run/agentenv": lambda: write("/run/agentenv/x"),
        "replace the agent": lambda: write("/run/agentenv/slotagent"),
        "unmount /run/agentenv": lambda: call("umount2", b"/run/agentenv", 2),
        "mount a tmpfs": lambda: call("mount", b"none", b"/mnt", b"tmpfs", 0, 0),
        "bind /": lambda: call("mount", b"/", b"/mnt", 0, 4096, 0),
        "make /proc writable": lambda: call("mount", b"none", b"/proc", 0, 32 | 4096, 0),
        "pivot the root": lambda: call("pivot_root", b"/", b"/"),
        "open a file system": lambda: call("fsopen", b"tmpfs", 0),
        "copy a mount": lambda: call("open_tree", _AT_FDCWD, b"/", 1),
        "change a mount": lambda: call("mount_setattr", _AT_FDCWD, b"/", 0, buffer, 32),
        "clone with a user namespace": clone_user,
        "clone3": lambda: call("clone3", buffer, 64),
        "make a disk": lambda: call("mknodat", _AT_FDCWD, b"/disk", _BLOCK, os.makedev(8, 0)),
        "make /dev/mem": lambda: call("mknodat", _AT_FDCWD, b"/mem", _CHARACTER, os.makedev(1, 1)),
        "make a whiteout": lambda: call("mknodat", _AT_FDCWD, b"/usr/bin/w", _CHARACTER, 0),
        "make a device in /dev": lambda: call("mknodat", _AT_FDCWD, b"/dev/mem", _CHARACTER, os.makedev(1, 1)),
        "a packet socket": lambda: send_to(socket.SOCK_RAW, socket.AF_PACKET),
        "a vsock socket": lambda: send_to(socket.SOCK_STREAM, 40),
        "a filter of a socket": lambda: _set_option(26),
        "a program of a socket": lambda: _set_option(50),
        "a program of a port": lambda: _set_option(51),
        "a larger buffer than the machine allows": lambda: _set_option(33),
        "a filter of system calls": lambda: call("seccomp", 1, 0, 0),
        "pages of the image in memory": lambda: call("mincore", 0, 0, buffer),
        "pages of a file in memory": lambda: call("cachestat", -1, buffer, buffer, 0),
        "submit aio": lambda: call("io_submit", 0, 0, 0),
        "watch a file system": lambda: call("fanotify_mark", -1, 0, 0, _AT_FDCWD, b"/"),
        "a handle of a file": lambda: call("name_to_handle_at", _AT_FDCWD, b"/", buffer, buffer, 0),
        "secret memory": lambda: call("memfd_secret", 0),
        "a shadow stack": lambda: call("map_shadow_stack", 0, 4096, 0),
        "pages in another order": lambda: call("remap_file_pages", 0, 0, 0, 0, 0),
        "pages in a pipe": lambda: call("vmsplice", -1, buffer, 0, 0),
        "write out a disk of the machine": lambda: call("syncfs", -1),
        "add a key": lambda: call("add_key", b"user", b"k", b"v", 1, -3),
        "read a keyring": lambda: call("keyctl", 6, -3, buffer, 64),
        "request a key": lambda: call("request_key", b"user", b"k", 0, 0),
        "bpf": lambda: call("bpf", 0, buffer, 64),
        "perf": lambda: call("perf_event_open", buffer, 0, -1, -1, 0),
        "io_uring": lambda: call("io_uring_setup", 8, buffer),
        "userfaultfd": lambda: call("userfaultfd", 0),
        "take all aio contexts": lambda: call("io_setup", 1, ctypes.byref(ctypes.c_ulong())),
        "another personality": lambda: call("personality", 0x0400000),
        "a call of i386": old_call,
        "compare processes": lambda: call("kcmp", os.getpid(), os.getpid(), 0, 0, 0),
        "load a module": lambda: call("init_module", buffer, 64, b""),
        "swap": lambda: call("swapon", b"/swap", 0),
        "reboot": lambda: call("reboot", 0xFEE1DEAD, 672274793, 0, 0),
        "account": lambda: call("acct", b"/acct"),
        "set the time": lambda: call("settimeofday", buffer, 0),
        "read the kernel's log": lambda: call("syslog", 3, buffer, 64),
        "read quotas": lambda: call("quotactl", 0x80000700 << 8, 0, 0, buffer),
        "open by handle": lambda: call("open_by_handle_at", _AT_FDCWD, buffer, 0),
        "set core_pattern": lambda: write("/proc/sys/kernel/core_pattern", "|/x"),
        "have the kernel watch the machine's memory": lambda: write("/proc/pressure/memory", "some 150000 2000000"),
        "set the machine's memory types": lambda: write("/proc/mtrr", "disable=0"),
        "set sysrq": lambda: write("/proc/sysrq-trigger", "b"),
        "write /sys": lambda: write("/sys/kernel/mm/ksm/run", "0"),
        "write a block device's setting": lambda: write("/sys/block/loop0/queue/read_ahead_kb"),
        "forge an opaque directory": opaque_by_hand,
        "forge a redirect": lambda: os.setxattr("/usr", "user.overlay.redirect", b"/etc"),
        "forge overlay's own": lambda: os.setxattr("/usr", "trusted.overlay.opaque", b"y"),
        "set a trusted attribute": lambda: os.setxattr("/etc", "trusted.x", b"y"),
        "be a uid outside": lambda: os.chown("/work", 70_000, 0),
        "be uid -2": lambda: os.seteuid(70_000),
        "leave by chroot": _leave_by_chroot,
        "set a capability": _ambient,
    }
    for kind, flag in _NEW.items():
        made[f"unshare {kind}"] = lambda flag=flag: call("unshare", flag)  # type: ignore[misc]
        made[f"enter the agent's {kind}"] = lambda kind=kind, flag=flag: _enter(kind, flag)  # type: ignore[misc]
    return made


def _enter(kind: str, flag: int) -> None:
    call("setns", os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), flag)


def _leave_by_chroot() -> None:
    """The classic way out: keep a descriptor of the root, change the root, climb."""
    root = os.open("/", os.O_RDONLY)
    before = Path("/").stat().st_ino
    os.chroot("/usr")
    os.fchdir(root)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    if Path("/").stat().st_ino == before:
        raise OSError(errno.EPERM, "the slot's own root")


def _ambient() -> None:
    """CAP_SYS_ADMIN as inheritable: only what is permitted can be."""
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    sets = (ctypes.c_uint32 * 6)()
    _libc.capget(header, sets)
    sets[0] |= 1 << 21
    sets[1] |= 1 << 21
    if _libc.capset(header, sets) < 0:
        raise OSError(ctypes.get_errno(), "capset")


def outcome(attempt: Callable[[], object]) -> str:
    """In a process of its own, as what an attempt changes must not help the next."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            said = DONE
        except OSError as error:
            said = errno.errorcode.get(error.errno or 0, str(error.errno))
        except BaseException as error:
            said = repr(error)
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as told:
        said = told.read().decode()
    _, status = os.waitpid(pid, 0)
    return said or f"ended with {status}"


if __name__ == "__main__":
    wanted = sys.argv[1:]
    json.dump({name: outcome(each) for name, each in attempts().items() if not wanted or name in wanted}, sys.stdout)
