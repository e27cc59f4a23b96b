"""The sandboxes of scripts and notebooks: :class:`agentenv.AsyncSandbox` and :class:`agentenv.AsyncFarm`, driven from
one background thread.

::

    with Sandbox() as box:
        print(box.run("python3 -c 'print(6 * 7)'").stdout)

    with Farm(slots=50) as farm:  # many at once share containers
        boxes = [farm.sandbox().open() for _ in range(50)]

They also work where an event loop is already running (a notebook). Ctrl-C also cancels the call in the sandbox.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from agentenv.config import ContainerFields, ContainerSettings
from agentenv.containers.live_output import OnOutput
from agentenv.containers.transfer import DEFAULT_MAX_BYTES, Progress, Transferred
from agentenv.deadlines import CALL_TIMEOUT_S, START_TIMEOUT_S
from agentenv.executor.session import Checkpoint
from agentenv.sdk.async_sandbox import SLOTS_PER_CONTAINER, AsyncFarm, AsyncSandbox
from agentenv.sdk.forwards import as_socket
from agentenv.sdk.loop_thread import LoopThread
from agentenv.sdk.processes import ExecResult, SlotProcess
from agentenv.sdk.roots import ImageRoot, Network, SandboxFields
from agentenv.sdk.streamed import StreamedProcess
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import BackendName
from agentenv.slots.farm_access import FarmAccess
from agentenv.wire.calls import CallResult
from agentenv.wire.roots import RootSpec
from agentenv.wire.sessions import ProcessState, Signal
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, PatchReply, SearchReply


class _Opened:
    """Opening and closing of what is driven from a background thread. ``owned``: the thread ends with it."""

    def _drive(self, driven: AsyncSandbox | AsyncFarm, loop: LoopThread, *, owned: bool = True) -> None:
        self._driven = driven
        self._loop = loop
        # One in a notebook that nobody closed: ended with the object, or at the latest with the interpreter.
        self._end = weakref.finalize(self, _close, driven, loop, owned)

    def __repr__(self) -> str:
        return repr(self._driven).replace("<Async", "<", 1)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._driven.is_open

    def open(self) -> Self:
        """Start it. Raises SandboxUnavailableError with cause and cure; then nothing is left running. Raises
        PoolClosedError if it was opened before: an open one stays as it is."""
        try:
            self._loop.run(self._driven.open())
        except BaseException:
            if not self.is_open:
                self.close()
            raise
        return self

    def close(self) -> None:
        """Wipe the slots, stop whatever :meth:`open` started. Repeatable."""
        self._loop.check_caller()
        self._end()

    def __enter__(self) -> Self:
        """Opens it, unless it is open."""
        return self if self.is_open and self._loop.running else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Farm(_Opened):
    """Containers that many sandboxes share; arguments, methods and errors are those of :class:`agentenv.AsyncFarm`.
    Thread-safe: its sandboxes may be used from as many threads."""

    def __init__(
        self,
        backend: BackendName | Literal["farm"] | ContainerBackend = "local",
        *,
        slots: int = SLOTS_PER_CONTAINER,
        settings: ContainerSettings | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        farm: FarmAccess | None = None,
        **fields: Unpack[ContainerFields],
    ) -> None:
        self._farm = AsyncFarm(
            backend,
            slots=slots,
            settings=settings,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            farm=farm,
            **fields,
        )
        self._drive(self._farm, LoopThread())

    def sandbox(self, root: ImageRoot | RootSpec | str | None = None) -> Sandbox:
        """A sandbox in one of the farm's containers; see :meth:`agentenv.AsyncFarm.sandbox`."""
        return Sandbox._of(self._farm.sandbox(root), self._loop, self)


