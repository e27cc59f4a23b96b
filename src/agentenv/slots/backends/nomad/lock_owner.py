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
from agentenv.process_marks import own_mark, process_mark


@dataclass(frozen=True)
class LockOwner:
    """The items of the job's variable ``owner``."""

    run: str = ""
    user: str = ""
    host: str = ""
    pid: str = ""
    process: str = ""
    """See :func:`agentenv.process_marks.process_mark`."""
    agentenv: str = ""
    since: str = ""
    url: str = ""
    """Address of the farm service that it is; empty for others."""
    task: str = ""
    """Allocation and task of the Nomad job that it runs in; empty outside Nomad."""

    @classmethod
    def ourselves(cls, run: str, url: str = "") -> Self:
        """This process. ``run``: its name for users; by default the program's name."""
        return cls(
            run=run or Path(sys.argv[0]).name,
            user=_user(),
            host=socket.gethostname(),
            pid=str(os.getpid()),
            process=own_mark(),
            agentenv=__version__,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            url=url,
            task=_task(),
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
        where = f" at {self.url}" if self.url else ""
        return f"{self.run or 'a run'!r}{where} ({who}, pid {self.pid}, agentenv {self.agentenv}) since {self.since}"

    def is_dead(self) -> bool:
        """Whether its process is known to have ended: it ran on this machine and no longer exists, or it ran as the
        Nomad task that this process is of, which Nomad has restarted since."""
        own = own_mark()
        if not own:
            return False
        if self.process.rsplit(":", 2)[0] == own.rsplit(":", 2)[0]:
            return self.pid.isdigit() and process_mark(int(self.pid)) != self.process
        # Processes of one run of a task share their boot and pid namespace, also those of `nomad alloc exec`.
        return bool(self.task) and self.task == _task()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a uid without a name
        return str(os.getuid())


def _task() -> str:
    allocation, task = os.environ.get("NOMAD_ALLOC_ID", ""), os.environ.get("NOMAD_TASK_NAME", "")
    return f"{allocation}/{task}" if allocation and task else ""
