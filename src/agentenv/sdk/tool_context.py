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

import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from agentenv.agent.loop import checked
from agentenv.agent.protocols import Session
from agentenv.containers.transfer import TransferLease
from agentenv.errors import (
    InfraError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
    SlotDestroyedError,
    ToolCallError,
    UnknownToolError,
    from_wire,
)
from agentenv.sdk.slot_tools import SlotTools, without_none
from agentenv.wire.calls import CallResult

_OURS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""Errors that reading a slot never causes: this machine's disk is full, or it is out of descriptors."""


class ToolContext(SlotTools):
    """Calls tools on one slot until :meth:`cleanup`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open = True
        self.infra_error: InfraError | SlotDestroyedError | None = None
        """The first infrastructure failure of a call through this context, or the destruction of the slot."""

    @property
    def trajectory_id(self) -> str:
        """The trajectory whose slot this is."""
        return self._session.trajectory

    async def __call__(
        self, tool: str, arguments: Mapping[str, Any] | str | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """Call any tool of the slot; invalid or refused calls are results with a ``fault``.

        Raises: InfraError when the slot failed; PoolClosedError after :meth:`cleanup`.
        """
        async with self._watched():
            return checked(await self._session.call(tool, arguments or {}, timeout_s=timeout_s))

    async def call_tool(
        self, tool: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """Like calling the context, but an invalid or refused call raises.

        Raises: ToolCallError, PolicyRefusalError, InfraError.
        """
        result = await self(tool, arguments, timeout_s=timeout_s)
        if result.fault != "none":
            kind = ToolCallError if result.fault == "model" else PolicyRefusalError
            message = result.message or f"{tool} was refused"
            raise from_wire(result.error, message, "", ToolCallError, PolicyRefusalError, otherwise=kind)
        return result

    async def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        session: str | None = None,
        pty: bool | None = None,
    ) -> CallResult:
        """Run a bash command in the workspace. Its exit code, output and timeout are in the result.

        Without ``session`` it is a new ``bash -c``, killed after ``timeout_s``. With ``session`` it runs in the
        persistent bash session of that name: directory, variables and functions are kept, and a command that
        exceeds ``timeout_s`` keeps running (an empty command returns more of its output). ``stdin`` is valid only
        without a session, ``pty`` only with one.
        """
        given: dict[str, Any] = {"command": command, "env": dict(env) if env else None}
        if session is None:
            given |= {"cwd": cwd, "stdin": stdin}
            return await self.call_tool("bash", without_none(given), timeout_s=timeout_s)
        if stdin is not None:
            raise InvalidArgumentsError("terminal: a session has no stdin", next_step="call its tool with input")
        given |= {"session": session, "timeout_s": timeout_s, "workdir": cwd, "pty": pty}
        return await self.call_tool("terminal", without_none(given))

    async def web_search(self, query: str, **more: Any) -> CallResult:
        """Search the web through the tool server. Raises: UnknownToolError without a tool server."""
        return await self._outside("web_search", "web", {"query": query, **more})

    async def web_extract(self, url: str, **more: Any) -> CallResult:
        """The text of a web page, through the tool server. Raises: UnknownToolError without a tool server."""
        return await self._outside("web_extract", "web", {"url": url, **more})

    async def browser_navigate(self, url: str, **more: Any) -> CallResult:
        """Open a page in the trajectory's browser. Raises: UnknownToolError without a tool server."""
        return await self._outside("browser_navigate", "browser", {"url": url, **more})

    async def browser_snapshot(self, **more: Any) -> CallResult:
        """The open page as text. Raises: UnknownToolError without a tool server."""
        return await self._outside("browser_snapshot", "browser", more)

    async def cleanup(self) -> None:
        """End the use of this context; the slot itself belongs to the rollout. Repeatable."""
        self._open = False

    async def _outside(self, tool: str, toolset: str, arguments: Mapping[str, Any]) -> CallResult:
        try:
            return await self.call_tool(tool, arguments)
        except UnknownToolError as error:
            raise UnknownToolError(
                f"{tool} runs on a tool server, and is not enabled here: {error.message}",
                next_step=f'set tool_server_url (or "inprocess") and enable the toolset {toolset!r}',
            ) from error

    @asynccontextmanager
    async def lease_for_transfer(self) -> AsyncIterator[TransferLease]:
        """See :class:`SlotTools`. Raises InvalidArgumentsError when the session has none."""
        lease: TransferLease | None = getattr(self._session, "lease", None)
        async with self._watched():
            if lease is None:
                raise InvalidArgumentsError("this session has no lease to transfer files under")
            yield lease

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Remembers failures that no score may hide; refuses calls once closed."""
        if not self._open:
            raise _closed()
        try:
            yield
        except (InfraError, SlotDestroyedError) as error:
            self.infra_error = self.infra_error or error
            raise


def _closed() -> PoolClosedError:
    return PoolClosedError("this tool context is closed", next_step="use it only inside the hook it was given to")
