"""``agentenv shell`` on a real terminal: a PTY of this test's, the command in a session of its own on it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0
OWN = ("--own", "--isolation", "full" if os.geteuid() == 0 else "user")
BACKENDS = {"fake": ("--backend", "fake"), "local": OWN}


class Window:
    """A terminal with the command on it, and somebody who types."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self.keys, self.line = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self.line)
        self.shown = ""
        self.process = subprocess.Popen(
            # the terminal becomes its own: keys that signal, and new sizes, reach it as they reach a program
            ["setsid", "--ctty", sys.executable, "-c", "from agentenv.cli import main; main()", "shell", *arguments],
            stdin=self.line, stdout=self.line, stderr=self.line,
            env={**os.environ, "AGENTENV_STATE_DIR": str(state), "TERM": "xterm-256color"},
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.keys, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def until(self, pattern: str) -> str:
        """What is shown up to (and with) the pattern; the rest is kept for the next time."""
        deadline = time.monotonic() + DEADLINE_S
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
        deadline = time.monotonic() + DEADLINE_S
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
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.keys)
        os.close(self.line)


@pytest.fixture(params=list(BACKENDS))
def window(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Window]:
    opened = Window(tmp_path, "--quiet", *BACKENDS[request.param])
    yield opened
    opened.close()


def test_it_is_a_terminal_of_this_size_and_follows_it(window: Window) -> None:
    window.until_prompt()
    assert not window.is_as_before()
    window.type("stty size; tty -s && echo on a terminal, $TERM\r")
    text = window.until(r"on a terminal, xterm-256color\r\n")
    assert "\r30 100\r\n" in text
    window.until_prompt()
    window.type("trap 'echo now $(stty size)' WINCH; echo set''\r")
    window.until(r"set\r\n")
    window.resize(41, 133)
    window.type("\r")
    window.until(r"now 41 \d+\r\n")  # rows are set before columns, and bash may take the two signals for one
    window.type("until [[ $(stty size) == '41 133' ]]; do sleep 0.05; done; echo at''last\r")
    window.until(r"atlast\r\n")
    window.type("exit 7\r")
    assert window.end() == 7
    assert window.is_as_before()


def test_control_keys_go_to_the_program_inside(window: Window) -> None:
    window.until_prompt()
    window.run("exec sleep 600")  # a shell between fork and exec can lose the key
    window.type("\x03")
    window.until_prompt()
    window.run("cat; echo end of $?")
    window.type("typed\r\x04")
    text = window.until(r"end of 0\r\n")
    assert text.count("typed") == 2, text
    window.until_prompt()
    window.run("exec sleep 600")
    window.type("\x1a")
    window.until("Stopped")
    window.until_prompt()
    window.type("kill %1; wait; (exit 5)\r")
    window.until_prompt()
    window.type("\x04")
    assert window.end() == 5
    assert window.is_as_before()


def test_full_screen_programs_get_every_byte_and_every_key(window: Window) -> None:
    window.until_prompt()
    window.type("stty -opost -icanon -echo; printf 'a\\nb\\r\\nc\\e[?1049h\\e[?25l'; IFS= read -rsn3 key; stty sane\r")
    assert "a\nb\r\nc" in window.until(r"\x1b\[\?25l")
    window.type("\x1b[A")
    window.until_prompt()
    window.type("printf '%q' \"$key\"; echo; echo ä'€'🙂\r")
    window.until(re.escape("$'\\E[A'\r\n"))
    window.until(r"ä€🙂\r\n")
    window.type("exit\r")
    assert window.end() == 0
    left = window.shown.rpartition("exit")[2]
    assert "\x1b[?1049l" in left
    assert "\x1b[?25h" in left
    assert window.is_as_before()


def test_a_paste_and_a_flood_arrive_whole_or_at_their_end(window: Window) -> None:
    window.until_prompt()
    window.run("stty -echo; sha256sum")
    lines = "".join(f"line {number} of a paste\r" for number in range(1_500))
    pasted = lines.encode()
    while pasted:  # as fast as the terminal takes it
        pasted = pasted[os.write(window.keys, pasted[:512]) :]
    window.type("\x04")
    text = window.until(r"[0-9a-f]{64}")
    assert text.endswith(hashlib.sha256(lines.replace("\r", "\n").encode()).hexdigest()), text[-200:]
    window.until_prompt()
    window.type("stty echo; seq 400000; echo over''\r")
    window.until(r"\n400000\r\nover\r\n")
    window.until_prompt()
    window.type("exit\r")
    assert window.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside_leaves_a_terminal_in_order(number: signal.Signals, tmp_path: Path) -> None:
    window = Window(tmp_path, "--quiet", "--backend", "fake")
    try:
        window.until_prompt()
        window.type("printf '\\e[?1049h'; sleep 600\r")
        window.until(r"\x1b\[\?1049h")
        window.process.send_signal(number)
        assert window.end() == 128 + number
        assert "\x1b[?1049l" in window.shown
        assert window.is_as_before()
    finally:
        window.close()
