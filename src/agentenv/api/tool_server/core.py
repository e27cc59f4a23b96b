"""The tool server itself, without HTTP: takes requests, remembers replies, runs tools.

The handling of one call is in :mod:`agentenv.api.tool_server.calls`; HTTP is in :mod:`agentenv.api.tool_server.app`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Protocol, Self

from agentenv._version import __version__
from agentenv.api.tool_server.audit import AuditLog
from agentenv.api.tool_server.calls import ExternalCallRunner, TrajectoryState
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool
from agentenv.errors import CallLostError, ConfigError, PoolClosedError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.schema import closest, parameters_schema
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import ToolCallReply, ToolCallRequest, ToolDescription, ToolList

logger = logging.getLogger(__name__)

_MOST_REPLIES: Final = 256
"""Finished calls remembered per trajectory; clients acknowledge replies long before."""


class Resource(Protocol):
    """A resource shared by tools (a browser, an HTTP session), open as long as the server."""

    async def __aenter__(self) -> object:
        """Open it, or prepare to."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""

    async def ended(self, trajectory: str) -> None:
        """Close its state for that trajectory. Repeatable."""


@dataclass
class _Held:
    """The server's state of one trajectory."""

    state: TrajectoryState = field(default_factory=TrajectoryState)
    runs: OrderedDict[str, asyncio.Task[CallResult]] = field(default_factory=OrderedDict)
    heard_at: float = 0.0

    @property
    def running(self) -> bool:
        return any(not task.done() for task in self.runs.values())


