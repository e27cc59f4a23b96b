"""What a run writes to files: its directory with manifest, log and rollouts, the groups of ``process`` and their page.
Whatever cannot be written is counted and ends the command with status 1; it never ends a rollout."""

from __future__ import annotations

import asyncio
import io
import logging
import platform
import shlex
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from atroposlib.frontend.jsonl2html import generate_html

from agentenv._version import __version__
from agentenv.agent.group import PLACE, Place, outcome_of, run_group
from agentenv.agent.jsonable import item_id
from agentenv.agent.rollout_log import GroupsFile, RolloutLog, unwritten
from agentenv.agent.transcript import GroupRecord, RunRecord, Transcript
from agentenv.config import debug
from agentenv.env.config import AgentFields
from agentenv.env.invocation import Invocation
from agentenv.env.progress import Ending, RunLog, RunProgress
from agentenv.errors import ConfigError, InfraError
from agentenv.runs import ROOT
from agentenv.runs.directory import FoundRun, RunDirectory
from agentenv.runs.kept import Kept, read_kept, reopened, to_reopen
from agentenv.runs.manifest import FILE, GROUPS, LOG, MEMBERS, ROLLOUTS, RunManifest, State, Verb
from agentenv.runs.members import MembersFile

logger = logging.getLogger(__name__)

WRITTEN: Final = ("groups", "page", "records", "metrics")
"""What may be written outside a run's directory, in the order in which it is named at the end."""
DRAW_ALIKE: Final = "get_next_item must give the same items in the same order: seed what it draws by, or sort them"


