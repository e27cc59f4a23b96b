"""Secrets by name, and a redactor that lets none of their values out."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus

from agentenv.errors import ConfigError

_SHORTEST: Final = 6
"""A shorter value would be found in half of all texts, and guessed from where it was removed."""


class Secrets:
    """Values by name; its repr shows names only.

    Raises:
        ConfigError: a value is empty or too short to be removed from texts reliably.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            if len(value) < _SHORTEST:
                raise ConfigError(
                    f"secrets.{name}", f"has {len(value)} characters", next_step=f"use at least {_SHORTEST}"
                )
        self._values = dict(values)
        self.redactor = Redactor(self._values)

    def __repr__(self) -> str:
        return f"<Secrets {', '.join(self._values) or 'none'}>"

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def value(self, name: str) -> str:
        """Raises ConfigError when no secret of that name is declared."""
        if name not in self._values:
            known = ", ".join(self._values) or "none"
            raise ConfigError("secrets", f"no secret is named {name!r}", next_step=f"declare it; declared: {known}")
        return self._values[name]

    def chosen(self, names: Iterable[str]) -> dict[str, str]:
        """Those values, by name."""
        return {name: self.value(name) for name in names}


def read_secret(name: str, path: Path) -> str:
    """A secret's value from its file, surrounding white space removed. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secrets.{name}", f"{path} cannot be read: {error}") from error


class Redactor:
    """Replaces the values of secrets by ``[secret:name]``, also where they are quoted for a URL, JSON or
    HTML, in base64, in hexadecimal or backwards."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for name, value in values.items():
            for form in _forms(value):
                self._names.setdefault(form, name)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """``text`` without any secret's value."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: f"[secret:{self._names[found.group()]}]", text)

    def value(self, value: Any) -> Any:
        """A JSON value without any secret's value, in keys neither."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            plain = str(value)
            return value if self.text(plain) == plain else self.text(plain)
        return value


def _forms(value: str) -> set[str]:
    raw = value.encode()
    encoded = {base64.b64encode(raw), base64.urlsafe_b64encode(raw)}
    texts = {form.decode() for form in encoded} | {form.decode().rstrip("=") for form in encoded}
    texts |= {
        value,
        quote(value),
        quote(value, safe=""),
        quote_plus(value),
        json.dumps(value)[1:-1],
        html.escape(value),
    }
    return texts | {raw.hex(), raw.hex().upper(), value[::-1]}
