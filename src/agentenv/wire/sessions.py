"""The tools whose state outlives a call (terminal, process, tmux): arguments, replies, rows; and all tools' rows.

Field descriptions are written for a language model: they become the JSON schema it is given. Some arguments are also
accepted under the names that models trained on other harnesses use (``AliasChoices``); the schema does not show these.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from agentenv.wire.base import NOT_BOOL, Base64, Count, ForCode, WireModel, for_code
from agentenv.wire.environment import MAX_PATH_CHARS
from agentenv.wire.tools import BASH, FILE_TOOLS, Argv, CommandText, Environment, SlotTool, UserName

MAX_WAIT_S = 3600.0
MAX_INPUT_BYTES = 8 * 1024 * 1024
MAX_TYPED_BYTES = 1024 * 1024
"""Of a command for a terminal's shell: the server quotes all of it at once."""


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain NUL bytes")
    return value


def _typed(value: str) -> str:
    if len(value.encode("utf-8", "surrogatepass")) > MAX_TYPED_BYTES:
        raise ValueError(f"must be at most {MAX_TYPED_BYTES} bytes: write a longer one to a file, and run that")
    return _no_nul(value)


def _input(value: str) -> str:
    if len(value.encode("utf-8", "surrogatepass")) > MAX_INPUT_BYTES:
        raise ValueError(f"must be at most {MAX_INPUT_BYTES} bytes")
    return value


def _listed(value: object) -> object:
    """Accept a single key without a list."""
    return (value,) if isinstance(value, str) else value


def _as_capture(given: dict[str, Any]) -> dict[str, Any]:
    """What other harnesses send for a capture: ``stream``, which returns what a session printed since the last call,
    and ``capture_entire``. A wait of null is the default."""
    kept = dict(given)
    if kept.get("max_wait_s", 0) is None:
        del kept["max_wait_s"]
    if kept.get("action") == "stream":
        kept.pop("max_bytes", None)
        kept |= {"action": "capture", "what": "scrollback" if kept.pop("reset", False) is True else "difference"}
    if isinstance(entire := kept.get("capture_entire"), bool):
        del kept["capture_entire"]
        kept.setdefault("what", "scrollback" if entire else "screen")
    return kept


SessionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
TypedText = Annotated[str, AfterValidator(_typed)]
InputText = Annotated[str, AfterValidator(_input)]
Signal = Literal["KILL", "TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "STOP", "CONT"]
PathText = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS), AfterValidator(_no_nul)]
KeyName = Annotated[str, Field(min_length=1, max_length=4_096)]
Keys = Annotated[tuple[KeyName, ...], Field(max_length=1_000), BeforeValidator(_listed)]
WaitS = Annotated[float, Field(ge=0, le=MAX_WAIT_S), NOT_BOOL]
Rows = Annotated[int, Field(ge=2, le=500), NOT_BOOL]
Columns = Annotated[int, Field(ge=2, le=1_000), NOT_BOOL]


class TerminalArguments(WireModel):
    """Run a command in a persistent bash session, get more of its output, send it keys, or start over."""

    command: TypedText | None = Field(
        default=None,
        description="Command to run in the session. It may span several lines. An empty command returns more output "
        "of the one that is running.",
    )
    session: SessionName = Field(default="default", description="Name of the session. A new name starts a new session.")
    timeout_s: WaitS | None = Field(
        default=None,
        validation_alias=AliasChoices("timeout_s", "timeout"),
        description="Seconds to wait for the command to finish. It keeps running after that; an empty command waits "
        "again. With pty, the result comes early when the program waits for input.",
    )
    keys: Keys = Field(
        default=(),
        description='Keys to send to the running program, such as ["C-c"] or ["Up", "Enter"]. An element that is not '
        "a key name is typed as text. Without pty only C-c and C-\\ work.",
    )
    input: InputText | None = Field(
        default=None,
        description="Text to type into the running program, before `keys`. Requires pty; not for commands.",
    )
    pty: bool | None = Field(
        default=None,
        description="Give the session a terminal (PTY). Set when the session starts, also for restarts; default false.",
    )
    reset: bool = Field(
        default=False,
        description="Kill the session and everything it runs. A command given with it runs in a new shell.",
    )
    workdir: PathText | None = Field(
        default=None,
        description="Directory to change to before the command; the session stays there. By default its current "
        "directory, initially the workspace.",
    )
    env: Environment | None = Field(
        default=None,
        description="Additional environment variables of a new session or a background process. A background process "
        "also gets the session's `env`, but not variables exported later.",
    )
    background: bool = Field(
        default=False, description="Run the command as a background process; the result has its id."
    )
    check_interval: Annotated[float, Field(ge=1, le=MAX_WAIT_S), NOT_BOOL] | None = Field(
        default=None,
        description="For background: report on this process with later results, at most every this many seconds.",
    )
    user: ForCode[UserName | None] = None
    """Whose shell a new session has, in an image slot."""

    @model_validator(mode="after")
    def _one_thing(self) -> TerminalArguments:
        typing = bool(self.keys) or self.input is not None
        if self.command and typing:
            raise ValueError("give either command or keys and input: keys and input go to the program that is running")
        if typing and self.reset:
            raise ValueError("give either reset or keys and input: after a reset nothing is running")
        if self.background and (typing or self.reset or not self.command):
            raise ValueError("background requires a command and cannot be combined with keys, input or reset")
        if self.command is None and not typing and not self.reset:
            raise ValueError("give a command (an empty one for more output), keys, input or reset")
        return self


