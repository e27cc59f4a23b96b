"""A container that is nobody's child: its start, its end, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import Any, Self

from agentenv.background import finish
from agentenv.process_marks import process_mark
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.slots.backends.kept_files import KeptContainer
from agentenv.slots.backends.local_process import container_command, container_environment

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
"""Interval between looks at the events of a container that starts."""
_POLL_S = 0.25
"""Interval between checks whether a process still exists, on a kernel that does not report its end."""


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

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

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


class KeptProcess:
    """The processes of one container, started by us or by whoever ran the farm before: there is no difference."""

    def __init__(self, files: KeptContainer) -> None:
        self.files = files
        self._process: OtherProcess | None = None

    async def launch(self, lock: int) -> None:
        """Start it; ``lock`` (see :meth:`KeptContainer.write`) is its own then. Completes even when cancelled. Raises
        OSError, StartFailedError."""
        await finish(asyncio.create_task(self._launch(lock), name=f"launch {self.files.id}"))

    async def _launch(self, lock: int) -> None:
        outputs: tuple[int, ...] = ()
        try:
            command = await container_command(self.files.id, self.files.spec_file, "--detach", kept=True)
            outputs = events, log = self.files.open_outputs()
            starting = await asyncio.create_subprocess_exec(
                *command,
                stdin=lock,
                stdout=events,
                stderr=log,
                env=container_environment(),
                start_new_session=True,
            )
        finally:
            for descriptor in (lock, *outputs):
                os.close(descriptor)
        await starting.wait()

    @property
    def pid(self) -> int | None:
        """The process that everything in the container ends with; None before it is known, and after its end."""
        return self._process.pid if self._process is not None else None

    async def ready(self) -> dict[str, Any]:
        """The `ready` event. Raises StartFailedError when it reported `failed`, or ended silently."""
        while True:
            held = self.files.is_held()
            said = self.files.said()
            if (failed := said.get("failed")) is not None:
                raise StartFailedError(StartFailed.from_event(failed))
            if not held:
                raise StartFailedError(StartFailed(f"{self.files.id} ended before it was ready: {self._end()}"))
            if (ready := said.get("ready")) is not None:
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
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.ended()
        except TimeoutError:
            logger.warning("%s did not stop within %g s and is killed", self.files.id, grace_s)
            process.kill_group()
            await process.ended()
        self.close()

    def close(self) -> None:
        """Stop watching it. Repeatable."""
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _found(self) -> OtherProcess | None:
        """Its first process, which says who it is when it starts; None when it has ended."""
        while self._process is None:
            held = self.files.is_held()
            detached = self.files.said().get("detached")
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
        said = self.files.said()
        if (failed := said.get("failed")) is not None:
            how = str(failed.get("message"))
        elif (unattended := said.get("unattended")) is not None:
            how = f"nobody used it for {unattended['after_s']} s"
        elif (exited := said.get("exited")) is not None:
            how = f"exited with {exited['code']}"
        else:
            how = "it was killed"
        return f"{how}; {self.files.last_words()}"

    def __repr__(self) -> str:
        return f"<KeptProcess {self.files.id} pid {self.pid}>"
