from __future__ import annotations

import time

import pytest

from agentenv.agent.terminal_text import rendered, without_overwritten


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("plain\ntext\n", "plain\ntext\n"),
        ("10%\r20%\r30%\ndone", "30%\ndone"),
        ("long line\rshort", "shortline"),
        ("a long one\r\x1b[Kshort", "short"),
        ("a long one\r\x1b[2Kshort\r", "short"),
        ("abc\r\ndef\r\n", "abc\ndef\n"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "red x link"),
        ("\x1b(Bcharset\x1b=\x1b>", "charset"),
        ("abd\bc\n", "abc\n"),
        ("a\b\b\bx", "x"),
        ("bell\a", "bell"),
        ("\x1b[38;5;196m\x1b[48;2;1;2;3mcolour", "colour"),
        ("unfinished \x1b[3", "unfinished \x1b[3"),
        ("日本\r🎉", "🎉本"),
    ],
)
def test_text_as_a_terminal_shows_it(printed: str, seen: str) -> None:
    assert rendered(printed) == seen


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("a\rb\n", "b\n"),
        ("a\r\nb\r\n", "a\r\nb\r\n"),
        ("1\r2\r3\r\n", "3\r\n"),
        ("\x1b[1mstays\x1b[0m", "\x1b[1mstays\x1b[0m"),
    ],
)
def test_only_what_was_overwritten_goes_from_other_output(printed: str, seen: str) -> None:
    assert without_overwritten(printed) == seen


@pytest.mark.parametrize(
    "piece",
    ["x\r", "\x1b[K\rab", "\x1b]", "\x1b[" + "1;" * 30, "a\b", "\x1bP", "\x1b[2K", "\r", "\x1b]0;" + "y" * 4_000],
)
def test_the_work_grows_with_the_text_alone(piece: str) -> None:
    """Ten times the text may take some thirty times as long on a loaded machine, never a hundred."""

    def taken_s(size: int) -> float:
        text = "A" * size + piece * (size // len(piece))
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            rendered(text)
            best = min(best, time.perf_counter() - began)
        return best

    assert taken_s(200_000) < 40 * taken_s(20_000) + 0.05
