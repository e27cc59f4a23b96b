"""Plays records with scripted players: the oracle must score 1, and a player that changes nothing must score 0."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.markup import escape

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.cli.output import InterruptedBySignalError, print_json, run_to_end
from agentenv.errors import AgentEnvError, ConfigError, InfraError, missing_extra
from agentenv.testing import Player, ScriptedPolicy, build_tokenizer

if TYPE_CHECKING:
    from agentenv import AgentEnv

EXPECTED: Final[Mapping[str, float]] = {"oracle": 1.0, "empty": 0.0}
_SHOWN_CHARS: Final = 120
"""Of each end of a long reason."""
_REASON_FIELDS: Final = ("reason", "not run", "still failing", "newly broken", "output")
"""Fields in which verifiers give the reason why a score is not 1; the first that exists counts."""
R = TypeVar("R")


PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "slot": ("slot_wait",),
    "prepare": ("prepare",),
    "agent": ("model", "tool"),
    "verify": ("verify",),
    "release": ("release",),
}
"""What a rollout's time is spent on, and the phases of a transcript that it is. The rest of it is ``image``: it was
fetched or built, or another rollout's build of it was waited for."""


@dataclass(frozen=True)
class Result:
    """What one record came to: the score of each player, None without one."""

    record: str
    scores: tuple[float | None, ...]
    seconds: float
    """From the first look for its image to the last verdict."""
    reason: str = ""
    """Why the first of the players that did not score as it must did not; empty if all did."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest player in each of :data:`PARTS`, and ``image``. They play at the same time."""

    @property
    def good(self) -> bool:
        """Whether each player scored as it must."""
        return not self.reason


@contextmanager
def busy(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that something takes its time: on a terminal a line that goes again, whose words can be changed by
    what is yielded; elsewhere a line."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        if doing:
            console.print(escape(doing), soft_wrap=True)
        yield lambda _: None
        return
    with console.status(escape(doing)) as status:
        yield lambda words: status.update(escape(words))


class Table:
    """The results, on stdout: a row as soon as it is there, or all of them as one JSON document at the end. On a
    terminal stderr shows what is being played."""

    def __init__(self, names: Sequence[str], *, times: bool = False, as_json: bool = False) -> None:
        """``names``: the players. ``times``: with the seconds of each part."""
        self.names = names
        self.results: list[Result] = []
        self.refused: Mapping[str, str] = {}
        """Records that are not played, and why; they are listed at the end."""
        self._times = times
        self._as_json = as_json
        self._of = self._width = 0
        self._began_s = time.monotonic()
        self._playing: dict[str, None] = {}
        self._show: Callable[[str], None] = lambda _: None

    @contextmanager
    def open(self, records: Sequence[str]) -> Iterator[None]:
        """Print the heading: what the columns are. Within it, show what is being played."""
        self._of, self._width = len(records), max(map(len, ["record", *records]))
        players = "  ".join(f"{name:>6}" for name in self.names)
        parts = "".join(f"  {name:>7}" for name in ("image", *PARTS)) if self._times else ""
        self._print(f"    {'record':{self._width}}  {players}  {'seconds':>7}{parts}  reason")
        with busy("") as self._show:
            yield

    @contextmanager
    def playing(self, record: str) -> Iterator[None]:
        """Show that this record is being played, for as long as it is."""
        self._playing[record] = None
        self._say()
        try:
            yield
        finally:
            del self._playing[record]
            self._say()

    def _say(self) -> None:
        self._show(f"{len(self.results)} of {self._of} played; now (at first the image): {', '.join(self._playing)}")

    def add(self, result: Result) -> None:
        """Print a row."""
        self.results.append(result)
        scores = "  ".join(f"{'none' if score is None else f'{score:g}':>6}" for score in result.scores)
        mark = "ok " if result.good else "BAD"
        parts = "".join(f"  {result.parts_s.get(name, 0):7.1f}" for name in ("image", *PARTS)) if self._times else ""
        self._print(f"{mark} {result.record:{self._width}}  {scores}  {result.seconds:7.1f}{parts}  {result.reason}")

    def end(self) -> None:
        """Print what was not played, and how many are as they must be."""
        elapsed_s = time.monotonic() - self._began_s
        if self._as_json:
            print_json(self._document(elapsed_s))
            return
        for record, reason in self.refused.items():
            self._print(f"--  {record:{self._width}}  refused: {' '.join(reason.split())}")
        if self._times:
            sums = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._sums().items())
            self._print(f"seconds of all: {elapsed_s:.1f} passed; {sums}")
        self._print(f"{self._good} of {self._of} ok" + (f", {len(self.refused)} refused" if self.refused else ""))

    @property
    def _good(self) -> int:
        return sum(result.good for result in self.results)

    def say_how_far(self, next_step: str) -> None:
        """On stderr: what an interrupted check has played, and how to go on."""
        if self._of:
            said = f"{len(self.results)} of {self._of} were played, {self._good} ok; {next_step}"
            print(said, file=sys.stderr)

    def _sums(self) -> dict[str, float]:
        return {name: sum(one.parts_s.get(name, 0) for one in self.results) for name in ("image", *PARTS)}

    def _document(self, elapsed_s: float) -> dict[str, Any]:
        rows = [
            {
                "record": result.record,
                "ok": result.good,
                "scores": dict(zip(self.names, result.scores, strict=True)),
                "seconds": round(result.seconds, 3),
                "parts_s": {name: round(seconds, 3) for name, seconds in result.parts_s.items()},
                "reason": result.reason,
            }
            for result in self.results
        ]
        return {
            "ok": self._good,
            "records": rows,
            "refused": dict(self.refused),
            "elapsed_s": round(elapsed_s, 3),
            "parts_s": {name: round(seconds, 3) for name, seconds in self._sums().items()},
        }

    def _print(self, row: str) -> None:
        if not self._as_json:
            print(row.rstrip(), flush=True)


