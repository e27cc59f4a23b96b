"""A cgroup v2 with processes in it: the kernel's where this machine has one (:class:`Real`), and one that behaves like
it everywhere (:class:`StandIn`). What holds over both is known to hold for the kernel, and for every controller."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar, Final, Protocol

import pytest

from agentenv.sandbox.supervisor import cgroups, limits
from tests.waiting import START_S, wait_for

_WANTED: Final = frozenset({"memory", "pids", "cpu"})
_RESTLESS: Final = "while :; do /bin/true; done"
_REMOVE: Final = """
import sys
from pathlib import Path
from agentenv.sandbox.supervisor import cgroups
cgroups.remove_tree(Path(sys.argv[1]))
"""


class CgroupTree(Protocol):
    """``own``, below ``top``, has ``controllers``, no children, and what :meth:`start` starts in it."""

    top: Path
    own: Path
    controllers: frozenset[str]

    def start(self, directory: Path | None = None, *, restless: bool = False) -> int:
        """A process in ``directory``, or in ``own``; its pid. ``restless``: it starts others, which end at once."""

    def cgroup_of(self, pid: int) -> Path:
        """Where the process is."""

    def remove_elsewhere(self, base: Path) -> None:
        """Remove a container's cgroups from another pid namespace."""


def real_mount() -> Path | None:
    """Where the kernel's cgroup v2 can be written; None where it is not mounted or not ours."""
    for kind, _root, point, _options in limits.parse_mounts(Path("/proc/self/mountinfo").read_text()):
        is_root = not (point / "cgroup.type").exists()
        if kind == "cgroup2" and is_root and os.geteuid() == 0 and os.access(point, os.W_OK) and _controllers(point):
            return point
    return None


def _controllers(point: Path) -> frozenset[str]:
    """Those slots are limited by; where version 1 has them, one of the others."""
    offered = (point / "cgroup.controllers").read_text().split()
    return _WANTED.intersection(offered) or frozenset(offered[:1])


