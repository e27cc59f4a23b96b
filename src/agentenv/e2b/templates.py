"""Templates: names that sandboxes begin from, of the farm's settings, built by clients, or snapshots of a sandbox.

What clients built is written to a file, so that it outlives the service, as its images do.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentenv.e2b.envd import HOME, USER
from agentenv.e2b.replies import RefusalError
from agentenv.errors import ConfigError
from agentenv.store.layout import replace

DEFAULT_TAG: Final = "default"
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Version(BaseModel):
    """What a template's tag means: an image, and how a sandbox of it begins. ``prepared``: it has envd and the user."""

    model_config = ConfigDict(frozen=True)

    build: str = Field(default_factory=lambda: str(uuid.uuid4()))
    image: str
    prepared: bool = False
    user: str = USER
    workdir: str = HOME
    env: dict[str, str] = Field(default_factory=dict)
    start_command: str = ""
    ready_command: str = ""
    cpus: float | None = None
    memory_mib: int | None = None
    created_unix_s: float = Field(default_factory=time.time)


class Template(BaseModel):
    """A name and its versions, by tag. ``run``: whose it is; empty: everybody's, by the farm's settings.
    ``snapshot_of``: the sandbox that it is a snapshot of."""

    name: str
    run: str = ""
    tags: dict[str, Version] = Field(default_factory=dict)
    snapshot_of: str = ""


_FILE: Final = TypeAdapter(list[Template])


class TemplateBook:
    """All templates. ``file``: where those of clients are kept; read when it is made, written at every change."""

    def __init__(self, given: dict[str, str], file: Path) -> None:
        self._file = file
        self._all: dict[tuple[str, str], Template] = {}
        for template in self._read():
            self._all[template.run, template.name] = template
        for name, image in given.items():
            self._all["", name] = Template(name=name, tags={DEFAULT_TAG: Version(image=image)})

    def _read(self) -> list[Template]:
        try:
            return _FILE.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise ConfigError(
                "e2b",
                f"{self._file} cannot be read: {error}",
                next_step="repair or remove it: it lists the templates built",
            ) from error

    def of(self, run: str) -> list[Template]:
        """Those that a run may use, without snapshots, the newest first."""
        found = [each for (owner, _), each in self._all.items() if owner in ("", run) and not each.snapshot_of]
        return sorted(found, key=_created, reverse=True)

    def snapshots(self, run: str) -> list[Template]:
        """Snapshots of a run's sandboxes, the newest first."""
        found = [each for (owner, _), each in self._all.items() if owner == run and each.snapshot_of]
        return sorted(found, key=_created, reverse=True)

    def find(self, run: str, name: str) -> Template | None:
        """The template of that name (without a tag) that a run means: its own goes before everybody's."""
        return self._all.get((run, name)) or self._all.get(("", name))

    def own(self, run: str, name: str) -> Template:
        """A run's own template. Raises RefusalError."""
        if (found := self._all.get((run, name))) is not None:
            return found
        if ("", name) in self._all:
            raise RefusalError(403, f"template '{name}' is of the farm's settings")
        raise RefusalError(404, f"template '{name}' not found")

    def version(self, run: str, name: str) -> tuple[Template, Version]:
        """What ``NAME`` or ``NAME:TAG`` means. Raises RefusalError."""
        base, _, tag = name.partition(":")
        template = self.find(run, base)
        if template is None or (version := template.tags.get(tag or DEFAULT_TAG)) is None:
            raise RefusalError(404, f"template '{name}' not found")
        return template, version

    async def add(self, run: str, name: str, tags: list[str], version: Version, *, snapshot_of: str = "") -> None:
        """Give a version these tags of a run's template, which is made if it is missing."""
        check_tags(tags)
        template = self._all.setdefault((run, name), Template(name=name, run=run, snapshot_of=snapshot_of))
        template.tags.update(dict.fromkeys(tags, version))
        await self._write()

    async def untag(self, run: str, name: str, tags: list[str]) -> None:
        """Remove tags. Raises RefusalError."""
        template = self.own(run, name)
        for tag in tags:
            template.tags.pop(tag, None)
        await self._write()

    async def remove(self, run: str, name: str) -> None:
        """Forget a run's own template; its images stay in the store for a week. Raises RefusalError."""
        del self._all[run, self.own(run, name).name]
        await self._write()

    async def _write(self) -> None:
        content = _FILE.dump_json([each for (run, _), each in self._all.items() if run])
        await asyncio.to_thread(_replace, self._file, content)


def check_tags(tags: list[str]) -> None:
    """Raises RefusalError."""
    for tag in tags:
        if not isinstance(tag, str) or not _TAG.fullmatch(tag):
            raise RefusalError(400, f"tag: got {tag!r}; allowed are letters, digits and . _ -")


def _created(template: Template) -> float:
    return max((version.created_unix_s for version in template.tags.values()), default=0.0)


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, content)
