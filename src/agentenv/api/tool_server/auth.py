"""Bearer tokens: read from a file (never argv or environment), compared in constant time."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError

_SHORTEST: Final = 16
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


def checked_token(token: str, where: str) -> str:
    """``token``, if it is valid. Raises ConfigError when it is too short or cannot be sent in a header."""
    if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
        raise ConfigError(where, "contains no usable token", next_step=f"at least {_SHORTEST} printable characters")
    return token


def read_token(path: Path) -> str:
    """The token in a file. Raises: ConfigError."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("token_file", f"{path} cannot be read: {error}") from error
    return checked_token(text, f"token_file {path}")


def token_from(path: Path) -> str:
    """The token in a file; if the file does not exist, it is created with a new token, readable by its owner only.

    Raises ConfigError when it can neither be read nor created.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError("token_file", f"{path} cannot be created: {error}") from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(file, "w") as opened:
        opened.write(token + "\n")
    return token


def authorized(header: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header carries this bearer token."""
    kind, _, given = (header or "").partition(" ")
    given_raw = given.strip().encode("utf-8", "replace")
    return hmac.compare_digest(given_raw, token.encode()) and kind.lower() == "bearer"
