"""How a user has started a command, as its run remembers it: without secrets, and so that it can be run again."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentenv.runs.directory import FoundRun


@dataclass(frozen=True)
class Invocation:
    """A command as a user has started it."""

    words: Sequence[str]
    """Program, verb and flags, without those that have secrets."""
    omitted: Sequence[str] = ()
    """The flags with secrets, without their values."""
    secrets: Collection[str] = ()
    """Their values."""
    given: frozenset[str] = frozenset()
    """The environment's settings that the command or its ``--config`` names."""
    resume: Path | None = None
    """The directory of the run to resume."""
    ended: list[FoundRun] = field(default_factory=list)
    """Its run, once that has ended."""

    def has_directory(self, config: Any) -> bool:
        """Whether its run has a directory."""
        return bool(config.runs_dir) or self.resume is not None


def program_words() -> list[str]:
    """The words that started this program, up to its own arguments: the interpreter with its options, and the file or
    ``-m MODULE``."""
    arguments = len(sys.argv) - 1
    whole = list(sys.orig_argv)
    if len(whole) > arguments and whole[len(whole) - arguments :] == sys.argv[1:]:
        words = whole[: len(whole) - arguments]
        if words[-1:] == sys.argv[:1] or "-m" in words:
            return [sys.executable, *words[1:]]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, sys.argv[0]]


_SECRET_NAMES = ("token", "key", "password", "secret")


def named_as_secret(name: str) -> bool:
    """Whether a setting of an environment's own, or a field of an object among the settings, has a value that is not
    written down."""
    return name.lower().split("_")[-1] in _SECRET_NAMES


def _secrets_of_object(text: str) -> list[str]:
    """The secrets in a JSON object of the command line, such as ``sandbox_env``."""
    try:
        given = json.loads(text)
    except ValueError:
        return []
    return _secrets_below(given) if isinstance(given, (dict, list)) else []


def _secrets_below(value: Any) -> list[str]:
    """The secrets in a value of a setting, however deep: fields that are named so, addresses with a password."""
    if isinstance(value, dict):
        named = [str(each) for name, each in value.items() if named_as_secret(str(name)) and _is_scalar(each)]
        return named + [secret for each in value.values() for secret in _secrets_below(each)]
    if isinstance(value, list):
        return [secret for each in value for secret in _secrets_below(each)]
    if isinstance(value, str):
        return [value] if _USER_IN_URL.search(value) else _secrets_of_object(value)
    return []


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, (dict, list, bool))


_USER_IN_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")


def without_user(text: str) -> str:
    """The text without the name and password in an address."""
    return _USER_IN_URL.sub("://", text)


def invocation_of(
    program: Sequence[str], arguments: Sequence[str], secret: Collection[str], resume: Path | None
) -> Invocation:
    """The invocation of ``program`` with these arguments, of which each flag has its value in the next word, or after
    ``=``. ``secret``: the environment's settings that are never written down."""
    words, given = list(program), set()
    omitted: list[str] = []
    secrets = [os.environ.get("OPENAI_API_KEY", "")]
    rest = list(arguments)
    while rest:
        flag, equals, value = (word := rest.pop(0)).partition("=")
        taken = [word]
        if flag.startswith("--") and not equals and rest and not rest[0].startswith("--"):
            taken.append(value := rest.pop(0))
        name = flag.removeprefix("--env.")
        if name != flag:
            given.add(name)
        hidden = flag == "--openai.api_key" or (name != flag and name in secret)
        inside = _secrets_of_object(value)
        if (hidden and not value.startswith("file:")) or inside or _USER_IN_URL.search(value):
            omitted.append(flag)
            secrets += [value, *inside]
        else:
            words += taken
        if flag == "--config":
            given |= {name for section in _sections(value, "env") for name in section}
            secrets += _secrets_in(value, secret)
    return Invocation(words, omitted, [each for each in secrets if each], frozenset(given), resume)


def _sections(path: str, name: str) -> list[dict[str, Any]]:
    """A section of a file of settings: one of ``openai`` may be a list."""
    section = (yaml.safe_load(Path(path).read_text()) or {}).get(name)
    return [each for each in (section if isinstance(section, list) else [section]) if isinstance(each, dict)]


def _secrets_in(path: str, secret: Collection[str]) -> list[str]:
    found = [env.get(name) for env in _sections(path, "env") for name in secret]
    found += [server.get("api_key") for server in _sections(path, "openai")]
    inside = [each for name in ("env", "openai") for section in _sections(path, name) for each in section.values()]
    return [str(each) for each in found if each] + _secrets_below(inside)
