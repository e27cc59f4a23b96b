"""Names of images: where one comes from, and which one of that place.

====================================  ==============================================================
``debian:trixie``                     a registry's (also ``docker://…``), by default docker.io
``registry.example:5000/a/b@sha256:…``  the one with this digest; a tag beside it is left out
``oci:PATH[:TAG]``                    of an OCI image layout: a directory, or a tar of one
``docker-archive:FILE[:NAME]``        of the tar that ``docker save`` writes
``docker-daemon:NAME``                of this machine's Docker engine
``dockerfile:DIR``                    to be built from a Dockerfile
``localhost/NAME[:TAG]``              named here, by ``commit("NAME:TAG")`` or ``agentenv images tag``
``committed:NAME[:TAG]``              the same in full, as it is stored and sent
``sha256:…``                          the one of a store that has this digest; without any registry
====================================  ==============================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from agentenv.errors import ConfigError

Kind = Literal["docker", "oci", "docker-archive", "docker-daemon", "dockerfile", "committed", "sha256"]

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_TAG: Final = re.compile(r"[\w][\w.-]{0,127}", re.ASCII)
_HOST: Final = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_PART: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LONGEST_NAME: Final = 255
_HUB, _OFFICIAL = "docker.io", "library"
_SCHEMES: Final[tuple[Kind, ...]] = ("oci", "docker-archive", "docker-daemon", "dockerfile")
_COMMITTED: Final[Kind] = "committed"
_HERE: Final = "localhost"
"""Before a name it means what Docker and podman mean by it: an image of no registry."""
_GIVEN_HERE: Final = (f"{_COMMITTED}:", f"{_HERE}/")
_STORED: Final[Kind] = "sha256"
_ALLOWED: Final = (
    "allowed: NAME[:TAG][@DIGEST], oci:PATH[:TAG], docker-archive:FILE[:NAME], docker-daemon:NAME, localhost/NAME, "
    "committed:NAME, sha256:DIGEST"
)


@dataclass(frozen=True)
class Reference:
    """A parsed name. ``str()`` gives it in full: parsed again, it is equal."""

    kind: Kind
    name: str
    """Registry and repository; or the path; or the engine's name of it."""
    tag: str = ""
    """Of a registry's or a layout's image; of an archive's, its whole name; empty: the only one there is."""
    digest: str = ""
    """``sha256:…`` of the registry's manifest."""

    @property
    def as_written(self) -> str:
        """As people write it: ``localhost/NAME`` of what was named here."""
        return f"{_HERE}/{str(self).removeprefix(f'{_COMMITTED}:')}" if self.kind == _COMMITTED else str(self)

    def __str__(self) -> str:
        if self.kind != "docker":
            return f"{self.kind}:{self.name}" + (f":{self.tag}" if self.tag else "")
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"

    @property
    def moves(self) -> bool:
        """Whether it may mean another image tomorrow."""
        return not self.digest


def parse(text: str) -> Reference:
    """Parse a reference. Raises ConfigError (``image``), naming what is allowed."""
    scheme, _, rest = text.partition(":")
    blank = " " if scheme == "dockerfile" else ""  # a path that no other program or machine is handed
    if any((char.isspace() or ord(char) < 32) and char not in blank for char in text) or not text:
        raise _wrong(text, "empty, or has white space")
    for kind in _SCHEMES:
        if scheme == kind:
            return _of_scheme(kind, rest, text)
    if is_committed(text):
        return committed(text)
    if scheme == _STORED:
        if not is_digest(text):
            raise _wrong(text, "it is not sha256: and 64 hexadecimal digits")
        return Reference(_STORED, rest)
    return _of_registry(text.removeprefix("docker://"), text)


def committed(name: str) -> Reference:
    """What ``commit(name)`` and ``agentenv images tag`` name: ``prepared``, ``team/prepared:2``, also with a prefix.
    Raises ConfigError (``image``)."""
    given = name.removeprefix(f"{_COMMITTED}:").removeprefix(f"{_HERE}/")
    parsed = _of_registry(given, name)
    if parsed.digest:
        raise _wrong(name, "a digest already names an image")
    short = parsed.name.removeprefix(f"{_HUB}/").removeprefix(f"{_OFFICIAL}/")
    return Reference(_COMMITTED, short, parsed.tag)


def is_committed(text: str) -> bool:
    """Whether a reference is a name given here, by ``commit`` or ``agentenv images tag``."""
    return text.startswith(_GIVEN_HERE)


def has_source(text: str) -> bool:
    """Whether a reference says where its image comes from. Digests and names given here do not: only nodes that have
    the image know them."""
    return not text.startswith(f"{_STORED}:") and not is_committed(text)


def is_of_this_machine(reference: Reference) -> bool:
    """Whether it names files or an engine of the machine that reads it: who names such an image reads what is there."""
    return reference.kind in _SCHEMES


def located(reference: Reference) -> Reference:
    """The same with an absolute path: a store is shared by processes of many working directories."""
    if reference.kind in ("oci", "docker-archive", "dockerfile"):
        return replace(reference, name=str(Path(reference.name).absolute()))
    return reference


def is_digest(text: object) -> bool:
    """Whether it is ``sha256:`` and 64 lower-case hexadecimal digits, the only kind of digest that is accepted."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _of_scheme(kind: Kind, rest: str, text: str) -> Reference:
    if kind == "docker-archive":
        path, _, name = rest.partition(":")
    elif kind == "oci":
        path, colon, name = rest.rpartition(":")
        if not colon or "/" in name:
            path, name = rest, ""
    else:
        path, name = rest, ""
    if not path:
        raise _wrong(text, "names nothing")
    return Reference(kind, path, name)


def _of_registry(name: str, text: str) -> Reference:
    name, at, digest = name.partition("@")
    if at and not is_digest(digest):
        raise _wrong(text, "its digest is not sha256: and 64 hexadecimal digits")
    before, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        before, tag = name, ""
    elif not _TAG.fullmatch(tag):
        raise _wrong(text, f"{tag!r} cannot be a tag")
    host, slash, path = before.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, path = _HUB, before
    if host == _HERE:
        raise _wrong(text, f"{_HERE}/ is no registry; one of this machine is named with its port: {_HERE}:443/{path}")
    if host == _HUB and "/" not in path:
        path = f"{_OFFICIAL}/{path}"
    if not _HOST.fullmatch(host) or len(path) > _LONGEST_NAME:
        raise _wrong(text, f"{host!r} cannot be a registry")
    for part in path.split("/"):
        if not _PART.fullmatch(part):
            raise _wrong(text, f"{part!r} cannot be a part of a name (lower case, digits, '.', '_', '-')")
    return Reference("docker", f"{host}/{path}", "" if digest else tag or "latest", digest)


def _wrong(text: str, problem: str) -> ConfigError:
    return ConfigError("image", f"got {text[:200]!r}: {problem}", next_step=_ALLOWED)