class RunFiles:
    """The files of one environment object, which plays one run. ``counts`` gets ``records_lost``, ``groups_lost``, ...;
    ``progress`` what and why.

    A command that a user has started (``invocation``) has a directory, from its first rollout on; an environment
    that is used as a library writes what its settings name, and nothing else.
    """

    def __init__(
        self,
        config: AgentFields,
        environment: str,
        model: str,
        counts: Counter[str],
        progress: RunProgress,
        invocation: Invocation | None = None,
    ) -> None:
        began = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))
        self.run = RunRecord(
            id=f"{stamp}-{uuid.uuid4().hex[:6]}",
            environment=environment,
            model=model,
            settings=config.digest(),
            agentenv=__version__,
            began_unix_s=began,
        )
        self.kept = Kept()
        self.groups = getattr(config, "data_path_to_save_groups", None) or ""
        """The file of the groups of `process`."""
        self._config = config
        self._counts = counts
        self._progress = progress
        self._invocation = invocation if invocation is not None and invocation.has_directory(config) else None
        self._directory: RunDirectory | None = None
        self._members: MembersFile | None = None
        self._log: RunLog | None = None
        self._writing = asyncio.Lock()
        self._elsewhere: dict[str, str] = {}
        self._records = config.rollouts_path
        self._rollouts = RolloutLog(self._records, self.run)
        self._run_to_name = ""
        self._about_verb: Verb | None = None
        self._lost_groups: set[str] = set()
        """Those that are not in all of their files: their members are kept."""
        self._full = ""
        """Why a record could not be written."""
        self._begun = False

    # -- a command --------------------------------------------------------------------------------

    @contextmanager
    def command(
        self, verb: Verb, goal: int | None, size: int, metrics: str | None = None, *, resumable: bool = True
    ) -> Iterator[None]:
        """The body is a command; :meth:`begin` is called in it when its first rollout may start. How it ends is in the
        manifest then.

        Raises: ConfigError when the run that it is to resume cannot be.
        """
        state: State = "failed"
        error = ""
        self._about_verb = verb
        self._about = RunManifest(
            id=self.run.id,
            name=(self._config.run_name or "").strip() or self.run.environment,
            verb=verb,
            command=[],
            directory=str(Path.cwd()),
            model=self.run.model,
            settings=self._config.compared(),
            settings_digest=self.run.settings,
            versions={
                "agentenv": __version__,
                "atroposlib": version("atroposlib"),
                "python": platform.python_version(),
            },
            began_unix_s=self.run.began_unix_s,
            goal_groups=goal,
            resumable=resumable and verb != "serve",
            group_size=size,
        )
        self._elsewhere = {
            name: path
            for name, path in (
                ("records", self._records),
                ("metrics", metrics),
                ("groups", self.groups if self.groups_given else ""),
            )
            if path
        }
        self._run_to_name = self.run.id if self._rollouts.has_content else ""
        if self._invocation is not None:
            self._log = RunLog(self._invocation.secrets)
        try:
            if self._invocation is not None and self._invocation.resume is not None:
                self._claim(self._invocation.resume, resumable=resumable)
            yield
            state = "finished"
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            state = "interrupted"
            raise
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._end(state, error)

    @property
    def groups_given(self) -> bool:
        """Whether the groups of `process` go to a file that the caller has named, not to the run's directory."""
        return self._invocation is None or "data_path_to_save_groups" in self._invocation.given

    def _claim(self, path: Path, *, resumable: bool) -> None:
        about = self._about
        if not resumable:
            raise ConfigError("RUN", "an evaluate() of one's own cannot be resumed: nothing says what it has done")
        directory = RunDirectory.opened(path)
        try:
            was = directory.manifest
            if (was.verb, was.model) != (about.verb, about.model):
                reason = f"{path} is {was.verb} with model {was.model or '?'}, this is {about.verb} with {about.model}"
                raise ConfigError("RUN", reason, next_step="agentenv runs resume RUN runs the same command")
            if was.settings_digest != about.settings_digest:
                names = [each for each in about.settings if about.settings[each] != was.settings.get(each)]
                changed = ", ".join(sorted(names)) or f"those of agentenv {was.versions.get('agentenv', '?')}"
                raise ConfigError(
                    "RUN", f"{path} has other settings: {changed}", next_step="set them as they were, or start anew"
                )
        except BaseException:
            directory.close()
            raise
        self._directory = directory
        self.run = self.run.model_copy(update={"id": was.id, "began_unix_s": was.began_unix_s})
        self._elsewhere = was.files
        self._place_files(directory.path)

    @property
    def log(self) -> str:
        """The file with warnings and errors; empty without a directory."""
        return str(self._directory.path / LOG) if self._directory is not None else ""

    @property
    def nothing_left(self) -> bool:
        """Whether the run that is to be resumed has ended with every rollout that it can have."""
        if self._directory is None or self._directory.manifest.state != "finished":
            return False
        if to_reopen(Path(self._records or ""), self.run.id, evaluated=self._about.verb == "evaluate"):
            return False
        self._read_kept(self._directory)
        self._progress.say("nothing to do: every rollout of this run has ended")
        return True

    def begin(self) -> None:
        """The first rollout may start now. Make the directory, or read what the resumed run has. Raises: ConfigError
        when that cannot be made, or read."""
        if self._invocation is None:
            return
        if self._directory is None:
            manifest = self._about.model_copy(
                update={
                    "command": list(self._invocation.words),
                    "omitted": list(self._invocation.omitted),
                    "files": {name: str(Path(path).absolute()) for name, path in self._elsewhere.items()},
                }
            )
            self._directory = RunDirectory.made(Path(self._config.runs_dir), manifest.name, manifest)
            self._place_files(self._directory.path)
            self._members = MembersFile(self._directory.path / MEMBERS)
        else:
            try:
                self._take_up(self._directory)
            except (OSError, ValueError) as error:
                refused, self._directory = self._directory, None
                refused.close()
                self._progress.forget()  # what the run had is no result of this command
                raise ConfigError("RUN", f"{refused.path} cannot be resumed: {error}") from error
        self._begun = True
        assert self._log is not None
        self._log.open(self._directory.path / LOG)

    def _place_files(self, path: Path) -> None:
        self._records = self._elsewhere.get("records", str(path / ROLLOUTS))
        self._rollouts = RolloutLog(self._records, self.run)
        if self._about.verb == "process":
            self.groups = self._elsewhere.get("groups", str(path / GROUPS))

    def _take_up(self, directory: RunDirectory) -> None:
        records, groups, members = self._places(directory)
        reopened(records, groups, members, self.run.id, evaluated=groups is None)
        self._read_kept(directory)
        self._members = MembersFile(members)
        self._members.take_over(self.kept.members)
        others = sum(len(group.members) for group in self.kept.open.values())
        self._progress.say(f"resumed; not played again: {len(self.kept.done)} groups, and {others} rollouts of others")
        resumed = [*directory.manifest.resumed_unix_s, time.time()]
        directory.update(state="running", ended_unix_s=None, error="", resumed_unix_s=resumed)

    def _places(self, directory: RunDirectory) -> tuple[Path, Path | None, Path]:
        """The files of records, groups (none with `evaluate`) and members."""
        groups = None if self._about.verb == "evaluate" else Path(self.groups)
        return Path(self._records or ""), groups, directory.path / MEMBERS

    def _read_kept(self, directory: RunDirectory) -> None:
        self.kept = read_kept(
            *self._places(directory),
            self.run.id,
            size=self._about.group_size,
            item_retries=self._config.item_retries,
            each=self._count_earlier,
        )

    def _count_earlier(self, record: GroupRecord, dropped: bool) -> None:
        self._progress.earlier(record.trajectories)
        if dropped:
            self._progress.results.missing.no_score(record.item_id, record.trajectories)

    def _end(self, state: State, error: str) -> None:
        if self._log is not None:
            if error:
                self._log.add("the command ended: %s", error)  # who started it prints it
            self._log.close()
            error = self._log.without_secrets(error)
        directory = self._directory
        if directory is None:
            return
        try:
            if self._begun:  # else it was to be resumed, and nothing has changed
                results = self._progress.document(self.ending(state != "finished"))
                directory.update(state=state, error=error, ended_unix_s=time.time(), results=results)
                if self._members is not None:
                    self._members.close()
        except OSError as failure:
            logger.error("%s cannot be written: %s; it says `running`", directory.path / FILE, failure)
        finally:
            directory.close()
            if self._begun and self._invocation is not None:
                self._invocation.ended.append(FoundRun(directory.path, directory.manifest))

    def at_end(self, incomplete: bool) -> Ending:
        """:meth:`ending`, after counting what a run has that was to be resumed, if that did not come to it."""
        if self._directory is not None and not self._begun and not self._progress.results.rollouts:
            with suppress(OSError, ValueError):  # it ends for a reason of its own
                self._read_kept(self._directory)
        return self.ending(incomplete)

    def ending(self, incomplete: bool) -> Ending:
        """What a command says at its end of where things are. ``incomplete``: something is missing."""
        records = self._records or ""
        named = f" --run {self._run_to_name}" if self._run_to_name else ""
        report = [f"agentenv report {shlex.quote(records)}{named}"] if records and Path(records).exists() else []
        here = self._directory.path if self._directory is not None else None
        places = self._elsewhere if here is not None else {"groups": self.groups, "records": records, **self._elsewhere}
        places = {name: path for name in WRITTEN if (path := {"page": self.page, **places}.get(name))}
        there = [
            (name, path) for name, path in places.items() if here not in Path(path).parents and Path(path).exists()
        ]
        if here is None:
            return Ending(there, report or ["set --env.rollouts_path to keep every rollout"], self._run_to_name)
        name = shlex.quote(here.name if here.parent == Path(ROOT) else str(here))
        verb = "resume" if incomplete and self._about.resumable else "show"
        return Ending(there, [f"agentenv runs {verb} {name}", *report], self.run.id, str(here))

    # -- its rollouts and groups --------------------------------------------------------------------

    def to_play(self, position: int, item: Any) -> bool:
        """Whether the item at this position is to be rolled out; not if that was done before this run was resumed.

        Raises: ConfigError when another item was there; InfraError when the run's directory cannot be written any more:
        nothing would be kept of what it cost.
        """
        if self._full and self._directory is not None and "records" not in self._elsewhere:
            raise InfraError(
                f"{self._directory.path} cannot be written: {self._full}", next_step="make room, and resume the run"
            )
        was = self.kept.items.get(position)
        if item is None:
            if position <= self.kept.last:
                last = self.kept.last
                raise ConfigError(
                    "get_next_item", f"ends before item {last}, which this run has played", next_step=DRAW_ALIKE
                )
            return False
        if was is not None and was != (now := item_id(item)):
            raise ConfigError("get_next_item", f"item {position} was {was!r} and is {now!r}", next_step=DRAW_ALIKE)
        return position not in self.kept.done

    async def play(
        self, item: Any, size: int, new_name: str, run: Callable[[str], Coroutine[Any, Any, Transcript]]
    ) -> tuple[str, list[Transcript], list[Transcript]]:
        """Roll out a group: its name, all its members in order, and those of them that are new. What is kept of a group
        from before this run was resumed is not played again; every rollout is kept as soon as it has ended."""
        place = PLACE.get() or Place()
        earlier = self.kept.open.pop(place.position, None) if place.position is not None else None
        place.group = group = earlier.group if earlier is not None else new_name
        members = dict(earlier.members) if earlier is not None else {}

        async def kept(trajectory: str) -> Transcript:
            transcript = await run(trajectory)
            await self._keep_member(place, int(trajectory.rpartition("-")[2]), size, transcript)
            return transcript

        missing = [number for number in range(size) if number not in members]
        played: list[Transcript] = []
        if missing:  # else it ended between its last rollout and its record
            played = await run_group([f"{group}-{number}" for number in missing], kept, item_id(item))
        members |= zip(missing, played, strict=True)
        return group, [members[number] for number in range(size)], played

    async def _keep_member(self, place: Place, member: int, size: int, transcript: Transcript) -> None:
        """Write down a rollout that has ended, if its group has not."""
        alone = size == 1 and self._about_verb == "evaluate"
        if self._members is None or place.position is None or alone:
            return
        write = partial(self._members.add, place.group, place.position, member, transcript)
        async with self._writing:
            if why := await asyncio.to_thread(unwritten, write):
                self.lost("rollout", MEMBERS, why)

    async def add(self, group: str, item: Any, size: int, transcripts: Sequence[Transcript]) -> None:
        """Record a group that has ended."""
        place = PLACE.get() or Place()
        if why := await self._rollouts.add(group, item, size, transcripts, place.position):
            self.lost("record", self._records, why)
            self._full = why
            self._lost_groups.add(group)  # its members are all that is left of it
            return
        if self._about_verb != "process" or outcome_of(transcripts) == "retry":
            await self.group_ended(group)
        if self._directory is not None:
            self._directory.progressed(lambda: self._progress.document(self.ending(True)))

    async def group_ended(self, group: str) -> None:
        """Everything of a group is in its files: nothing needs its members any more."""
        if self._members is None or not group or group in self._lost_groups:
            return
        async with self._writing:
            if why := await asyncio.to_thread(unwritten, partial(self._members.ended, group)):
                self.lost("rollout", MEMBERS, why)

    def groups_file(self) -> GroupsFile:
        """The file of scored groups, in place of the writer that atropos has opened."""

        def lost(why: str) -> None:
            self.lost("group", self.groups, why)
            if (place := PLACE.get()) is not None:
                self._lost_groups.add(place.group)

        return GroupsFile(self.groups, lost)

    @property
    def page(self) -> str:
        """atropos' page of the groups."""
        return str(Path(self.groups).with_suffix(".html")) if self.groups else ""

    async def write_page(self) -> None:
        """atropos' page of the groups that were written, if there are any."""
        if self.groups and not await asyncio.to_thread(_page_written, Path(self.groups), Path(self.page)):
            self.lost("page", self.page, "atropos could not write it, and has printed why")

    def lost(self, what: str, path: str | None, why: str) -> None:
        """Count something that could not be written; the first of its kind is logged."""
        self._counts[f"{what}s_lost"] += 1
        if self._counts[f"{what}s_lost"] == 1:
            logger.error("a %s cannot be written to %s: %s; further ones are only counted", what, path, why)
        self._progress.results.missing.lost.add(what, why, "")


@contextmanager
def groups_in_run(config: Any, invocation: Invocation | None) -> Iterator[None]:
    """atropos' constructor, within which it opens a file for groups: none where they go to the run's directory, which
    is not there yet."""
    path = config.data_path_to_save_groups
    if invocation is None or path is None or not invocation.has_directory(config):
        yield
        return
    if "data_path_to_save_groups" in invocation.given and invocation.resume is None:
        yield
        return
    config.data_path_to_save_groups = None
    try:
        yield
    finally:
        config.data_path_to_save_groups = path


def _page_written(groups: Path, page: Path) -> bool:
    if not groups.exists():
        return True
    try:
        with nullcontext() if debug() else redirect_stdout(io.StringIO()):  # it prints that it was successful
            generate_html(str(groups), str(page))
    except SystemExit:
        page.unlink(missing_ok=True)
        return False
    return True
