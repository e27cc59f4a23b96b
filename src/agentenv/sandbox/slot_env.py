"""The environment of commands in a slot: its variables, and git's settings. Pure, standard library only."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentenv.sandbox.slot_paths import WORKSPACE, is_root

PROGRAMS: Final = "/run/agentenv/bin"
"""A directory of links that comes last on PATH: it has a ``python`` where the machine only has a ``python3``."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PAGERS = {"PAGER": "cat", "MANPAGER": "cat", "GIT_PAGER": "cat", "LESS": "-FRX"}
SLOT_ENV: Final[Mapping[str, str]] = MappingProxyType(
    {
        "PATH": f"{PATH}:{PROGRAMS}",
        "HOME": WORKSPACE,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LC_CTYPE": "C.UTF-8",
        "TMPDIR": "/tmp",  # noqa: S108 - the slot's own
        "TERM": "dumb",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        **_PAGERS,
    }
)
"""What every command in a slot starts with.

LC_CTYPE alone makes text UTF-8. LANG would do the same, but every program would open and map a dozen locale files
equal to those of C: 0.1 core-ms for each of thousands a second. Pagers print and exit, because nobody turns pages.
PIP_BREAK_SYSTEM_PACKAGES: the system is read-only, so pip installs into the workspace and can break nothing; without
it Debian's pip refuses (externally-managed-environment)."""

SEALED_ENV: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/tmp/.cache",  # noqa: S108 - of the slot's own, which a seal makes anew
        "PYTHONNOUSERSITE": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
    }
)
"""Environment of every command in a sealed slot; a call's own variables are added to it. Home is no longer the
workspace but a directory that does not exist, and cannot be created where the root is read-only: the files that
programs execute or obey in a home directory (usercustomize, .bashrc, .gitconfig, .local/bin, pip.conf) could have
been written by the policy."""

GITCONFIG: Final = """\
[user]
\tname = agent
\temail = agent@localhost
[safe]
\tdirectory = *
"""
"""git's system configuration in a slot. The identity is a setting and not GIT_AUTHOR_NAME and its like, which would
win over ``git config user.name``. ``safe.directory``: repositories bound into slots belong to other uids, and git
would refuse to clone them; the environment cannot tell it, because git does not pass it on to the clone's source."""


def command_env(extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a command in a slot, before the call's own; ``extra`` (the user's ``sandbox_env``)
    wins."""
    return {**SLOT_ENV, **extra}


_IMAGE_ENV = {
    "PATH": PATH,
    "SHELL": "/bin/bash",  # without it every bash looks its user up in /etc/passwd
    "TERM": "dumb",
    "LC_CTYPE": "C.UTF-8",
    **_PAGERS,
}
_ROOTS_OWN = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}


def image_env(image: Mapping[str, str], extra: Mapping[str, str], user: str = "", shell: str = "") -> dict[str, str]:
    """The whole environment of a command in an image slot, before the call's own: what the image sets wins over our
    defaults, and ``extra`` (the user's ``sandbox_env``) over both. See :func:`env_of` for ``user``. ``shell``: path of
    a bash for an image that has none; its directory is last on PATH, so that scripts find it too."""
    env = env_of(user, {**_IMAGE_ENV, **({"SHELL": shell} if shell else {}), **image, **extra})
    return {**env, "PATH": f"{env['PATH']}:{posixpath.dirname(shell)}"} if shell else env


def env_of(user: str, env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for the commands of another user of the image slot: HOME, USER and LOGNAME are root's, or left to slotas,
    which knows the accounts of the slot; unless they were set to something else."""
    if is_root(user):
        return {**_ROOTS_OWN, **env}
    return {name: value for name, value in env.items() if _ROOTS_OWN.get(name) != value}


def proxy_env(port: int) -> dict[str, str]:
    """Variables that lead programs to the slot's proxy at ``port`` of its loopback. curl and what uses it (git) read
    the lower-case ``http_proxy`` only; Python, Go and others read either."""
    url, direct = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    upper = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": direct}
    return upper | {name.lower(): value for name, value in upper.items()}
