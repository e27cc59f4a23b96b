"""Commands as another user, without a copy of the test process: `subprocess` forks when it has to set the user itself,
and to copy a process of hundreds of MiB takes as long as most of what is tested with it."""

from __future__ import annotations

import os


def as_user(uid: int) -> tuple[str, ...]:
    """What to put before a command: it runs as this user and group, or as ours where we are not root."""
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--") if os.geteuid() == 0 else ()
