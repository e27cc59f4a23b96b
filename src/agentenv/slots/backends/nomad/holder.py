"""The owner of a job: its description stored under the lock, and whether its process can still be alive. No
requests."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from agentenv._version import __version__

_PROC = Path("/proc")


@dataclass(frozen=True)
class Holder:
    """The items of the job's variable ``owner``."""

    run: str = ""
    user: str = ""
    host: str = ""
    pid: str = ""
    process: str = ""
    """Boot, pid namespace, pid and start time: unique to a process. Empty without /proc."""
    agentenv: str = ""
    since: str = ""

    @classmethod
    def ourselves(cls, run: str) -> Self:
        """This process. ``run``: its name for users; by default the program's name."""
        return cls(
            run=run or Path(sys.argv[0]).name,
            user=_user(),
            host=socket.gethostname(),
            pid=str(os.getpid()),
            process=process_mark(os.getpid()),
            agentenv=__version__,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    @classmethod
    def of(cls, items: Mapping[str, str]) -> Self:
        """Parse the items as written by any version."""
        return cls(**{name: items.get(name, "") for name in cls.__dataclass_fields__})

    def items(self) -> dict[str, str]:
        """The items to write. Nomad accepts no empty values."""
        return {name: value for name, value in asdict(self).items() if value}

    def __str__(self) -> str:
        who = f"{self.user or 'somebody'} on {self.host or 'an unknown host'}"
        return f"{self.run or 'a run'!r} ({who}, pid {self.pid}, agentenv {self.agentenv}) since {self.since}"

    def is_dead(self) -> bool:
        """Whether its process is known to have ended: it ran on this machine and no longer exists."""
        own = process_mark(os.getpid())
        here = bool(own) and self.process.rsplit(":", 2)[0] == own.rsplit(":", 2)[0]
        return here and self.pid.isdigit() and process_mark(int(self.pid)) != self.process


def process_mark(pid: int) -> str:
    """See :attr:`Holder.process`; empty when there is no such process, or it has ended and only waits to be reaped."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else f"{boot}:{namespace}:{pid}:{fields[19]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a uid without a name
        return str(os.getuid())
