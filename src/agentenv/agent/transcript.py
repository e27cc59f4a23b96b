"""The record of a rollout: every message, call, result and time. ``rollouts.jsonl`` has one GroupRecord per line.

Times ending in ``_s`` with "started"/"ended" are seconds since the start of the trajectory's attempt, monotonic;
``began_unix_s`` anchors them to the wall clock.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentenv.agent.token_sequences import TokenSequence
from agentenv.agent.tool_call import ToolResult
from agentenv.errors import Fault
from agentenv.wire.calls import CallResult

__all__ = [
    "ConversationRecord", "GroupRecord", "Phase", "ProgramRecord", "RunRecord", "SequenceSummary", "Shortening", "Step",
    "ToolRecord", "Transcript",
]  # fmt: skip

PhaseName = Literal["slot_wait", "prepare", "model", "tool", "verify", "release"]
FinishReason = Literal[
    "stop", "max_steps", "max_time", "length", "context_overflow", "max_conversations", "program_failed",
    "slot_destroyed", "fault",
]  # fmt: skip
"""``max_time``: ``AgentSettings.max_s`` (of an agent program: its time limit) passed before it ended; ``length``: the
last message was cut at its token limit; ``context_overflow``: there was no room for another turn;
``max_conversations``: an agent program began too many; ``program_failed``: it ended with another exit code than 0;
``slot_destroyed``: the policy's own commands destroyed its slot (``fault`` is "policy")."""
StepOutcome = Literal["answer", "tool_calls", "malformed", "truncated"]
"""``malformed``: something that looked like a call could not be parsed; ``truncated``: cut at the token limit."""


def text_of(content: Any) -> str:
    """A message's content as text; some servers send it in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")


def _unset(value: Any) -> bool:
    """Whether a field that only agent programs have is unset, and is not written: the built-in loop's records do not
    grow by it."""
    return value is None


def _empty(value: Any) -> bool:
    """As :func:`_unset`, of fields whose defaults are 0 and ''."""
    return not value


class Record(BaseModel):
    """Base of transcript models; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class Phase(Record):
    """A phase of a trajectory's time: one bar of the waterfall. ``label`` names the tool or step."""

    name: PhaseName
    label: str = ""
    started_s: float
    ended_s: float


class ToolRecord(Record):
    """One tool call and its result.

    ``arguments`` is what the model sent (a string when it could not be parsed). ``batch_wait_s`` is the time in the
    executor before the batch left; ``queue_s`` and ``duration_s`` are in ``result``. ``shown`` is the observation
    the model was given. Of a call that an agent program ran, ``result`` is None: it was run between ``started_s`` (the
    model's answer) and ``ended_s`` (the request with ``shown``).
    """

    call_id: str
    tool: str
    arguments: Any
    started_s: float
    ended_s: float
    batch_wait_s: float = 0.0
    result: CallResult | None = None
    shown: str = ""

    @property
    def name(self) -> str:
        """The tool, by the name this has in other harnesses; empty for what could not be read as a call."""
        return self.tool

    @property
    def uniq_id(self) -> str:
        """The call's id, by the name this has in other harnesses."""
        return self.call_id


class Step(Record):
    """One model turn and the tool calls it made."""

    index: int
    model_started_s: float
    model_ended_s: float
    message: dict[str, Any]
    tool_calls: list[ToolRecord] = Field(default_factory=list)
    usage: dict[str, Any] | None = None
    outcome: StepOutcome = "answer"
    problem: str = ""
    """The message the model was given about a malformed call."""
    reasoning: str = ""
    raw: str | None = None
    """The message exactly as the model wrote it, markup included (managed servers)."""
    conversation: int = Field(default=0, exclude_if=_empty)
    """Which conversation of an agent program it belongs to (``ProgramRecord.conversations``)."""
    after: int | None = Field(default=None, exclude_if=_unset)
    """The step whose answer an agent program's request continued; None: it began with messages of its own."""
    dialect: str = Field(default="", exclude_if=_empty)
    """The API in which an agent program asked for it."""

    @property
    def tool_results(self) -> list[ToolResult]:
        """The results of its calls, in order; a call without a result is not included."""
        return [ToolResult.of(call.result, call.call_id) for call in self.tool_calls if call.result is not None]

    @property
    def step_number(self) -> int:
        """The turn's number, 1 for the first."""
        return self.index + 1

    @property
    def assistant_message(self) -> str:
        """What the model wrote: with its markup where that is known (``raw``), its reasoning if there is no text."""
        return (text_of(self.message.get("content")) if self.raw is None else self.raw) or self.reasoning

    @property
    def has_tool_calls(self) -> bool:
        """Whether it made a call, perhaps a refused one; what could not be read as a call is none."""
        return any(call.tool for call in self.tool_calls)