class ToolServer:
    """Runs external tools; an async context manager that opens and closes its ``resources``.

    Raises:
        ConfigError: two tools have one name, a limit names an unknown tool, or a tool needs a
            secret that is not declared.
    """

    def __init__(
        self,
        tools: Iterable[ExternalTool],
        settings: ToolServerSettings = ToolServerSettings(),  # noqa: B008 - frozen
        *,
        secrets: Secrets | None = None,
        resources: Sequence[Resource] = (),
    ) -> None:
        self.boot = random.token_hex(8)
        self._settings = settings
        self._secrets = secrets or Secrets({})
        limited = [_limited(tool, settings) for tool in tools]
        self.catalog = ToolCatalog(tool.spec for tool in limited)
        self._tools = {tool.name: tool for tool in limited}
        for name in settings.limits:
            if name not in self._tools:
                match = closest(name, self._tools)
                hint = f"; did you mean {match!r}?" if match else ""
                raise ConfigError("limits", f"unknown tool {name!r}{hint}")
        for tool in self._tools.values():
            self._secrets.chosen(tool.secrets)
        self._resources = resources
        self._trajectories: dict[str, _Held] = {}
        self._stack = AsyncExitStack()
        self._runner: ExternalCallRunner | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._told_off: asyncio.Future[None]

    def __repr__(self) -> str:
        return f"<ToolServer {len(self._tools)} tools, {len(self._trajectories)} trajectories>"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            audit = AuditLog(self._settings.audit_log)
            stack.callback(audit.close)
            for resource in self._resources:
                await stack.enter_async_context(resource)
            self._runner = ExternalCallRunner(self._tools, self.catalog, self._settings, self._secrets, audit)
            self._told_off = asyncio.get_running_loop().create_future()
            self._sweeping = asyncio.create_task(self._sweep(), name="tool-server-sweep")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner = None
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for trajectory in tuple(self._trajectories):
            await self.ended(trajectory)
        await self._stack.aclose()

    def describe(self) -> ToolList:
        """Descriptions of all tools."""
        tools = tuple(
            ToolDescription(
                name=tool.name,
                description=tool.spec.description,
                parameters=parameters_schema(tool.spec.arguments),
                timeout_s=tool.timeout_s,
                unavailable=self._unavailable(tool),
            )
            for tool in self._tools.values()
        )
        return ToolList(boot=self.boot, version=__version__, tools=tools)

    def _unavailable(self, tool: ExternalTool) -> str:
        replayed = self._settings.cassettes.mode == "replay" and tool.recorded
        return "" if replayed else tool.unavailable

    async def call(self, request: ToolCallRequest) -> ToolCallReply:
        """Run this call, or keep waiting for the one with this id, at most ``request.wait_s``.

        Cancelling this does not cancel the call (:meth:`cancel` does). Failures of a tool, and errors in a call,
        are reported in the result.

        Raises: CallLostError: the call may have run in an earlier server, or needs state that one had.
        PoolClosedError: the server is closed.
        """
        if self._runner is None:
            raise PoolClosedError("the tool server is closed")
        held = self._trajectories.setdefault(request.scope.trajectory, _Held())
        held.heard_at = asyncio.get_running_loop().time()
        for call_id in request.forget:
            if (task := held.runs.get(call_id)) is not None and task.done():
                del held.runs[call_id]
        task = held.runs.get(request.id)
        if task is None:
            self._refuse_lost(request, held)
            task = asyncio.create_task(self._runner.run(request, held.state), name=f"tool-{request.id}")
            held.runs[request.id] = task
            _forget_oldest(held)
        awaited: set[asyncio.Future[Any]] = {task, self._told_off}
        await asyncio.wait(awaited, timeout=request.wait_s, return_when=asyncio.FIRST_COMPLETED)
        held.heard_at = asyncio.get_running_loop().time()
        if not task.done():
            return ToolCallReply(boot=self.boot)
        result = CallResult(id=request.id, cancelled=True) if task.cancelled() else task.result()
        return ToolCallReply(boot=self.boot, result=result, stateful=held.state.stateful)

    def send_away(self) -> None:
        """Answer every waiting :meth:`call` now: the call still runs, ask again."""
        if self._runner is not None:
            self._told_off.set_result(None)
            self._told_off = asyncio.get_running_loop().create_future()

    async def cancel(self, trajectory: str, ids: Iterable[str]) -> None:
        """Cancel these calls of the trajectory; calls that are not running are ignored."""
        held = self._trajectories.get(trajectory)
        tasks = {held.runs[call_id] for call_id in ids if call_id in held.runs} if held else set()
        await _end(tasks)

    async def ended(self, trajectory: str) -> None:
        """Cancel the trajectory's calls, close its state in tools, forget its replies. Repeatable."""
        held = self._trajectories.pop(trajectory, None)
        if held is not None:
            await _end(held.runs.values())
        if self._runner is not None:
            self._runner.budgets.ended(trajectory)
        for resource in self._resources:
            try:
                await resource.ended(trajectory)
            except Exception:
                logger.exception("%s: a resource of a tool could not be closed", trajectory)

    def _refuse_lost(self, request: ToolCallRequest, held: _Held) -> None:
        tool = self._tools.get(request.tool)
        if tool is None:
            return
        if tool.stateful and request.state_boot is not None and not held.state.stateful:
            raise CallLostError(
                f"what {request.tool} held for {request.scope.trajectory} is lost: the tool server was restarted, "
                "or got no request for it for too long"
            )
        if request.boot != self.boot and not tool.repeatable:
            raise CallLostError(f"the tool server was restarted; call {request.id} may already have run")

    async def _sweep(self) -> None:
        idle_s = self._settings.trajectory_idle_s
        while True:
            await asyncio.sleep(max(0.02, min(60.0, idle_s / 4)))
            silent_since = asyncio.get_running_loop().time() - idle_s
            for trajectory, held in tuple(self._trajectories.items()):
                if held.heard_at < silent_since and not held.running:
                    logger.warning("%s: no request for %g s; closed its state", trajectory, idle_s)
                    await self.ended(trajectory)


async def _end(tasks: Iterable[asyncio.Task[CallResult]]) -> None:
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _forget_oldest(held: _Held) -> None:
    done = [call_id for call_id, task in held.runs.items() if task.done()]
    for call_id in done[: max(0, len(done) - _MOST_REPLIES)]:
        del held.runs[call_id]


def _limited(tool: ExternalTool, settings: ToolServerSettings) -> ExternalTool:
    """The tool with the limits the settings name for it."""
    limits = settings.limits.get(tool.name)
    changed = limits.model_dump(exclude_none=True) if limits else {}
    spec = replace(tool.spec, default_timeout_s=changed.get("timeout_s", tool.timeout_s))
    return replace(tool, spec=spec, **changed)
