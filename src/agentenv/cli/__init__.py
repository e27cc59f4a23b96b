"""The ``agentenv`` command, one file per verb."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the ``agentenv`` command; ends the process with the verb's exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before a verb runs there is nothing to close, and a traceback of imports tells nobody anything.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agentenv.cli.app import app  # late: `import agentenv.cli` alone must stay cheap

    app()


__all__ = ["main"]
