"""``agentenv exec``: one command in a fresh slot."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import select
import shlex
import stat
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, TextIO

import typer

from agentenv.cli.image_root import (
    AllowOption,
    CpusOption,
    DockerfileOption,
    ImageOption,
    MemoryOption,
    Place,
    RootOptions,
    StorageOption,
    UserOption,
    WorkdirOption,
    WritableOption,
    stored_here,
    stored_there,
)
from agentenv.cli.options import (
    BackendOption,
    DownloadOption,
    FarmOption,
    GuestOption,
    Isolation,
    IsolationOption,
    JobOption,
    JsonOption,
    NetworkOption,
    OwnOption,
    SetOption,
    TimeoutOption,
    UploadOption,
    WaitOption,
    backend_of,
)
from agentenv.cli.output import (
    EXIT_INFRA,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    described,
    err,
    escape,
    exit_code_of,
    print_error,
    print_json,
    run_to_end,
    silence,
    verb,
)
from agentenv.deadlines import CALL_TIMEOUT_S
from agentenv.errors import AgentEnvError, InfraError

if TYPE_CHECKING:
    from agentenv.containers.byte_stream import ByteStream
    from agentenv.containers.programs import StreamedProgram
    from agentenv.executor.session import ToolSession
    from agentenv.executor.tool_executor import ToolExecutor
    from agentenv.wire.calls import CallResult
    from agentenv.wire.roots import RootSpec

_PIECE_BYTES: Final = 64 * 1024


@verb
def execute(
    command: Annotated[
        list[str], typer.Argument(help="The command, or a single argument of bash text.", metavar="COMMAND")
    ],
    timeout_s: TimeoutOption = CALL_TIMEOUT_S,
    image: ImageOption = None,
    dockerfile: DockerfileOption = None,
    user: UserOption = None,
    workdir: WorkdirOption = None,
    cpus: CpusOption = None,
    memory_mib: MemoryOption = None,
    storage_mib: StorageOption = None,
    writable: WritableOption = Place.memory,
    network: NetworkOption = False,
    allow: AllowOption = None,
    isolation: IsolationOption = Isolation.auto,
    settings: SetOption = None,
    backend: BackendOption = None,
    job: JobOption = None,
    own: OwnOption = False,
    farm: FarmOption = False,
    guest: GuestOption = False,
    wait_s: WaitOption = None,
    upload: UploadOption = None,
    download: DownloadOption = None,
    with_stdin: Annotated[bool, typer.Option("--stdin", help="Pass standard input to the command.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one command in a fresh slot; its output and exit code become this command's.

    With --image or --dockerfile the slot's root is an image: the command is root in it, and may install and change
    anything; nothing of it stays. Without, it sees this machine's programs, read-only, and an empty workspace.

    If a farm is running (`agentenv up`, or a Nomad job), the slot is taken from it; otherwise, or with
    --own, --image, --dockerfile, --memory, --storage, --network, --isolation or --set, from a container that lives as
    long as the command.

    Put options before the command. Standard input is passed only with --stdin.

    Output is passed on byte for byte, as it comes and as fast as it is read; the command waits meanwhile. At a
    terminal, bytes that are no UTF-8 are replaced. With --json it is in the result, 1 MiB of each stream (head and
    tail) as text, and where bytes were replaced as they were, too (base64, content.data).

    \b
    Examples:
      agentenv exec ls -la
      agentenv exec 'for i in 1 2 3; do echo $i; done | wc -l'
      agentenv exec --upload src --upload setup.cfg python3 -m compileall src
      agentenv exec --upload pkg --download pkg/dist:dist make -C pkg dist
      agentenv exec --network git ls-remote https://example.org/repo.git
      agentenv exec --image debian:trixie cat /etc/os-release
      agentenv exec --image debian:trixie --network \\
        'apt-get update && apt-get install -y jq && jq --version'
      agentenv exec --dockerfile tasks/hello --user app --memory 4096 make test
      agentenv exec --image python:3.13 \\
        --allow git.example.org git clone https://git.example.org/team/project
      agentenv exec --backend nomad cat /etc/os-release
      agentenv exec --farm uname -a
      echo hello | agentenv exec --stdin tr a-z A-Z
      agentenv exec --image python:3.13 tar cz -C /usr/local/lib . > lib.tgz
    """

    asked = RootOptions(
        image, dockerfile, user, workdir, cpus, memory_mib, storage_mib, writable, network, tuple(allow or ()),
        tuple(settings or ()),
    )  # fmt: skip
    chosen = backend_of(backend)
    asked.check(chosen, farm=farm)
    opened = asked.farm(chosen, isolation, own=own, job=job, service=farm, guest=guest, wait_s=wait_s)
    text = command[0] if len(command) == 1 else " ".join(map(quoted, command))
    root = asked.root()
    spec = None if root is None or farm else stored_here(root, quiet=as_json)
    how = _collected if as_json else _piped

    async def ran(session: ToolSession) -> CallResult:
        return await how(session, text, timeout_s, with_stdin=with_stdin)

    async def rooted(executor: ToolExecutor) -> RootSpec | None:
        return await stored_there(root, executor, quiet=as_json) if root is not None and farm else spec

    result, lost = run_to_end(_run(opened, rooted, ran, upload or [], download or [], wait_s))
    if not with_stdin and waiting_bytes(sys.stdin):
        err().print("[yellow]agentenv:[/] standard input was not passed on (--stdin does that)", soft_wrap=True)
    document = result.model_dump(mode="json")
    if lost is None:
        print_json(document) if as_json else _show_notes(result)
        raise typer.Exit(shell_exit_code(result))
    # The command's output often tells why there is nothing to fetch.
    if as_json:
        print_json({**document, "download_error": described(lost)})
    else:
        _show_notes(result)
        print_error(lost, as_json=False)
    raise typer.Exit(shell_exit_code(result) or exit_code_of(lost))


