"""How long agentenv waits for what takes milliseconds on an idle machine, before it gives up. Standard library only,
but for the error.

Every such deadline, and every default of a setting that is one, is written ``scaled(SECONDS)``: seconds on a machine of
ordinary speed, times ``$AGENTENV_TIME_FACTOR``. The factor is for machines that are slower by far: emulated ones, and
hosts so loaded that slots do not start in time. It must be the same for a client and the containers it uses: containers
started by it inherit it, those of a Nomad job take it from the job's environment. What a caller asks for by itself
(``timeout_s`` of a call) is never scaled, nor are intervals at which something is looked at.
"""

from __future__ import annotations

import os
from typing import Final

from agentenv.errors import ConfigError

VARIABLE: Final = "AGENTENV_TIME_FACTOR"
LARGEST: Final = 100.0


def time_factor(text: str | None) -> float:
    """The factor as the environment gives it; 1 without it. Raises ConfigError unless it is a number of 1 to 100."""
    if not text:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= LARGEST:  # NaN is not either
        raise ConfigError(VARIABLE, f"{text!r} is not a number of 1 to {LARGEST:g}", next_step="unset it, or give one")
    return factor


TIME_FACTOR: Final = time_factor(os.environ.get(VARIABLE))


def scaled(seconds: float) -> float:
    """A deadline of so many seconds, on this machine."""
    return seconds * TIME_FACTOR


ACQUIRE_TIMEOUT_S: Final = scaled(30.0)
START_TIMEOUT_S: Final = scaled(60.0)
CALL_TIMEOUT_S: Final = scaled(60.0)
"""Defaults, wherever such a time can be set: of waiting for a slot, of a container's start, of a call."""

# Deadlines of one wait in several processes. Whoever is nearer to the cause has to give up first: its answer says what
# is wrong, where a client that gave up before would see a lost connection, and try again. ORDERED has the order.
KILL_DEADLINE_S: Final = scaled(10.0)
"""The supervisor, for the end of a slot's processes."""
COPY_S: Final = scaled(40.0)
"""The supervisor, for a copy of a workspace: 2 GiB take about 2 s."""
SEAL_S: Final = scaled(60.0)
"""The server, for the supervisor to seal a slot: killing (10 s), verifying (5 s), waiting until a start is possible (15
s), and starting (10 s, and 10 s more for a network)."""
REROOT_S: Final = scaled(60.0)
"""The server, for a lease with a root: as a seal, and the same again for another attempt."""
SLOT_REMADE_S: Final = scaled(75.0)
"""The client, for what makes a slot anew: an action, or a lease with a root."""
RELEASE_S: Final = scaled(20.0)
"""The server, for the supervisor to reset a slot, before it answers that it does not know yet."""
RELEASE_TIMEOUT_S: Final = scaled(30.0)
"""The client, for that answer. A reset that kills a fork bomb may take seconds; dead containers are found by the
heartbeat, not by this."""
LAYER_PART_S: Final = scaled(30.0)
"""The server, for the supervisor to hand over more of a checkpoint's layer."""
LAYER_SILENCE_S: Final = scaled(60.0)
"""The client, for more of it."""
SERVING_DEADLINE_S: Final = scaled(30.0)
"""The supervisor, for its server to serve; whoever starts the container waits ``START_TIMEOUT_S``."""

ORDERED: Final = {
    "a slot is sealed or copied": (KILL_DEADLINE_S, COPY_S, SEAL_S, SLOT_REMADE_S),
    "a slot gets a root": (KILL_DEADLINE_S, REROOT_S, SLOT_REMADE_S),
    "a slot is released": (KILL_DEADLINE_S, RELEASE_S, RELEASE_TIMEOUT_S),
    "a layer is fetched": (LAYER_PART_S, LAYER_SILENCE_S),
    "a container starts": (SERVING_DEADLINE_S, START_TIMEOUT_S),
}
"""From the innermost process outward: each is longer than the one before."""
