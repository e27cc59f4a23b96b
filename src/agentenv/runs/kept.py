"""What a run has when it is resumed: which items are done, and what is kept of groups that are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.locks import locked
from agentenv.runs.directory import replace
from agentenv.runs.members import MemberRecord, MembersFile, read_members


def failed_by_us(transcript: Transcript) -> bool:
    """Whether infrastructure has failed it, so that it is played again: it has no score, and the model cannot have
    caused that."""
    return transcript.score is None and transcript.fault == "infra" and not transcript.doubtful


@dataclass
class OpenGroup:
    """A group of which members are missing."""

    group: str
    members: dict[int, Transcript] = field(default_factory=dict)
    """Those that have ended, by their number."""


@dataclass
class Kept:
    """What there is of a run, by the positions of its items."""

    items: dict[int, str] = field(default_factory=dict)
    """The item's id at each position that was played."""
    done: set[int] = field(default_factory=set)
    """Positions that are not played again."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failed groups of positions whose item is to be retried."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    unwritten: dict[str, list[Transcript]] = field(default_factory=dict)
    """Groups of `process` that are recorded and not in its file: the process died between the two."""
    groups: int = 0
    """Groups with a score."""
    evaluated: dict[int, list[Transcript]] = field(default_factory=dict)
    """With `evaluate`: the rollouts at each position that is done."""
    members: list[MemberRecord] = field(default_factory=list)
    """What ``members.jsonl`` has to begin with."""
    doubtful: int = 0
    """Rollouts without a score that are not played again, because the model may have caused their failure."""

    @property
    def last(self) -> int:
        """The highest position that was played; -1 if there is none."""
        return max(self.items, default=-1)


def records_of(path: Path, run: str) -> Iterable[GroupRecord]:
    """This run's groups in a file of rollouts, in order; half a last line is left out.

    Raises: OSError; ValueError for a line that is no group record."""
    try:
        lines = path.open("rb")
    except FileNotFoundError:
        return
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                record = GroupRecord.model_validate_json(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}:{number} is no group record: {str(error).splitlines()[0]}") from error
            if record.run is not None and record.run.id == run:
                yield record


def to_reopen(records: Path, run: str, *, evaluated: bool) -> dict[str, GroupRecord]:
    """The recorded groups with members that infrastructure has failed, by their names. Raises: OSError, ValueError.

    Those of `process` without any score are not among them: their item was retried, or will be.
    """
    return {
        record.group: record
        for record in records_of(records, run)
        if record.position is not None
        and (evaluated or record.outcome != "retry")
        and any(map(failed_by_us, record.trajectories))
    }


def reopened(records: Path, groups: Path | None, members: Path, run: str, *, evaluated: bool) -> None:
    """Take the groups with members that infrastructure has failed out of the run's files, so that only their other
    members are left, in ``members.jsonl``; and groups out of ``groups`` whose record was lost, which are formed again
    of their members. Ended at any point, it can be done again. Raises: OSError, ValueError."""
    if groups is not None:
        recorded = {record.group for record in records_of(records, run)}
        if lost := (_names_in(groups) & {each.group for each in read_members(members)}) - recorded:
            _without(groups, lambda line: line.get("group") in lost)
    again = to_reopen(records, run, evaluated=evaluated)
    if not again:
        return
    kept = list(read_members(members))
    there = {(each.group, each.member) for each in kept}
    for record in list(again.values()):
        others = [(n, one) for n, one in enumerate(record.trajectories) if not failed_by_us(one)]
        lacking = [(n, one) for n, one in others if (record.group, n) not in there]
        if any(one.sequences for _, one in lacking):  # whose tokens are nowhere
            del again[record.group]
            continue
        kept += [
            MemberRecord(group=record.group, position=record.position, member=number, transcript=one)
            for number, one in lacking
        ]
    MembersFile(members).take_over(kept)
    _without(records, lambda line: line.get("group") in again)
    if groups is not None:
        _without(groups, lambda line: line.get("group") in again)


def _without(path: Path, dropped: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file of JSON lines without some of them; those of others' runs are kept byte by byte."""
    path = path.resolve()  # what a link names is replaced, not the link
    if not path.exists():
        return
    with locked(path):
        lines = path.read_bytes().splitlines(keepends=True)
        replace(path, b"".join(line for line in lines if not _is(line, dropped)))


def _is(line: bytes, dropped: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        document = json.loads(line)
    except ValueError:
        return False
    return isinstance(document, dict) and dropped(document)


def read_kept(
    records: Path,
    groups: Path | None,
    members: Path,
    run: str,
    *,
    size: int,
    item_retries: int,
    each: Callable[[GroupRecord, bool], None],
) -> Kept:
    """What there is of a run, after :func:`reopened`. ``each`` is called with every group that counts, and whether its
    item is dropped with it. ``groups``: the file of `process`, None with `evaluate`.

    Raises: OSError, ValueError.
    """
    kept = Kept()
    ended = list(read_members(members))
    written = _names_in(groups) if groups is not None else set()
    named: set[str] = set()
    failures: dict[int, int] = {}
    for record in records_of(records, run):
        if record.position is None or record.group in named:
            continue
        position = record.position
        named.add(record.group)
        kept.items[position] = record.item_id
        kept.doubtful += sum(one.score is None and one.doubtful for one in record.trajectories)
        failed = groups is not None and record.outcome == "retry"
        if failed:
            failures[position] = failures.get(position, 0) + 1
        else:
            kept.done.add(position)
            kept.groups += record.outcome != "retry"
            if groups is None:
                kept.evaluated[position] = record.trajectories
            if groups is not None and record.group not in written:
                mine = {one.member: one.whole() for one in ended if one.group == record.group}
                if len(mine) == len(record.trajectories):
                    kept.unwritten[record.group] = [mine[number] for number in sorted(mine)]
                elif not any(one.sequences for one in record.trajectories):  # no tokens are needed to form it
                    kept.unwritten[record.group] = record.trajectories
        dropped = failed and failures[position] > item_retries and not any(map(failed_by_us, record.trajectories))
        if dropped:
            kept.done.add(position)
        each(record, dropped or (groups is None and record.outcome == "retry"))
    if unknown := written - named - {one.group for one in ended}:
        raise ValueError(
            f"{groups} has {len(unknown)} groups that no record knows: records were lost, or a collect_trajectories of "
            "one's own has made none"
        )
    for position, count in failures.items():
        if position not in kept.done and count <= item_retries:
            kept.failures[position] = count
    _take_members(kept, ended, named, size)
    return kept


def _take_members(kept: Kept, ended: Iterable[MemberRecord], named: set[str], size: int) -> None:
    for record in ended:
        position = record.position
        if record.group in named:
            if record.group in kept.unwritten:
                kept.members.append(record)
            continue
        if position is None or position in kept.done or failed_by_us(record.transcript) or record.member >= size:
            continue
        kept.items[position] = record.transcript.item_id
        there = kept.open.setdefault(position, OpenGroup(record.group))
        if there.group == record.group:
            there.members[record.member] = record.whole()
            kept.members.append(record)


def _names_in(groups: Path) -> set[str]:
    """The names of the groups in the file of `process`."""
    found: set[str] = set()
    try:
        lines = groups.open("rb")
    except FileNotFoundError:
        return found
    with lines:
        for line in lines:
            try:
                found.add(str(json.loads(line).get("group")))
            except ValueError:
                continue
    return found