def quoted(word: str) -> str:
    """An argument for bash. Commands travel as text: bytes that are not UTF-8 are written as escapes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"
    return shlex.quote(word)


def waiting_bytes(stream: TextIO) -> int:
    """How much of a pipe or a file is unread yet; 0 for everything else, a terminal for instance."""
    try:
        fd = stream.fileno()
        kind = os.fstat(fd)
        if stat.S_ISREG(kind.st_mode):
            return max(0, kind.st_size - os.lseek(fd, 0, os.SEEK_CUR))
        if stat.S_ISFIFO(kind.st_mode):
            return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # closed, or no file of the system's
        pass
    return 0


async def _run(
    opened: AbstractAsyncContextManager[ToolExecutor],
    rooted: Callable[[ToolExecutor], Awaitable[RootSpec | None]],
    ran: Callable[[ToolSession], Awaitable[CallResult]],
    upload: list[Path],
    download: list[str],
    wait_s: float | None,
) -> tuple[CallResult, AgentEnvError | None]:
    """The command's result, and the error if its files could not be fetched."""
    from agentenv.cli.upload import get_all, named, put_all, targets

    sources, sinks = named(upload), targets(download)
    async with opened as executor:
        root = await rooted(executor)
        async with executor.open("agentenv-exec", acquire_timeout_s=wait_s, kind="interactive", root=root) as session:
            await put_all(session.lease, sources)
            result = await ran(session)
            try:
                if result.fault == "none":
                    await get_all(session.lease, sinks)
            except AgentEnvError as error:
                return result, error
            return result, None


async def _piped(session: ToolSession, command: str, timeout_s: float, *, with_stdin: bool) -> CallResult:
    """Run the command with our own standard input and output; a result without its output."""
    from agentenv.containers.programs import checked_order, start_program
    from agentenv.wire.calls import CallResult

    order = checked_order(command=command, input=with_stdin, timeout_s=timeout_s)
    began_s = time.monotonic()
    async with await start_program(session.lease, order) as program:
        code = await joined(program, with_stdin=with_stdin)
        return CallResult(
            id="exec",
            exit_code=code,
            timed_out=program.timed_out,
            oom_killed=program.oom_killed,
            duration_s=time.monotonic() - began_s,
        )


