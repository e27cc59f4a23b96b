"""``agentenv shell`` on a real terminal: a PTY of this test's, the command in a session of its own on it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.window import Window

OWN = ("--own", "--isolation", "full" if os.geteuid() == 0 else "user")
BACKENDS = {"fake": ("--backend", "fake"), "local": OWN}


SHELL = (sys.executable, "-m", "agentenv.cli", "shell", "--quiet")


@pytest.fixture(params=list(BACKENDS))
def window(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Window]:
    opened = Window(tmp_path, (*SHELL, *BACKENDS[request.param]))
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
    window.type("kill %1; while [[ $(jobs -s) ]]; do sleep 0.05; done; (exit 5)\r")  # `wait` waits for no stopped job
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


def test_a_paste_and_a_flood_arrive_whole(window: Window) -> None:
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
    window.type("stty echo; seq 60000; echo over''\r")
    assert "".join(f"{number}\r\n" for number in range(1, 60_001)) in window.until(r"\nover\r\n")
    window.until_prompt()
    window.type("exit\r")
    assert window.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside_leaves_a_terminal_in_order(number: signal.Signals, tmp_path: Path) -> None:
    window = Window(tmp_path, (*SHELL, *BACKENDS["fake"]))
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
