"""The ``agentenv`` command as tests use it: in this process, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner

from agentenv.cli.app import app
from tests.waiting import START_S


class Command:
    """The command with changes of this process' environment: a name with None is removed from it."""

    def __init__(self, env: Mapping[str, str | None]) -> None:
        self.env = dict(env)

    @property
    def environment(self) -> dict[str, str]:
        """This process' environment with the changes made."""
        return {name: value for name, value in {**os.environ, **self.env}.items() if value is not None}

    def run(self, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a verb run in this process, which saves starting an interpreter."""
        done = CliRunner().invoke(app, list(arguments), env=self.env, input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    def told(self, *arguments: str) -> Any:
        """What the verb writes with ``--json``."""
        code, stdout, stderr = self.run(*arguments, "--json")
        assert stdout, (code, stderr)
        return json.loads(stdout)

    @contextmanager
    def started(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.PIPE
    ) -> Iterator[subprocess.Popen[str]]:
        """The command as a process, for a verb that stays or is sent signals. If the test leaves it running it is
        ended in order, so that nothing of it stays."""
        with subprocess.Popen(
            [sys.executable, "-c", "from agentenv.cli import main; main()", *arguments],
            env=self.environment,
            start_new_session=True, text=True, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.communicate(timeout=START_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        raise