class Room:
    """How many records are played at once: ``jobs`` at most, and no more than have room in ``memory_mib`` together. One
    that needs more than all of it is played alone. Who came first is first."""

    def __init__(self, jobs: int, memory_mib: float) -> None:
        self.jobs = self._free_jobs = jobs
        self._free_mib = self._memory_mib = memory_mib
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, memory_mib: float) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        memory_mib = min(memory_mib, self._memory_mib)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((memory_mib, place))
        self._admit()
        try:
            await place
            yield
        finally:
            if place.done() and not place.cancelled():
                self._free_jobs, self._free_mib = self._free_jobs + 1, self._free_mib + memory_mib
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._free_jobs:
            memory_mib, place = self._waiting[0]
            if not place.cancelled():
                if memory_mib > self._free_mib:
                    return
                self._free_jobs, self._free_mib = self._free_jobs - 1, self._free_mib - memory_mib
                place.set_result(None)
            self._waiting.popleft()


async def play(
    directory: Path,
    kind: type[AgentEnv[Any]],
    fields: Mapping[str, Any],
    records: Callable[[Any], Mapping[str, R]],
    players: Callable[[R], list[Player]],
    table: Table | None = None,
    *,
    room: Room | None = None,
    needs_mib: Callable[[R], float] = lambda _: 0,
) -> list[GroupRecord]:
    """Play every record once with each of its players. Returns what was recorded, which ``directory`` has too, in the
    order in which they ended.

    ``fields`` are the environment's settings, in addition to those of every such play; ``records`` returns its records
    by id, and ``kind.item_of`` makes items of them. ``table`` gets the results as they come. Records are played
    one after the other, or as many at once as have ``room`` for what they need (``needs_mib``, of all players); those
    that ``directory`` has as played already are not played again. Raises: ConfigError, what the environment's setup
    raises, InfraError when a record cannot be written.
    """
    room = room or Room(1, math.inf)
    log = directory / "rollouts.jsonl"
    log.touch()
    settings: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "max_containers": 1,
        "slots_per_container": 2 * room.jobs,
        "use_wandb": False,
        "send_trajectory_id": True,
        "rollouts_path": str(log),
        "agent_max_steps": 4,
        "item_retries": 0,
        **fields,
    }
    script: dict[str, list[Player]] = {}
    async with ScriptedPolicy(script) as policy:
        _, (default,) = kind.config_init()
        server = default.model_copy(update={"base_url": policy.base_url, "model_name": "scripted"})
        async with kind(kind.env_config_cls(**settings), [server]) as env:
            found = records(env)
            script |= {name: players(record) for name, record in found.items()}
            with log.open("rb") as lines, nullcontext() if table is None else table.open(list(found)):
                written = _Written(lines)
                kept = {name: group for name in found if (group := written.of(name)) and is_played(group)}
                if table is not None:
                    for group in kept.values():
                        table.add(result_of(group, table.names, _total_s(group)))

                async def one(name: str, record: R) -> GroupRecord:
                    async with room.of(needs_mib(record)):
                        began_s = time.monotonic()
                        with nullcontext() if table is None else table.playing(name):
                            await env.collect_trajectories(env.item_of(record))
                        if (group := written.of(name)) is None:
                            raise InfraError(f"the record of {name} could not be written to {log}")
                        if table is not None:
                            table.add(result_of(group, table.names, time.monotonic() - began_s))
                        return group

                async with asyncio.TaskGroup() as playing:
                    rest = {name: record for name, record in found.items() if name not in kept}
                    tasks = [playing.create_task(one(name, record)) for name, record in rest.items()]
    return [*kept.values(), *(task.result() for task in tasks)]