class Shortening(Record):
    """Old tool outputs removed from the conversation before a step; ``ToolRecord.shown`` still has them."""

    step: int
    outputs: int
    bytes_removed: int


class SequenceSummary(Record):
    """One token sequence given to a trainer: ``trained`` of its ``tokens`` are the policy's own. It begins with the
    prompt of step ``first_step``."""

    first_step: int
    tokens: int
    trained: int


class ConversationRecord(Record):
    """One conversation of an agent program with its model. ``behind``: it began with the messages up to this step's
    answer; None: with messages of its own. ``trained``: whether its tokens are given to a trainer. ``messages``, empty
    for the main one, whose messages are the transcript's, end with its last answer."""

    behind: int | None = None
    tools: list[str] = Field(default_factory=list)
    trained: bool = True
    messages: list[dict[str, Any]] = Field(default_factory=list)


class ProgramRecord(Record):
    """What an agent program did in the place of the built-in loop. ``stdout`` and ``stderr`` are the first and last of
    its output; the bytes left out between are counted."""

    name: str
    exit_code: int | None = None
    """None: it was ended, at a limit or with the slot."""
    duration_s: float = 0.0
    stdout: str = ""
    stderr: str = ""
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    refused: list[str] = Field(default_factory=list)
    """Requests that were refused, by their reason: the first of them."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Parts of requests that the model was not shown, by their path."""
    overruled: list[str] = Field(default_factory=list)
    """Settings in requests for which the environment's were used."""
    main: int = 0
    """The conversation whose messages are the transcript's."""
    conversations: list[ConversationRecord] = Field(default_factory=list)


class Transcript(Record):
    """One complete trajectory (its last attempt). ``score`` is None if it was not scored. A rollout with a
    ``fault`` has no score, except for a slot the policy destroyed, which the environment scores."""

    trajectory: str
    item_id: str
    attempt: int = 1
    began_unix_s: float
    messages: list[dict[str, Any]] = Field(default_factory=list)
    steps: list[Step] = Field(default_factory=list)
    tools: list[str] = Field(default_factory=list)
    """The tools the model was offered, by name."""
    phases: list[Phase] = Field(default_factory=list)
    final_response: str = ""
    finish_reason: FinishReason = "stop"
    score: float | None = None
    fault: Fault = "none"
    error: str = ""
    """Type and message of the error that ended the rollout; empty if there was none."""
    doubtful: bool = False
    """Whether the model may have caused the infrastructure failure that ended it (:mod:`agentenv.agent.culprit`): such
    a rollout is not played again."""
    earlier_attempts: list[str] = Field(default_factory=list)
    """The errors of infra-failed attempts before this one."""
    workspace_meta: dict[str, Any] = Field(default_factory=dict)
    verification: dict[str, Any] = Field(default_factory=dict)
    """Data the verifier chose to record (tests run, their outcome)."""
    model_faults: int = 0
    """Number of calls the model got wrong: unreadable, unknown tool, bad arguments, refused path."""
    program: ProgramRecord | None = Field(default=None, exclude_if=_unset)
    """Of the agent program that ran in the place of the built-in loop, if one did."""
    shortenings: list[Shortening] = Field(default_factory=list)
    last_recordings: list[dict[str, Any]] = Field(default_factory=list)
    """Output of recorded tmux sessions after the model's last call to each. The rest of the recordings is in the
    results of the calls; :func:`agentenv.agent.tmux_recordings.recordings_of` joins them."""
    sequences: list[SequenceSummary] = Field(default_factory=list)
    """Summaries of the managed server's token sequences: more than one when the conversation was not a mere
    continuation."""
    token_sequences: list[TokenSequence] = Field(default_factory=list, exclude=True, repr=False)
    """The sequences themselves: for the trainer, not written to files."""
    totals: dict[str, float] = Field(default_factory=dict)
    """Seconds by kind: slot_wait_s, prepare_s, model_s, batch_wait_s, queue_s, run_s, verify_s, total_s."""


class RunRecord(Record):
    """The run that recorded a group: one environment object, from its construction to its end."""

    id: str
    """Sortable by time, different for every run."""
    environment: str
    model: str
    """Name of the model at its server; empty if the environment has models of its own."""
    settings: str
    """Digest of the environment's settings, without secrets and without the places of results."""
    agentenv: str
    """Version."""
    began_unix_s: float


class GroupRecord(Record):
    """All rollouts of one item."""

    run: RunRecord | None = None
    """None: recorded before runs were named."""
    group: str
    position: int | None = None
    """The item's number in the sequence of ``get_next_item``, 0 for the first; None with ``serve`` and outside
    commands."""
    item_id: str
    item: dict[str, Any] = Field(default_factory=dict)
    group_size: int
    """Number of members requested; ``trajectories`` with a score may be fewer."""
    outcome: Literal["complete", "partial", "retry"]
    trajectories: list[Transcript]
