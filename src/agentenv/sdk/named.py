"""Sandboxes with names: leases of a farm service that outlast the process that opened them, and are found again.

The service keeps nothing for it. A lease's tags name it in every list of leases, and its tag ``item`` says what an ask
has to repeat to be granted the same lease.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Final, Self

from agentenv.errors import ConfigError
from agentenv.wire.farm import LeaseView
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.roots import RootSpec

NAMED: Final = "named"
"""The tag ``environment`` of their leases."""
IDLE_TIMEOUT_S: Final = 600.0
_LEAST_S: Final = 5.0
"""Twice the time between two heartbeats."""
_MOST_S: Final = 86_400.0
_ROOTED: Final = "root"


@dataclass(frozen=True)
class NamedSandbox:
    """A sandbox of a farm service, as :meth:`agentenv.Farm.sandboxes` lists it."""

    name: str
    container: str
    idle_timeout_s: float
    """It ends when no process has been connected to it for this long."""


@dataclass(frozen=True)
class Mark:
    """What the tag ``item`` of such a lease says. ``nonce``: this name's lease is not an earlier one's."""

    nonce: str
    idle_timeout_s: float
    has_root: bool

    @classmethod
    def new(cls, idle_timeout_s: float, root: RootSpec | None) -> Self:
        """Of a lease that is yet to be made."""
        if not _LEAST_S <= idle_timeout_s <= _MOST_S:
            raise ConfigError(
                "idle_timeout_s", f"got {idle_timeout_s!r}", next_step=f"allowed: {_LEAST_S:g} to {_MOST_S:g} seconds"
            )
        return cls(secrets.token_hex(8), float(idle_timeout_s), root is not None)

    @classmethod
    def parse(cls, item: str) -> Self | None:
        """None: it is none."""
        nonce, _, rest = item.partition("/")
        seconds, _, kind = rest.partition("/")
        try:
            return cls(nonce, float(seconds), kind == _ROOTED)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.nonce}/{self.idle_timeout_s!r}/{_ROOTED if self.has_root else 'plain'}"

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
    """Of the leases of that name, the first to be kept first: one, unless two processes have opened it at once."""
    found = [mark for lease in leases if lease.trajectory == name and (mark := Mark.parse(lease.tags.item)) is not None]
    return sorted(found, key=lambda mark: mark.nonce)


def listed(leases: tuple[LeaseView, ...]) -> list[NamedSandbox]:
    """By name."""
    found = [
        NamedSandbox(lease.trajectory, lease.container, mark.idle_timeout_s)
        for lease in leases
        if (mark := Mark.parse(lease.tags.item)) is not None
    ]
    return sorted(found, key=lambda one: one.name)
