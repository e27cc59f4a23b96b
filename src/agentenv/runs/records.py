"""The runs that a caller names, and what they have recorded."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from agentenv.agent.transcript import GroupRecord, RunRecord, Transcript
from agentenv.errors import ConfigError
from agentenv.locks import is_locked
from agentenv.runs.manifest import FILE, LOCK, ROLLOUTS, RunManifest, read_manifest

RUNS: Final = Path("runs")
"""Where runs are looked for by their names."""
LAST: Final = "last"
"""Names the newest run."""


class RecordError(ValueError):
    """A line of a rollouts file is not a GroupRecord; the message names file and line."""


@dataclass
class Run:
    """One run and what it has recorded so far."""

    path: Path
    """Its directory, or the rollouts file that it has written to."""
    manifest: RunManifest | None = None
    """None for the records of a file that is in no run's directory."""
    record: RunRecord | None = None
    """What its records say of it; None if it has none, or they name no run."""
    groups: list[GroupRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines of its file that are not in ``groups``, and why."""
    is_played: bool = False
    """Whether a process plays it now."""

    @property
    def id(self) -> str:
        """Different for every run; empty for records that name no run."""
        return self.manifest.id if self.manifest else self.record.id if self.record else ""

    @property
    def key(self) -> str:
        """Its id, or its label where it has none."""
        return self.id or self.label

    @property
    def label(self) -> str:
        """The name under which a caller finds it: of its directory, or its id."""
        return self.path.name if self.manifest else self.id or self.path.name

    @property
    def name(self) -> str:
        """What the caller has called it; by default the environment's name."""
        return self.manifest.name if self.manifest else self.environment

    @property
    def environment(self) -> str:
        """The environment's name, as its records have it."""
        return self.record.environment if self.record else self.manifest.name if self.manifest else ""

    @property
    def model(self) -> str:
        """The model's name at its server; empty if unknown, or the environment has models of its own."""
        return self.manifest.model if self.manifest else self.record.model if self.record else ""

    @property
    def settings_digest(self) -> str:
        """Equal for runs with equal settings; empty if unknown."""
        return self.manifest.settings_digest if self.manifest else self.record.settings if self.record else ""

    @property
    def began_unix_s(self) -> float | None:
        """When it began; None if unknown."""
        if self.manifest:
            return self.manifest.began_unix_s
        return self.record.began_unix_s if self.record else None

    @property
    def state(self) -> str:
        """Of its manifest, or ``killed`` for one that says ``running`` and is not played; empty without a manifest."""
        if self.manifest is None:
            return ""
        return "killed" if self.manifest.state == "running" and not self.is_played else self.manifest.state

    @property
    def transcripts(self) -> list[Transcript]:
        """Every rollout that is recorded."""
        return [transcript for group in self.groups for transcript in group.trajectories]

    def facts(self) -> dict[str, str]:
        """What the run is, by name, for the head of a page; empty for records that name no run."""
        if (began := self.began_unix_s) is None:
            return {}
        at = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began))
        facts = {"Environment": self.environment, "Model": self.model, "Run": self.id, "Began": at}
        return facts | {"Settings": self.settings_digest, "agentenv": self._version()}

    def _version(self) -> str:
        return (
            self.record.agentenv if self.record else self.manifest.versions.get("agentenv", "") if self.manifest else ""
        )


@dataclass(frozen=True)
class Source:
    """Where runs lie: a run's directory, or a rollouts file that may have the records of several runs."""

    path: Path
    rollouts: Path
    """The file of records, which may be missing."""

    @classmethod
    def at(cls, path: Path) -> Source:
        """A run's directory. Its records may be elsewhere, together with those of other runs."""
        elsewhere = manifest.files.get("records") if (manifest := _manifest(path)) else None
        return cls(path, Path(elsewhere) if elsewhere else path / ROLLOUTS)

    @classmethod
    def file(cls, path: Path) -> Source:
        """A rollouts file by itself."""
        return cls(path, path)

    @property
    def is_directory(self) -> bool:
        """Whether it is a run's directory."""
        return self.path != self.rollouts

    @property
    def name(self) -> str:
        """Its own, without the directory it is in."""
        return self.path.name

    def version(self) -> str:
        """Another text whenever something has changed."""
        files = [self.path / FILE, self.rollouts] if self.is_directory else [self.path]
        played = "p" if self.is_directory and is_locked(self.path / LOCK) else ""
        return " ".join(map(_version, files)) + played


def find(*given: str | Path, below: Path = RUNS) -> list[Source]:
    """The runs that are meant, in this order: a run's directory, a directory of runs (the oldest first), a rollouts
    file, the name of a run below ``below`` (its ``name``, its id or that of its directory, or a beginning of that;
    ``last``: the newest). Without ``given``: every run below ``below``.

    Raises: ConfigError: there is none of this name.
    """
    if not given:
        return _below(below)
    found: dict[Path, Source] = {}
    for one in given:
        for source in _meant(str(one), below):
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def read(source: Source) -> list[Run]:
    """The runs of a source: one for a directory; for a file one for each run that its records name, in the order in
    which they began to record. A line that is no record is left out and named in ``problems``.

    Raises: RecordError: the file is one of scored groups for a trainer. OSError: it cannot be read.
    """
    problems: list[str] = []
    if source.is_directory:
        return [_read_directory(source, problems)]
    runs = runs_of(readable_records(source.path, problems.append), source.path)
    if problems and not runs:
        runs = [Run(source.path)]
    for run in runs[-1:]:
        run.problems = problems
    return runs


