"""An ordinary user of this machine, with subordinate ids or without: what a test runs as somebody else than root.

Run by root, it becomes him first, in a mount namespace where this interpreter and this checkout can be reached although
they may lie below a directory that only root may enter. There, and only there, he has a name and subordinate ids.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentenv.sandbox.slotagent.build import ensure_built

REPOSITORY: Final = Path(__file__).resolve().parents[1]
UID: Final = 10_001
NAME: Final = "laptop"
FIRST: Final = 0x6000_0000
"""The first of his subordinate ids."""
_BECOME: Final = """
import os, sys
from pathlib import Path
from agentenv.sandbox.supervisor import mounts, syscalls
checkout, user, name, first, groups, *command = sys.argv[1:]
mounts.enter_private_namespace()
if first:
    lines = {"passwd": f"{name}:x:{user}:{user}::/nonexistent:/bin/sh"}
    lines["subuid"] = lines["subgid"] = f"{name}:{first}:65536"
    known = {file: Path("/etc", file).read_text() for file in lines}
    mounts.mount_tmpfs(Path("/mnt"), size_bytes=1 << 20, mode=0o755, uid=0)
    for file, line in lines.items():
        Path("/mnt", file).write_text(known[file] + line + chr(10))
        syscalls.mount(f"/mnt/{file}", f"/etc/{file}", flags=syscalls.MS_BIND)
for group in filter(None, groups.split(":")):
    Path(group, "tasks").write_text("0")
mounts.show_to_everybody(mounts.unreachable([*mounts.interpreter_directories(), Path(checkout)]))
uid = int(user)
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
os.chdir("/")
os.execv(command[0], command)
"""


def prefix(*, subordinate: bool = False, cgroups: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """The words before a command that he is to run. ``subordinate``: he has subordinate ids; ``cgroups``: he is in
    these (of version 1)."""
    if os.geteuid() != 0:
        return ()
    first = str(FIRST) if subordinate else ""
    groups = ":".join(map(str, cgroups))
    return (sys.executable, "-c", _BECOME, str(REPOSITORY), str(UID), NAME, first, groups)


def as_ordinary_user(
    command: Sequence[str],
    *,
    subordinate: bool = False,
    cgroups: tuple[Path, ...] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Have him run a command to its end, with nothing of our environment but where programs and packages are."""
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return subprocess.run(
        [*prefix(subordinate=subordinate, cgroups=cgroups), *command],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


@contextmanager
def own_directory() -> Iterator[Path]:
    """A directory of his."""
    ensure_built()  # by whoever owns the checkout: he may not write there
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        give(directory)
        yield directory


def give(*paths: Path) -> None:
    """Make these his."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, UID, UID)
            if path.is_dir():
                path.chmod(0o755)


@contextmanager
def delegated_cgroups() -> Iterator[tuple[Path, ...]]:
    """Cgroups of version 1 in which he may make others."""
    made = []
    for controller in ("memory", "pids", "cpu"):
        group = Path("/sys/fs/cgroup", controller, f"agentenv-test-{secrets.token_hex(4)}")
        group.mkdir()
        made.append(group)
        give(group, *group.iterdir())
    try:
        yield tuple(made)
    finally:
        for group in made:
            with contextlib.suppress(FileNotFoundError):
                (group / "agentenv").rmdir()
            group.rmdir()