class ProcessState(WireModel):
    """One background process."""

    process: str
    command: str
    state: Literal["running", "exited"]
    exit_code: int | None = None
    pty: bool = False
    runs_s: float
    """Seconds it has been running, or ran."""
    total_bytes: int = 0
    """Bytes printed in total."""
    dropped_bytes: int = 0
    """Bytes discarded from the beginning of the output."""
    unread_bytes: int = 0


class TerminalReply(WireModel):
    """State of the session. ``command``: the running command. ``started``: this call started its shell.
    ``waiting_for_input``: the running program is blocked reading from its terminal."""

    session: str
    state: Literal["idle", "running", "exited", "none"]
    cwd: str
    pty: bool = False
    command: str | None = None
    running_s: float | None = None
    started: bool = False
    waiting_for_input: bool = False
    process: ProcessState | None = None
    note: str = ""
    notices: tuple[str, ...] = ()
    """State of background processes whose ``check_interval`` has passed."""


class ProcessArguments(WireModel):
    """Manage background processes: start them, read their output, write to them, end them."""

    action: Literal["start", "list", "poll", "log", "wait", "kill", "write", "submit", "close"] = Field(
        description="start a command; list all processes; poll: status and output since the last call; log: earlier "
        "output, from `offset`; wait: until it ends; kill it; write input; submit: write input, then Enter; close: end "
        "of input."
    )
    process: SessionName | None = Field(
        default=None,
        validation_alias=AliasChoices("process", "session_id"),
        description="Process id, such as p1.",
    )
    command: CommandText | None = Field(default=None, description="For start: the bash command.")
    workdir: PathText | None = Field(
        default=None, description="For start: working directory; by default the workspace."
    )
    env: Environment | None = Field(default=None, description="For start: additional environment variables.")
    pty: bool = Field(default=False, description="For start: give it a terminal (PTY).")
    check_interval: Annotated[float, Field(ge=1, le=MAX_WAIT_S), NOT_BOOL] | None = Field(
        default=None,
        description="For start: report on this process with later results, at most every this many seconds.",
    )
    input: InputText | None = Field(
        default=None,
        validation_alias=AliasChoices("input", "data"),
        description="For write and submit: the text to write.",
    )
    timeout_s: WaitS | None = Field(
        default=None,
        validation_alias=AliasChoices("timeout_s", "timeout"),
        description="For wait: maximum number of seconds to wait.",
    )
    signal: Signal = Field(
        default="KILL",
        description="For kill: the signal to send. KILL ends the process and everything it started; other signals go "
        "to its process group, which may handle them.",
    )
    offset: Annotated[Count, NOT_BOOL] | None = Field(
        default=None, description="For log: offset of the first byte; by default the last `limit` bytes."
    )
    limit: Annotated[int, Field(ge=1, le=200_000), NOT_BOOL] = Field(
        default=20_000, description="Maximum number of bytes."
    )
    user: ForCode[UserName | None] = None
    """For start, in an image slot: whose process it is."""
    argv: ForCode[Argv | None] = None
    """For start: the program and its arguments, instead of a shell; ``command`` is then only what is shown of it."""
    input_data: ForCode[Base64 | None] = None
    """For write: bytes, instead of ``input``."""
    binary: ForCode[bool] = False
    """For log: the reply has the bytes in ``data``, and the result no text."""

    @model_validator(mode="after")
    def _complete(self) -> ProcessArguments:
        if self.action == "start" and not (self.command or "").strip():
            raise ValueError("start requires a command")
        if self.action in ("poll", "log", "wait", "kill", "write", "submit", "close") and self.process is None:
            raise ValueError(f"{self.action} requires a process (list shows them)")
        if self.action == "write" and self.input is None and self.input_data is None:
            raise ValueError("write requires input")
        return self


class ProcessReply(WireModel):
    """``output`` is in the result's stdout. ``offset`` and ``next_offset`` are its position in the whole output;
    ``truncated``: more output follows it. The beginning of a character that
    has not come whole is left to the next reply."""

    process: ProcessState | None = None
    processes: tuple[ProcessState, ...] = ()
    offset: int = 0
    next_offset: int = 0
    truncated: bool = False
    written_bytes: int = 0
    data: Base64 | None = None
    waited_s: float = 0.0
    clamped_to_s: float | None = None
    """The maximum wait that was applied, if the requested one was longer."""
    note: str = ""
    notices: tuple[str, ...] = ()


