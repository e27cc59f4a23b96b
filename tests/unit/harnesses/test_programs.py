"""What is kept of the output of a harness's program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.harnesses.programs import Kept


def kept(pieces: list[bytes], first_bytes: int, last_bytes: int) -> Kept:
    found = Kept(first_bytes=first_bytes, last_bytes=last_bytes)
    for piece in pieces:
        found.add(piece)
    return found


@given(st.lists(st.binary(max_size=9)), st.integers(0, 12), st.integers(0, 12))
def test_beginning_and_end_are_kept_however_it_comes(pieces: list[bytes], first_bytes: int, last_bytes: int) -> None:
    whole = b"".join(pieces)
    found = kept(pieces, first_bytes, last_bytes)
    assert found.dropped_bytes == max(0, len(whole) - first_bytes - last_bytes)
    if not found.dropped_bytes:
        assert found.text == whole.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("first_bytes", "last_bytes", "text"),
    [
        (4, 4, "0123\n[... 2 bytes left out ...]\n6789"),
        (0, 3, "[... 7 bytes left out ...]\n789"),
        (3, 0, "012\n[... 7 bytes left out ...]\n"),
        (5, 5, "0123456789"),
    ],
)
def test_a_line_says_what_is_left_out(first_bytes: int, last_bytes: int, text: str) -> None:
    assert kept([b"0123456", b"789"], first_bytes, last_bytes).text == text


def test_no_character_is_halved() -> None:
    """A cut is no reason for U+FFFD; bytes that are no UTF-8 are."""
    whole = "€€€€".encode()
    assert kept([whole], 4, 4).text == "€\n[... 4 bytes left out ...]\n€"
    assert kept([b"\xff" + whole], 4, 0).text.startswith("\ufffd€\n")
