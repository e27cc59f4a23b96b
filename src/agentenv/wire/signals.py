"""Names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals, which have no name in Python, are given by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
