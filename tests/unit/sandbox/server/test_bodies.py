"""What requests bring is read strictly."""

from __future__ import annotations

import pytest

from agentenv.errors import ProtocolError
from agentenv.sandbox.server.bodies import number


@pytest.mark.parametrize(("text", "read"), [("2", 2), ("0002", 2), ("7", 7)])
def test_numbers_within_their_bounds_are_read(text: str, read: int) -> None:
    assert number("slot", text, 7, least=2) == read


@pytest.mark.parametrize("text", ["", "1", "8", "-3", "+3", " 3", "3.0", "3_0", "x", "3x", "٣", "²", "0" * 18 + "3"])
def test_what_is_no_number_within_its_bounds_is_refused_by_name(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^slot: must be a number from 2 to 7"):
        number("slot", text, 7, least=2)
