"""The tools of the fake backend: bash as an ordinary child process, file operations in plain Python.

Nothing here isolates anything: a command runs as the user who runs the tests, in a temporary directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError
from agentenv.sandbox.server.inbox import Attached
from agentenv.sandbox.server.tools.bash import PAGERS
from agentenv.sandbox.server.tools.files import run_file_tool as run_slot_tool
from agentenv.sandbox.server.tools.runner import Finished
from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sessions.head_tail import HeadTail, whole_end
from agentenv.slots.backends.fake_sessions import hear_signals
from agentenv.tasks import finish
from agentenv.wire.base import MAX_FILE_BYTES, WireModel
from agentenv.wire.spec import SEALED_ENV
from agentenv.wire.tools import (
    ArtifactsArguments,
    BashArguments,
    FileEntry,
    ListFilesArguments,
    ListFilesReply,
    PatchArguments,
    ReadFileArguments,
    ReadFileReply,
    SearchArguments,
    WriteFileArguments,
    WriteFileReply,
)

_ARGV_BYTES = 100_000
"""Above this a command goes in by descriptor: one argument may have 128 KiB at most."""
_FROM_DESCRIPTOR = 'IFS= read -r -d "" -u %d s; exec %d<&-; eval "$s"'


class Capture:
    """Reads a pipe as it fills; keeps the head and the tail of what came, counts the rest."""

    def __init__(self, keep_bytes: int) -> None:
        self._kept = HeadTail(keep_bytes)
        self.dropped_bytes = 0
        """What is missing of the text; known once it was taken."""
        self._keeping = True
        self._fd, self.writer = os.pipe()
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> bool:
        """Read once; False when there is nothing now, or nothing more."""
        try:
            chunk = os.read(self._fd, 65_536)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._fd)
            return False
        if self._keeping:
            self._kept.feed(chunk)
        return True

    def take(self) -> str:
        """What came so far. What comes later (from background processes) is read and dropped."""
        for _ in range(64):
            if not self._read():
                break
        self._keeping = False
        text, self.dropped_bytes = self._kept.text()
        return text

    def close(self) -> None:
        """Stop reading."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int


class FakeShell:
    """Runs the commands of one slot and can end all it ever started."""

    def __init__(self, workspace: Path, env: Mapping[str, str], output_bytes: int) -> None:
        self._workspace = workspace
        self._mark = f"AGENTENV_FAKE_SLOT={workspace}"
        self._env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "HOME": str(workspace),
            "USER": "agent",
            "LC_CTYPE": "C.UTF-8",
            "TMPDIR": "/tmp",  # noqa: S108 - the same path slots of the real sandbox have
            "TERM": "dumb",
            **PAGERS,
            **env,
        }
        self._output_bytes = output_bytes
        self._captures: list[Capture] = []

    async def run(self, arguments: BashArguments) -> Ran:
        """Run to the end of the foreground process. Cancelling kills its process group."""
        cwd = inside(self._workspace, arguments.cwd or ".")
        out, err = Capture(self._output_bytes), Capture(self._output_bytes)
        self._captures += [out, err]
        spawning = asyncio.create_task(self._spawn(arguments, cwd, out.writer, err.writer))
        try:
            try:
                process = await finish(spawning)  # a start that is broken off would leave the command's children
            finally:
                os.close(out.writer)
                os.close(err.writer)
            code = await process.wait()
        except asyncio.CancelledError:
            if spawning.exception() is None:  # not reaped yet, so the id is still this group's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(spawning.result().pid, signal.SIGKILL)
                await spawning.result().wait()
            raise
        return Ran(128 - code if code < 0 else code, out.take(), err.take(), out.dropped_bytes, err.dropped_bytes)

    def partial(self) -> Ran:
        """The output so far of the command that was last started: for calls that were cut short."""
        out, err = self._captures[-2:]
        return Ran(137, out.take(), err.take(), out.dropped_bytes, err.dropped_bytes)

    async def _spawn(self, arguments: BashArguments, cwd: Path, out: int, err: int) -> asyncio.subprocess.Process:
        mark, _, value = self._mark.partition("=")
        script, opened = arguments.command, []
        if len(script.encode()) > _ARGV_BYTES:
            opened.append(_memory_file(script + "\0"))
            script = _FROM_DESCRIPTOR % (opened[0], opened[0])
        stdin = asyncio.subprocess.DEVNULL
        if arguments.stdin is not None:
            stdin = _memory_file(arguments.stdin)
        try:
            return await asyncio.create_subprocess_exec(
                "bash",
                "-c",
                script,
                stdin=stdin,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env={**self._env, **(arguments.env or {}), mark: value},
                pass_fds=opened,
                start_new_session=True,
                preexec_fn=hear_signals,
            )
        finally:
            for descriptor in [*opened, *([stdin] if stdin >= 0 else [])]:
                os.close(descriptor)

    def seal(self) -> None:
        """From now on commands find the environment of a sealed slot."""
        self._env = {**self._env, **SEALED_ENV}

    @property
    def env(self) -> dict[str, str]:
        """The environment of everything that runs here, the mark included."""
        name, _, value = self._mark.partition("=")
        return {**self._env, name: value}

    def kill_all(self, *, used: bool = False) -> None:
        """End every process ever started here, daemons included: they carry this slot's mark. ``used``: also
        when no command ran."""
        if self._captures or used:
            for _ in range(3):  # a process may fork while we look
                if not sum(_kill(pid) for pid in _marked(self._mark.encode())):
                    break
        for capture in self._captures:
            capture.close()
        self._captures.clear()


