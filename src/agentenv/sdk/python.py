"""A Python interpreter in a slot that keeps its state between cells, with results as notebooks show them.

The program in the slot is :mod:`agentenv.sdk.interpreter`, a streamed program. All that it sends is a policy's word: a
frame that is none ends the interpreter, and is no failure of ours.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agentenv.containers.live_output import OnOutput, OutputBytes, Stream, tell
from agentenv.containers.programs import StreamedProgram
from agentenv.deadlines import CALL_TIMEOUT_S, scaled
from agentenv.errors import InvalidArgumentsError, PoolClosedError
from agentenv.sessions.head_tail import HeadTail
from agentenv.wire.spec import MIB

_SOURCE: Final = Path(__file__).with_name("interpreter.py")
_MAX_FRAME_BYTES: Final = 64 * MIB
_MAX_OUTPUTS_BYTES: Final = 64 * MIB
_OUTPUT_BYTES: Final = MIB
_START_S: Final = scaled(60.0)
_INTERRUPT_S: Final = scaled(5.0)
"""Time for a cell to end once it was interrupted, before its interpreter is killed."""
_SHOWN_BYTES: Final = 2_000


@dataclass(frozen=True)
class PythonOutput:
    """One thing that a cell showed: a MIME bundle, as in Jupyter. Binary content (``image/png``) is base64 text."""

    data: Mapping[str, Any]
    is_result: bool = False
    """Whether it is the value of the cell's last expression; else it was displayed, or is a figure."""

    @property
    def text(self) -> str:
        """``text/plain``; empty if it has none."""
        return str(self.data.get("text/plain", ""))

    @property
    def html(self) -> str | None:
        """``text/html``."""
        found = self.data.get("text/html")
        return None if found is None else str(found)

    @property
    def json(self) -> Any:
        """``application/json``."""
        return self.data.get("application/json")

    @property
    def png(self) -> bytes | None:
        """``image/png``; None if it has none, or what is no image."""
        try:
            return base64.b64decode(self.data["image/png"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            return None

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:  # noqa: ARG002
        """A notebook that this is a value in shows it as the cell did."""
        return dict(self.data)


@dataclass(frozen=True)
class PythonError:
    """What a cell raised."""

    name: str
    value: str
    traceback: str

    def __str__(self) -> str:
        return self.traceback or f"{self.name}: {self.value}"


@dataclass(frozen=True)
class PythonResult:
    """What a cell did. An exception in it is data, as a command's exit code is."""

    outputs: tuple[PythonOutput, ...] = ()
    """In the order in which they were shown; the value of the last expression has ``is_result``."""
    stdout: str = ""
    stderr: str = ""
    """Of the cell and what it started; of more than 1 MiB the first and the last part."""
    error: PythonError | None = None
    timed_out: bool = False
    """It was interrupted at its ``timeout_s``."""
    ended: bool = False
    """The interpreter has ended with the cell (it was killed, or crashed; ``error`` says how), and its state with it:
    the next cell runs in a new one."""
    truncated: bool = False
    """Whether printed text, outputs, or part of one are missing."""

    @property
    def success(self) -> bool:
        """Whether it ended without an exception."""
        return self.error is None

    @property
    def text(self) -> str | None:
        """The ``repr`` of the value of the last expression; None if there was none."""
        return next((output.text for output in reversed(self.outputs) if output.is_result), None)


class SlotPython:
    """A Python interpreter that runs in a slot until :meth:`close`, or until that is sealed, restored or closed. Cells
    run one at a time, beside the slot's other calls. ``async with`` closes it on leaving."""

    def __init__(self, start: Callable[[list[str]], Awaitable[StreamedProgram]], program: str) -> None:
        """``start`` starts a program in the slot."""
        self._start = start
        self._argv = [program, "-u", "-c", _SOURCE.read_text(encoding="utf-8")]
        self._program: StreamedProgram | None = None
        self._one_at_a_time = asyncio.Lock()
        self._cells = 0
        self._cell: _Cell | None = None
        """The latest one."""
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._program else "not running"
        return f"<SlotPython {self._argv[0]} {state}, {self._cells} cells>"

    async def run(
        self, code: str, timeout_s: float = CALL_TIMEOUT_S, *, on_output: OnOutput | None = None
    ) -> PythonResult:
        """Run a cell. At ``timeout_s`` it is interrupted (KeyboardInterrupt), its state stays; where it does not end
        upon that within 5 s, its interpreter is killed. Cancelling interrupts it too.

        The value of the last expression is an output, unless the cell ends with ``;``. ``display(value)`` shows more of
        them, matplotlib's open figures become PNG images, coroutines may be awaited at the top level.
        ``on_output(stream, text)`` is called with what is printed, as it comes (:meth:`exec` of the sandbox says how);
        what it raises interrupts the cell and is raised here. Cells have no standard input.

        Raises: InvalidArgumentsError when there is no Python, PoolClosedError, InfraError when the slot failed.
        """
        if not isinstance(code, str):
            raise InvalidArgumentsError(
                f"code is {code!r:.60}, of type {type(code).__name__}", next_step="pass the cell's text, a str"
            )
        if timeout_s <= 0:
            raise InvalidArgumentsError(f"timeout_s is {timeout_s:g}")
        async with self._one_at_a_time:
            if self._closed:
                raise PoolClosedError("the interpreter is closed")
            program = self._program = self._program or await self._started()
            self._cells += 1
            cell = self._cell = _Cell(self._cells, on_output)
            request = json.dumps({"n": self._cells, "code": code}) + "\n"
            reading = asyncio.create_task(self._run(program, request, cell))
            try:
                done, _ = await asyncio.wait({reading}, timeout=timeout_s)
                if not done:
                    cell.timed_out = True
                    done = await self._interrupted(program, reading, cell)
                reading.result()
            except BaseException:
                await asyncio.shield(self._abandon(program, reading, cell))
                raise
        return cell.result()

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does. No effect when none does."""
        if self._program is not None and self._cell is not None and not self._cell.over:
            await self._signalled(self._program, self._cell)

    async def restart(self) -> None:
        """End the interpreter with all that it has started, and start a new one without its state."""
        async with self._one_at_a_time:
            await self._end()
            if not self._closed:
                self._program = await self._started()

    async def close(self) -> None:
        """End the interpreter. Repeatable."""
        self._closed = True
        await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ----------------------------------------------------------------------------------------------

    async def _started(self) -> StreamedProgram:
        program = await self._start(self._argv)
        try:
            async with asyncio.timeout(_START_S):
                if "version" in (await _frame(program) or {}):
                    return program
                said = (await program.stderr.read(_SHOWN_BYTES)).decode("utf-8", "replace").strip()
        except TimeoutError:
            said = f"it did not start within {_START_S:g} s"
        except BaseException:
            await program.close()
            raise
        await program.close()
        raise InvalidArgumentsError(
            f"python: {said or f'{self._argv[0]} ended, and said nothing'}",
            next_step="name a Python 3.7 or later of the slot: python(program=...)",
        )

    async def _run(self, program: StreamedProgram, request: str, cell: _Cell) -> None:
        with contextlib.suppress(BrokenPipeError):
            await program.write(request)
        await self._read(program, cell)

    async def _read(self, program: StreamedProgram, cell: _Cell) -> None:
        while not cell.over:
            if (frame := await _frame(program)) is None:
                break
            await cell.take(frame)
        if not cell.over:
            await program.kill()
            cell.ended = await _how_it_ended(program)
            await self._end()

    async def _signalled(self, program: StreamedProgram, cell: _Cell) -> None:
        """Interrupt a cell, once it has begun: before that, its interpreter ignores the signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTERRUPT_S):
                await cell.begun.wait()
        await program.kill("INT")

    async def _interrupted(
        self, program: StreamedProgram, reading: asyncio.Task[None], cell: _Cell
    ) -> set[asyncio.Task[None]]:
        """Interrupt a cell, and kill its interpreter when it goes on."""
        await self._signalled(program, cell)
        done, _ = await asyncio.wait({reading}, timeout=_INTERRUPT_S)
        if not done:
            await program.kill()
            done, _ = await asyncio.wait({reading})
        return done

    async def _abandon(self, program: StreamedProgram, reading: asyncio.Task[None], cell: _Cell) -> None:
        """The cell's caller has gone, or its callback has raised: the next cell finds an interpreter that waits for it,
        or none."""
        try:
            if cell.unheard:
                reading = asyncio.create_task(self._read(program, cell))
            if not reading.done():
                await self._interrupted(program, reading, cell)
            if reading.exception() is not None:
                await self._end()
        except Exception:
            await self._end()

    async def _end(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            await program.close()


class _Cell:
    """Gathers the frames of one cell. Raises what ``on_output`` raises."""

    def __init__(self, number: int, on_output: OnOutput | None) -> None:
        self._number = number
        self._on_output = on_output
        names: tuple[Stream, Stream] = ("stdout", "stderr")
        self._kept = {name: HeadTail(_OUTPUT_BYTES) for name in names}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._kept}
        self._outputs: list[PythonOutput] = []
        self._outputs_bytes = 0
        self._error: PythonError | None = None
        self._truncated = False
        self.begun = asyncio.Event()
        self.over = False
        self.unheard = False
        """``on_output`` has raised, and is called no more."""
        self.timed_out = False
        self.ended = ""
        """How the interpreter ended, if it did."""

    async def take(self, frame: Mapping[str, Any]) -> None:
        """The next frame; one of another cell, or without a meaning, is passed over. What was printed since that cell's
        end (by a thread, or a child) is this one's."""
        match frame:
            case {"stream": "stdout" | "stderr" as name, "data": str(data)}:
                await self._printed(name, data.encode("latin-1", "replace"))
            case {"n": number} if number != self._number:
                return
            case {"begun": True}:
                self.begun.set()
            case {"output": dict(data), "result": result}:
                self._truncated |= bool(frame.get("cut"))
                self._outputs_bytes += len(json.dumps(data))
                if self._outputs_bytes > _MAX_OUTPUTS_BYTES:
                    self._truncated = True
                else:
                    self._outputs.append(PythonOutput(data, bool(result)))
            case {"error": [str(name), str(value), str(trace)]}:
                self._error = PythonError(name, value, trace)
            case {"over": True}:
                self.over = True

    async def _printed(self, name: Stream, data: bytes) -> None:
        self._kept[name].feed(data)
        if self._on_output is None or self.unheard:
            return
        piece = data if isinstance(self._on_output, OutputBytes) else self._decoders[name].decode(data)
        if piece:
            try:
                await tell(self._on_output, name, piece)
            except BaseException:
                self.unheard = True
                raise

    def result(self) -> PythonResult:
        """What the cell did."""
        (stdout, lost_out), (stderr, lost_err) = (self._kept[name].text() for name in ("stdout", "stderr"))
        error = PythonError("InterpreterEnded", self.ended, "") if self.ended else self._error
        truncated = bool(lost_out or lost_err or self._truncated)
        return PythonResult(
            tuple(self._outputs), stdout, stderr, error, self.timed_out, bool(self.ended), truncated=truncated
        )


async def _frame(program: StreamedProgram) -> Mapping[str, Any] | None:
    """The next frame; None at the end, and for what is none."""
    try:
        size = int.from_bytes(await program.stdout.readexactly(4), "big")
        if size > _MAX_FRAME_BYTES:
            return None
        frame = json.loads(await program.stdout.readexactly(size))
    except (asyncio.IncompleteReadError, ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) else None


async def _how_it_ended(program: StreamedProgram) -> str:
    try:
        code = await program.wait(_INTERRUPT_S)
    except TimeoutError:
        return "killed"
    return f"exit code {code}" + (", out of memory" if program.oom_killed else "")
