"""The ``agentenv`` command, one file per verb."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``agentenv`` command; ends the process with the verb's exit code."""
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before a verb runs there is nothing to close, and a traceback of imports helps no one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _check_environment()
    from agentenv.cli.app import app  # late: `import agentenv.cli` alone must stay cheap

    app()


def _check_environment() -> None:
    """What is read when agentenv is imported, before any verb could report that it is wrong."""
    from agentenv.errors import ConfigError

    try:
        import agentenv.deadlines  # noqa: F401
    except ConfigError as error:
        from agentenv.cli.output import exit_code_of, print_error

        print_error(error, as_json="--json" in sys.argv)
        sys.exit(exit_code_of(error))


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
