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
