"""An ordinary user as the root of a user namespace of his own, with the ids that the machine's administrator has given
him: subuid(5), subgid(5), and the programs newuidmap(1) and newgidmap(1), which alone may map them.

Inside, 0 is the user himself and 1 to 65,536 are his subordinate ids. Standard library only. As a program it runs a
command in such a namespace: ``python -m agentenv.subordinate_ids COMMAND…``, to delete files that have those ids.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv import apparmor

WANTED: Final = 65_536
"""Subordinate ids of users and as many of groups: what useradd(8) gives."""
PROGRAMS: Final = ("newuidmap", "newgidmap")
FILES: Final = (Path("/etc/subuid"), Path("/etc/subgid"))
_FIRST: Final = 100_000
"""The first subordinate id that useradd(8) gives (login.defs(5): SUB_UID_MIN)."""
_CLONE_NEWNS: Final = 0x0002_0000
_CLONE_NEWUSER: Final = 0x1000_0000
_FAILED: Final = 125
"""Exit code of a namespace that could not be made."""


@dataclass(frozen=True)
class Range:
    """Ids from ``first`` on."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The id after the last."""
        return self.first + self.count


@dataclass(frozen=True)
class Maps:
    """What a namespace is given: of users and of groups, each extent as (inside, outside, count)."""

    uids: tuple[tuple[int, int, int], ...]
    gids: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Refusal:
    """Why there is no such namespace. ``cures``: commands for root."""

    problem: str
    cures: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.problem} (as root: {'; '.join(self.cures)})" if self.cures else self.problem


def ranges_of(text: str, owners: Collection[str]) -> list[Range]:
    """The ranges of a subuid(5) or subgid(5) file of these owners (a user's name, and his uid in digits), in its order.
    What overlaps an earlier one is left out, as are lines that are malformed. Pure."""
    found: list[Range] = []
    for owner, given in _lines(text):
        if owner in owners and all(given.end <= one.first or one.end <= given.first for one in found):
            found.append(given)
    return found


def first_free(texts: Iterable[str]) -> int:
    """An id above all ids in these files, as useradd(8) chooses it. Pure."""
    return max([_FIRST, *(given.end for text in texts for _, given in _lines(text))])


def _lines(text: str) -> Iterator[tuple[str, Range]]:
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit() and int(fields[2]):
            yield fields[0], Range(int(fields[1]), int(fields[2]))


def extents(own: int, ranges: Iterable[Range]) -> tuple[tuple[int, int, int], ...]:
    """0 for the user himself, and at most :data:`WANTED` ids of his from 1 on, without a gap: of his largest range
    first, because who needs many needs them side by side. Pure."""
    made, inside = [(0, own, 1)], 1
    for one in sorted(ranges, key=lambda one: (-one.count, one.first)):
        count = min(one.count, WANTED + 1 - inside)
        if count > 0:
            made.append((inside, one.first, count))
            inside += count
    return tuple(made)


def lacking(maps: Maps, user: str, programs: Collection[str], free: int) -> Refusal | None:
    """Why a user of these maps cannot have the namespace; None if he can. ``programs``: those of :data:`PROGRAMS` that
    are there; ``free``: from where on nobody has ids. Pure."""
    problems, cures = [], []
    files = [str(file) for file, of in zip(FILES, (maps.uids, maps.gids), strict=True) if _count(of) < WANTED]
    if files:
        span = f"{free}-{free + WANTED - 1}"
        problems.append(f"user {user} has no {WANTED} ids in {' and '.join(files)}")
        cures.append(f"usermod --add-subuids {span} --add-subgids {span} {user}")
    if missing := [name for name in PROGRAMS if name not in programs]:
        problems.append(f"there is no {' and no '.join(missing)}")
        cures.append("apt-get install uidmap")
    return Refusal("; ".join(problems), tuple(cures)) if problems else None


def _count(of: Iterable[tuple[int, int, int]]) -> int:
    return sum(count for inside, _, count in of if inside)


def own_maps(files: Sequence[Path] = FILES) -> Maps:
    """The maps of the user who runs this process; without subordinate ids they have only himself."""
    owners = {user_name(), str(os.getuid())}
    uids, gids = (ranges_of(_text(file), owners) for file in files)
    return Maps(extents(os.getuid(), uids), extents(os.getgid(), gids))


def user_name() -> str:
    """The user's name, or his uid where he has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def refusal() -> Refusal | None:
    """Why the user who runs this process cannot be root of such a namespace, as far as files tell; None if he can."""
    programs = [name for name in PROGRAMS if shutil.which(name)]
    return lacking(own_maps(), user_name(), programs, first_free(map(_text, FILES)))


def refusal_when_tried() -> Refusal | None:
    """The same, tried in a process that ends then."""
    if found := refusal():
        return found
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter(own_maps())
            # AppArmor of Ubuntu lets everybody have a namespace, and gives its root no rights.
            _unshare(_CLONE_NEWNS, "root of a user namespace has no rights here")
        except BaseException as error:
            os.write(write, str(getattr(error, "strerror", "") or error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return Refusal(said) if said else None


def enter(maps: Maps) -> None:
    """Make the calling process, which has one thread, the root of a new user namespace. Raises OSError; the process has
    no ids then, and can only end."""
    apparmor.take_profile()
    go_read, go_write = os.pipe()
    said_read, said_write = os.pipe()
    pid = os.getpid()
    mapper = os.fork()  # it stays outside, where it has the right to map
    if mapper == 0:
        os.close(go_write)
        os.close(said_read)
        _map_when_told(go_read, said_write, pid, maps)
    os.close(go_read)
    os.close(said_write)
    try:
        _unshare(_CLONE_NEWUSER, "this machine refuses user namespaces")
        os.write(go_write, b"m")
        with os.fdopen(said_read, "rb", closefd=False) as said:
            if reason := said.read().decode(errors="replace"):
                raise OSError(reason)
    finally:
        os.close(go_write)
        os.close(said_read)
        os.waitpid(mapper, 0)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _unshare(flag: int, refused: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flag) < 0:
        number = ctypes.get_errno()
        settings = "user.max_user_namespaces and kernel.unprivileged_userns_clone"
        profile = f"under AppArmor, load the profile {apparmor.PROFILE}: agentenv doctor --cure"
        raise OSError(number, f"{refused}: {os.strerror(number)} (see sysctl {settings}; {profile})")


def _map_when_told(go: int, said: int, pid: int, maps: Maps) -> None:
    """In the forked child. Never returns; what it writes to ``said`` is why it failed."""
    try:
        if os.read(go, 1):
            for program, of in zip(PROGRAMS, (maps.uids, maps.gids), strict=True):
                numbers = [str(number) for extent in of for number in extent]
                done = subprocess.run(
                    [program, str(pid), *numbers], stdin=subprocess.DEVNULL, capture_output=True, check=False
                )
                if done.returncode:
                    os.write(said, done.stderr.strip() or f"{program} failed".encode())
                    break
    except BaseException as error:
        os.write(said, str(error).encode())
    finally:
        os._exit(0)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def main(command: list[str]) -> int:
    """Become the command, as root of the namespace."""
    try:
        if found := refusal():
            raise OSError(str(found))
        enter(own_maps())
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{error}\n")
    return _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
