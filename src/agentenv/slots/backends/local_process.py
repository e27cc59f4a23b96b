"""One container's processes: their start, their end, their signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, Self

from agentenv import shipped
from agentenv.background import finish
from agentenv.config import cache_dir, launch_environment
from agentenv.process_marks import process_mark
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.slots.backends.local_files import ContainerFiles
from agentenv.slots.backends.local_scope import make_scope
from agentenv.wire.signals import signal_name

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
"""Interval between looks at the events of a container that starts."""
_POLL_S = 0.25
"""Interval between checks whether a process still exists, on a kernel that does not report its end, and between reads
of a log that is repeated."""


class ChildProcess:
    """A child of this process. It ends when we do: its standard input is its lifeline, whose other end is here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def end(self) -> str:
        """How it ended; empty while it runs."""
        code = self._process.returncode
        if code is None:
            return ""
        return f"killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"

    async def ended(self) -> None:
        """Wait for its end."""
        await self._process.wait()

    def terminate(self) -> None:
        """Cut its lifeline and send SIGTERM, unless it has ended."""
        self.close()
        if not self.end:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill_group(self) -> None:
        """SIGKILL it and what it has started in its session."""
        if not self.end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Cut its lifeline. Repeatable."""
        if self._process.stdin is not None:
            self._process.stdin.close()


class OtherProcess:
    """A process that need not be our child. Its pid may be another's after its end: it is known by its mark (see
    :func:`agentenv.process_marks.process_mark`), and held by a pidfd where the kernel has them."""

    def __init__(self, pid: int, mark: str, pidfd: int) -> None:
        self.pid = pid
        self._mark = mark
        self._pidfd = pidfd
        self._over = asyncio.Event()
        if pidfd >= 0:
            asyncio.get_running_loop().add_reader(pidfd, self._readable)

    @classmethod
    def open(cls, pid: int, mark: str) -> Self | None:
        """The process of this pid and mark; None when it has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError:  # an old kernel, or a sandbox of ours does not allow it
            pidfd = -1
        if process_mark(pid) != mark:
            if pidfd >= 0:
                os.close(pidfd)
            return None
        return cls(pid, mark, pidfd)

    async def ended(self) -> None:
        """Wait for its end."""
        while self._pidfd < 0 and not self._over.is_set():
            if process_mark(self.pid) != self._mark:
                self._over.set()
            else:
                await asyncio.sleep(_POLL_S)
        await self._over.wait()

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        if self._is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """SIGKILL it and what it has started, if it leads a group."""
        if self._is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching it. Repeatable."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._over.set()

    def _is_running(self) -> bool:
        return not self._over.is_set() and process_mark(self.pid) == self._mark

    def _readable(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._over.set()


class LocalProcess:
    """The processes of one container. Detached ones are nobody's children, and it makes no difference whether we
    started them or whoever ran the farm before; others are ours and end with us."""

    def __init__(self, files: ContainerFiles) -> None:
        self.files = files
        self._process: ChildProcess | OtherProcess | None = None
        self._repeating: asyncio.Task[None] | None = None

    async def launch(self, *, detached: bool) -> None:
        """Start it, with its files written. Completes even when cancelled. Raises OSError, StartFailedError."""
        lock = self.files.lock() if detached else None
        await finish(asyncio.create_task(self._launch(lock), name=f"launch {self.files.id}"))

    async def _launch(self, lock: int | None) -> None:
        given = [] if lock is None else [lock]
        try:
            command = await container_command(self.files.id, self.files.spec_file, detached=lock is not None)
            events, log = outputs = self.files.open_outputs()
            given += outputs
            # A session of its own: Ctrl-C in our terminal is turned into an orderly stop by us.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE if lock is None else lock,
                stdout=events,
                stderr=log,
                env=container_environment(),
                start_new_session=True,
            )
        finally:
            for descriptor in given:
                os.close(descriptor)
        if lock is not None:
            await process.wait()  # it has left a process that is not our child
            return
        self._process = ChildProcess(process)
        if logger.isEnabledFor(logging.DEBUG):
            self._repeating = asyncio.create_task(self._repeat_log(), name=f"log of {self.files.id}")

    @property
    def pid(self) -> int | None:
        """The process that everything in the container ends with; None before it is known, and after its end."""
        return self._process.pid if self._process is not None else None

    async def ready(self) -> dict[str, Any]:
        """The `ready` event. Raises StartFailedError when it reported `failed`, or ended silently."""
        while True:
            running = self._is_running()  # before its last event is read
            events = self.files.events()
            if (failed := events.get("failed")) is not None:
                raise StartFailedError(StartFailed.from_event(failed))
            if not running:
                raise StartFailedError(StartFailed(f"{self.files.id} ended before it was ready: {self._end()}"))
            if (ready := events.get("ready")) is not None:
                await self._found()
                return ready
            await asyncio.sleep(_LOOK_S)

    async def ended(self) -> str:
        """Wait for its end; how it ended, and its last words. May be cancelled and called again."""
        process = await self._found()
        if process is not None:
            await process.ended()
        return self._end()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to all of it if that did not end it. Returns when it has ended."""
        process = await self._found()
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.ended()
        except TimeoutError:
            logger.warning("%s did not stop within %g s and is killed", self.files.id, grace_s)
            process.kill_group()
            await process.ended()
        self.close()

    def close(self) -> None:
        """Let go of it: a detached one goes on, another ends. Repeatable."""
        if self._repeating is not None:
            self._repeating.cancel()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _is_running(self) -> bool:
        return not self._process.end if isinstance(self._process, ChildProcess) else self.files.is_held()

    async def _found(self) -> ChildProcess | OtherProcess | None:
        """Its first process: our child, or the one that a detached container names when it starts. None when it has
        ended."""
        while self._process is None:
            held = self.files.is_held()
            detached = self.files.events().get("detached")
            if detached is not None:
                self._process = OtherProcess.open(detached["pid"], detached["mark"])
                if self._process is None:
                    return None
            elif not held:
                return None
            else:
                await asyncio.sleep(_LOOK_S)
        return self._process

    def _end(self) -> str:
        events = self.files.events()
        if (failed := events.get("failed")) is not None:
            how = str(failed.get("message"))
        elif (unattended := events.get("unattended")) is not None:
            how = f"nobody used it for {unattended['after_s']} s"
        elif isinstance(self._process, ChildProcess):
            how = self._process.end
        elif (exited := events.get("exited")) is not None:
            how = f"exited with {exited['code']}"
        else:
            how = "it was killed"
        return f"{how}; {self.files.last_words()}"

    async def _repeat_log(self) -> None:
        """Its log, as debug messages: the file goes with the container."""
        with self.files.log_file.open(encoding="utf-8", errors="replace") as log:
            while True:
                if os.fstat(log.fileno()).st_size < log.tell():
                    log.seek(0, os.SEEK_END)  # it was cut to its last lines, which were read before
                while line := log.readline():
                    logger.debug("%s: %s", self.files.id, line.rstrip()[:500])
                await asyncio.sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"<LocalProcess {self.files.id} pid {self.pid}>"


async def container_command(name: str, spec: Path, *, detached: bool) -> list[str]:
    """The command that starts a container."""
    scope = await asyncio.to_thread(make_scope, name, detached=detached)
    option = "--detach" if detached else "--lifeline"
    command = [sys.executable, "-m", "agentenv.sandbox", str(spec), option, "--cache", str(cache_dir().absolute())]
    return [*scope.words, *command] if scope else command


def container_environment() -> dict[str, str]:
    """Its environment: it must import this very package, installed or not."""
    env = launch_environment()
    package = str(shipped.PACKAGE.parent)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))}
