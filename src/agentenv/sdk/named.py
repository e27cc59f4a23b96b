"""Sandboxes with names: leases of a farm service that outlast the process that opened them, and are found again.

The service keeps nothing for it. A lease's tags name it in every list of leases, and its tag ``item`` says what an ask
has to repeat to be granted the same lease. One that is paused is kept by its container, with the same tags.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, get_args

from agentenv.deadlines import scaled
from agentenv.errors import ConfigError
from agentenv.wire.farm import LeaseView, PausedView
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.roots import RootSpec

NAMED: Final = "named"
"""The tag ``environment`` of their leases."""
IDLE_TIMEOUT_S: Final = 600.0
_LEAST_S: Final = scaled(5.0)
"""Twice the time between two heartbeats."""
_MOST_S: Final = 86_400.0
_ROOTED: Final = "root"
_RESUMED: Final = "-"


OnIdle = Literal["kill", "pause"]
"""What becomes of a sandbox with a name that nobody has been connected to for its idle timeout."""


@dataclass(frozen=True)
class NamedSandbox:
    """A sandbox of a farm service, as :meth:`agentenv.Farm.sandboxes` lists it."""

    name: str
    container: str
    idle_timeout_s: float
    """It is killed or paused when no process has been connected to it for this long."""
    on_idle: OnIdle = "kill"
    state: Literal["running", "paused"] = "running"
    paused_s: float = 0.0
    """For how long it has been paused."""


@dataclass(frozen=True)
class Mark:
    """What the tag ``item`` of such a lease says. ``nonce``: this name's lease is not an earlier one's."""

    nonce: str
    idle_timeout_s: float
    has_root: bool
    on_idle: OnIdle = "kill"

    @classmethod
    def new(cls, idle_timeout_s: float, root: RootSpec | None, on_idle: OnIdle = "kill") -> Self:
        """Of a lease that is yet to be made."""
        if not _LEAST_S <= idle_timeout_s <= _MOST_S:
            raise ConfigError(
                "idle_timeout_s", f"got {idle_timeout_s!r}", next_step=f"allowed: {_LEAST_S:g} to {_MOST_S:g} seconds"
            )
        if on_idle not in get_args(OnIdle):
            raise ConfigError("on_idle", f"got {on_idle!r}", next_step=f"allowed: {', '.join(get_args(OnIdle))}")
        return cls(secrets.token_hex(8), float(idle_timeout_s), root is not None, on_idle)

    def resumed(self) -> Self:
        """Of the lease that goes on with this one's files."""
        return replace(self, nonce=f"{_RESUMED}{secrets.token_hex(8)}")

    @property
    def is_resumed(self) -> bool:
        """Whether its lease goes on with the files of an earlier one."""
        return self.nonce.startswith(_RESUMED)

    @classmethod
    def parse(cls, item: str) -> Self | None:
        """None: it is none."""
        nonce, _, rest = item.partition("/")
        seconds, _, rest = rest.partition("/")
        kind, _, on_idle = rest.partition("/")
        try:
            return cls(nonce, float(seconds), kind == _ROOTED, "pause" if on_idle == "pause" else "kill")
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.nonce}/{self.idle_timeout_s!r}/{_ROOTED if self.has_root else 'plain'}/{self.on_idle}"

    def request(self, name: str, root: RootSpec | None, container: str = "", *, existing: bool = False) -> SlotRequest:
        """The request for the lease."""
        return SlotRequest(
            (name,),
            Tags(environment=NAMED, kind="interactive", item=str(self)),
            hashlib.sha256(f"{name}\0{self}".encode()).hexdigest()[:40],
            self.idle_timeout_s,
            root,
            container,
            existing=existing,
        )


def marks_of(leases: tuple[LeaseView, ...], name: str) -> list[Mark]:
    """Of the leases of that name, the one to be kept first: one, unless two processes have opened it at once. Then that
    is the one that was granted first: whoever has it may have found no other. One that goes on with earlier files comes
    before those that are new."""
    found = [
        (not mark.is_resumed, -(lease.age_s or 0.0), mark.nonce, mark)
        for lease in leases
        if lease.trajectory == name and (mark := Mark.parse(lease.tags.item)) is not None
    ]
    return [mark for *_, mark in sorted(found, key=lambda one: one[:-1])]


def paused_of(paused: tuple[PausedView, ...], name: str) -> tuple[PausedView, Mark] | None:
    """What was paused of that name last; it may have been ``resumed`` since."""
    found = [
        (one, mark) for one in paused if one.trajectory == name and (mark := Mark.parse(one.tags.item)) is not None
    ]
    return min(found, key=lambda pair: pair[0].paused_s, default=None)


def listed(leases: tuple[LeaseView, ...], paused: tuple[PausedView, ...]) -> list[NamedSandbox]:
    """By name. What a container has paused is paused, though the farm may not know yet that its lease has ended."""
    found = {
        lease.trajectory: NamedSandbox(lease.trajectory, lease.container, mark.idle_timeout_s, mark.on_idle)
        for lease in leases
        if (mark := Mark.parse(lease.tags.item)) is not None
    }
    for name in {one.trajectory for one in paused}:
        if (latest := paused_of(paused, name)) is not None:
            one, mark = latest
            shown = NamedSandbox(name, one.container, mark.idle_timeout_s, mark.on_idle)
            found[name] = shown if one.resumed else replace(shown, state="paused", paused_s=round(one.paused_s, 1))
    return sorted(found.values(), key=lambda one: one.name)
