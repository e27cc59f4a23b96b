"""Rollouts as rows: for notebooks, and for everything here that counts them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, overload

from agentenv.agent.conversations import Conversation, conversations_of
from agentenv.agent.program_totals import by_dialect
from agentenv.agent.transcript import GroupRecord, Step, ToolRecord, Transcript, text_of
from agentenv.errors import MissingExtraError
from agentenv.runs.records import RUNS, Run, find, read

if TYPE_CHECKING:
    import pandas
    import polars

Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = Mapping[str, type]

_OF_RUN: Final[Columns] = {"run": str, "name": str, "model": str, "item_id": str, "group": str, "trajectory": str}
TIMES: Final = ("total_s", "slot_wait_s", "prepare_s", "model_s", "batch_wait_s", "queue_s", "run_s", "verify_s")
ROLLOUTS: Final[Columns] = {
    **_OF_RUN,
    "member": int,
    "attempt": int,
    "outcome": str,
    "score": float,
    "fault": str,
    "error": str,
    "finish_reason": str,
    "steps": int,
    "calls": int,
    "model_faults": int,
    "prompt_tokens": int,
    "completion_tokens": int,
    "began": datetime,
    **dict.fromkeys(TIMES, float),
    "final_response": str,
    "verification": str,
    "program": str,
    "program_exit_code": int,
    "program_s": float,
    "conversations": int,
    "dialects": str,
    "dropped": int,
    "refused": int,
}
"""Columns of :func:`load`."""
CALLS: Final[Columns] = {
    **_OF_RUN,
    "step": int,
    "call_id": str,
    "tool": str,
    "arguments": str,
    "exit_code": int,
    "fault": str,
    "error": str,
    "message": str,
    "timed_out": bool,
    "oom_killed": bool,
    "started_s": float,
    "took_s": float,
    "batch_wait_s": float,
    "queue_s": float,
    "run_s": float,
    "stdout": str,
    "stderr": str,
    "shown": str,
    "conversation": int,
}
"""Columns of :func:`load_calls`."""
MESSAGES: Final[Columns] = {
    **_OF_RUN,
    "index": int,
    "step": int,
    "role": str,
    "content": str,
    "reasoning": str,
    "tool_calls": str,
    "tool_call_id": str,
    "conversation": int,
    "main": bool,
}
"""Columns of :func:`load_messages`."""


class Rows(Sequence[Row]):
    """Rows with the same columns, in the order of the records. A value that is not known is None.

    ``problems`` names each line of a file that is in no row, and why.
    """

    def __init__(self, columns: Columns, rows: Sequence[Row], problems: Sequence[str] = ()) -> None:
        self.columns = tuple(columns)
        self.problems = tuple(problems)
        self._types = columns
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        runs = len({row["run"] for row in self._rows})
        problems = f", {len(self.problems)} lines left out" if self.problems else ""
        return f"<{len(self)} rows of {runs} runs{problems}: {', '.join(self.columns)}>"

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas DataFrame; whole numbers are ``Int64``, which has missing values, and ``began`` is in UTC. Raises:
        MissingExtraError: pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise _not_installed("pandas", error) from None
        frame = pandas.DataFrame(self._rows, columns=list(self.columns))
        kinds: dict[type, Any] = {int: "Int64", float: "float64", bool: "boolean", datetime: "datetime64[us, UTC]"}
        return frame.astype({name: kinds[kind] for name, kind in self._types.items() if kind in kinds})

    def to_polars(self) -> polars.DataFrame:
        """A polars DataFrame; ``began`` is in UTC. Raises: MissingExtraError: polars is not installed."""
        try:
            import polars
        except ModuleNotFoundError as error:
            raise _not_installed("polars", error) from None
        kinds: dict[type, Any] = {
            int: polars.Int64,
            float: polars.Float64,
            bool: polars.Boolean,
            str: polars.String,
            datetime: polars.Datetime("us", "UTC"),
        }
        return polars.DataFrame(self._rows, schema={name: kinds[kind] for name, kind in self._types.items()})


def load(*runs: str | Path, below: str | Path = RUNS) -> Rows:
    """One row per rollout of these runs, also of those that still play: what they were, how they ended, their score,
    tokens and times (``_s``: seconds).

    A run is its directory or its name below ``below``; a directory of runs, and a file of ``--env.rollouts_path``,
    stand for all runs in them; without any, all runs below ``below``. ``tokens`` are the sums over a rollout's turns of
    what the server has counted, None if it has counted nothing; ``verification`` is JSON. ``program`` and what follows
    it are of agent programs, and None for the built-in loop.

    A line that is no record, or half a one, is in no row: ``Rows.problems`` names it, and a RuntimeWarning says so.
    Raises: ConfigError: there is no such run. RecordError: a file of groups for a trainer was given.
    """
    return _loaded(runs, below, ROLLOUTS, rollout_rows)


def load_calls(*runs: str | Path, below: str | Path = RUNS) -> Rows:
    """One row per tool call of these runs; otherwise as :func:`load`. ``arguments`` is JSON, ``step`` counts from 0. Of
    a call that an agent program ran only ``shown`` is known, and ``took_s`` is a bound."""
    return _loaded(runs, below, CALLS, _call_rows)


def load_messages(*runs: str | Path, below: str | Path = RUNS) -> Rows:
    """One row per message of these runs' conversations; otherwise as :func:`load`. ``tool_calls`` is JSON; ``step`` is
    the model's turn for its own messages. Each conversation of an agent program (0 first; ``main``: the rollout's) is
    whole: one that began behind an answer of another has the messages up to there again."""
    return _loaded(runs, below, MESSAGES, _message_rows)


def rollout_rows(run: Run) -> Iterator[Row]:
    """The rows of :func:`load` for one run."""
    for group, member, transcript in _members(run):
        yield {
            **_of_run(run, group, transcript),
            "member": member,
            "attempt": transcript.attempt,
            "outcome": group.outcome,
            "score": transcript.score,
            "fault": transcript.fault,
            "error": transcript.error,
            "finish_reason": transcript.finish_reason,
            "steps": len(transcript.steps),
            "calls": sum(len(step.tool_calls) for step in transcript.steps),
            "model_faults": transcript.model_faults,
            **dict(zip(("prompt_tokens", "completion_tokens"), tokens_of(transcript), strict=True)),
            "began": datetime.fromtimestamp(transcript.began_unix_s, UTC),
            **{name: transcript.totals.get(name) for name in TIMES},
            "final_response": transcript.final_response,
            "verification": _json(transcript.verification),
            **_of_program(transcript),
        }


def _of_program(transcript: Transcript) -> Row:
    program = transcript.program
    return {
        "program": program and program.name,
        "program_exit_code": program and program.exit_code,
        "program_s": program and program.duration_s,
        "conversations": program and len(program.conversations),
        "dialects": program and ", ".join(sorted(by_dialect(transcript))),
        "dropped": program and sum(program.dropped.values()),
        "refused": program and len(program.refused),
    }


def tokens_of(transcript: Transcript) -> tuple[int | None, int | None]:
    """Tokens of prompts and of completions over all turns, as the model's server has counted them; None if it has
    counted none. What a prompt repeats of the turn before is counted again, as servers bill it."""
    prompt, completion = (
        [step.usage[kind] for step in transcript.steps if step.usage and step.usage.get(kind) is not None]
        for kind in ("prompt_tokens", "completion_tokens")
    )
    return sum(prompt) if prompt else None, sum(completion) if completion else None


def _call_rows(run: Run) -> Iterator[Row]:
    for group, _, transcript in _members(run):
        for step in transcript.steps:
            for call in step.tool_calls:
                # The calls of a program have no result. Another call without one was lost.
                fault = "infra" if transcript.program is None else "none"
                yield _of_run(run, group, transcript) | _call(step, call, fault)


def _call(step: Step, call: ToolRecord, fault: str) -> Row:
    """``fault``: of a call without a result."""
    result = call.result
    return {
        "step": step.index,
        "call_id": call.call_id,
        "tool": call.tool,
        "arguments": call.arguments if isinstance(call.arguments, str) else _json(call.arguments),
        "exit_code": result and result.exit_code,
        "fault": result.fault if result else fault,
        "error": result.error if result else "",
        "message": result.message if result else "",
        "timed_out": result and result.timed_out,
        "oom_killed": result and result.oom_killed,
        "started_s": call.started_s,
        "took_s": call.ended_s - call.started_s,
        "batch_wait_s": call.batch_wait_s,
        "queue_s": result and result.queue_s,
        "run_s": result and result.duration_s,
        "stdout": result.stdout if result else "",
        "stderr": result.stderr if result else "",
        "shown": call.shown,
        "conversation": step.conversation,
    }


def _message_rows(run: Run) -> Iterator[Row]:
    for group, _, transcript in _members(run):
        for conversation in conversations_of(transcript):
            for index, (message, step) in enumerate(conversation.said):
                yield _of_run(run, group, transcript) | _message(index, message, step, conversation)


def _message(index: int, message: Mapping[str, Any], step: Step | None, conversation: Conversation) -> Row:
    reasoning = message.get("reasoning_content") or message.get("reasoning") or (step and step.reasoning)
    return {
        "index": index,
        "step": None if step is None else step.index,
        "role": str(message.get("role", "")),
        "content": text_of(message.get("content")),
        "reasoning": str(reasoning or ""),
        "tool_calls": _json(calls) if (calls := message.get("tool_calls")) else None,
        "tool_call_id": message.get("tool_call_id"),
        "conversation": conversation.number,
        "main": conversation.is_main,
    }


def _members(run: Run) -> Iterator[tuple[GroupRecord, int, Transcript]]:
    for group in run.groups:
        for member, transcript in enumerate(group.trajectories):
            yield group, member, transcript


def _of_run(run: Run, group: GroupRecord, transcript: Transcript) -> Row:
    return {
        "run": run.key,
        "name": run.name,
        "model": run.model,
        "item_id": group.item_id,
        "group": group.group,
        "trajectory": transcript.trajectory,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _loaded(
    runs: Iterable[str | Path], below: str | Path, columns: Columns, rows: Callable[[Run], Iterator[Row]]
) -> Rows:
    found = [run for source in find(*runs, below=Path(below)) for run in read(source)]
    problems = [problem for run in found for problem in run.problems]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        warnings.warn(f"left out: {problems[0]}{more}", RuntimeWarning, stacklevel=3)
    return Rows(columns, [row for run in found for row in rows(run)], problems)


def _not_installed(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError | MissingExtraError:
    if error.name != package:
        return error
    return MissingExtraError(
        f"to_{package}", f"needs {package}, which is not installed", next_step=f"pip install {package}"
    )
