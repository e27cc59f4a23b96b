"""The context that preparation and verifiers get for their trajectory's slot.

One object serves as both ``exec_tool`` and tool context::

    result = await exec_tool("bash", {"command": "pytest -q"}, timeout_s=120)   # any tool
    result = await exec_tool.terminal("pytest -q", timeout_s=120)               # the same
    text = await exec_tool.read_file("report.txt")

A failing command is data (``CallResult.exit_code``). A failing *file* operation raises ``OSError`` with the slot's
errno (``FileNotFoundError`` and so on). The first InfraError or SlotDestroyedError is remembered in
``infra_error``: it decides the outcome of the rollout, even if the verifier caught it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, overload

from agentenv.agent.protocols import Session
from agentenv.agent.tool_call import ToolCall, ToolResult, one_shot
from agentenv.containers.live_output import OnOutput
from agentenv.errors import InfraError, InvalidArgumentsError, PoolClosedError, SlotDestroyedError
from agentenv.executor.session import ToolSession
from agentenv.sdk.processes import sendable
from agentenv.sdk.slot_tools import SlotTools
from agentenv.wire.calls import CallResult


class ToolContext(SlotTools):
    """Calls tools on one slot until :meth:`cleanup`.

    A fork has a context of its own; ``async with`` it, or :meth:`cleanup`, ends it with its slot.
    """

    def __init__(self, session: Session, origin: ToolContext | None = None) -> None:
        self._session = session
        self._origin = origin
        """Of what it is a fork."""
        self._forks: list[ToolContext] = []
        self._open = True
        self.infra_error: InfraError | SlotDestroyedError | None = None
        """The first infrastructure failure of a call through this context, or the destruction of the slot."""

    @property
    def trajectory_id(self) -> str:
        """The trajectory whose slot this is."""
        return self._session.trajectory

    @overload
    async def __call__(self, tool: ToolCall, /) -> ToolResult: ...
    @overload
    async def __call__(
        self,
        tool: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult: ...
    async def __call__(
        self,
        tool: str | ToolCall,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult | ToolResult:
        """Call any tool of the slot; invalid or refused calls are results with a ``fault``. ``on_output``: see
        :meth:`terminal`.

        A :class:`ToolCall` may have ``timeout`` (seconds) among its arguments, and returns a :class:`ToolResult`. Its
        ``terminal`` runs a command in a new shell, as in the harnesses that use it.

        Raises: InfraError when the slot failed; PoolClosedError after :meth:`cleanup`.
        """
        if isinstance(tool, ToolCall):
            name, given, limit_s = one_shot(tool)
            return ToolResult.of(await self._call(name, given, limit_s, None), tool.uniq_id)
        return await self._call(tool, arguments, timeout_s, on_output)

    async def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        session: str | None = None,
        pty: bool | None = None,
        user: str | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """Run a bash command in the workspace. Its exit code, output and timeout are in the result.

        Without ``session`` it is a new ``bash -c``, killed after ``timeout_s`` (``math.inf``: never). With ``session``
        it runs in the persistent bash session of that name: directory, variables and functions are kept, and a command
        that exceeds ``timeout_s`` keeps running (an empty command returns more of it). ``stdin``, ``output_bytes``
        and ``on_output`` are valid only without a session, ``pty`` only with one. ``on_output(stream, text)`` is called
        with the output as it comes; stream is "stdout" or "stderr". ``user``: whose the new shell is; these three: see
        :meth:`exec`.
        """
        _, env = sendable((), env)
        arguments: dict[str, Any] = {"command": command, "env": dict(env) if env else None, "user": user}
        if session is None:
            arguments |= {"cwd": cwd, "output_bytes": output_bytes}
            arguments["stdin_data" if isinstance(stdin, bytes) else "stdin"] = stdin
            return await self._typed_call("bash", arguments, timeout_s, on_output)
        if stdin is not None:
            raise InvalidArgumentsError("terminal: a session has no stdin", next_step="call its tool with input")
        if output_bytes is not None:
            raise InvalidArgumentsError("terminal: a session's output has its own limit", next_step="leave it out")
        if on_output is not None:
            raise InvalidArgumentsError(
                "terminal: on_output is for commands without a session",
                next_step="leave out session, or poll the session with an empty command",
            )
        arguments |= {"session": session, "timeout_s": timeout_s, "workdir": cwd, "pty": pty}
        return await self._typed_call("terminal", arguments)

    async def web_search(self, query: str, **more: Any) -> CallResult:
        """Search the web through the tool server. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("web_search", {"query": query, **more})

    async def web_extract(self, url: str | Sequence[str], **more: Any) -> CallResult:
        """The text of a web page (or of five at most), through the tool server. Raises: UnknownToolError without a
        tool server."""
        return await self.call_tool("web_extract", {"url": url if isinstance(url, str) else list(url), **more})

    async def browser_navigate(self, url: str, **more: Any) -> CallResult:
        """Open a page in the trajectory's browser. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_navigate", {"url": url, **more})

    async def browser_snapshot(self, **more: Any) -> CallResult:
        """The open page as text. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_snapshot", more)

    async def browser_click(self, ref: str) -> CallResult:
        """Click the element with this ref of the last snapshot. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_click", {"ref": ref})

    async def browser_type(self, ref: str, text: str, *, submit: bool = False) -> CallResult:
        """Replace a field's text; ``submit`` presses Enter. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_type", {"ref": ref, "text": text, "submit": submit})

    async def browser_select_option(self, ref: str, values: Sequence[str]) -> CallResult:
        """Select options by value or label. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_select_option", {"ref": ref, "values": list(values)})

    async def browser_press(self, key: str) -> CallResult:
        """Press a key, such as ``Enter``. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_press", {"key": key})

    async def browser_scroll(self, direction: Literal["up", "down"]) -> CallResult:
        """Scroll by most of a screen. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_scroll", {"direction": direction})

    async def browser_back(self) -> CallResult:
        """Go back to the page before. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_back", {})

    async def browser_screenshot(self) -> CallResult:
        """What is visible, a JPEG: ``content["image"]``, in base64. Raises: UnknownToolError without a tool server."""
        return await self.call_tool("browser_screenshot", {})

    async def cleanup(self) -> None:
        """End the use of this context, and its forks; the slot itself belongs to the rollout, that of a fork ends too.
        Repeatable."""
        self._open = False
        forks, self._forks = self._forks, []
        await asyncio.gather(*(fork.cleanup() for fork in forks))
        if self._origin is not None and isinstance(self._session, ToolSession):
            await self._session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    def _over(self, session: ToolSession) -> Self:
        fork = type(self)(session, self)
        self._forks.append(fork)
        return fork

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[Session]:
        """Remembers failures that no score may hide; refuses calls once closed."""
        if not self._open:
            raise _closed()
        try:
            yield self._session
        except (InfraError, SlotDestroyedError) as error:
            self._failed(error)
            raise

    def _failed(self, error: InfraError | SlotDestroyedError) -> None:
        self.infra_error = self.infra_error or error
        if self._origin is not None:  # no score may hide the failure of a fork either
            self._origin._failed(error)


def _closed() -> PoolClosedError:
    return PoolClosedError("this tool context is closed", next_step="use it only inside the hook it was given to")
