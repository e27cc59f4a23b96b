"""Builds an image: performs a plan's steps on machines, each step at most once for its cache key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agentenv.builder.context import BuildContext, Source, inline_sources
from agentenv.builder.copying import copy_from_context, copy_from_root, make_directory
from agentenv.builder.instructions import Dockerfile, Place
from agentenv.builder.machine import BaseImage, Machine, Machines, Start
from agentenv.builder.parser import parse
from agentenv.builder.plan import SCRATCH, Options, Plan, StagePlan, base_images, copied_images, plan
from agentenv.builder.steps import CopyStep, RunStep, Step, WorkdirStep, key_of
from agentenv.errors import BuildStepError, CheckpointError
from agentenv.rooted import LeadsOutError, read_beneath

MAX_DOCKERFILE_BYTES: Final = 1024 * 1024
_TAIL_BYTES: Final = 16 * 1024
_TAIL_LINES: Final = 20
"""Of a failed command's output, what its error shows."""
StepState = Literal["started", "done", "cached", "failed"]


@dataclass(frozen=True)
class StepEvent:
    """A step has started, ended, or need not run. ``number`` counts from 1 to ``total``, the plan's steps; steps of
    a stage that is not needed, since what was copied from it is cached, have no event."""

    number: int
    total: int
    place: Place
    state: StepState
    seconds: float = 0.0


@dataclass(frozen=True)
class Built:
    """The image, and how it was made."""

    image: str
    plan: Plan
    ran: int
    cached: int


@dataclass(frozen=True)
class Listeners:
    """Callbacks of a build, called on its loop: for each step, and for the output of commands as it comes."""

    on_step: Callable[[StepEvent], None] = lambda _: None
    on_output: Callable[[bytes], None] = lambda _: None


class LayerCache:
    """A directory with one small file for each key. Several builds may use it at the same time; of two that make the
    same, the later is kept. What it names may have been deleted since, which the user checks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: str) -> str | None:
        """What was kept under the key."""
        try:
            return (self._directory / key).read_text() or None
        except FileNotFoundError:
            return None

    def keep(self, key: str, value: str) -> None:
        """Keep what was made; a reader sees the old or the new, also after a crash."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._directory, prefix=".new-", delete=False) as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._directory / key)


def load(directory: Path, file: Path | None = None) -> Dockerfile:
    """The Dockerfile of a build context, or ``file``. No link is followed out of the context, or, where the file is not
    in it, out of the file's own directory. Raises DockerfileError."""
    place = Place(str(file or "Dockerfile"), 0, "Dockerfile")
    context, path = (Path(os.path.abspath(one)) for one in (directory, file or directory / "Dockerfile"))  # noqa: PTH100 - without following links
    beneath = context if path.is_relative_to(context) else path.parent
    try:
        content = read_beneath(beneath, str(path.relative_to(beneath)), MAX_DOCKERFILE_BYTES)
        return parse(content.decode(), place.file)
    except LeadsOutError as error:
        raise place.wrong(
            f"it leads out of {beneath}: {error}", next_step="put the Dockerfile itself into the directory"
        ) from error
    except OSError as error:
        raise place.wrong(error.strerror or str(error), next_step="name a Dockerfile that can be read") from error
    except UnicodeDecodeError as error:
        raise place.wrong(f"it is not UTF-8: {error}", next_step="save it as UTF-8") from error


async def build(
    dockerfile: Dockerfile,
    context: BuildContext,
    machines: Machines,
    cache: LayerCache,
    options: Options | None = None,
    *,
    listeners: Listeners | None = None,
    timeout_s: float = 3600.0,
) -> Built:
    """Build the target. ``context`` is open. ``timeout_s`` holds for each RUN.

    Raises DockerfileError before anything runs where the Dockerfile is wrong, and at a COPY whose files are;
    BuildStepError when a command fails; whatever the machines raise.
    """
    options = options or Options()
    bases = await asyncio.to_thread(base_images, dockerfile, options)
    images = {reference: await machines.resolve(reference) for reference in bases}
    configs = {reference: image.config for reference, image in images.items()}
    planned = await asyncio.to_thread(plan, dockerfile, options, configs)
    for reference in copied_images(planned):
        images[reference] = images.get(reference) or await machines.resolve(reference)
    work = _Build(planned, context, machines, cache, images, listeners or Listeners(), timeout_s)
    await work.prepare()
    image = await work.image()
    return Built(image, planned, work.ran, work.cached)


