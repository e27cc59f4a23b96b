"""The tools of one slot as typed methods, and what is done with the slot as a whole: checkpoints, forks, its network.
For hooks and for scripts alike.

A failing *file* operation raises ``OSError`` with the slot's errno (``FileNotFoundError`` and so on).
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, Self, overload

from agentenv.agent.protocols import Session
from agentenv.containers import transfer
from agentenv.containers.attachments import decoded_base64
from agentenv.containers.connect import Streams, connected
from agentenv.containers.layers import image_above
from agentenv.containers.live_output import OnOutput
from agentenv.containers.programs import StreamedProgram, checked_order, start_program
from agentenv.containers.slot_reports import image_config, slot_metrics
from agentenv.containers.transfer import Progress, TransferLease, Transferred
from agentenv.errors import (
    CheckpointError,
    ConfigError,
    InfraError,
    InvalidArgumentsError,
    PolicyRefusalError,
    ProtocolError,
    ToolCallError,
    UnknownToolError,
    from_wire,
)
from agentenv.executor.session import Checkpoint, ToolSession
from agentenv.farm_client.images import FarmImages
from agentenv.sdk.forwards import forwarded
from agentenv.sdk.processes import ExecResult, SlotProcess, exec_result, sendable, shown
from agentenv.sdk.python import SlotPython
from agentenv.sdk.roots import Network, farm_images, network_policy, store_directory
from agentenv.sdk.serving import Served, Target, served
from agentenv.store.addition import Runtime
from agentenv.store.reference import committed as committed_reference
from agentenv.store.store import Store
from agentenv.tools.toolsets import EXTERNAL
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import CallResult
from agentenv.wire.image_config import ImageConfig
from agentenv.wire.sessions import ProcessReply
from agentenv.wire.slot_metrics import SlotMetrics
from agentenv.wire.tools import (
    ArtifactsReply,
    FileEntry,
    ListFilesReply,
    PatchReply,
    PathsReply,
    ReadFileReply,
    SearchReply,
    WriteFileReply,
)

_OURS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""Errors that reading a slot never causes: the machine the download is written to is full, or out of descriptors."""
_NOT_SERVED: Final = '{tool} needs a tool server that has it: set tool_server_url (or "inprocess")'
_ELSEWHERE: Final = "images are built where the slot's own is stored: pull it here, or use a sandbox of this machine"