def _read_directory(source: Source, problems: list[str]) -> Run:
    run = Run(source.path, problems=problems, is_played=is_locked(source.path / LOCK))
    try:
        run.manifest = read_manifest(source.path)
    except ValueError as error:
        problems.append(f"{source.path / FILE} is not a run's: {str(error).splitlines()[0]}")
    if source.rollouts.exists():
        is_shared = source.rollouts.parent != source.path
        for group in readable_records(source.rollouts, problems.append):
            if not is_shared or (group.run is not None and group.run.id == run.id):
                run.groups.append(group)
    run.record = next((group.run for group in run.groups if group.run), None)
    return run


def runs_of(groups: Iterable[GroupRecord], path: Path = Path()) -> list[Run]:
    """The groups of a file by their run, in the order in which the runs began to record."""
    found: dict[str, Run] = {}
    for group in groups:
        name = group.run.id if group.run else ""
        found.setdefault(name, Run(path, record=group.run)).groups.append(group)
    return list(found.values())


def read_records(path: Path, *, on_cut: Callable[[int], None] = lambda _: None) -> Iterator[GroupRecord]:
    """The groups in a ``rollouts.jsonl``, in order. An incomplete last line, of a writer that was killed or still
    writes, is left out: ``on_cut`` is called with its number.

    Raises: RecordError: a complete line is not a GroupRecord. OSError: the file cannot be read.
    """
    for number, record in _lines(path):
        if isinstance(record, GroupRecord):
            yield record
        elif record is None:
            on_cut(number)
        else:
            raise RecordError(f"{path}:{number} is not a group record: {record}")


def readable_records(path: Path, on_problem: Callable[[str], None]) -> Iterator[GroupRecord]:
    """The groups in a ``rollouts.jsonl``, in order. ``on_problem`` is called with a text for each line that is not
    one. Raises: RecordError: the file is one of scored groups for a trainer. OSError."""
    for number, record in _lines(path):
        if isinstance(record, GroupRecord):
            yield record
        elif record is None:
            on_problem(f"{path}:{number}, the last line, is incomplete")
        else:
            on_problem(f"{path}:{number} is not a group record: {record.splitlines()[0]}")


def _lines(path: Path) -> Iterator[tuple[int, GroupRecord | str | None]]:
    """Every line that is not empty, by its number: its record, why it is none, or None if it is cut."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, _record(line)
            except ValueError as error:  # a ValidationError, or not JSON
                if not line.endswith(b"\n"):
                    yield number, None
                elif _is_scored_group(line):
                    raise RecordError(
                        f"{path}:{number} is a scored group for a trainer (data_path_to_save_groups), not a "
                        "record of rollouts"
                    ) from None
                else:
                    yield number, str(error)


def _record(line: bytes) -> GroupRecord:
    try:
        return GroupRecord.model_validate_json(line)
    except ValidationError:  # slower, and reads what is stricter there: lone surrogates, deep nesting
        return GroupRecord.model_validate(json.loads(line))


def _is_scored_group(line: bytes) -> bool:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"tokens", "masks", "scores"} <= document.keys()


def _meant(given: str, below: Path) -> list[Source]:
    path = Path(given)
    if path.is_file():
        is_runs = path.name in (ROLLOUTS, FILE) and (path.parent / FILE).is_file()
        return [Source.at(path.parent) if is_runs else Source.file(path)]
    for directory in (path, below / given):
        if (directory / FILE).is_file():
            return [Source.at(directory)]
        if found := _below(directory):
            return found
        if (directory / ROLLOUTS).is_file():
            return [Source.file(directory / ROLLOUTS)]
    known = _below(below)
    if given == LAST and known:
        return known[-1:]
    if named := [source for source in known if given in _names(source.path)]:
        return named
    if begun := [source for source in known if source.name.startswith(given)]:
        return begun
    raise _unknown(given, below, [source.name for source in known])


def _unknown(given: str, below: Path, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.4) or known[-3:]
    missing = f"there is no run in {below.resolve()}; give a run's directory or a file of --env.rollouts_path"
    hint = f"there are: {', '.join(near)}" if near else missing
    return ConfigError("RUN", f"{given} is no run, no directory of runs and no file", next_step=hint)


def _below(directory: Path) -> list[Source]:
    try:
        found = [path for path in directory.iterdir() if (path / FILE).is_file()]
    except OSError:
        return []
    began = {path: manifest.began_unix_s if (manifest := _manifest(path)) else 0.0 for path in found}
    return [Source.at(path) for path in sorted(found, key=lambda path: (began[path], path.name))]


def _names(path: Path) -> set[str]:
    return {manifest.name, manifest.id} if (manifest := _manifest(path)) else set()


def _manifest(path: Path) -> RunManifest | None:
    """None if it cannot be read."""
    try:
        return read_manifest(path)
    except (OSError, ValueError):
        return None


def _version(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "none"
    return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
