"""The ``agentenv`` command, one file per verb."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``agentenv`` command; ends the process with the verb's exit code."""
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before a verb runs there is nothing to close, and a traceback of imports tells nobody anything.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agentenv.cli.app import app  # late: `import agentenv.cli` alone must stay cheap

    app()


def _open_standard_streams() -> None:
    """Those that were closed are empty: otherwise the next files opened would be them, and Python has none."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # of the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


__all__ = ["main"]
