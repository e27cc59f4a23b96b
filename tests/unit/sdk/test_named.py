"""Which of several sandboxes of one name is kept."""

from __future__ import annotations

from agentenv.sdk.named import NAMED, Mark, marks_of
from agentenv.wire.farm import LeaseView
from agentenv.wire.leases import Tags

EARLIER, LATER = Mark("ff", 60.0, False), Mark("00", 60.0, False)


def lease(mark: Mark, age_s: float, name: str = "one") -> LeaseView:
    tags = Tags(environment=NAMED, item=str(mark))
    return LeaseView(lease="c/0/1", container="c", slot=0, trajectory=name, tags=tags, age_s=age_s)


def test_the_one_that_was_granted_first_is_kept() -> None:
    assert marks_of((lease(EARLIER, 0.002),), "one")[0] == EARLIER, "it may look before the other is there"
    assert marks_of((lease(LATER, 0.001), lease(EARLIER, 0.5)), "one") == [EARLIER, LATER]
    assert marks_of((lease(LATER, 0.001), lease(EARLIER, 0.5)), "two") == []


def test_one_that_is_resumed_comes_before_new_ones() -> None:
    resumed = EARLIER.resumed()
    assert resumed.is_resumed
    assert Mark.parse(str(resumed)) == resumed
    assert marks_of((lease(LATER, 0.5), lease(resumed, 0.1)), "one") == [resumed, LATER]
