"""Names that clients choose and operators are shown."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentenv.wire.leases import LeaseRequest


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[2J", "a\nb", "a\x7f", "a\x9b2J", "a\u2028b", "\t"])
def test_a_trajectory_is_not_named_with_control_characters(name: str) -> None:
    with pytest.raises(ValidationError, match="contains the control character"):
        LeaseRequest(slot=0, trajectory=name, ttl_s=5, request_id="r" * 16)


@pytest.mark.parametrize("name", ["t-1", "Grüße 日本 🦊", "a/b:c[d]", " "])
def test_any_other_name_will_do(name: str) -> None:
    assert LeaseRequest(slot=0, trajectory=name, ttl_s=5, request_id="r" * 16).trajectory == name
