"""Plays records with scripted players: the oracle must score 1, and a player that changes nothing must score 0."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.markup import escape

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.errors import AgentEnvError, ConfigError, InfraError, missing_extra
from agentenv.testing import Player, ScriptedPolicy, build_tokenizer

if TYPE_CHECKING:
    from agentenv import AgentEnv

EXPECTED: Final[Mapping[str, float]] = {"oracle": 1.0, "empty": 0.0}
_SHOWN_CHARS: Final = 120
"""Of each end of a long reason."""
_REASON_FIELDS: Final = ("reason", "still failing", "newly broken", "output")
"""Fields in which verifiers give the reason why a score is not 1; the first that exists counts."""
R = TypeVar("R")


@dataclass(frozen=True)
class Result:
    """What one record came to: the score of each player, None without one."""

    record: str
    scores: tuple[float | None, ...]
    seconds: float
    """From the first look for its image to the last verdict."""
    reason: str = ""
    """Why the first of the players that did not score as it must did not; empty if all did."""

    @property
    def good(self) -> bool:
        """Whether each player scored as it must."""
        return not self.reason


@contextmanager
def busy(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr that something takes its time; what it yields changes the words."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(doing)) as status:
        yield lambda words: status.update(escape(words))


class Table:
    """The results on stdout, a row as soon as it is there; on a terminal stderr shows what is being played."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: the players."""
        self.names = names
        self.results: list[Result] = []
        self.refused: Mapping[str, str] = {}
        """Records that are not played, and why; they are listed at the end."""
        self._of = self._width = 0

    def begin(self, records: Sequence[str]) -> None:
        """Print the heading: what the columns are."""
        self._of, self._width = len(records), max(map(len, ["record", *records]))
        players = "  ".join(f"{name:>6}" for name in self.names)
        print(f"    {'record':{self._width}}  {players}  {'seconds':>7}  reason", flush=True)

    @contextmanager
    def playing(self, record: str) -> Iterator[None]:
        """Show that this record is being played, for as long as it is."""
        with busy(f"{len(self.results) + 1} of {self._of}: {record} (at first its image is fetched or built)"):
            yield

    def add(self, result: Result) -> None:
        """Print a row."""
        self.results.append(result)
        scores = "  ".join(f"{'none' if score is None else f'{score:g}':>6}" for score in result.scores)
        mark = "ok " if result.good else "BAD"
        row = f"{mark} {result.record:{self._width}}  {scores}  {result.seconds:7.1f}  {result.reason}"
        print(row.rstrip(), flush=True)

    def end(self) -> None:
        """Print what was not played, and how many are as they must be."""
        for record, reason in self.refused.items():
            print(f"--  {record:{self._width}}  refused: {' '.join(reason.split())}")
        good = sum(result.good for result in self.results)
        print(f"{good} of {self._of} ok" + (f", {len(self.refused)} refused" if self.refused else ""), flush=True)


async def play(
    directory: Path,
    kind: type[AgentEnv[Any]],
    fields: Mapping[str, Any],
    records: Callable[[Any], Mapping[str, R]],
    players: Callable[[R], list[Player]],
    table: Table | None = None,
) -> list[GroupRecord]:
    """Play every record once with each of its players. Returns what was recorded, which ``directory`` has too.

    ``fields`` are the environment's settings, in addition to those of every such play; ``records`` returns its records
    by id, and ``kind.item_of`` makes items of them. ``table`` gets the results as they come. Raises: ConfigError, what
    the environment's setup raises, InfraError when a record cannot be written.
    """
    log = directory / "rollouts.jsonl"
    log.touch()
    settings: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "max_containers": 1,
        "slots_per_container": 2,
        "use_wandb": False,
        "send_trajectory_id": True,
        "rollouts_path": str(log),
        "agent_max_steps": 4,
        "item_retries": 0,
        **fields,
    }
    groups: list[GroupRecord] = []
    script: dict[str, list[Player]] = {}
    async with ScriptedPolicy(script) as policy:
        _, (default,) = kind.config_init()
        server = default.model_copy(update={"base_url": policy.base_url, "model_name": "scripted"})
        async with kind(kind.env_config_cls(**settings), [server]) as env:
            found = records(env)
            script |= {name: players(record) for name, record in found.items()}
            if table is not None:
                table.begin(list(found))
            with log.open() as lines:
                for name, record in found.items():
                    began_s = time.monotonic()
                    with nullcontext() if table is None else table.playing(name):
                        await env.collect_trajectories(env.item_of(record))
                    if not (line := lines.readline()):
                        raise InfraError(f"the record of {name} could not be written to {log}")
                    groups.append(GroupRecord.model_validate_json(line))
                    if table is not None:
                        table.add(result_of(groups[-1], table.names, time.monotonic() - began_s))
    return groups


def result_of(group: GroupRecord, names: Sequence[str], seconds: float) -> Result:
    """What a group of these players came to. Pure."""
    members = list(zip(names, group.trajectories, strict=True))
    wrong = [f"{name}: {_reason(member)}" for name, member in members if member.score != EXPECTED[name]]
    return Result(group.item_id, tuple(member.score for _, member in members), seconds, wrong[0] if wrong else "")


def _reason(member: Transcript) -> str:
    """Why a score is none, or is not what it must be, in one line."""
    if member.error:
        reason = member.error
    else:
        name, value = next(
            ((name, value) for name in _REASON_FIELDS if (value := member.verification.get(name))), ("", "no reason")
        )
        value = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        reason = value if name in ("", "reason") else f"{name}: {value}"
    reason = " ".join(reason.split())
    return reason if len(reason) <= 2 * _SHOWN_CHARS else f"{reason[:_SHOWN_CHARS]} … {reason[-_SHOWN_CHARS:]}"


def report(names: list[str], playing: Callable[[Path, Table], Coroutine[Any, Any, object]], out: Path | None) -> int:
    """Run ``playing(directory, table)``, which prints each record's scores as they come.

    Returns the exit code: 1 when a record failed or nothing could be played, 2 when a setting or record is malformed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    table = Table(names)
    with ExitStack() as stack:
        directory = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "rollouts.jsonl").unlink(missing_ok=True)
        try:
            asyncio.run(playing(directory, table))
        except (AgentEnvError, ModuleNotFoundError) as error:
            failed = error if isinstance(error, AgentEnvError) else missing_extra("agentenv.tasks", error)
            if failed is None:
                raise
            print(f"{type(failed).__name__}: {failed}", file=sys.stderr)
            return 2 if isinstance(failed, ConfigError) else 1
    table.end()
    return 0 if table.results and all(result.good for result in table.results) else 1


def comma_separated(text: str) -> list[str]:
    """The names in an option's value."""
    return [part.strip() for part in text.split(",") if part.strip()]
