"""One sandbox for a script: a slot that is leased for the duration of ``async with``.

::

    async with AsyncSandbox() as box:
        result = await box.run("python3 -c 'print(6 * 7)'")
        print(result.stdout)

:class:`agentenv.Sandbox` is the same without ``await``, for scripts and notebooks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Self

from agentenv.config import ContainerSettings, ExecutorSettings, NomadSettings, PoolSettings
from agentenv.containers.transfer import TransferLease
from agentenv.errors import PoolClosedError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.slot_tools import SlotTools
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import BackendName, make_backend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult


class AsyncSandbox(SlotTools):
    """A sandbox from :meth:`open` to :meth:`close`, or as an async context manager.

    ``backend``: ``local`` runs a container on this machine, ``nomad`` a job of its own on the cluster that
    ``NOMAD_ADDR`` names, ``fake`` plain child processes without any isolation (only for code you would run
    yourself); or a :class:`ContainerBackend`, which is opened and closed here. ``settings`` configure the
    container; ``allow_network`` overrides their value. ``timeout_s`` bounds each call without a timeout of its own.

    A failing command is data (``exit_code``); invalid calls raise ToolCallError, forbidden ones PolicyRefusalError,
    failures of the sandbox InfraError. File operations raise ``OSError`` like local ones.
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
        chosen = settings or ContainerSettings(slots_per_container=1)
        if allow_network is not None:
            chosen = chosen.model_copy(update={"allow_network": allow_network})
        self._backend = _backend(backend, chosen, start_timeout_s) if isinstance(backend, str) else backend
        self._executor = ExecutorSettings(default_timeout_s=timeout_s)
        self._start_timeout_s = start_timeout_s
        self._name = f"sandbox-{secrets.token_hex(4)}"
        self._stack: AsyncExitStack | None = None
        self._context: ToolContext | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend!r} {'open' if self._context else 'closed'}>"

    async def open(self) -> Self:
        """Start it. Raises SandboxUnavailableError with cause and cure; then nothing is left running."""
        if self._stack is not None:
            raise PoolClosedError("a sandbox is opened once", next_step="make a new one")
        async with AsyncExitStack() as stack:
            one = PoolSettings(min_containers=1, max_containers=1, start_timeout_s=self._start_timeout_s)
            pool = await stack.enter_async_context(SlotPool(self._backend, one))
            executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin(), self._executor))
            session = executor.open(self._name, acquire_timeout_s=self._start_timeout_s)
            self._context = ToolContext(await stack.enter_async_context(session))
            self._session = session
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Wipe the slot and stop whatever :meth:`open` started. Repeatable."""
        self._context = None
        if self._stack is not None:
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- commands ----------------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> CallResult:
        """Run a bash command in a new shell in the workspace; it is killed after ``timeout_s``."""
        return await self._tools.terminal(command, timeout_s, cwd=cwd, env=env, stdin=stdin)

    async def terminal(
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
        return await self._tools.terminal(command, timeout_s, session=session, cwd=cwd, env=env, pty=pty)

    async def call_tool(
        self, tool: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """Call any tool by its name."""
        return await self._tools.call_tool(tool, arguments, timeout_s=timeout_s)

    async def seal(self) -> None:
        """Kill everything running in the sandbox; its files stay."""
        _ = self._tools
        await self._session.seal()

    def lease_for_transfer(self) -> AbstractAsyncContextManager[TransferLease]:
        """See :class:`SlotTools`."""
        return self._tools.lease_for_transfer()

    @property
    def _tools(self) -> ToolContext:
        if self._context is None:
            raise PoolClosedError("the sandbox is not open", next_step="use it inside `with`, or call open()")
        return self._context


def _backend(name: str, settings: ContainerSettings, start_timeout_s: float) -> ContainerBackend:
    nomad = None
    if name == "nomad":  # a separate job: closing a script's sandbox must not end a farm's containers
        nomad = NomadSettings.from_environment(job_id=f"agentenv-sandbox-{secrets.token_hex(4)}")
    return make_backend(name, settings, nomad=nomad, start_timeout_s=start_timeout_s, field="backend")