class Real:
    """Of the kernel, in a directory of its own at the root."""

    _numbers: ClassVar = itertools.count()

    def __init__(self, mount: Path) -> None:
        self.controllers = _controllers(mount)
        self.top = mount / f"tests-{os.getpid()}-{next(self._numbers)}"
        self.own = self.top / "session"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Real:
        enable = " ".join(f"+{name}" for name in self.controllers)
        (self.top.parent / "cgroup.subtree_control").write_text(enable)
        self.top.mkdir()
        (self.top / "cgroup.subtree_control").write_text(enable)
        self.own.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        (self.top / "cgroup.kill").write_text("1")
        for process in self._processes:
            process.wait(START_S)
        wait_for(lambda: not self._populated(), explain="every process in it has ended")
        for directory, _names, _files in os.walk(self.top, topdown=False):
            Path(directory).rmdir()

    def _populated(self) -> bool:
        return "populated 1" in (self.top / "cgroup.events").read_text()

    def start(self, directory: Path | None = None, *, restless: bool = False) -> int:
        process = subprocess.Popen(["sh", "-c", _RESTLESS if restless else "exec sleep 1000"])
        self._processes.append(process)
        ((directory or self.own) / "cgroup.procs").write_text(str(process.pid))
        return process.pid

    def cgroup_of(self, pid: int) -> Path:
        (line,) = (line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
        return self.top.parent / line.removeprefix("0::/")

    def remove_elsewhere(self, base: Path) -> None:
        command = ["unshare", "--pid", "--fork", sys.executable, "-c", _REMOVE, str(base)]
        subprocess.run(command, check=True, timeout=START_S)


class _Node:
    """One cgroup of the stand-in."""

    def __init__(self, offered: frozenset[str]) -> None:
        self.offered = offered
        self.enabled: frozenset[str] = frozenset()
        self.pids: list[int] = []


_OF_ROOT: Final = ("controllers", "procs", "subtree_control")
_OF_EVERY: Final = (*_OF_ROOT, "type", "kill")
_OF_CONTROLLER: Final = {
    "memory": ("memory.max", "memory.current", "memory.swap.max", "memory.oom.group"),
    "pids": ("pids.max", "pids.current"),
    "cpu": ("cpu.weight", "cpu.max"),
}
_FIRST_PID: Final = 5_000_000
"""Above every pid of a kernel."""


class StandIn:
    """What the kernel does with the directories and files below ``top`` (cgroup_mkdir, cgroup_rmdir,
    cgroup_subtree_control_write and cgroup_procs_write of Linux), done for this process alone, by the calls of
    :mod:`agentenv.sandbox.supervisor.cgroups`. Its processes are pids that no other process has."""

    controllers = _WANTED

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.top, self.own = top, top / "session"
        self._nodes: dict[Path, _Node] = {}
        self._values: dict[Path, str] = {}
        self._restless: set[int] = set()
        self._pids = itertools.count(_FIRST_PID)
        self._hidden = False
        self._lock = threading.RLock()
        self._instead_of(patch)
        top.mkdir()
        (top / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        self.own.mkdir()

    def start(self, directory: Path | None = None, *, restless: bool = False) -> int:
        pid = next(self._pids)
        self._nodes[directory or self.own].pids.append(pid)
        if restless:
            self._restless.add(pid)
        return pid

    def cgroup_of(self, pid: int) -> Path:
        return next(path for path, node in self._nodes.items() if pid in node.pids)

    def remove_elsewhere(self, base: Path) -> None:
        self._hidden = True
        cgroups.remove_tree(base)
        self._hidden = False

    # ---- calls of the system

    def _instead_of(self, patch: pytest.MonkeyPatch) -> None:
        mkdir, rmdir, write, kill = os.mkdir, os.rmdir, os.write, os.kill
        read_text, write_text = Path.read_text, Path.write_text

        def new_mkdir(path: str | Path, mode: int = 0o777, **options: int) -> None:
            with self._lock:
                mkdir(path, mode, **options)
                if Path(path).is_relative_to(self.top):
                    self._created(Path(path))

        def new_rmdir(path: str | Path, **options: int) -> None:
            with self._lock:
                if Path(path) in self._nodes:
                    self._removed(Path(path))
                rmdir(path, **options)

        def new_read_text(path: Path, *arguments: str, **options: str) -> str:
            with self._lock:
                known = path.parent in self._nodes and path.exists()
                return self._read(path) if known else read_text(path, *arguments, **options)

        def new_write_text(path: Path, text: str, *arguments: str, **options: str) -> int:
            with self._lock:
                if path.parent not in self._nodes:
                    return write_text(path, text, *arguments, **options)
                path.stat()  # raises: nobody creates files there
                return self._write(path, text)

        def new_write(descriptor: int, data: bytes) -> int:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            with self._lock:
                known = path.parent in self._nodes
                return self._write(path, data.decode()) if known else write(descriptor, data)

        def new_kill(pid: int, number: int) -> None:
            if pid < _FIRST_PID:
                kill(pid, number)
            elif number == signal.SIGKILL:
                with self._lock:
                    self._end(pid)

        for owner, name, new in (
            (os, "mkdir", new_mkdir),
            (os, "rmdir", new_rmdir),
            (os, "write", new_write),
            (os, "kill", new_kill),
            (Path, "read_text", new_read_text),
            (Path, "write_text", new_write_text),
        ):
            patch.setattr(owner, name, new)

    # ---- what the kernel does

    def _created(self, directory: Path) -> None:
        above = self._nodes.get(directory.parent)
        node = _Node(above.enabled if above else self.controllers)
        self._nodes[directory] = node
        for name in _OF_EVERY if above else _OF_ROOT:
            (directory / f"cgroup.{name}").touch()
        self._show(directory, node.offered)

    def _removed(self, directory: Path) -> None:
        if self._nodes[directory].pids or self._children(directory):
            raise _refusal(errno.EBUSY)
        del self._nodes[directory]
        for file in directory.iterdir():
            file.unlink()
            self._values.pop(file, None)

    def _read(self, file: Path) -> str:
        node = self._nodes[file.parent]
        if file.name == "cgroup.procs":
            # Of a process that starts others, one is seen that has ended when the list has been read.
            ended = [next(self._pids) for pid in node.pids if pid in self._restless]
            return "".join(f"{0 if self._hidden else pid}\n" for pid in [*ended, *node.pids])
        if file.name in ("cgroup.controllers", "cgroup.subtree_control"):
            names = node.offered if file.name == "cgroup.controllers" else node.enabled
            return " ".join(sorted(names)) + "\n"
        return self._values.get(file, "")

    def _write(self, file: Path, text: str) -> int:
        match file.name:
            case "cgroup.procs":
                self._moved(int(text), file.parent)
            case "cgroup.subtree_control":
                self._enabled(file.parent, text.split())
            case "cgroup.kill":
                for directory in (file.parent, *self._children(file.parent)):
                    self._nodes[directory].pids.clear()
            case _:
                self._values[file] = f"{text}\n"
        return len(text)

    def _moved(self, pid: int, to: Path) -> None:
        node = self._nodes[to]
        there = [other for other in self._nodes.values() if pid in other.pids]
        if not there or self._hidden:
            raise _refusal(errno.ESRCH)
        if node.enabled and to != self.top:
            raise _refusal(errno.EBUSY)
        there[0].pids.remove(pid)
        node.pids.append(pid)

    def _enabled(self, directory: Path, words: list[str]) -> None:
        node = self._nodes[directory]
        more = {word[1:] for word in words if word[0] == "+"} - node.enabled
        less = {word[1:] for word in words if word[0] == "-"} & node.enabled
        children = [path for path in self._children(directory) if path.parent == directory]
        handed_on = any(less & self._nodes[child].enabled for child in children)
        if more - node.offered:
            raise _refusal(errno.ENOENT)
        if handed_on or (more and node.pids and directory != self.top):  # "no internal processes"
            raise _refusal(errno.EBUSY)
        node.enabled = (node.enabled | more) - less
        for child in children:
            self._nodes[child].offered = node.enabled
            self._show(child, node.enabled)

    def _show(self, directory: Path, offered: frozenset[str]) -> None:
        for name, files in _OF_CONTROLLER.items():
            for file in files:
                if name in offered:
                    (directory / file).touch()
                else:
                    (directory / file).unlink(missing_ok=True)

    def _children(self, directory: Path) -> list[Path]:
        return [path for path in self._nodes if directory in path.parents]

    def _end(self, pid: int) -> None:
        for node in self._nodes.values():
            if pid in node.pids:
                node.pids.remove(pid)
                return
        raise _refusal(errno.ESRCH)


def _refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))
