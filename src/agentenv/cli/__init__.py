"""The ``agentenv`` command, one file per verb."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``agentenv`` command; ends the process with the verb's exit code."""
    from agentenv.cli.app import app  # late: `import agentenv.cli` alone must stay cheap

    app()


__all__ = ["main"]