class _Written:
    """The groups that have been written to a file, by their item."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines
        self._groups: dict[str, GroupRecord] = {}
        self._begun = b""

    def of(self, item_id: str) -> GroupRecord | None:
        """The last of an item; None: there is none."""
        for line in self._lines:
            self._begun += line
            if self._begun.endswith(b"\n"):  # else another is being written
                group = GroupRecord.model_validate_json(self._begun)
                self._groups[group.item_id], self._begun = group, b""
        return self._groups.get(item_id)


def is_played(group: GroupRecord) -> bool:
    """Whether its scores stand: none of its rollouts failed by infrastructure. Pure."""
    return all(member.fault != "infra" for member in group.trajectories)


def _total_s(group: GroupRecord) -> float:
    return max((member.totals.get("total_s", 0.0) for member in group.trajectories), default=0.0)


def result_of(group: GroupRecord, names: Sequence[str], seconds: float) -> Result:
    """What a group of these players came to. Pure."""
    members = list(zip(names, group.trajectories, strict=True))
    wrong = [f"{name}: {_reason(member)}" for name, member in members if member.score != EXPECTED[name]]
    every = [parts_of(member) for member in group.trajectories]
    parts_s = {name: max(each[name] for each in every) for name in ("image", *PARTS)}
    scores = tuple(member.score for _, member in members)
    return Result(group.item_id, scores, seconds, wrong[0] if wrong else "", parts_s)


def parts_of(member: Transcript) -> dict[str, float]:
    """The seconds of each of :data:`PARTS` of a rollout, and those of its image. Pure."""
    parts = {
        name: sum(phase.ended_s - phase.started_s for phase in member.phases if phase.name in phases)
        for name, phases in PARTS.items()
    }
    return {"image": max(0.0, member.totals.get("total_s", 0.0) - sum(parts.values())), **parts}


def _reason(member: Transcript) -> str:
    """Why a score is none, or is not what it must be, in one line."""
    if member.error:
        reason = member.error
    else:
        name, value = next(
            ((name, value) for name in _REASON_FIELDS if (value := member.verification.get(name))),
            ("", _without_reason(member)),
        )
        value = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        reason = value if name in ("", "reason") else f"{name}: {value}"
    reason = " ".join(reason.split())
    return reason if len(reason) <= 2 * _SHOWN_CHARS else f"{reason[:_SHOWN_CHARS]} … {reason[-_SHOWN_CHARS:]}"


def _without_reason(member: Transcript) -> str:
    """What can be said where the verifier gives no reason: the last command that failed."""
    calls = [call.result for step in member.steps for call in step.tool_calls if call.result and call.result.exit_code]
    if member.score is None or not calls:
        return "no score" if member.score is None else "the verifier gave no reason"
    said = (calls[-1].stderr or calls[-1].stdout).strip() or "it printed nothing"
    return f"the verifier gave no reason; a command ended with {calls[-1].exit_code}: {said}"


def played(
    table: Table,
    playing: Callable[[Path, Table], Coroutine[Any, Any, object]],
    out: Path | None,
    *,
    resume: bool = False,
) -> int:
    """Run ``playing(directory, table)``, which adds each record's scores as they come; a signal unwinds it. The records
    are kept in ``out``, if it is given; with ``resume`` those that it has from before count.

    Returns the exit code: 1 when a record failed or nothing could be played. Raises: what ``playing`` raises;
    ConfigError when there is nothing to resume; InterruptedBySignalError.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with ExitStack() as stack:
        directory = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        _begin(directory, table.names, resume=resume)
        try:
            run_to_end(playing(directory, table))
        except (InterruptedBySignalError, BaseExceptionGroup) as ended:
            next_step = "to play the rest, add --resume" if out else "a check with --out DIRECTORY can be resumed"
            table.say_how_far(next_step)
            if isinstance(ended, BaseExceptionGroup):  # of records that are played at once
                raise ended.exceptions[0] from None
            raise
    table.end()
    return 0 if table.results and all(result.good for result in table.results) else 1


def _begin(directory: Path, names: Sequence[str], *, resume: bool) -> None:
    """Make ready what records are written to. Raises ConfigError when what is there is not by these players."""
    log, players = directory / "rollouts.jsonl", directory / "players.json"
    if not resume:
        log.unlink(missing_ok=True)
        players.write_text(json.dumps(list(names)))
    elif not players.exists() or json.loads(players.read_text()) != list(names):
        raise ConfigError(
            "resume",
            f"{directory} has no check by these agents: {', '.join(names)}",
            next_step="name the directory (--out) and the agent of the check that was interrupted",
        )
    elif log.exists():  # a process that was killed may have left part of a line
        with log.open("rb") as lines:
            whole_bytes = sum(len(line) for line in lines if line.endswith(b"\n"))
        os.truncate(log, whole_bytes)


def report(
    names: list[str],
    playing: Callable[[Path, Table], Coroutine[Any, Any, object]],
    out: Path | None,
    *,
    resume: bool = False,
) -> int:
    """As :func:`played`, with a new table of these players. An error is one line on stderr and an exit code: 2 when a
    setting or record is malformed, else 1; 128 + n after signal n."""
    try:
        return played(Table(names), playing, out, resume=resume)
    except InterruptedBySignalError as ended:
        print(f"interrupted by {ended}; nothing was left running", file=sys.stderr)
        return 128 + ended.number
    except (AgentEnvError, ModuleNotFoundError) as error:
        failed = error if isinstance(error, AgentEnvError) else missing_extra("agentenv.tasks", error)
        if failed is None:
            raise
        print(f"{type(failed).__name__}: {failed}", file=sys.stderr)
        return 2 if isinstance(failed, ConfigError) else 1


def comma_separated(text: str) -> list[str]:
    """The names in an option's value."""
    return [part.strip() for part in text.split(",") if part.strip()]
