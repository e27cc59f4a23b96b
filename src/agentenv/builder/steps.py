"""The steps of a build, and their cache keys. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from agentenv.builder.instructions import Place

KEY_VERSION: Final = 1
"""Part of every cache key: raised when a step of the same description would have another result."""


@dataclass(frozen=True)
class InlineFile:
    """A file whose content is in the Dockerfile."""

    name: str
    content: str


@dataclass(frozen=True)
class RunStep:
    """Run ``argv`` as ``user`` in ``cwd``. ``env`` is complete but for the ``hidden`` variables, which are not part
    of the cache key."""

    place: Place
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    user: str
    cwd: str
    hidden: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CopyStep:
    """Copy to ``destination``, which is absolute; a slash at its end makes it a directory. ``origin`` is a stage's
    number, an image, or None for the build context."""

    place: Place
    sources: tuple[str, ...]
    destination: str
    inline: tuple[InlineFile, ...] = ()
    origin: int | str | None = None
    chown: str = ""
    chmod: str = ""
    unpack: bool = False


@dataclass(frozen=True)
class WorkdirStep:
    """Make the directory ``path`` and its missing parents, for ``user``."""

    place: Place
    path: str
    user: str


Step = RunStep | CopyStep | WorkdirStep


def key_of(parent: str, step: Step, content: str = "") -> str:
    """The cache key of a step after ``parent`` (the key of the step before, or the digest of the base image).
    ``content`` is the digest of what COPY copies. Equal keys have equal results, as far as RUN repeats itself."""
    described = {
        "version": KEY_VERSION,
        "parent": parent,
        "kind": type(step).__name__,
        "step": _described(step),
        "content": content,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _described(step: Step) -> list[object]:
    if isinstance(step, RunStep):
        return [step.argv, sorted(step.env), step.user, step.cwd]
    if isinstance(step, WorkdirStep):
        return [step.path, step.user]
    inline = [(file.name, file.content) for file in step.inline]
    return [step.sources, step.destination, inline, step.chown, step.chmod, step.unpack]
