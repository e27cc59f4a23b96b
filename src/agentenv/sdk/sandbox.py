"""The sandbox of scripts and notebooks: :class:`agentenv.AsyncSandbox` driven from one background thread.

::

    with Sandbox() as box:
        print(box.run("python3 -c 'print(6 * 7)'").stdout)

It also works where an event loop is already running (a notebook). Ctrl-C also cancels the call in the sandbox.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, overload

from agentenv.config import ContainerSettings
from agentenv.containers.transfer import DEFAULT_MAX_BYTES, Progress, Transferred
from agentenv.errors import PoolClosedError
from agentenv.sdk.async_sandbox import AsyncSandbox
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import BackendName
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, PatchReply, SearchReply

T = TypeVar("T")


class Sandbox:
    """A sandbox from :meth:`open` to :meth:`close`, or as a context manager; arguments, methods, replies and errors
    are those of :class:`agentenv.AsyncSandbox`. Thread-safe.

    ``progress`` callbacks run in the background thread, and must not use the sandbox.
    """

    def __init__(
        self,
        backend: BackendName | ContainerBackend = "local",
        *,
        settings: ContainerSettings | None = None,
        allow_network: bool | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._box = AsyncSandbox(
            backend,
            settings=settings,
            allow_network=allow_network,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._loop = LoopThread()
        # A notebook's sandbox that nobody closed: ended with the object, or at the latest with the interpreter.
        self._end = weakref.finalize(self, _close, self._box, self._loop)

    def __repr__(self) -> str:
        return repr(self._box).replace("AsyncSandbox", "Sandbox", 1)

    def open(self) -> Self:
        """Start it. Raises SandboxUnavailableError with cause and cure; then nothing is left running."""
        try:
            self._loop.run(self._box.open())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Wipe the slot, stop whatever :meth:`open` started, end the thread. Repeatable."""
        self._loop.check_caller()
        self._end()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- commands ----------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> CallResult:
        """Run a bash command in a new shell in the workspace; it is killed after ``timeout_s``."""
        return self._loop.run(self._box.run(command, timeout_s, cwd=cwd, env=env, stdin=stdin))

    def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        session: str = "default",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool | None = None,
    ) -> CallResult:
        """Run a command in the persistent bash session of that name, which keeps directory, variables and
        functions. A command that exceeds ``timeout_s`` keeps running; an empty command returns more of its output."""
        return self._loop.run(self._box.terminal(command, timeout_s, session=session, cwd=cwd, env=env, pty=pty))

    def call_tool(
        self, tool: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """Call any tool by its name."""
        return self._loop.run(self._box.call_tool(tool, arguments, timeout_s=timeout_s))

    def seal(self) -> None:
        """Kill everything running in the sandbox; its files stay."""
        self._loop.run(self._box.seal())

    # -- files -------------------------------------------------------------------------------------

    @overload
    def read_file(self, path: str, *, binary: Literal[False] = False) -> str: ...
    @overload
    def read_file(self, path: str, *, binary: Literal[True]) -> bytes: ...
    def read_file(self, path: str, *, binary: bool = False) -> str | bytes:
        """Read a whole file, at most 64 MiB."""
        if binary:
            return self._loop.run(self._box.read_file(path, binary=True))
        return self._loop.run(self._box.read_file(path))

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


class LoopThread:
    """An event loop in a separate thread, started at the first :meth:`run`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the thread and wait for its result. An interruption of the wait (KeyboardInterrupt)
        cancels ``work`` and is raised when it has ended. Raises PoolClosedError after :meth:`close`."""
        try:
            loop = self._started()
        except BaseException:
            work.close()
            raise
        call = _Call(loop, work)
        try:
            call.begin()
            call.wait()
        except BaseException:
            call.cancel()
            call.wait()
            raise
        return call.result()

    def close(self) -> None:
        """Stop the loop and end the thread. Repeatable."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @property
    def inside(self) -> bool:
        """Whether the caller is that thread itself."""
        return threading.current_thread() is self._thread

    def check_caller(self) -> None:
        """Raise RuntimeError in the thread itself, which would wait for itself for ever."""
        if self.inside:
            raise RuntimeError("the sandbox cannot be used from its own callbacks")

    def end_after(self, work: Coroutine[Any, Any, None]) -> None:
        """For the thread itself: run ``work``, then end. Nobody waits for it."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is None:
            work.close()
        else:
            loop.create_task(work).add_done_callback(lambda _: loop.stop())

    def _started(self) -> asyncio.AbstractEventLoop:
        self.check_caller()
        with self._lock:
            if self._closed:
                raise PoolClosedError("the sandbox is closed", next_step="make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon: an interpreter that exits must not wait for a sandbox that nobody closed.
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="agentenv sandbox", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class _Call(Generic[T]):
    """One coroutine being run in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        # Held until the end. A plain lock, because no interrupt can leave it half changed, unlike an Event.
        self._running = threading.Lock()
        self._running.acquire()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start it, once. If interrupted, it may not have begun, which :meth:`cancel` settles."""
        self._loop.call_soon_threadsafe(self._begin)

    def wait(self) -> None:
        """Wait until it has ended. Repeatable; may be interrupted."""
        with self._running:
            pass

    def cancel(self) -> None:
        """Cancel it; it ends when it has cleaned up."""
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self) -> T:
        """The result of a call that has ended; raises what it raised."""
        assert self._task is not None
        if self._task.cancelled():
            raise PoolClosedError("the sandbox was closed while it was used")
        return self._task.result()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self._running.release())

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self._running.release()


def _close(box: AsyncSandbox, loop: LoopThread) -> None:
    if loop.inside:  # the garbage collector may find a forgotten sandbox in any thread
        loop.end_after(box.close())
        return
    try:
        if loop.running:
            loop.run(box.close())
    finally:
        loop.close()
