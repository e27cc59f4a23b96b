"""Programs whose input and output are streams: ``GET /v1/slots/{slot}/program``, a WebSocket, with the lease's key in
the header :data:`agentenv.wire.transfers.LEASE_HEADER`. The program lives no longer than the connection.

The client's first message is a :class:`ProgramOrder`, the server's a :class:`ProgramStarted` or a
:class:`ProgramRefused`. From then on binary messages carry the bytes: to the server those of the program's input; to
the client those of one stream, whose number (1 stdout, 2 stderr) is the first byte. Texts are the other models.

Nothing is dropped. Each of the three streams has a window: its sender sends at most :data:`WINDOW_BYTES` more than the
receiver has reported as taken (:class:`InputTaken` of the input, :class:`StreamRoom` of the others), and then does not
read its source, so that the writer there waits. No stream, and no message, waits for another stream. Once the program
is killed, the rest of its output is sent whether there is room or not: it is at most what its pipes held.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, model_validator

from agentenv.wire.base import MAX_COUNT, MAX_TIMEOUT_S, WireModel
from agentenv.wire.sessions import PathText, Signal
from agentenv.wire.tools import Argv, CommandText, Environment, UserName

MAX_PROGRAMS: Final = 64
"""Connected at once in one slot."""
WINDOW_BYTES: Final = 1024 * 1024
StreamName = Literal["stdout", "stderr"]
NUMBERS: Final[dict[StreamName, int]] = {"stdout": 1, "stderr": 2}


class ProgramOrder(WireModel):
    """What to start: bash text, or a program and its arguments (``command`` is then only what is shown of it).
    ``input``: it has a standard input; otherwise there is nothing to read. It is killed after ``timeout_s``."""

    command: CommandText
    argv: Argv | None = None
    workdir: PathText | None = None
    env: Environment | None = None
    user: UserName | None = None
    input: bool = True
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> ProgramOrder:
        if not self.command.strip():
            raise ValueError("command: must not be empty")
        return self


class ProgramStarted(WireModel):
    """Server → client: it runs; ``pid`` as its slot sees it. 0: it could not be started, and has ended."""

    type: Literal["started"] = "started"
    pid: int


class ProgramRefused(WireModel):
    """Server → client: nothing was started. ``error`` is the ``code`` of a class in :mod:`agentenv.errors`."""

    type: Literal["refused"] = "refused"
    error: str
    message: str
    next_step: str = ""


class InputTaken(WireModel):
    """Server → client: the program has read so many more bytes of its input. ``closed``: it will read no more."""

    type: Literal["taken"] = "taken"
    bytes: int = 0
    closed: bool = False


class StreamOver(WireModel):
    """Server → client: all of this stream was sent."""

    type: Literal["over"] = "over"
    stream: StreamName


class ProgramEnded(WireModel):
    """Server → client: the program has ended; ``exit_code`` is 128 + n when signal n ended it."""

    type: Literal["ended"] = "ended"
    exit_code: int
    timed_out: bool = False
    oom_killed: bool = False


class ProgramLost(WireModel):
    """Server → client: the slot was lost, and the program with it; ``error`` has the reason."""

    type: Literal["lost"] = "lost"
    error: str = "lease_lost"
    message: str
    next_step: str = ""


class StreamRoom(WireModel):
    """Client → server: so many bytes more of this stream may be sent."""

    type: Literal["room"] = "room"
    stream: StreamName
    bytes: Annotated[int, Field(gt=0, le=MAX_COUNT)]


class EndOfInput(WireModel):
    """Client → server: close the program's input once it has read what was sent."""

    type: Literal["end_of_input"] = "end_of_input"


class SendSignal(WireModel):
    """Client → server: KILL ends the program and everything it started; another signal goes to its process group."""

    type: Literal["signal"] = "signal"
    signal: Signal


ProgramReply = ProgramStarted | ProgramRefused | InputTaken | StreamOver | ProgramEnded | ProgramLost
ProgramRequest = StreamRoom | EndOfInput | SendSignal
program_reply: TypeAdapter[ProgramReply] = TypeAdapter(Annotated[ProgramReply, Field(discriminator="type")])
program_request: TypeAdapter[ProgramRequest] = TypeAdapter(Annotated[ProgramRequest, Field(discriminator="type")])
