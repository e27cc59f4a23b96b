from __future__ import annotations

import pytest

from agentenv.errors import ImageUnavailableError
from agentenv.image_placement.placement import RETRY_S, Placement
from agentenv.slots.records import ContainerRecord

IMAGE = "sha256:" + "1" * 64


def test_a_node_is_tried_again_after_a_while() -> None:
    placement: Placement[ContainerRecord] = Placement()
    placement.joined(ContainerRecord("c0", 0, node="a"))
    assert placement.ahead(IMAGE, 0.0) == "a"
    placement.failed("a", IMAGE, ImageUnavailableError("the registry is away"), 0.0)
    assert placement.ahead(IMAGE, RETRY_S - 1) is None
    assert placement.ahead(IMAGE, RETRY_S) == "a"


def test_at_least_one_copy_is_wanted() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        Placement(0)
