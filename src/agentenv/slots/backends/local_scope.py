"""Where the cgroups of a local container are made: below this process's own cgroup, or in a scope that systemd makes.

A login session's cgroup is root's, so without a scope the slots of an ordinary user would have no limits of their own;
and systemd ends what is in a service's cgroup with the service, which detached containers outlive.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from agentenv.config import launch_environment
from agentenv.deadlines import scaled
from agentenv.sandbox.supervisor.limits import CONTROLLERS, own_directory_v2

logger = logging.getLogger(__name__)

_LIMITS: Final = frozenset(CONTROLLERS)
_SHOW_CONTROLLERS: Final = "cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/cgroup.controllers"
_CURE: Final = "loginctl enable-linger"
_TRIAL_S: Final = scaled(10.0)
_SYSTEMD: Final = Path("/run/systemd")
_LINGER: Final = Path("/var/lib/systemd/linger")


@dataclass(frozen=True)
class Place:
    """This process's place on a machine that systemd runs, with cgroup v2.

    ``unit``: its cgroup, from the root of the hierarchy. ``able``: groups with limits of memory, processes and CPU can
    be made in it. ``lingers``: the manager that makes its scopes (root's: the system's) outlives its user's last login
    session.
    """

    uid: int
    unit: PurePosixPath
    able: bool
    lingers: bool

    def wants_scope(self, *, detached: bool) -> bool:
        """Whether a container is to have a scope of its own. ``detached``: it outlives whoever starts it.

        A user's scopes are in the same slice as his sessions, so the limits of the one are those of the other. Of what
        runs elsewhere (a service with limits, a batch job), only detached containers leave the cgroup.
        """
        of_session = self.uid != 0 and f"user-{self.uid}.slice" in self.unit.parts
        if detached and self.unit.name.endswith(".service"):
            return True
        return of_session and not self.able

    @property
    def lasts(self) -> bool:
        """Whether a detached container in a scope lasts as long as one beside this process."""
        return self.lingers or f"user@{self.uid}.service" in self.unit.parts


@dataclass(frozen=True)
class Scope:
    """``words``: in front of a container's command, they start it in the scope. ``controllers``: of memory, processes
    and CPU, those that slots can be limited by there."""

    words: tuple[str, ...]
    controllers: frozenset[str]


def find_place() -> Place | None:
    """None: no systemd, no cgroup v2 with controllers, or no manager of this user's runs."""
    uid = os.geteuid()
    manager = _SYSTEMD if uid == 0 else Path(_runtime_dir(uid)) / "systemd"
    if not (_SYSTEMD / "system").is_dir() or not (manager / "private").exists() or not shutil.which("systemd-run"):
        return None
    found = own_directory_v2(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if found is None or not _controllers(found[0]):
        return None
    top, own = found
    able = _controllers(own) == _LIMITS and os.access(own, os.W_OK)
    return Place(uid, PurePosixPath("/") / own.relative_to(top), able, lingers=uid == 0 or _lingers(uid))


def make_scope(container: str, *, detached: bool) -> Scope | None:
    """The scope that this container is to be started in; None where it needs none, or where systemd makes none with
    limits, which is logged (the container then reports what it lacks). Takes up to 10 s."""
    here = find_place()
    if here is None or not here.wants_scope(detached=detached):
        return None
    if detached and not here.lasts:
        logger.warning(
            "%s gets no scope of systemd's, which would end with your last login session: %s", container, _CURE
        )
        return None
    name = f"agentenv-{container}-{secrets.token_hex(4)}"
    try:
        tried = subprocess.run(
            [*_systemd_run(here.uid, f"{name}-trial"), "sh", "-c", _SHOW_CONTROLLERS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=launch_environment(),
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        found, refused = frozenset[str](), str(error)
    else:
        found, refused = _LIMITS.intersection(tried.stdout.split()), tried.stderr.strip()
    if found:
        return Scope(_systemd_run(here.uid, name), found)
    logger.warning("systemd makes no scope with limits for %s: %s", container, refused or "it has no controllers")
    return None


def _controllers(directory: Path) -> frozenset[str]:
    try:
        return _LIMITS.intersection((directory / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()


def _systemd_run(uid: int, name: str) -> tuple[str, ...]:
    """A command that executes what follows it in a new scope; the process stays the same. The scope has no limit of its
    own on tasks: each slot has one, and so has the slice."""
    scope = ("--scope", "--quiet", "--collect", f"--unit={name}", "-p", "Delegate=yes", "-p", "TasksMax=infinity", "--")
    if uid == 0:
        return ("systemd-run", "--slice-inherit", *scope)
    return ("env", f"XDG_RUNTIME_DIR={_runtime_dir(uid)}", "systemd-run", "--user", *scope)


def _runtime_dir(uid: int) -> str:
    """Where a user's manager listens. The variable of that name is missing where somebody became the user by su or
    sudo."""
    return f"/run/user/{uid}"


def _lingers(uid: int) -> bool:
    try:
        return (_LINGER / pwd.getpwuid(uid).pw_name).exists()
    except KeyError:
        return False
