"""Builds of templates: files that clients upload by their hash, steps that become a Dockerfile, and its image."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from agentenv.background import TaskSet
from agentenv.e2b.envd import environment_of
from agentenv.e2b.replies import RefusalError
from agentenv.e2b.sandboxes import Sandboxes, Tenant
from agentenv.e2b.templates import DEFAULT_TAG, TemplateBook, Version, check_tags
from agentenv.errors import AgentEnvError, BuildStepError, DockerfileError
from agentenv.sdk.roots import ImageRoot
from agentenv.store.reference import is_digest, parse

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_HASH: Final = re.compile(r"[A-Za-z0-9]{1,128}")
_BUILDS_KEPT: Final = 1000
_UNPACKED: Final = "/e2b-files"
"""Of the stages with a client's files."""


@dataclass
class Build:
    """One build of a run's template. ``status``: waiting, building, ready or error."""

    run: str
    name: str
    tags: list[str]
    cpus: float | None
    memory_mib: int | None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "waiting"
    message: str = ""
    step: str = ""

    def told(self) -> dict[str, Any]:
        """It, as the API describes it."""
        told: dict[str, Any] = {
            "templateID": self.name, "buildID": self.id, "status": self.status, "logs": [], "logEntries": []
        }  # fmt: skip
        if self.status == "error":
            told["reason"] = {"message": self.message, "logEntries": [], **({"step": self.step} if self.step else {})}
        return told


class Uploads:
    """Files of templates, as clients upload them: a tar for each COPY, named by a hash that the client made, so each
    run has its own. A link to upload one is good once, and only whoever has it knows it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._links: dict[str, Path] = {}

    def file(self, run: str, name: str) -> Path:
        """Where a run's tar of this hash is. Raises RefusalError."""
        if not _HASH.fullmatch(name):
            raise RefusalError(400, f"{name[:200]!r} is not a hash of files")
        return self._directory / run.replace("/", "+") / name

    def link(self, run: str, name: str) -> tuple[bool, str]:
        """Whether it is there, and the secret name under which it may be put."""
        file, secret = self.file(run, name), secrets.token_urlsafe(24)
        self._links[secret] = file
        return file.exists(), secret

    async def put(self, secret: str, request: web.Request) -> None:
        """Keep what a request uploads. Raises RefusalError."""
        if (file := self._links.pop(secret, None)) is None:
            raise RefusalError(404, "this link was used, or never made")
        part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        await asyncio.to_thread(part.parent.mkdir, parents=True, exist_ok=True)
        try:
            with part.open("wb") as output:
                async for piece in request.content.iter_any():
                    await asyncio.to_thread(output.write, piece)
            await asyncio.to_thread(part.replace, file)
        finally:
            await asyncio.to_thread(part.unlink, missing_ok=True)


