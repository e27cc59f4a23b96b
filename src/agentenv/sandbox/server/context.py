"""State shared by all slots of one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentenv.sandbox.descriptors import MOST_PER_SLOT
from agentenv.sandbox.server.calls import SlotCall
from agentenv.sandbox.server.leases import LostLeases
from agentenv.sandbox.server.metrics import Statistics
from agentenv.sandbox.server.paused import PausedSlots
from agentenv.sandbox.server.poller import Poller
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.wire.spec import SlotLimits


@dataclass(frozen=True)
class ServerContext:
    """``index`` finds any call of any lease by its id; ``env`` is the environment of every command; for
    ``shell`` see :class:`agentenv.sandbox.server.tools.bash.ShellPool`."""

    poller: Poller
    supervisor: SupervisorLink
    env: dict[str, str]
    output_bytes: int
    reply_memory: int
    spare_shells: bool
    shell: str = ""
    given_env: Mapping[str, str] = field(default_factory=dict)
    """The user's part of ``env``."""
    limits: SlotLimits = field(default_factory=SlotLimits)
    """Limits of the slots."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """See :attr:`agentenv.sandbox.control_protocol.Hello.refused`."""
    descriptors: int = MOST_PER_SLOT
    """Maximum number of this process's file descriptors per slot."""
    statistics: Statistics = field(default_factory=Statistics)
    index: dict[str, SlotCall] = field(default_factory=dict)
    lost: LostLeases = field(default_factory=LostLeases)
    paused: PausedSlots = field(default_factory=PausedSlots)
    changed: Callable[[int], None] = lambda _: None
    """Called with a slot's number when its state or lease changes."""
