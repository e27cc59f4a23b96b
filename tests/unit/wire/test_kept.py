"""Models of which a service keeps tens of thousands are as small as they can be, and nobody sees a difference."""

from __future__ import annotations

import pytest

from agentenv.wire.base import KeptModel, WireModel
from agentenv.wire.farm import Ask, AskTags, Grant
from agentenv.wire.leases import SlotReport, Tags, TokenTag
from agentenv.wire.states import SlotState


class _Kept(KeptModel):
    name: str
    number: int = 0


class _Plain(WireModel):
    name: str
    number: int = 0


def test_they_share_one_set_of_fields() -> None:
    given, read = _Kept(name="a"), _Kept.model_validate_json('{"name": "b", "number": 3}')
    assert given.model_fields_set is read.model_fields_set
    assert given.model_fields_set == {"name", "number"}


@pytest.mark.parametrize("kept", [Ask, AskTags, Grant, SlotReport, Tags, TokenTag])
def test_what_a_service_keeps_is_one_of_them(kept: type[WireModel]) -> None:
    assert issubclass(kept, KeptModel)


def test_otherwise_they_are_as_other_models() -> None:
    one, other = _Kept(name="a"), _Kept(name="a", number=0)
    assert one == other
    assert hash(one) == hash(other)
    assert one.model_dump_json() == _Plain(name="a").model_dump_json()
    with pytest.raises(ValueError, match="frozen"):
        setattr(one, "name", "b")  # noqa: B010 - mypy knows that it is frozen
    with pytest.raises(ValueError, match="Extra inputs"):
        _Kept(name="a", more=1)  # type: ignore[call-arg]


def test_a_changed_copy_changes_no_other() -> None:
    one = _Kept(name="a")
    copy = one.model_copy(update={"name": "b"})
    copy.model_fields_set.discard("number")
    assert _Kept(name="c").model_fields_set == {"name", "number"}
    assert one.name == "a"


def test_a_report_is_told_whole() -> None:
    """Also what has its default: who reads it may have another one."""
    report = SlotReport(slot=1, state=SlotState.free, epoch=2)
    assert set(report.model_dump(exclude_unset=True)) == set(SlotReport.model_fields)
