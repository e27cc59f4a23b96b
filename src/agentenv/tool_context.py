"""The handle preparation and verifiers get on their trajectory's own slot.

One object serves as both ``exec_tool`` and tool context::

    result = await exec_tool("bash", {"command": "pytest -q"}, timeout_s=120)   # any tool
    result = await exec_tool.terminal("pytest -q", timeout_s=120)               # the same
    text = await exec_tool.read_file("report.txt")

A failing command is data (``CallResult.exit_code``). A failing *file* operation raises ``OSError``
with the slot's errno (``FileNotFoundError`` and so on). InfraError is remembered in ``infra_error``:
the rollout is then tried again and never scored, even if the verifier caught it.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

from agentenv.agent.loop import checked
from agentenv.agent.ports import Session
from agentenv.errors import (
    AgentEnvError,
    InfraError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
    ToolCallError,
    by_code,
)
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, ReadFileReply, WriteFileReply


class ToolContext:
    """Calls tools on one slot until :meth:`cleanup`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open = True
        self.infra_error: InfraError | None = None
        """The first failure of ours that a call through this handle met."""

    @property
    def trajectory_id(self) -> str:
        """The trajectory whose slot this is."""
        return self._session.trajectory

    async def __call__(
        self, tool: str, arguments: Mapping[str, Any] | str | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """Call any tool of the slot; wrong or refused calls come back as results with a ``fault``.

        Raises: InfraError when the slot failed; PoolClosedError after :meth:`cleanup`.
        """
        if not self._open:
            raise PoolClosedError(
                "this tool context is closed", next_step="use it only inside the hook it was given to"
            )
        try:
            return checked(await self._session.call(tool, arguments or {}, timeout_s=timeout_s))
        except InfraError as error:
            self.infra_error = self.infra_error or error
            raise

    async def call_tool(
        self, tool: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> CallResult:
        """As calling the context, but a wrong or refused call raises.

        Raises: ToolCallError, PolicyRefusalError, InfraError.
        """
        result = await self(tool, arguments, timeout_s=timeout_s)
        if result.fault != "none":
            found = by_code().get(result.error or "", ToolCallError if result.fault == "model" else PolicyRefusalError)
            raise _made(found, result.message or f"{tool} was refused")
        return result

    async def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> CallResult:
        """Run a bash command in the workspace. Its exit code, output and timeout are in the result."""
        given = {"command": command, "cwd": cwd, "env": dict(env) if env else None, "stdin": stdin}
        return await self.call_tool("bash", _without_none(given), timeout_s=timeout_s)

    @overload
    async def read_file(self, path: str, *, binary: Literal[False] = False) -> str: ...
    @overload
    async def read_file(self, path: str, *, binary: Literal[True]) -> bytes: ...
    async def read_file(self, path: str, *, binary: bool = False) -> str | bytes:
        """A whole file of the slot, at most 64 MiB. Raises: OSError (missing, a directory, too large)."""
        reply = ReadFileReply.model_validate(await self._file_call("read_file", {"path": path, "binary": binary}))
        if reply.truncated:
            raise OSError(errno.EFBIG, f"{path} has {reply.size_bytes} bytes, more than one call carries")
        return (reply.data or b"") if binary else (reply.text or "")

    async def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> int:
        """Write a file of the slot, whole; its directories are made. Returns its size in bytes."""
        body: dict[str, Any] = {"path": path, "mode": mode}
        if isinstance(content, str):
            body["text"] = content
        else:
            body["data"] = _base64(content)
        return WriteFileReply.model_validate(await self._file_call("write_file", _without_none(body))).size_bytes

    async def list_files(self, path: str = ".", *, depth: int = 1) -> ListFilesReply:
        """The entries of a directory of the slot."""
        return ListFilesReply.model_validate(await self._file_call("list_files", {"path": path, "depth": depth}))

    async def upload(self, local: Path | str, remote: str) -> None:
        """Copy a local file or directory into the slot. A directory's content lands in ``remote``.

        Raises: OSError; InvalidArgumentsError when it is larger than 64 MiB.
        """
        content, mode = await asyncio.to_thread(_packed, Path(local))
        if mode is None:
            await self.extract(content, remote)
        else:
            await self.write_file(remote, content, mode=mode)

    async def extract(self, archive: bytes, remote: str) -> ArtifactsReply:
        """Unpack a tar (plain or gzip) into a directory of the slot."""
        given = {"action": "extract", "path": remote, "data": _base64(archive)}
        return ArtifactsReply.model_validate(await self._file_call("artifacts", given))

    async def download(self, remote: str, local: Path | str) -> None:
        """Copy a file or directory of the slot to a local path (a directory's content lands in it).

        What a slot sends is not trusted. Raises: OSError for names and links that lead out of ``local``,
        devices, a missing ``remote``.
        """
        reply = ArtifactsReply.model_validate(await self._file_call("artifacts", {"action": "archive", "path": remote}))
        await asyncio.to_thread(_unpack, reply.data or b"", Path(remote).name, Path(local))

    async def search(self, pattern: str, path: str = ".", *, max_matches: int = 200) -> list[str]:
        """Lines matching an extended regular expression, as ``file:line:text``; binary files are left out.

        Raises: InvalidArgumentsError when the pattern or path is wrong.
        """
        grep = f"grep -rnIE -- {shlex.quote(pattern)} {shlex.quote(path)}"
        result = await self.terminal(f"{grep} | head -n {int(max_matches)}; exit ${{PIPESTATUS[0]}}")
        if result.exit_code not in (0, 1, 141):  # 141: head closed the pipe on enough matches
            raise InvalidArgumentsError(f"search failed: {result.stderr.strip()}")
        return result.stdout.splitlines()

    async def web_search(self, *_: Any, **__: Any) -> CallResult:
        """Not in this version. Raises: ToolCallError."""
        raise _needs_tool_server("web_search")

    async def web_extract(self, *_: Any, **__: Any) -> CallResult:
        """Not in this version. Raises: ToolCallError."""
        raise _needs_tool_server("web_extract")

    async def browser_navigate(self, *_: Any, **__: Any) -> CallResult:
        """Not in this version. Raises: ToolCallError."""
        raise _needs_tool_server("browser_navigate")

    async def browser_snapshot(self, *_: Any, **__: Any) -> CallResult:
        """Not in this version. Raises: ToolCallError."""
        raise _needs_tool_server("browser_snapshot")

    async def cleanup(self) -> None:
        """No more calls through this context; the slot itself is the rollout's. Repeatable."""
        self._open = False

    async def _file_call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        result = await self.call_tool(tool, arguments)
        if result.exit_code:
            raise OSError(result.exit_code, result.stderr.strip() or f"{tool} failed", str(arguments.get("path")))
        return result.content


def _made(kind: type[AgentEnvError], message: str) -> AgentEnvError:
    return kind(message) if issubclass(kind, (ToolCallError, PolicyRefusalError)) else ToolCallError(message)


def _needs_tool_server(tool: str) -> ToolCallError:
    return ToolCallError(f"{tool} needs a tool server (not in this version)", next_step="use terminal or call_tool")


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bounded(content: bytes, source: Path) -> bytes:
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgumentsError(f"{source} is larger than the {MAX_FILE_BYTES} bytes one upload carries")
    return content


def _packed(source: Path) -> tuple[bytes, int | None]:
    """A file's content and mode, or a directory as a tar and None."""
    if not source.is_dir():
        return _bounded(source.read_bytes(), source), source.stat().st_mode & 0o777
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(source, arcname=".")
    return _bounded(archive.getvalue(), source), None


def _unpack(archive: bytes, name: str, target: Path) -> None:
    """A tar of one file called ``name`` becomes ``target``; any other is extracted into it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
        if len(members) == 1 and members[0].isfile() and members[0].name == name:
            held = tar.extractfile(members[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(held.read() if held else b"")
            return
        target.mkdir(parents=True, exist_ok=True)
        try:
            tar.extractall(target, filter="data")
        except tarfile.FilterError as error:
            raise OSError(errno.EPERM, f"the slot sent something unsafe to extract: {error}", name) from error
