"""A command's streams joined to this process's own, byte for byte."""

from __future__ import annotations

import asyncio
import codecs
import select
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO, Final

from agentenv.cli.output import silence
from agentenv.errors import AgentEnvError, InfraError

if TYPE_CHECKING:
    from agentenv.containers.byte_stream import ByteStream
    from agentenv.containers.programs import StreamedProgram

_PIECE_BYTES: Final = 64 * 1024


async def joined(program: StreamedProgram, *, with_stdin: bool) -> int:
    """Pass on everything, as fast as it is taken, until the program has ended; its exit code. Raises InfraError, also
    when our output cannot be written (a full disk), and BrokenPipeError when nobody reads it."""
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
            if piece is None:  # somebody made it non-blocking
                select.select([source], [], [])
            else:
                asyncio.run_coroutine_threadsafe(program.write(piece), loop).result()
        asyncio.run_coroutine_threadsafe(program.close_stdin(), loop).result()
    except (OSError, AgentEnvError):  # it reads no more, or is lost, which its output says
        pass