class TmuxArguments(WireModel):
    """Drive full-screen programs in tmux: start a session, send keys, wait, capture the screen."""

    action: Literal["start", "send_keys", "wait", "capture", "resize", "stop", "list"] = Field(
        description="start a session; send_keys; wait for a text, an idle shell or the end of the session; capture "
        "the screen; resize; stop; list all sessions."
    )
    session: SessionName = Field(default="main", description="Name of the tmux session.")
    command: CommandText | None = Field(default=None, description="For start: the program to run; by default bash.")
    workdir: PathText | None = Field(
        default=None, description="For start: working directory; by default the workspace."
    )
    env: Environment | None = Field(default=None, description="For start: additional environment variables.")
    rows: Rows = Field(
        default=40,
        validation_alias=AliasChoices("rows", "pane_height"),
        description="For start and resize: height of the screen.",
    )
    columns: Columns = Field(
        default=120,
        validation_alias=AliasChoices("columns", "pane_width"),
        description="For start and resize: width of the screen.",
    )
    record: bool = Field(default=True, description="For start: record the session as an asciicast.")
    text: InputText | None = Field(
        default=None, description="For send_keys: text to type, before `keys`. For wait: the text to wait for."
    )
    keys: Keys = Field(
        default=(),
        description='For send_keys: keys to send in order, such as ["C-c"] or ["ls", "Enter"]. An element that is '
        "not a key name is typed as text.",
    )
    block: bool = Field(
        default=False, description="For send_keys: wait until the command has finished and the shell is idle again."
    )
    until: Literal["text", "idle", "exit"] | None = Field(
        default=None, description="For wait: what to wait for; by default the text if one is given, else idle."
    )
    min_wait_s: WaitS = Field(
        default=0.0, description="For send_keys: minimum number of seconds to wait before the screen is captured."
    )
    max_wait_s: WaitS = Field(
        default=30.0, description="For wait, and for send_keys with block: maximum number of seconds to wait."
    )
    what: Literal["screen", "scrollback", "difference"] = Field(
        default="screen",
        description="For capture: the visible screen; the scrollback as well; or what is new since the last capture.",
    )

    @model_validator(mode="before")
    @classmethod
    def _capture(cls, given: Any) -> Any:
        return _as_capture(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _complete(self) -> TmuxArguments:
        if self.action == "send_keys" and not self.keys and not self.text:
            raise ValueError("send_keys requires text or keys")
        if self.action == "wait" and self.until == "text" and not self.text:
            raise ValueError("waiting for text requires text")
        if self.min_wait_s > self.max_wait_s:
            raise ValueError("min_wait_s must not be greater than max_wait_s")
        return self


class TmuxState(WireModel):
    """One tmux session."""

    session: str
    state: Literal["running", "exited"]
    exit_code: int | None = None
    idle: bool | None = None
    """Whether its shell waits for input; None if not determined."""
    command: str = ""
    """The foreground command."""
    rows: int = 0
    columns: int = 0
    cursor_row: int = 0
    cursor_column: int = 0
    history_lines: int = 0


class TmuxReply(WireModel):
    """The screen is in the result's stdout. ``recording`` is the part of the session's asciicast (v2) added since
    the last reply: concatenated, the recordings of a session are a playable file."""

    session: TmuxState | None = None
    sessions: tuple[TmuxState, ...] = ()
    sent_bytes: int = 0
    matched: bool | None = None
    waited_s: float = 0.0
    note: str = ""
    recording: str = ""


SESSION_TOOLS: Final = (
    SlotTool(
        name="terminal",
        description=(
            "Run a command in a persistent bash session: the current directory, variables, functions and jobs are "
            "kept between calls. Several named sessions can be used side by side. A command that exceeds "
            "`timeout_s` keeps running: send an empty command to get more of its output, `keys` such as C-c to "
            "control it, or `reset` to start over. Set `pty` for programs that need a terminal. `background` "
            "starts the command as a background process."
        ),
        arguments=TerminalArguments,
        reply=TerminalReply,
        toolset="terminal",
    ),
    SlotTool(
        name="process",
        description=(
            "Manage background processes, whatever tool started them: start, list, poll (status and new output), "
            "log (earlier output), wait, kill, write, submit (write, then Enter) and close (end of input). The last "
            "200 kB of output are kept. All processes end with the task."
        ),
        arguments=ProcessArguments,
        reply=ProcessReply,
        toolset="process",
    ),
    SlotTool(
        name="tmux",
        description=(
            "Drive full-screen programs (editors, debuggers, games) in tmux: start a session, send_keys, wait "
            "(for a text, an idle shell or the end of the session), capture (the screen, the scrollback or what "
            "is new), resize, stop, list."
        ),
        arguments=TmuxArguments,
        reply=TmuxReply,
        toolset="tmux",
    ),
)

SLOT_TOOLS: Final = (BASH, *SESSION_TOOLS, *FILE_TOOLS)
"""All tools of a slot, in the order in which a model gets them."""
FOR_CODE: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {one.name: for_code(one.arguments) for one in SLOT_TOOLS}
)
"""The arguments of each tool that a model may not give."""