class Sandbox(_Opened):
    """A sandbox from :meth:`open` to :meth:`close`, or as a context manager; arguments, methods, replies and errors
    are those of :class:`agentenv.AsyncSandbox`. Thread-safe.

    Callbacks (``progress``, ``on_output``) run in the background thread, and must not use the sandbox.
    """

    _kept: Farm | Sandbox | None = None
    """Whose thread drives it: if nobody else held that, it would be closed."""

    def __init__(
        self,
        backend: BackendName | Literal["farm"] | ContainerBackend = "local",
        *,
        settings: ContainerSettings | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        farm: FarmAccess | None = None,
        image: str | None = None,
        forks: int = 0,
        pool: Farm | None = None,
        **fields: Unpack[SandboxFields],
    ) -> None:
        self._kept = pool
        self._box = AsyncSandbox(
            backend,
            settings=settings,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            farm=farm,
            image=image,
            forks=forks,
            pool=None if pool is None else pool._farm,
            **fields,
        )
        self._drive(self._box, LoopThread() if pool is None else pool._loop, owned=pool is None)

    @classmethod
    def _of(cls, box: AsyncSandbox, loop: LoopThread, kept: Farm | Sandbox) -> Sandbox:
        made = cls.__new__(cls)
        made._kept = kept
        made._box = box
        made._drive(box, loop, owned=False)
        return made

    # -- commands ----------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """Run a bash command in a new shell in the workspace; it is killed after ``timeout_s``. ``user`` and
        ``output_bytes``: see :meth:`exec`, which runs a program without a shell.

        ``on_output(stream, text)`` is called with the output as it comes; stream is "stdout" or "stderr". What it
        raises cancels the command and is raised here.
        """
        return self._loop.run(
            self._box.run(
                command,
                timeout_s,
                cwd=cwd,
                env=env,
                stdin=stdin,
                user=user,
                output_bytes=output_bytes,
                on_output=on_output,
            )
        )

    def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        output_bytes: int | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a program with these arguments, without a shell; see :meth:`agentenv.AsyncSandbox.exec`."""
        return self._loop.run(
            self._box.exec(
                argv,
                cwd=cwd,
                env=env,
                user=user,
                stdin=stdin,
                output_bytes=output_bytes,
                timeout_s=timeout_s,
                on_output=on_output,
            )
        )

    @contextmanager
    def connect(self, port: int, *, timeout_s: float = 30.0) -> Iterator[socket.socket]:
        """A connection to a server that listens at this port of the sandbox's own 127.0.0.1 (or ::1): a blocking
        socket, for ``with``; up to 64 at once. ``makefile()`` makes a file of it.

        It ends with the block, and when the sandbox is sealed, restored or closed: that reads as its end, and leaving
        the block raises InfraError. Raises ConnectionRefusedError when nothing listens there, TimeoutError, InfraError.
        """
        with self._loop.held(as_socket(self._box.connect(port, timeout_s=timeout_s))) as connected:
            yield connected

    @contextmanager
    def forward(self, port: int, *, local_port: int = 0) -> Iterator[str]:
        """Listen on this machine's loopback while the block runs, and lead every connection to the server at this port
        of the sandbox; the URL to use here. See :meth:`agentenv.AsyncSandbox.forward`."""
        with self._loop.held(self._box.forward(port, local_port=local_port)) as url:
            yield url

    @overload
    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: bool = False,
        output: Literal["tail"] = "tail",
    ) -> Process: ...
    @overload
    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        output: Literal["stream"],
        timeout_s: float | None = None,
    ) -> StreamedProcess: ...
    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: bool = False,
        output: Literal["tail", "stream"] = "tail",
        timeout_s: float | None = None,
    ) -> Process | StreamedProcess:
        """Start a program in the background; see :meth:`agentenv.AsyncSandbox.start`."""
        given: dict[str, Any] = {"cwd": cwd, "env": env, "user": user, "pty": pty, "timeout_s": timeout_s}
        if output == "stream":
            return StreamedProcess(self._loop.run(self._box.start(command, output="stream", **given)), self._loop)
        return Process(self._loop.run(self._box.start(command, **given)), self._loop)

    def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        session: str = "default",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool | None = None,
        user: str | None = None,
    ) -> CallResult:
        """Run a command in the persistent bash session of that name, which keeps directory, variables and
        functions. A command that exceeds ``timeout_s`` keeps running; an empty command returns more of its output.
        ``pty`` and ``user`` are those of a new session."""
        return self._loop.run(
            self._box.terminal(command, timeout_s, session=session, cwd=cwd, env=env, pty=pty, user=user)
        )

    def call_tool(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """Call any tool by its name. ``on_output``, of ``bash``: see :meth:`run`."""
        return self._loop.run(self._box.call_tool(tool, arguments, timeout_s=timeout_s, on_output=on_output))

    def seal(self) -> None:
        """Kill everything running in the sandbox; its files stay."""
        self._loop.run(self._box.seal())

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Keep the sandbox's files; see :meth:`agentenv.AsyncSandbox.checkpoint`."""
        return self._loop.run(self._box.checkpoint())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Give the sandbox the files of a checkpoint; see :meth:`agentenv.AsyncSandbox.restore`."""
        self._loop.run(self._box.restore(checkpoint))

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint, and free its memory. Sandboxes that began with it keep its files."""
        self._loop.run(self._box.drop(checkpoint))

    def fork(self, n: int = 1) -> list[Sandbox]:
        """Open n sandboxes that begin with this one's files; see :meth:`agentenv.AsyncSandbox.fork`."""
        return [Sandbox._of(box, self._loop, self) for box in self._loop.run(self._box.fork(n))]

    def commit(self, name: str = "") -> str:
        """Make an image of the sandbox's files; returns its digest. See :meth:`agentenv.AsyncSandbox.commit`."""
        return self._loop.run(self._box.commit(name))

    def set_network(self, network: Network) -> None:
        """Change what the sandbox may reach; see :meth:`agentenv.AsyncSandbox.set_network`."""
        self._loop.run(self._box.set_network(network))

    # -- files -------------------------------------------------------------------------------------

    @overload
    def read_file(self, path: str, *, binary: Literal[False] = False, errors: str = "strict") -> str: ...
    @overload
    def read_file(self, path: str, *, binary: Literal[True]) -> bytes: ...
    def read_file(self, path: str, *, binary: bool = False, errors: str = "strict") -> str | bytes:
        """Read a whole file, at most 64 MiB; see :meth:`agentenv.AsyncSandbox.read_file`."""
        if binary:
            return self._loop.run(self._box.read_file(path, binary=True))
        return self._loop.run(self._box.read_file(path, errors=errors))

    def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> int:
        """Write a whole file; its parent directories are created. Returns its size in bytes."""
        return self._loop.run(self._box.write_file(path, content, mode=mode))

    def list_files(self, path: str = ".", *, depth: int = 1) -> ListFilesReply:
        """The entries of a directory."""
        return self._loop.run(self._box.list_files(path, depth=depth))

    def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        limit: int = 200,
    ) -> SearchReply:
        """Lines of files that match a regular expression; see :meth:`ToolContext.search`."""
        return self._loop.run(
            self._box.search(pattern, path, glob=glob, ignore_case=ignore_case, literal=literal, limit=limit)
        )

    def patch(self, patch: str, path: str = ".", *, strip: int | None = None, fuzz: int | None = None) -> PatchReply:
        """Apply a unified diff, all of it or nothing; see :meth:`ToolContext.patch`."""
        return self._loop.run(self._box.patch(patch, path, strip=strip, fuzz=fuzz))

    def upload(self, local: Path | str, remote: str, *, progress: Progress | None = None) -> Transferred:
        """Copy a local file or directory of any size into the sandbox, streamed, with SHA-256 end to end."""
        return self._loop.run(self._box.upload(local, remote, progress=progress))

    def download(
        self,
        remote: str,
        local: Path | str,
        *,
        progress: Progress | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Transferred:
        """Copy a file or directory of the sandbox to a local path, streamed, with SHA-256 end to end."""
        return self._loop.run(self._box.download(remote, local, progress=progress, max_bytes=max_bytes))

    def extract(self, archive: bytes, remote: str) -> ArtifactsReply:
        """Unpack a tar (plain or gzip) into a directory."""
        return self._loop.run(self._box.extract(archive, remote))

    def archive(self, path: str = ".") -> ArtifactsReply:
        """A file or directory as a tar archive (at most 64 MiB), with the SHA-256 of every file in it."""
        return self._loop.run(self._box.archive(path))

    def list_artifacts(self, path: str = ".") -> ArtifactsReply:
        """Every file below a directory (or one file), with size and SHA-256; limited like an archive."""
        return self._loop.run(self._box.list_artifacts(path))

    def read_artifact(self, path: str) -> ArtifactsReply:
        """One file of at most 64 MiB: its bytes in ``data``, its size and SHA-256 in ``files[0]``."""
        return self._loop.run(self._box.read_artifact(path))


class Process:
    """A program that runs in the background of a sandbox: :class:`agentenv.sdk.processes.SlotProcess`, driven from the
    sandbox's thread."""

    def __init__(self, process: SlotProcess, loop: LoopThread) -> None:
        self._process = process
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._process)

    @property
    def name(self) -> str:
        """Its id in the slot, as the ``process`` tool has it."""
        return self._process.name

    @property
    def exit_code(self) -> int | None:
        """Once it is known to have ended; 128 + n when signal n ended it."""
        return self._process.exit_code

    @property
    def dropped_bytes(self) -> int:
        """Bytes of its output that were gone before they were read."""
        return self._process.dropped_bytes

    def read(self) -> bytes:
        """The output since the last read; empty if there is none now."""
        return self._loop.run(self._process.read())

    def output(self) -> Iterator[bytes]:
        """The output as it comes, until the program has ended and everything was read."""
        pieces = self._process.output()
        while piece := self._loop.run(_next(pieces)):
            yield piece

    def write(self, data: bytes | str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Write to its standard input; see :meth:`agentenv.sdk.processes.SlotProcess.write`."""
        self._loop.run(self._process.write(data, timeout_s=timeout_s))

    def close_input(self) -> None:
        """Close its standard input: it reads end of file."""
        self._loop.run(self._process.close_input())

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; its exit code. Raises TimeoutError when it still runs after ``timeout_s``; it goes on."""
        return self._loop.run(self._process.wait(timeout_s))

    def kill(self, signal: Signal = "KILL") -> None:
        """KILL ends it and everything it started; another signal goes to its process group, which may handle it. No
        effect when it has ended."""
        self._loop.run(self._process.kill(signal))

    def state(self) -> ProcessState:
        """Its state now."""
        return self._loop.run(self._process.state())


async def _next(pieces: AsyncIterator[bytes]) -> bytes:
    """The next piece, which is never empty; empty at the end."""
    return await anext(pieces, b"")


def _close(driven: AsyncSandbox | AsyncFarm, loop: LoopThread, owned: bool) -> None:
    if loop.inside:  # the garbage collector may find a forgotten sandbox in any thread
        loop.begin(driven.close(), then_end=owned)
        return
    try:
        if loop.running:
            loop.run(driven.close())
    finally:
        if owned:
            loop.close()