@dataclass
class _Build:
    """One build. ``keys`` has each stage's keys, from its base's to its last step's."""

    plan: Plan
    context: BuildContext
    machines: Machines
    cache: LayerCache
    images: dict[str, BaseImage]
    listeners: Listeners
    timeout_s: float
    keys: dict[int, list[str]] = field(default_factory=dict)
    sources: dict[tuple[int, int], list[Source]] = field(default_factory=dict)
    ends: dict[int, Start] = field(default_factory=dict)
    ran: int = 0
    cached: int = 0

    async def prepare(self) -> None:
        """Read what is copied from the context, and compute all keys."""
        for number, stage in self.plan.stages.items():
            keys = [self._base_key(stage)]
            for index, step in enumerate(stage.steps):
                keys.append(key_of(keys[-1], step, await self._content(number, index, step)))
            self.keys[number] = keys

    async def image(self) -> str:
        """The target's image."""
        number = self.plan.target
        config = json.dumps(self.plan.stages[number].config.to_oci(), sort_keys=True)
        key = hashlib.sha256(f"image\0{self.keys[number][-1]}\0{config}".encode()).hexdigest()
        known = self.cache.find(key)
        if known and await self.machines.holds(Start(image=known)):
            self._skip(number, len(self.plan.stages[number].steps))
            return known
        start, done = await self._deepest(number)
        await self._needed_stages(number, done)
        async with self.machines.open(start) as machine:
            await self._perform(number, done, machine)
            image = await machine.commit(self.plan.stages[number].config)
        self.cache.keep(key, image)
        return image

    async def _end(self, number: int) -> Start:
        """Where a stage ends, built if need be."""
        if number not in self.ends:
            start, done = await self._deepest(number)
            await self._needed_stages(number, done)
            if done < len(self.plan.stages[number].steps):
                async with self.machines.open(start) as machine:
                    start = await self._perform(number, done, machine)
            self.ends[number] = start
        return self.ends[number]

    async def _deepest(self, number: int) -> tuple[Start, int]:
        """The last step of a stage that is cached, and how many steps that spares."""
        stage = self.plan.stages[number]
        for done in range(len(stage.steps), 0, -1):
            checkpoint = self.cache.find(self.keys[number][done])
            if checkpoint and await self.machines.holds(Start(checkpoint=checkpoint)):
                self._skip(number, done)
                return Start(checkpoint=checkpoint), done
        if isinstance(stage.base, int):
            return await self._end(stage.base), 0
        return Start(image=self.images[stage.base].digest) if stage.base else Start(), 0

    async def _needed_stages(self, number: int, done: int) -> None:
        """Build what the steps left to do copy from, before a machine is opened for them."""
        for step in self.plan.stages[number].steps[done:]:
            if isinstance(step, CopyStep) and isinstance(step.origin, int):
                await self._end(step.origin)

    async def _perform(self, number: int, done: int, machine: Machine) -> Start:
        """Run the steps of a stage after the first ``done``; each is a checkpoint."""
        checkpoint = ""
        for index, step in list(enumerate(self.plan.stages[number].steps))[done:]:
            began = time.monotonic()
            self._tell(number, index, "started")
            try:
                await self._step(number, index, step, machine)
                checkpoint = await self._checkpoint_after(step, machine)
            except BaseException:
                self._tell(number, index, "failed", time.monotonic() - began)
                raise
            self.cache.keep(self.keys[number][index + 1], checkpoint)
            self.ran += 1
            self._tell(number, index, "done", time.monotonic() - began)
        return Start(checkpoint=checkpoint)

    async def _checkpoint_after(self, step: Step, machine: Machine) -> str:
        """A checkpoint after the step. Raises CheckpointError that names its place: it is often what it has written."""
        try:
            return await machine.checkpoint()
        except CheckpointError as error:
            where = f"{step.place.file}:{step.place.line}: {step.place.keyword}"
            raise CheckpointError(f"{where}: {error.message}", next_step=error.next_step) from error

    async def _step(self, number: int, index: int, step: Step, machine: Machine) -> None:
        match step:
            case RunStep():
                await self._run(step, machine)
            case CopyStep():
                await self._copy(step, self.sources.get((number, index)) or inline_sources(step), machine)
            case WorkdirStep():
                await make_directory(step, machine)

    async def _run(self, step: RunStep, machine: Machine) -> None:
        tail = bytearray()

        def on_output(output: bytes) -> None:
            self.listeners.on_output(output)
            tail.extend(output)
            del tail[:-_TAIL_BYTES]

        env = dict(step.env) | dict(step.hidden)
        code = await machine.run(
            step.argv, env=env, user=step.user, cwd=step.cwd, timeout_s=self.timeout_s, on_output=on_output
        )
        if code == 0:
            return
        lines = tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]
        ending = f"ended with exit code {code}" if code is not None else f"was killed after {self.timeout_s:g} s"
        shown = "; its last lines:\n" + "\n".join(lines) + "\n" if lines else ""
        raise BuildStepError(
            f"{step.place.file}:{step.place.line}: {step.place.text} {ending}{shown}",
            next_step="correct the command; the steps before it are cached",
            line=step.place.line,
            exit_code=code,
            output="\n".join(lines),
        )

    async def _copy(self, step: CopyStep, sources: list[Source], machine: Machine) -> None:
        if step.origin is not None and step.sources:
            async with self.machines.open(await self._origin(step.origin)) as origin:
                await copy_from_root(step, origin, machine)
        await copy_from_context(step, self.context, sources, machine)

    async def _origin(self, origin: int | str) -> Start:
        return await self._end(origin) if isinstance(origin, int) else Start(image=self.images[origin].digest)

    async def _content(self, number: int, index: int, step: Step) -> str:
        """The digest of what a step copies; files from a stage are represented by the stage's last key."""
        if not isinstance(step, CopyStep):
            return ""
        if isinstance(step.origin, int):
            return self.keys[step.origin][-1]
        if step.origin is not None:
            return self.images[step.origin].digest
        sources = await asyncio.to_thread(self.context.sources, step)
        self.sources[number, index] = sources
        try:
            return await asyncio.to_thread(self.context.digest, sources)
        except OSError as error:
            raise step.place.wrong(
                f"{error.filename or 'a file'} cannot be read: {error.strerror}", next_step="change its permissions"
            ) from error

    def _base_key(self, stage: StagePlan) -> str:
        if isinstance(stage.base, int):
            return self.keys[stage.base][-1]
        return self.images[stage.base].digest if stage.base else SCRATCH

    def _skip(self, number: int, steps: int) -> None:
        for index in range(steps):
            self.cached += 1
            self._tell(number, index, "cached")

    def _tell(self, number: int, index: int, state: StepState, seconds: float = 0.0) -> None:
        before = sum(len(stage.steps) for other, stage in self.plan.stages.items() if other < number)
        place = self.plan.stages[number].steps[index].place
        event = StepEvent(before + index + 1, self.plan.steps, place, state, seconds)
        self.listeners.on_step(event)
