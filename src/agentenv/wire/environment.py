"""How large the environment of a container, an image or a lease may be, and the other texts that their programs get.

Pure, standard library only, because the privileged supervisor imports it. A call's own environment has Linux's limits
instead: what ``execve`` refuses is the result of that call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

MAX_VARIABLES: Final = 1_000
MAX_VARIABLE_BYTES: Final = 128 * 1024
"""Of one, as ``NAME=value`` and a NUL: what Linux takes (``MAX_ARG_STRLEN``)."""
MAX_ENVIRONMENT_BYTES: Final = 512 * 1024
"""Of all: a quarter of what Linux gives a program by default. So the environments of a container, an image and a lease
together leave the last quarter to a call's own, and to its arguments."""
MAX_USER_CHARS: Final = 256
MAX_PATH_CHARS: Final = 4096
"""Linux's ``PATH_MAX``."""
_MAX_SHOWN: Final = 80


def why_no_environment(env: Mapping[str, str]) -> str:
    """Why these variables cannot be the environment of a program, or are too large; empty if they can."""
    if len(env) > MAX_VARIABLES:
        return f"{len(env)} variables; at most {MAX_VARIABLES} are possible"
    total_bytes = 0
    for name, value in env.items():
        if not name or "=" in name:
            return f"{name[:_MAX_SHOWN]!r} is not a variable name"
        if why := why_no_argument(name) or why_no_argument(value):
            return f"{name[:_MAX_SHOWN]!r} {why}"
        size_bytes = len(name.encode()) + len(value.encode()) + len("=\0")
        if size_bytes > MAX_VARIABLE_BYTES:
            return f"{name[:_MAX_SHOWN]!r} takes {size_bytes} bytes; at most {MAX_VARIABLE_BYTES} are possible"
        total_bytes += size_bytes
    if total_bytes > MAX_ENVIRONMENT_BYTES:
        return f"the variables take {total_bytes} bytes; at most {MAX_ENVIRONMENT_BYTES} are possible"
    return ""


def why_no_argument(text: str) -> str:
    """Why no program can be given this text; empty if one can."""
    if "\0" in text:
        return "has a NUL"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "has half a character"
    return ""


def why_no_config(env: Mapping[str, str], user: str, workdir: str, command: Sequence[str] = ()) -> str:
    """Why the programs of a slot cannot be started so; empty if they can. ``command``: an image's ENTRYPOINT and CMD,
    which has the limits of an environment."""
    if why := why_no_environment(env):
        return f"env: {why}"
    if len(user) > MAX_USER_CHARS or why_no_argument(user):
        return f"user: {user[:_MAX_SHOWN]!r} has more than {MAX_USER_CHARS} characters, or a NUL"
    if len(workdir) > MAX_PATH_CHARS or why_no_argument(workdir):
        return f"workdir: {workdir[:_MAX_SHOWN]!r} has more than {MAX_PATH_CHARS} characters, or a NUL"
    if len(command) > MAX_VARIABLES or sum(len(each.encode()) + 1 for each in command) > MAX_ENVIRONMENT_BYTES:
        return f"command: more than {MAX_VARIABLES} arguments, or {MAX_ENVIRONMENT_BYTES} bytes"
    return ""