def _memory_file(text: str) -> int:
    descriptor = os.memfd_create("fake")
    os.write(descriptor, text.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def inside(workspace: Path, path: str) -> Path:
    """The path in the workspace directory. Raises PolicyRefusalError when it leads out of it."""
    if "\0" in path:
        raise InvalidArgumentsError("path: must not contain NUL bytes")
    found = Path(os.path.realpath(workspace / _relative(path)))
    if found != workspace and workspace not in found.parents:
        raise PolicyRefusalError(
            f"{path!r} is outside the workspace (or behind a link with an absolute target)",
            next_step="use a path inside /workspace",
        )
    return found


def _relative(path: str) -> str:
    """A path as a slot knows it, from its workspace; unchanged when it is absolute and not below that."""
    below = path == "/workspace" or path.startswith("/workspace/")
    return path.removeprefix("/workspace").lstrip("/") or "." if below else path


def run_file_tool(workspace: Path, arguments: WireModel) -> WireModel:
    """One file operation. Raises OSError (data, to the caller), PolicyRefusalError, InvalidArgumentsError."""
    match arguments:
        case ReadFileArguments():
            return _read(inside(workspace, arguments.path), arguments)
        case WriteFileArguments():
            return _write(inside(workspace, arguments.path), arguments)
        case ListFilesArguments():
            return _list(inside(workspace, arguments.path), arguments)
        case ArtifactsArguments():
            return _in_slotfiles("artifacts", workspace, arguments)
        case PatchArguments():
            return _in_slotfiles("patch", workspace, arguments)
        case SearchArguments():
            return _in_slotfiles("search", workspace, arguments)
    raise InvalidArgumentsError(f"no file operation takes {type(arguments).__name__}")


class _Child:
    """Runs slotfiles as an ordinary child (:class:`agentenv.sandbox.server.tools.runner.SlotRunner`)."""

    async def run(self, argv: Sequence[str], *, stdin: bytes | Attached | None = None, output_bytes: int) -> Finished:
        assert not isinstance(stdin, Attached)  # the fake's attachments are in the arguments
        command = [os.fsencode(word) for word in argv]
        done = await asyncio.to_thread(subprocess.run, command, input=stdin or b"", capture_output=True)
        code = 128 - done.returncode if done.returncode < 0 else done.returncode
        return Finished(code, done.stdout[:output_bytes], done.stderr, max(0, len(done.stdout) - output_bytes))


class SlotfilesError(OSError):
    """What slotfiles says of a failure that is data: ``strerror`` is the whole of it."""


def _in_slotfiles(
    tool: str, workspace: Path, arguments: ArtifactsArguments | PatchArguments | SearchArguments
) -> WireModel:
    """By the very program that slots have: what a pattern matches, where a hunk fits and which archive is refused
    is the same there."""
    program = (str(ensure_built().files), str(workspace))
    # slotfiles knows the workspace by its path here.
    asked = arguments.model_copy(update={"path": _relative(arguments.path)})
    outcome = asyncio.run(run_slot_tool(tool, asked, _Child(), program=program))
    if outcome.content is None:
        raise SlotfilesError(outcome.exit_code, outcome.stderr)
    return outcome.content.model_copy(update={name: bytes(raw) for name, raw in outcome.raw.items()})


def _read(path: Path, arguments: ReadFileArguments) -> ReadFileReply:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        file.seek(arguments.offset)
        data = file.read(arguments.limit or MAX_FILE_BYTES)
    more = arguments.offset + len(data) < status.st_size
    if more and not arguments.binary:
        data = data[: whole_end(data)] or data
    common: dict[str, Any] = {"size_bytes": status.st_size, "mode": stat.S_IMODE(status.st_mode), "truncated": more}
    if more:
        common["next_offset"] = arguments.offset + len(data)
    if arguments.binary:
        return ReadFileReply(data=data, **common)
    text = data.decode("utf-8", "replace")
    return ReadFileReply(text=text, lossy=text.encode() != data, **common)


def _write(path: Path, arguments: WriteFileArguments) -> WriteFileReply:
    if (arguments.text is None) == (arguments.data is None):
        raise InvalidArgumentsError("give either text or data", next_step="send exactly one of them")
    data = arguments.data if arguments.data is not None else (arguments.text or "").encode("utf-8", "surrogatepass")
    created = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if arguments.mode is not None or created:
        path.chmod(0o644 if arguments.mode is None else arguments.mode)
    return WriteFileReply(size_bytes=len(data), created=created)


def _list(root: Path, arguments: ListFilesArguments) -> ListFilesReply:
    entries = sorted(_walk(root, root, arguments.depth, arguments.hidden), key=lambda entry: entry.path)
    return ListFilesReply(entries=tuple(entries[: arguments.limit]), truncated=len(entries) > arguments.limit)


def _walk(root: Path, directory: Path, depth: int, hidden: bool) -> Iterator[FileEntry]:
    for path in directory.iterdir():
        if path.name.startswith(".") and not hidden:
            continue
        status = path.lstat()
        yield FileEntry(
            path=str(path.relative_to(root)),
            kind=_kind(status.st_mode),
            size_bytes=status.st_size,
            mode=stat.S_IMODE(status.st_mode),
            modified_s=status.st_mtime,
        )
        if depth > 1 and stat.S_ISDIR(status.st_mode):
            yield from _walk(root, path, depth - 1, hidden)


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "other")
