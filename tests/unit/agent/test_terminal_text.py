from __future__ import annotations

import random
import re
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
        ("\x1b[2K\r⠋ Installing\x1b[2K\r⠙ Installing\x1b[2K\r✔ done\n", "✔ done\n"),
        ("⠋ Installing\x1b[1G\x1b[0K⠙ Linking\x1b[1G\x1b[0K✔ done\n", "✔ done\n"),
        ("\x1b[?25l⠋ build\x1b[G\x1b[2K⠙ build\x1b[0G\x1b[2Kok\x1b[?25h\n", "ok\n"),
        ("a long one\x1b[1Gshort", "shortg one"),
        ("gone\x1b[2K", ""),
        ("gone\x1b[2K!", "    !"),
        ("two words\x1b[5D\x1b[1K!", "    !ords"),
        ("\x1b[1;31m\x1b[Kmatch\x1b[m\x1b[K of grep", "match of grep"),
        ("name\x1b[10Gsize\x1b[3Cdate", "name     size   date"),
        ("x\x1b[999999999Cy\rz", "z" + 999 * " " + "y"),
        ("a \r", "a "),
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


def drawn(pieces: list[str]) -> str:
    """The same cell by cell, as the standard (ECMA-48) says of each control, without a thought for time."""
    cells, at = dict[int, str](), 0
    for piece in pieces:
        move = re.fullmatch(r"\x1b\[(\d*)([CDGK])", piece)
        number = int(move[1] or 0) if move else 0
        match move[2] if move else piece:
            case "\r":
                at = 0
            case "\b":
                at = max(0, at - 1)
            case "C":
                at += max(1, number)
            case "D":
                at = max(0, at - max(1, number))
            case "G":
                at = max(1, number) - 1
            case "K":
                first, last = (0 if number else at), (at if number == 1 else len("".join(pieces)))
                cells = {n: cell for n, cell in cells.items() if not first <= n <= last}
            case text:
                cells |= dict(enumerate(text, at))
                at += len(text)
    return "".join(cells.get(n, " ") for n in range(max(cells, default=-1) + 1))


@pytest.mark.parametrize("seed", range(300))
def test_any_line_is_what_its_cells_are(seed: int) -> None:
    numbers = random.Random(seed)
    controls = [
        "\r",
        "\b",
        "\x1b[K",
        "\x1b[0K",
        "\x1b[1K",
        "\x1b[2K",
        "\x1b[G",
        "\x1b[3G",
        "\x1b[2C",
        "\x1b[D",
        "\x1b[4D",
    ]
    pieces = numbers.choices([*controls, "a", "bcd", "efghijk"], k=numbers.randrange(30))
    assert rendered("".join([*pieces, "."])) == drawn([*pieces, "."])


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
    ["x\r", "\x1b[K\rab", "\x1b]", "\x1b[" + "1;" * 30, "a\b", "\x1bP", "\x1b[2K", "\r", "\x1b]0;" + "y" * 4_000,
     "x\x1b[2K", "\x1b[1K", "y\b\x1b[1K", "\x1b[Gy\x1b[1K", "\x1b[D\x1b[2K", "\x1b[9999Cz"],
)  # fmt: skip
def test_the_work_grows_with_the_text_alone(piece: str) -> None:
    """Ten times the text may take thirty times the processor time, whose caches others use too, never a hundred."""

    def taken_s(size: int) -> float:
        text = "A" * size + piece * (size // len(piece))
        best = float("inf")
        for _ in range(3):
            began = time.thread_time()
            rendered(text)
            best = min(best, time.thread_time() - began)
        return best

    assert taken_s(200_000) < 40 * taken_s(20_000) + 0.05


def test_movements_make_no_more_text_than_was_printed_and_a_little() -> None:
    flood = "\x1b[999Cb\n" * 131_072
    shown = rendered(flood)
    assert len(shown) < 2 * len(flood)
    assert shown.startswith(" " * 999 + "b\n")
    assert shown.endswith("\nb\n")