async def _collected(session: ToolSession, command: str, timeout_s: float, *, with_stdin: bool) -> CallResult:
    """Run the command; its result with its output as text, and where that is not all, also as bytes (BashReply)."""
    import asyncio

    from agentenv.containers.live_output import as_text

    arguments: dict[str, object] = {"command": command, "binary": True}
    if with_stdin:
        arguments["stdin_data"] = await asyncio.to_thread(sys.stdin.buffer.read)
    result = await session.call("bash", arguments, timeout_s=timeout_s)
    text = await as_text(result)
    replaced = "\ufffd" in text.stdout or "\ufffd" in text.stderr
    return text.model_copy(update={"content": result.content}) if replaced else text


def _show_notes(result: CallResult) -> None:
    """On stderr, what the exit code alone would hide."""
    for note in notes(result):
        err().print(f"[yellow]agentenv:[/] {escape(note)}", soft_wrap=True)


def notes(result: CallResult) -> list[str]:
    """Notes on the output: deadline, memory, cut output, refusals."""
    said = []
    if result.fault != "none":
        said.append(f"{result.error}: {result.message}")
    if result.timed_out:
        said.append(f"timed out after {result.duration_s:.1f} s")
    if result.oom_killed:
        said.append("the slot ran out of memory and the kernel killed a process in it")
    for stream, dropped in (("stdout", result.stdout_dropped_bytes), ("stderr", result.stderr_dropped_bytes)):
        if dropped:
            said.append(f"{dropped} bytes were cut from the middle of {stream}")
    return said


def shell_exit_code(result: CallResult) -> int:
    """The command's own code; 124 when it timed out; 2 or 125 when it never ran (refused, or an infrastructure
    failure)."""
    if result.fault != "none":
        return EXIT_INFRA if result.fault == "infra" else EXIT_USAGE
    if result.timed_out:
        return EXIT_TIMED_OUT
    return result.exit_code or 0


async def joined(program: StreamedProgram, *, with_stdin: bool) -> int:
    """Pass on everything, as fast as it is taken, until the program has ended; its exit code. Raises InfraError, also
    when our output cannot be written (a full disk), and BrokenPipeError when it is not read."""
    if with_stdin:
        # A daemon: a read of our standard input cannot be ended, and must not keep this process.
        loop = asyncio.get_running_loop()
        threading.Thread(target=_feed, args=(program, loop), name="stdin", daemon=True).start()
    outputs = ((program.stdout, sys.stdout.buffer), (program.stderr, sys.stderr.buffer))
    copying = [asyncio.create_task(_copied(stream, to)) for stream, to in outputs]
    try:
        await asyncio.gather(*copying)
    finally:
        for task in copying:
            task.cancel()
    return await program.wait()


async def _copied(stream: ByteStream, to: BinaryIO) -> None:
    """Bytes as they are; to a terminal, text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace") if to.isatty() else None
    while piece := await stream.read(_PIECE_BYTES):
        await asyncio.to_thread(_write, to, piece if decoder is None else decoder.decode(piece).encode())
    if decoder is not None:
        _write(to, decoder.decode(b"", final=True).encode())


def _write(to: BinaryIO, data: bytes) -> None:
    try:
        to.write(data)
        to.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(to.fileno())
        raise InfraError(
            f"what the command printed cannot be written: {error.strerror}", next_step="make room, or send it elsewhere"
        ) from error


def _feed(program: StreamedProgram, loop: asyncio.AbstractEventLoop) -> None:
    source = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)  # without its lock, which an exit would wait for
    try:
        while (piece := source.read(_PIECE_BYTES)) != b"":
            if piece is None:  # another process made it non-blocking
                select.select([source], [], [])
            else:
                asyncio.run_coroutine_threadsafe(program.write(piece), loop).result()
        asyncio.run_coroutine_threadsafe(program.close_stdin(), loop).result()
    except (OSError, AgentEnvError):  # it reads no more, or is lost, which its output says
        pass