class Builds:
    """All builds since the service began. An async context manager: leaving it ends those that run."""

    def __init__(self, sandboxes: Sandboxes, templates: TemplateBook, uploads: Uploads, scratch: Path) -> None:
        self._sandboxes = sandboxes
        self._templates = templates
        self.uploads = uploads
        self._scratch = scratch
        self._all: dict[str, Build] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Builds:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()

    def new(self, run: str, asked: Mapping[str, Any]) -> Build:
        """A build that waits for its steps. Raises RefusalError."""
        name, _, tag = str(asked.get("name") or asked.get("alias") or "").partition(":")
        if not _NAME.fullmatch(name):
            raise RefusalError(400, f"name: got {name[:200]!r}; allowed are letters, digits and . _ / -")
        known = self._templates.find(run, name)
        if known is not None and not known.run:
            raise RefusalError(403, f"template '{name}' is of the farm's settings; build another name")
        tags = [*(asked.get("tags") or ()), *([tag] if tag else ())] or [DEFAULT_TAG]
        check_tags(tags)
        build = Build(run, name, tags, asked.get("cpuCount"), asked.get("memoryMB"))
        self._all[build.id] = build
        while len(self._all) > _BUILDS_KEPT:
            del self._all[next(iter(self._all))]
        return build

    def get(self, run: str, build: str) -> Build:
        """A run's build. Raises RefusalError."""
        found = self._all.get(build)
        if found is None or found.run != run:
            raise RefusalError(404, f"build '{build}' not found")
        return found

    def start(self, tenant: Tenant, build: Build, asked: Mapping[str, Any]) -> None:
        """Begin with it; it ends in the background. Raises RefusalError."""
        if build.status != "waiting":
            raise RefusalError(409, f"build '{build.id}' has begun already")
        if asked.get("fromImageRegistry"):
            raise RefusalError(
                501, "fromImageRegistry: clients' passwords of registries are not used; configure the farm's"
            )
        build.status = "building"
        self._tasks.start(build.id, self._run(tenant, build, asked), "build")

    async def _run(self, tenant: Tenant, build: Build, asked: Mapping[str, Any]) -> None:
        directory = self._scratch / build.id
        made: Made | None = None
        try:
            base = await self._base(tenant, asked)
            steps = asked.get("steps") or []
            files = await asyncio.to_thread(self._context, directory, build.run, steps)
            made = dockerfile(base, steps, files)
            await asyncio.to_thread((directory / "Dockerfile").write_text, made.text)
            async with tenant.farm.sandbox(ImageRoot(f"dockerfile:{directory}", user="0")) as box:
                env = await environment_of(box)
                image = await box.commit(f"e2b-template:{build.id}")
            version = base.model_copy(
                update={
                    "build": build.id, "image": image, "user": made.user, "workdir": made.workdir,
                    "env": env, "cpus": build.cpus, "memory_mib": build.memory_mib,
                    "start_command": asked.get("startCmd") or base.start_command,
                    "ready_command": asked.get("readyCmd") or base.ready_command,
                }
            )  # fmt: skip
            await self._templates.add(build.run, build.name, build.tags, version)
            build.status = "ready"
        except (AgentEnvError, RefusalError, OSError, ValueError, KeyError, IndexError) as error:
            build.message = str(error) or type(error).__name__
            build.step = _step_of(error, made)
            build.status = "error"
            logger.info("build %s of %s failed: %s", build.id, build.name, build.message)
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _base(self, tenant: Tenant, asked: Mapping[str, Any]) -> Version:
        if name := asked.get("fromTemplate"):
            version = self._templates.version(tenant.run, name)[1]
        elif image := asked.get("fromImage"):
            if not is_digest(image) and parse(image).kind not in ("docker", "committed"):
                raise RefusalError(400, f"fromImage: {image!r} is not an image of a registry")
            version = Version(image=image)
        else:
            raise RefusalError(400, "fromImage or fromTemplate is missing")
        return await self._sandboxes.prepared(tenant, version)

    def _context(self, directory: Path, run: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The files of the build: the names of the tars in its directory, by their hashes."""
        directory.mkdir(parents=True)
        names: dict[str, str] = {}
        for step in steps:
            if (wanted := step.get("filesHash")) and wanted not in names:
                file = self.uploads.file(run, wanted)
                if not file.exists():
                    raise RefusalError(400, f"the files {wanted} were not uploaded")
                names[wanted] = f"{len(names)}.tar"
                shutil.copyfile(file, directory / names[wanted])
        return names


@dataclass(frozen=True)
class Made:
    """A Dockerfile, whose its image's sandboxes are and where they begin, and the line of each step."""

    text: str
    user: str
    workdir: str
    lines: tuple[int, ...]


def dockerfile(base: Version, steps: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> Made:
    """The Dockerfile of a template's steps. ``files``: names of the uploaded tars by hash. The tars are unpacked in
    stages of their own, so no file of a client is unpacked outside a slot. Raises RefusalError. Pure."""
    lines = [
        f"FROM {base.image} AS files{number}\nUSER root\nADD {name} {_UNPACKED}/"
        for number, name in enumerate(files.values())
    ]
    stages = {wanted: f"files{number}" for number, wanted in enumerate(files)}
    user, workdir = base.user, base.workdir
    lines += [f"FROM {base.image}", f"USER {user}", f"WORKDIR {workdir}"]
    at: list[int] = []
    for step in steps:
        kind, args = str(step.get("type", "")).upper(), list(step.get("args") or [])
        match kind, args:
            case "RUN", [command, *rest]:
                run = f"RUN {json.dumps(['/bin/bash', '-l', '-c', command])}"
                other = rest[0] if rest and rest[0] else user
                lines += [run] if other == user else [f"USER {other}", run, f"USER {user}"]
            case "COPY", [source, target, *rest]:
                owner = rest[0] if rest and rest[0] else user
                mode = f"--chmod={rest[1]} " if len(rest) > 1 and rest[1] else ""
                if any(character in source for character in "*?["):  # perhaps several files, which want a directory
                    target = f"{target.rstrip('/')}/"
                paths = json.dumps([f"{_UNPACKED}/{source.removeprefix('./')}", target])
                lines.append(f"COPY --from={stages[step['filesHash']]} --chown={owner} {mode}{paths}")
            case "ENV", _ if len(args) % 2 == 0:
                lines += [f"ENV {name}={_quoted(value)}" for name, value in zip(args[::2], args[1::2], strict=True)]
            case "WORKDIR", [workdir]:
                lines.append(f"WORKDIR {workdir}")
            case "USER", [user]:
                lines.append(f"USER {user}")
            case _:
                raise RefusalError(400, f"a step {kind!r} with {len(args)} arguments is not known")
        at.append("\n".join(lines).count("\n") + 1)
    return Made("\n".join(lines) + "\n", user, workdir, tuple(at))


def _quoted(value: str) -> str:
    if "\n" in value:
        raise RefusalError(400, f"ENV: {value[:80]!r} has a line break, which no Dockerfile can have")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _step_of(error: Exception, made: Made | None) -> str:
    """The number of the step whose line failed, as a text; empty: none of them."""
    if made is None or not isinstance(error, BuildStepError | DockerfileError):
        return ""
    return next((str(number) for number, last in enumerate(made.lines, 1) if error.line <= last), "")
