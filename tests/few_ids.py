"""Containers of the local backend as root of a user namespace with few ids: what an engine's userns-remap gives, or
newuidmap an ordinary user.

As a program it is what starts such a container, instead of ``python -m agentenv.sandbox``: real root, which shows it
what it needs, and goes on as root of the namespace.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from agentenv.sandbox.supervisor import mounts, syscalls
from agentenv.slots.backends import local_process
from agentenv.wire.spec import SandboxSpec

FIRST: Final = 100_000
IDS: Final = 65_536
_NEW: Final = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | 0x0800_0000  # and ipc


@contextmanager
def few_ids(first: int = FIRST, count: int = IDS) -> Iterator[None]:
    """Containers started meanwhile have ``count`` ids, which are those from ``first`` on of the machine, and cgroups of
    their own."""
    ordinary = local_process.container_command

    async def command(name: str, spec: Path, *, detached: bool) -> list[str]:
        asked = [str(first), str(count), ":".join(map(str, groups))]
        return [sys.executable, __file__, *asked, *await ordinary(name, spec, detached=detached)]

    with ExitStack() as stack:
        groups = [stack.enter_context(_group(parent, first)) for parent in _own_groups()]
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(local_process, "container_command", command)
        yield


@contextmanager
def _group(parent: Path, owner: int) -> Iterator[Path]:
    """A cgroup that belongs to this user, as an engine or systemd delegates one."""
    made = parent / f"few-ids-{secrets.token_hex(4)}"
    made.mkdir()
    try:
        for path in (made, made / "cgroup.procs", made / "tasks"):
            if path.exists():
                os.chown(path, owner, owner)
        yield made
    finally:
        for directory in sorted(made.rglob("*"), reverse=True):
            if directory.is_dir():
                directory.rmdir()
        made.rmdir()


def _own_groups() -> list[Path]:
    """Our own cgroup in every hierarchy that limits slots."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            place = Path("/sys/fs/cgroup", name, path.lstrip("/"))
            if name in ("memory", "pids", "cpu", "freezer", "") and (place / "cgroup.procs").exists():
                found.append(place)
    return found


def main(arguments: Sequence[str]) -> None:
    """FIRST COUNT GROUP[:GROUP...] COMMAND..."""
    first, count = map(int, arguments[:2])
    for group in filter(None, arguments[2].split(":")):
        Path(group, "cgroup.procs").write_text("0")
    command = arguments[3:]
    spec_file = Path(next(word for word in command if word.endswith(".json")))
    spec = SandboxSpec.load(spec_file)
    data = Path(spec.data_dir)
    data.mkdir(parents=True, exist_ok=True)
    for path in (spec_file, spec_file.parent, Path(spec.token_file), data):
        os.chown(path, first, first)
    named = [Path(word).parent for word in command if word.startswith("/") and Path(word).is_file()]
    stores = [Path(spec.store_dir)] if spec.store_dir else []
    mounts.enter_private_namespace()
    _show([data, *stores, *named, *mounts.interpreter_directories()])
    _enter(first, count)
    os.execv(command[0], list(command))


def _show(directories: Sequence[Path]) -> None:
    """Let everybody reach these: other directories above them may be closed."""
    shown = mounts.unreachable(directories)
    opened = [(item, os.open(item.directory, os.O_PATH | os.O_DIRECTORY)) for item in shown]
    for blocker in dict.fromkeys(item.blocker for item in shown):
        mounts.mount_tmpfs(blocker, size_bytes=1024 * 1024, mode=0o755, uid=0)
    for item, descriptor in opened:
        item.directory.mkdir(parents=True, exist_ok=True)
        syscalls.mount(f"/proc/self/fd/{descriptor}", str(item.directory), flags=syscalls.MS_BIND | syscalls.MS_REC)
        if not mounts.searchable_by_all(item.directory):
            item.directory.chmod(0o755)
        os.close(descriptor)


def _enter(first: int, count: int) -> None:
    """Become root of a new user namespace, whose maps a child of ours writes, as newuidmap does."""
    inside, ready = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.read(inside, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{parent}/{name}").write_text(f"0 {first} {count}\n")
        os._exit(0)
    syscalls.unshare(_NEW)
    os.write(ready, b"r")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(inside)
    os.close(ready)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
