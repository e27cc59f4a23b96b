"""A terminal with a command on it, and somebody who types: a PTY, the command in a session of its own on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import START_S


class Window:
    """A terminal with the command on it, and somebody who types."""

    def __init__(self, state: Path, command: Sequence[str]) -> None:
        self.keys, self.line = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self.line)
        self.shown = ""
        self.process = subprocess.Popen(
            # the terminal becomes its own: keys that signal, and new sizes, reach it as they reach a program
            ["setsid", "--ctty", *command],
            stdin=self.line, stdout=self.line, stderr=self.line,
            env={**os.environ, "AGENTENV_STATE_DIR": str(state), "TERM": "xterm-256color"},
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.keys, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def until(self, pattern: str) -> str:
        """What is shown up to (and with) the pattern; the rest is kept for the next time."""
        deadline = time.monotonic() + START_S
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.keys], [], [], 0.1)[0]:
                self.shown += os.read(self.keys, 65536).decode(errors="replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def run(self, script: str) -> None:
        """Returns when it is in the foreground: keys typed earlier would be for the shell."""
        self.type(f"sh -c 'echo begun\"\"; {script}'\r")
        self.until(r"begun\r\n")

    def until_prompt(self) -> str:
        return self.until(r"slot:\S+[$#] ")

    def end(self) -> int:
        """Its exit code; afterwards ``shown`` has all it wrote."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.keys], [], [], 0.1)[0]:
                self.shown += os.read(self.keys, 65536).decode(errors="replace")
        while select.select([self.keys], [], [], 0)[0]:
            self.shown += os.read(self.keys, 65536).decode(errors="replace")
        return self.process.returncode

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.line) == self.before

    def close(self) -> None:
        self.process.terminate()  # of a test that failed: the fake's children end with an orderly end only
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.keys)
        os.close(self.line)
