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
from pathlib import Path
from typing import Any, Final, Literal, overload

from agentenv.agent.loop import checked
from agentenv.agent.protocols import Session
from agentenv.containers import transfer
from agentenv.containers.attachments import decoded_base64
from agentenv.containers.transfer import Progress, TransferLease, Transferred
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
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import (
    ArtifactsReply,
    ListFilesReply,
    PatchReply,
    ReadFileReply,
    SearchReply,
    WriteFileReply,
)

_OURS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""Errors that reading a slot never causes: this machine's disk is full, or it is out of descriptors."""


class ToolContext:
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
            return await self.call_tool("bash", _without_none(given), timeout_s=timeout_s)
        if stdin is not None:
            raise InvalidArgumentsError("terminal: a session has no stdin", next_step="call its tool with input")
        given |= {"session": session, "timeout_s": timeout_s, "workdir": cwd, "pty": pty}
        return await self.call_tool("terminal", _without_none(given))

    @overload
    async def read_file(self, path: str, *, binary: Literal[False] = False) -> str: ...
    @overload
    async def read_file(self, path: str, *, binary: Literal[True]) -> bytes: ...
    async def read_file(self, path: str, *, binary: bool = False) -> str | bytes:
        """Read a whole file of the slot, at most 64 MiB. Raises: OSError (missing, a directory, too large)."""
        reply = ReadFileReply.model_validate(await self._file_call("read_file", {"path": path, "binary": binary}))
        if reply.truncated:
            raise OSError(errno.EFBIG, f"{path} has {reply.size_bytes} bytes, more than one call carries")
        return (reply.data or b"") if binary else (reply.text or "")

    async def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> int:
        """Write a whole file in the slot; its parent directories are created. Returns its size in bytes."""
        body: dict[str, Any] = {"path": path, "mode": mode}
        if isinstance(content, str):
            body["text"] = content
        else:
            body["data"] = content
        return WriteFileReply.model_validate(await self._file_call("write_file", _without_none(body))).size_bytes

    async def list_files(self, path: str = ".", *, depth: int = 1) -> ListFilesReply:
        """The entries of a directory of the slot."""
        return ListFilesReply.model_validate(await self._file_call("list_files", {"path": path, "depth": depth}))

    async def upload(self, local: Path | str, remote: str, *, progress: Progress | None = None) -> Transferred:
        """Copy a local file or directory of any size into the slot; see :func:`agentenv.containers.transfer.upload`.

        Raises: OSError, InvalidArgumentsError, PolicyRefusalError, InfraError.
        """
        async with self._watched():
            return await transfer.upload(self._lease(), Path(local), remote, progress=progress)

    async def extract(self, archive: bytes, remote: str) -> ArtifactsReply:
        """Unpack a tar (plain or gzip) into a directory of the slot."""
        given = {"action": "extract", "path": remote, "data": archive}
        return ArtifactsReply.model_validate(await self._file_call("artifacts", given))

    async def download(
        self,
        remote: str,
        local: Path | str,
        *,
        progress: Progress | None = None,
        max_bytes: int = transfer.DEFAULT_MAX_BYTES,
    ) -> Transferred:
        """Copy a file or directory of the slot to a local path (a directory's content is put into it); see
        :func:`agentenv.containers.transfer.download`. The slot's data is not trusted.

        Raises: OSError, PolicyRefusalError, InfraError (also when this machine's own disk is full: a verifier must
        not score that).
        """
        async with self._watched():
            try:
                return await transfer.download(
                    self._lease(), remote, Path(local), progress=progress, max_bytes=max_bytes
                )
            except OSError as error:
                if error.errno in _OURS:
                    raise InfraError(f"{remote} could not be kept on this machine: {error}") from error
                raise

    async def archive(self, path: str = ".") -> ArtifactsReply:
        """A file or directory of the slot as a tar archive (at most 64 MiB), with the SHA-256 of every file in it."""
        return await self._artifacts("archive", path)

    async def list_artifacts(self, path: str = ".") -> ArtifactsReply:
        """Every file below a directory of the slot (or one file), with size and SHA-256; limited like
        :meth:`archive`."""
        return await self._artifacts("list", path)

    async def read_artifact(self, path: str) -> ArtifactsReply:
        """One file of the slot, at most 64 MiB: its bytes in ``data``, its size and SHA-256 in ``files[0]``."""
        return await self._artifacts("read", path)

    async def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        limit: int = 200,
    ) -> SearchReply:
        """Lines of the slot's files that match a regular expression, by path and line; omitted matches are counted
        in the reply.

        Raises: InvalidArgumentsError when the pattern is wrong; OSError when there is no such path.
        """
        given = {"pattern": pattern, "path": path, "glob": glob, "limit": limit}
        given |= {"ignore_case": ignore_case or None, "literal": literal or None}
        return SearchReply.model_validate(await self._file_call("search", _without_none(given)))

    async def patch(
        self, patch: str, path: str = ".", *, strip: int | None = None, fuzz: int | None = None
    ) -> PatchReply:
        """Apply a unified diff to the slot's files: all of it, or nothing.

        Raises: InvalidArgumentsError when it is not a diff or does not apply (the message names the hunk, the
        reason, and the content found instead); OSError when the slot cannot write.
        """
        given = _without_none({"patch": patch, "path": path, "strip": strip, "fuzz": fuzz})
        result = await self.call_tool("patch", given)
        if result.exit_code == 1:
            raise InvalidArgumentsError(result.stderr.strip())
        _check_file_result("patch", path, result)
        return PatchReply.model_validate(result.content)

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

    async def _artifacts(self, action: str, path: str) -> ArtifactsReply:
        return ArtifactsReply.model_validate(await self._file_call("artifacts", {"action": action, "path": path}))

    async def _file_call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        result = await self.call_tool(tool, arguments)
        _check_file_result(tool, str(arguments.get("path")), result)
        if isinstance(result.content, dict) and isinstance(data := result.content.get("data"), str):
            return {**result.content, "data": await decoded_base64(data)}
        return result.content

    async def _outside(self, tool: str, toolset: str, arguments: Mapping[str, Any]) -> CallResult:
        try:
            return await self.call_tool(tool, arguments)
        except UnknownToolError as error:
            raise UnknownToolError(
                f"{tool} runs on a tool server, and is not enabled here: {error.message}",
                next_step=f'set tool_server_url (or "inprocess") and enable the toolset {toolset!r}',
            ) from error

    def _lease(self) -> TransferLease:
        lease: TransferLease | None = getattr(self._session, "lease", None)
        if lease is None:
            raise InvalidArgumentsError("this session has no lease to transfer files under")
        return lease

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


def _check_file_result(tool: str, path: str, result: CallResult) -> None:
    if result.timed_out or result.cancelled:
        raise TimeoutError(errno.ETIMEDOUT, f"{tool} did not end in time", path)
    if result.exit_code:
        raise OSError(result.exit_code, result.stderr.strip() or f"{tool} failed", path)


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