class SlotTools(ABC):
    """Typed calls of a slot's tools, over :meth:`call_tool`."""

    @abstractmethod
    def _used(self) -> AbstractAsyncContextManager[Session]:
        """The session, for one use. Raises PoolClosedError."""

    @abstractmethod
    def _over(self, session: ToolSession) -> Self:
        """The same kind of thing over the session of a fork, which ends with it."""

    async def _call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | str | None,
        timeout_s: float | None,
        on_output: OnOutput | None,
    ) -> CallResult:
        """As :meth:`call_tool`, but a wrong call, or one that is not allowed, is a result with a ``fault``."""
        live: dict[str, Any] = {} if on_output is None else {"on_output": on_output}  # not every session has it
        async with self._used() as session:
            result = await session.call(tool, arguments or {}, timeout_s=timeout_s, **live)
            if result.fault != "none" or result.cancelled:
                result.raise_failure()
        if result.error == UnknownToolError.code and tool in EXTERNAL:
            return result.model_copy(update={"message": _NOT_SERVED.format(tool=tool)})
        return result

    async def call_tool(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """Call any tool by its name. ``on_output``, of ``bash``: see :meth:`exec`.

        Raises: ToolCallError when the call is wrong, PolicyRefusalError when it is not allowed, InfraError when the
        slot failed.
        """
        result = await self._call(tool, arguments, timeout_s, on_output)
        if result.fault != "none":
            kind = ToolCallError if result.fault == "model" else PolicyRefusalError
            message = result.message or f"{tool} was refused"
            raise from_wire(result.error, message, "", ToolCallError, PolicyRefusalError, otherwise=kind)
        return result

    async def _typed_call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """As :meth:`call_tool`, without the arguments that are None: those were not given to the typed method."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return await self.call_tool(tool, given, timeout_s=timeout_s, on_output=on_output)

    @asynccontextmanager
    async def slot_session(self) -> AsyncIterator[ToolSession]:
        """The slot's session, for one use. Raises InvalidArgumentsError when it is another kind of session."""
        async with self._used() as session:
            if not isinstance(session, ToolSession):
                raise InvalidArgumentsError("this session only calls tools; it has no slot")
            yield session

    @asynccontextmanager
    async def lease_for_transfer(self) -> AsyncIterator[TransferLease]:
        """The lease to transfer files under, for one transfer."""
        async with self.slot_session() as session:
            yield session.lease

    # -- the slot as a whole -----------------------------------------------------------------------

    async def seal(self) -> None:
        """Kill everything running in the slot; its files stay."""
        async with self.slot_session() as session:
            await session.seal()

    async def checkpoint(self) -> Checkpoint:
        """Keep the slot's files, and no process: everything running in it is killed. It continues with its files.

        Without an image: those of the workspace. The checkpoint lives in the slot's container, and as long as that, or
        until :meth:`drop`. Raises CheckpointError when there is no room to keep the files.
        """
        async with self.slot_session() as session:
            return await session.checkpoint()

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Give the slot the files of a checkpoint in place of its own, and no process: everything running in it is
        killed. Raises CheckpointError when the checkpoint is another image's, or in another container."""
        async with self.slot_session() as session:
            await session.restore(checkpoint)

    async def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint, and free its memory. Slots that began with it keep its files."""
        async with self.slot_session() as session:
            await session.drop(checkpoint)

    async def service(self, name: str) -> Self:
        """The same over one of the slot's services (:class:`agentenv.sdk.roots.Service`): its commands, files and
        connections are the service's. It ends with this, or by its own end. Checkpoints and the network are the slot's.
        Raises ConfigError when there is no such service, InfraError."""
        async with self.slot_session() as session:
            return self._over(session.service(name))

    async def fork(self, n: int = 1) -> list[Self]:
        """Open n slots that begin with this one's files, and no process: everything running in this one is killed.

        They are independent of it and of each other, and to be closed each; they end with the farm, that of a lone
        sandbox with the sandbox, that of a hook with the hook. They need as many free slots in the same container: of a
        lone sandbox, its ``forks``; those in use are waited for as long as for a slot. All are opened, or none. Raises
        ConfigError at once when the container has fewer slots; CheckpointError, AcquireTimeoutError, InfraError.
        """
        async with self.slot_session() as session:
            return [self._over(fork) for fork in await session.fork(n)]

    async def commit(self, name: str = "") -> str:
        """Make an image of the slot's files, with the user, environment and directory of the image that it has, in this
        machine's store, or that of the farm's node; returns its digest, which ``image=`` takes. ``name``, such as
        ``prepared:1``: ``image="committed:prepared:1"`` means it from then on, on this machine or on every node of the
        farm, until a week after its last use. Everything running in the slot is killed; it continues with its files.

        Raises: CheckpointError when there is no image, when there are services or volumes, no room, or a file that no
        image can have (its name begins with ``.wh.``, or its path has more than 4096 bytes); ConfigError when the name
        is malformed, or when the slot's own image is not in this machine's store; ImageUnavailableError when the disk
        is full; InfraError.
        """
        async with self.slot_session() as session:
            return await committed(session, name)

    async def set_network(self, network: Network) -> None:
        """Change what the slot may reach: ``"none"``, ``"public"``, a list of hosts, or a NetworkPolicy. Its processes
        go on; connections that are no longer allowed are closed when this returns.

        For slots with an image whose container gives its slots a network (``allow_network``; a lone sandbox that was
        opened with one). Raises ConfigError when the network is malformed, or there is no image;
        SandboxUnavailableError when it is not available: then there is none.
        """
        policy = network_policy(network)
        async with self.slot_session() as session:
            await session.set_network(policy)

    # -- programs ----------------------------------------------------------------------------------

    async def exec(
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
        """Run a program with these arguments, without a shell, found by PATH; it is killed after ``timeout_s``
        (``math.inf``: never). It waits for the slot's earlier calls: they run one at a time (:meth:`start` runs beside
        them).

        ``user``: a name or number of the slot's own /etc/passwd, with ``:GROUP`` or without, in a slot with an image.
        ``stdin``: at most 64 MiB; without it there is nothing to read. ``output_bytes``: how much of each output is
        kept, its beginning and its end, up to 64 MiB; by default the slot's own limit (1 MiB). ``truncated`` of the
        result says that there was more. ``on_output(stream, text)`` is called with the output as it comes, as text;
        stream is "stdout" or "stderr". It may be a coroutine function, which is awaited before the next piece;
        ``on_output=OutputBytes(callback)``: it gets bytes. What it raises cancels the program and is raised here.

        Arguments and variables may be as long as Linux takes them: 128 KiB each, mostly 2 MiB together. Longer ones
        end with exit code 126 and ``Argument list too long``, as in a shell.

        Raises: InvalidArgumentsError when the call is wrong, InfraError when the slot failed.
        """
        argv, env = sendable(argv, env)
        arguments: dict[str, Any] = {"command": shown(argv), "argv": list(argv), "binary": True, "user": user}
        arguments |= {"cwd": cwd, "env": dict(env) if env else None, "output_bytes": output_bytes}
        arguments["stdin_data"] = stdin.encode() if isinstance(stdin, str) else stdin
        done = await self._typed_call("bash", arguments, timeout_s, on_output)
        return await exec_result(done)

    @asynccontextmanager
    async def connect(self, port: int, *, timeout_s: float = 30.0) -> AsyncIterator[Streams]:
        """A connection to a server that listens at this port of the slot's own 127.0.0.1 (or ::1): an asyncio stream
        reader and writer, for ``async with``; up to 64 at once.

        Back-pressure and half-closing (``writer.write_eof()``) are as on a socket. It ends with the block, with the
        slot, and when that is sealed or restored from a checkpoint: reading then raises InfraError.

        Raises: ConnectionRefusedError when nothing listens there, TimeoutError, InfraError.
        """
        async with self.lease_for_transfer() as lease, connected(lease, port, timeout_s=timeout_s) as streams:
            yield streams

    @asynccontextmanager
    async def forward(self, port: int, *, local_port: int = 0, unix: Path | str | None = None) -> AsyncIterator[str]:
        """Listen on this machine's loopback while the block runs, and lead every connection to the server at this port
        of the slot; the URL to use here: ``async with box.forward(8000) as url:`` gives ``http://127.0.0.1:40123``.

        ``local_port`` 0: any free one. Whoever is on this machine can connect. ``unix``: a Unix socket at this path
        instead, which is yielded; only this user can connect (0600), and it is removed at the end. A connection is
        reset when it cannot be made (nothing listens there, or 64 are open) or is lost. Raises ConfigError when it
        cannot listen.
        """
        path = None if unix is None else Path(unix)
        async with forwarded(lambda: self.connect(port), local_port, path) as where:
            yield where

    @asynccontextmanager
    async def serve(self, target: Target, port: int = 0, *, timeout_s: float = 30.0) -> AsyncIterator[Served]:
        """Listen on the slot's own 127.0.0.1 (and ::1) while the block runs, at this port (0: any free one), and answer
        the connections that its programs make there, up to 64 at once; more wait. The slot needs no network, and
        nothing listens on this machine: ``async with box.serve(app) as served:`` gives ``served.url``, for programs of
        the slot.

        ``target``: an :class:`aiohttp.web.Application`, for one block at a time (of one that is served in many slots,
        the ``server`` of its :class:`aiohttp.web.AppRunner`), another factory of streaming protocols, or what each
        connection is led to: a port of this machine's loopback, ``"HOST:PORT"``, or the path of a Unix socket. Every
        program of the slot can connect; a connection is reset when its target cannot be reached or breaks it off.

        It ends with the block, with the slot, and when that is sealed or restored from a checkpoint; ``served.error``
        says why it ended before the block did. A process of the slot can end it, too, or take the place of what
        listens there: what comes is from the slot, and no more is known. Raises ConfigError when the target is
        malformed, OSError when the port is in use, TimeoutError, InfraError.
        """
        async with (
            self.lease_for_transfer() as lease,
            served(lease, target, port, timeout_s=timeout_s) as found,
        ):
            yield found

    @overload
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: bool = False,
        output: Literal["tail"] = "tail",
    ) -> SlotProcess: ...
    @overload
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        output: Literal["stream"],
        timeout_s: float | None = None,
    ) -> StreamedProgram: ...
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: bool = False,
        output: Literal["tail", "stream"] = "tail",
        timeout_s: float | None = None,
    ) -> SlotProcess | StreamedProgram:
        """Start a program in the background: bash text, or a list of a program and its arguments. For the rest see
        :meth:`exec`. A program that cannot be started has ended with 126.

        ``output="tail"``: it prints whether anybody reads or not, the slot keeps the last 200 kB, and the ``process``
        tool has it, too. ``pty``: on a terminal of its own. ``output="stream"``: nothing is lost, stdout and stderr are
        apart, and it waits while they are not read; up to 64 at once. It is killed after ``timeout_s``, by default
        never, and ends with its handle.

        Raises: InvalidArgumentsError when the call is wrong, InfraError when the slot failed.
        """
        words, env = sendable(() if isinstance(command, str) else command, env)
        argv = None if isinstance(command, str) else list(words)
        text = command if isinstance(command, str) else shown(words)
        if output == "stream":
            if pty:
                raise InvalidArgumentsError("start: a terminal has one output", next_step="leave pty or output out")
            order = checked_order(command=text, argv=argv, workdir=cwd, env=env, user=user, timeout_s=timeout_s)
            async with self.lease_for_transfer() as lease:
                return await start_program(lease, order, self.slot_session)
        if timeout_s is not None:
            raise InvalidArgumentsError("start: timeout_s is of output='stream'", next_step="wait(timeout_s) and kill")
        arguments: dict[str, Any] = {"action": "start", "command": text, "argv": argv, "workdir": cwd, "user": user}
        arguments |= {"pty": pty or None, "env": dict(env) if env else None}
        reply = ProcessReply.model_validate((await self._typed_call("process", arguments)).content)
        assert reply.process is not None  # it was started, or the call had raised
        return SlotProcess(self, reply.process.process)

    async def image_config(self) -> ImageConfig:
        """How the slot's image configures its programs: user, directory, environment, ENTRYPOINT and CMD. Raises
        ConfigError when the slot has no image, InfraError."""
        async with self.lease_for_transfer() as lease:
            return await image_config(lease)

    async def metrics(self) -> SlotMetrics:
        """What the slot uses now: memory, CPU time, processes, storage, and their limits. It waits for no call. Raises
        InfraError."""
        async with self.lease_for_transfer() as lease:
            return await slot_metrics(lease)

    async def start_command(
        self,
        command: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: bool = False,
    ) -> SlotProcess:
        """Start what an engine starts in the image, in the background: its ENTRYPOINT, and after it ``command`` or by
        default its CMD. For the rest see :meth:`start`.

        Raises: ConfigError when the slot has no image, or the image neither of them; InvalidArgumentsError, InfraError.
        """
        config = await self.image_config()
        argv = [*config.entrypoint, *(config.cmd if command is None else command)]
        if not argv:
            raise ConfigError("command", "the image has no ENTRYPOINT and no CMD", next_step="start() a program of it")
        return await self.start(argv, cwd=cwd, env=env, user=user, pty=pty)

    def python(
        self,
        *,
        program: str = "python3",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> SlotPython:
        """A Python interpreter in the slot that keeps its variables between cells, with results as notebooks show them:
        ``async with box.python() as python: await python.run("1 + 1")``.

        ``program``: a Python 3.7 or later of the slot, which is started by the first cell. For the rest see
        :meth:`exec`; up to 64 interpreters and streamed programs at once.
        """
        return SlotPython(lambda argv: self.start(argv, cwd=cwd, env=env, user=user, output="stream"), program)

    # -- files, as a user of the slot: see :meth:`exec` -----------------------------------------------

    @overload
    async def read_file(
        self, path: str, *, binary: Literal[False] = False, errors: str = "strict", user: str | None = None
    ) -> str: ...
    @overload
    async def read_file(self, path: str, *, binary: Literal[True], user: str | None = None) -> bytes: ...
    async def read_file(
        self, path: str, *, binary: bool = False, errors: str = "strict", user: str | None = None
    ) -> str | bytes:
        """Read a whole file of the slot, at most 64 MiB: as text (UTF-8), or its bytes. ``errors``: what becomes of
        bytes that are not UTF-8, as in ``bytes.decode`` ("replace", "surrogateescape", ...). ``user``: as whom, in a
        slot with an image; see :meth:`exec`.

        Raises: OSError (missing, a directory, too large; EILSEQ, with the offset: not UTF-8, and ``errors`` is strict).
        """
        reply = await self._read_whole(path, binary, user)
        if not binary and not reply.lossy:
            return reply.text or ""
        data = (reply if binary else await self._read_whole(path, True, user)).data or b""
        return data if binary else _decoded(path, data, errors)

    async def _read_whole(self, path: str, binary: bool, user: str | None) -> ReadFileReply:
        arguments = {"path": path, "binary": binary, "user": user}
        reply = ReadFileReply.model_validate(await self._file_call("read_file", arguments))
        if reply.truncated:
            limit = (
                f"{reply.size_bytes} bytes, more than the {MAX_FILE_BYTES} of one call; download() has no such limit"
            )
            raise OSError(errno.EFBIG, limit, path)
        return reply

    async def write_file(
        self, path: str, content: str | bytes, *, mode: int | None = None, user: str | None = None
    ) -> int:
        """Write a whole file in the slot; its parent directories are created. ``user``: as whom, in a slot with an
        image. Returns its size in bytes. Raises:
        OSError; ProtocolError when another number of bytes was written."""
        arguments = {"path": path, "mode": mode, "user": user, "text" if isinstance(content, str) else "data": content}
        return WriteFileReply.model_validate(await self._file_call("write_file", arguments)).size_bytes

    async def list_files(self, path: str = ".", *, depth: int = 1, user: str | None = None) -> ListFilesReply:
        """The entries of a directory of the slot. ``user``: as whom, in a slot with an image."""
        arguments = {"path": path, "depth": depth, "user": user}
        return ListFilesReply.model_validate(await self._file_call("list_files", arguments))

    async def stat(self, path: str, *, follow_symlinks: bool = True, user: str | None = None) -> FileEntry:
        """The kind, size, mode and time of a file or directory of the slot. Raises OSError (FileNotFoundError and so
        on)."""
        entry = (await self._paths("stat", path, user, follow=follow_symlinks)).entry
        if entry is None:
            raise ProtocolError("stat: the slot gave no entry")
        return entry

    async def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool = False, user: str | None = None) -> None:
        """Make a directory in the slot (0755), as ``pathlib.Path.mkdir`` does. Raises OSError (FileExistsError,
        FileNotFoundError when its parent is missing, and so on)."""
        await self._paths("mkdir", path, user, parents=parents, exist_ok=exist_ok)

    async def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Rename a file or directory of the slot, as ``os.rename`` does: in one step, in place of a file, link or empty
        directory at ``target``. Raises OSError (EXDEV between file systems of the slot, such as /tmp and the workspace
        of one without an image)."""
        await self._paths("rename", path, user, target=target)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file or link of the slot, or with ``recursive`` a directory and everything in it (512 levels at
        most); links are not followed. Raises OSError (FileNotFoundError; IsADirectoryError of a directory, and so on):
        what was removed before the failure is gone."""
        await self._paths("remove", path, user, recursive=recursive)

    async def _paths(self, action: str, path: str, user: str | None, **given: str | bool) -> PathsReply:
        arguments = {"action": action, "path": path, "user": user, **given}
        return PathsReply.model_validate(await self._file_call("paths", arguments))

    async def upload(
        self, local: Path | str, remote: str, *, progress: Progress | None = None, user: str | None = None
    ) -> Transferred:
        """Copy a local file or directory of any size into the slot; see :func:`agentenv.containers.transfer.upload`.

        Raises: OSError, InvalidArgumentsError, PolicyRefusalError, InfraError.
        """
        async with self.lease_for_transfer() as lease:
            return await transfer.upload(lease, Path(local), remote, progress=progress, user=user)

    async def extract(self, archive: bytes, remote: str, *, user: str | None = None) -> ArtifactsReply:
        """Unpack a tar (plain or gzip) into a directory of the slot. ``user``: whose the files are, in a slot with an
        image."""
        arguments = {"action": "extract", "path": remote, "data": archive, "user": user}
        return ArtifactsReply.model_validate(await self._file_call("artifacts", arguments))

    async def download(
        self,
        remote: str,
        local: Path | str,
        *,
        progress: Progress | None = None,
        max_bytes: int = transfer.DEFAULT_MAX_BYTES,
        user: str | None = None,
    ) -> Transferred:
        """Copy a file or directory of the slot to a local path (a directory's content is put into it); see
        :func:`agentenv.containers.transfer.download`. The slot's data is not trusted.

        Raises: OSError, PolicyRefusalError, InfraError (also when this machine's own disk is full: a verifier must
        not score that).
        """
        async with self.lease_for_transfer() as lease:
            try:
                return await transfer.download(
                    lease, remote, Path(local), progress=progress, max_bytes=max_bytes, user=user
                )
            except OSError as error:
                if error.errno in _OURS:
                    raise InfraError(f"{remote} could not be stored on this machine: {error}") from error
                raise

    async def archive(self, path: str = ".", *, user: str | None = None) -> ArtifactsReply:
        """A file or directory of the slot as a tar archive (at most 64 MiB), with the SHA-256 of every file in it."""
        return await self._artifacts("archive", path, user)

    async def list_artifacts(self, path: str = ".", *, user: str | None = None) -> ArtifactsReply:
        """Every file below a directory of the slot (or one file), with size and SHA-256; limited like
        :meth:`archive`."""
        return await self._artifacts("list", path, user)

    async def read_artifact(self, path: str, *, user: str | None = None) -> ArtifactsReply:
        """One file of the slot, at most 64 MiB: its bytes in ``data``, its size and SHA-256 in ``files[0]``."""
        return await self._artifacts("read", path, user)

    async def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        limit: int = 200,
        user: str | None = None,
    ) -> SearchReply:
        """Lines of the slot's files that match a regular expression, by path and line; omitted matches are counted
        in the reply.

        Raises: InvalidArgumentsError when the pattern is wrong; OSError when there is no such path.
        """
        arguments = {"pattern": pattern, "path": path, "glob": glob, "limit": limit, "user": user}
        arguments |= {"ignore_case": ignore_case or None, "literal": literal or None}
        return SearchReply.model_validate(await self._file_call("search", arguments))

    async def patch(
        self,
        patch: str,
        path: str = ".",
        *,
        strip: int | None = None,
        fuzz: int | None = None,
        user: str | None = None,
    ) -> PatchReply:
        """Apply a unified diff to the slot's files: all of it, or nothing.

        Raises: InvalidArgumentsError when it is not a diff or does not apply (the message names the hunk, the
        reason, and the content found instead); OSError when the slot cannot write.
        """
        arguments = {"patch": patch, "path": path, "strip": strip, "fuzz": fuzz, "user": user}
        result = await self._typed_call("patch", arguments)
        if result.exit_code == 1:
            raise InvalidArgumentsError(result.stderr.strip())
        _check_file_result("patch", path, result)
        return PatchReply.model_validate(result.content)

    async def _artifacts(self, action: str, path: str, user: str | None) -> ArtifactsReply:
        arguments = {"action": action, "path": path, "user": user}
        return ArtifactsReply.model_validate(await self._file_call("artifacts", arguments))

    async def _file_call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        result = await self._typed_call(tool, arguments)
        _check_file_result(tool, str(arguments.get("path")), result, arguments.get("target"))
        if isinstance(result.content, dict) and isinstance(data := result.content.get("data"), str):
            return {**result.content, "data": await decoded_base64(data)}
        return result.content


def _decoded(path: str, data: bytes, errors: str) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        where = f"byte {error.start} (0x{data[error.start]:02x})"
        hint = "binary=True returns the bytes, errors='replace' text with U+FFFD in their place"
        raise OSError(errno.EILSEQ, f"not UTF-8 at {where}; {hint}", path) from error


def _check_file_result(tool: str, path: str, result: CallResult, target: str | None = None) -> None:
    if result.timed_out or result.cancelled:
        raise TimeoutError(errno.ETIMEDOUT, f"{tool} did not end in time", path)
    if result.exit_code:
        text = result.stderr.strip() or f"{tool} failed"
        if text.startswith(f"{path}: "):  # an OSError adds the path itself
            raise OSError(result.exit_code, text.removeprefix(f"{path}: "), path, None, target)
        raise OSError(result.exit_code, text)


async def committed(session: ToolSession, name: str) -> str:
    """See :meth:`SlotTools.commit`."""
    named = _reference(name) if name else ""
    if session.root is None or not session.root.image:
        raise CheckpointError("a slot without an image cannot become one", next_step="lease one with an image")
    if session.root.services or session.root.volumes:  # before its programs are ended for it
        raise CheckpointError("a slot with services or volumes is no image", next_step="lease one without them")
    if (farm := farm_images(session.pool)) is not None:
        return await _committed_there(session, farm, named)
    store = await asyncio.to_thread(Store.open, store_directory())
    base = await asyncio.to_thread(store.find, session.root.image)
    if base is None:
        raise ConfigError("image", f"{session.root.image} is not in {store_directory()}", next_step=_ELSEWHERE)
    checkpoint = await session.checkpoint()
    try:
        container = session.lease.container
        image, _ = await image_above(store, base, container, checkpoint.root.checkpoint, Runtime.of(base))
    finally:
        await session.drop(checkpoint)
    if named:
        await asyncio.to_thread(store.name, named, image)
    return image.digest


def _reference(name: str) -> str:
    """``committed:NAME``. Raises ConfigError (``name``)."""
    try:
        return str(committed_reference(name))
    except ConfigError as error:
        raise ConfigError("name", f"got {name!r}", next_step="give a name like a registry's: prepared:1") from error


async def _committed_there(session: ToolSession, farm: FarmImages, named: str) -> str:
    """Into the store of the slot's node, by its keeper."""
    checkpoint = await session.checkpoint()
    root = checkpoint.root
    try:
        return (await farm.commit(checkpoint.container, root.checkpoint, root.image, named)).digest
    finally:
        await session.drop(checkpoint)
