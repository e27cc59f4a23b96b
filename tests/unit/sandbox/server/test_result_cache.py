"""The result cache, against random histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentenv.sandbox.server import calls
from agentenv.sandbox.server.calls import SlotCall
from tests.unit.sandbox.server.slot_calls import result_cache, slot_call

MAX_COUNT, MAX_BYTES, MAX_SENT_BYTES = 4, 100, 150


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index: dict[str, SlotCall] = {}
        self.cache = result_cache(self.index, MAX_COUNT, MAX_BYTES, MAX_SENT_BYTES)
        self.began: list[SlotCall] = []

    def pick(self, data: st.DataObject, wanted: Callable[[SlotCall], bool]) -> SlotCall | None:
        found = [call for call in self.began if wanted(call) and call.call_id in self.index]
        return data.draw(st.sampled_from(found)) if found else None

    @rule()
    def begin(self) -> None:
        call = slot_call(f"call-{len(self.began)}", self.cache)
        self.cache.begin(call)
        self.began.append(call)

    @rule(data=st.data(), size=st.integers(0, 150))
    def finish(self, data: st.DataObject, size: int) -> None:
        if (call := self.pick(data, lambda r: r.message is None)) is not None:
            self.cache.finish(call, b"x" * size)

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        if (call := self.pick(data, lambda r: r.message is not None)) is not None:
            self.cache.sent(call)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if (call := self.pick(data, lambda r: True)) is not None:
            self.cache.forget(call)

    @precondition(lambda self: self.began)
    @rule(data=st.data())
    def beginning_a_known_call_is_refused(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.began))
        with pytest.raises(ValueError, match="known already"):
            self.cache.begin(slot_call(call.call_id, self.cache))

    @invariant()
    def every_call_is_running_or_answered_or_known_to_have_ended(self) -> None:
        for call in self.began:
            known = self.index.get(call.call_id)
            assert (known is call) != self.cache.has_ended(call.call_id)

    @invariant()
    def unsent_answers_are_never_dropped(self) -> None:
        for call in self.began:
            if call.message is not None and not call.delivered and not self.cache.has_ended(call.call_id):
                assert self.index[call.call_id] is call

    @invariant()
    def sent_answers_are_bounded(self) -> None:
        sent = [r for r in self.began if r.delivered and r.call_id in self.index]
        assert len(sent) <= MAX_COUNT
        assert len(sent) <= 1 or sum(r.size_bytes for r in sent) <= MAX_SENT_BYTES

    @invariant()
    def full_is_told_from_what_was_not_sent(self) -> None:
        unsent = [r for r in self.index.values() if r.message is not None and not r.delivered]
        size = sum(len(r.message or b"") for r in unsent)
        assert self.cache.full == (size >= MAX_BYTES or len(unsent) >= MAX_COUNT)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_lease_leaves_nothing_in_the_index() -> None:
    index: dict[str, SlotCall] = {}
    cache = result_cache(index)
    running, unsent, sent = (slot_call(name, cache) for name in "abc")
    for call in (running, unsent, sent):
        cache.begin(call)
    cache.finish(unsent, b"1")
    cache.finish(sent, b"2")
    cache.sent(sent)
    cache.clear()
    assert index == {}
    assert repr(cache) == "ResultCache(running=0, unsent=0, sent=0)"
    cache.sent(unsent)  # a connection that still had it in hand
    cache.forget(sent)
    assert index == {}


def test_the_ids_of_ended_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ENDED_IDS", 3)
    cache = result_cache({})
    for number in range(5):
        call = slot_call(str(number), cache)
        cache.begin(call)
        cache.finish(call, b"")
        cache.forget(call)
    assert [cache.has_ended(str(number)) for number in range(5)] == [False, False, True, True, True]


def test_a_running_call_is_not_forgotten() -> None:
    cache = result_cache({})
    call = slot_call("a", cache)
    cache.begin(call)
    cache.forget(call)
    assert cache._running == {"a": call}
    assert repr(call) == "SlotCall('a', not ended)"


def test_the_newest_answer_is_remembered_whatever_its_size() -> None:
    index: dict[str, SlotCall] = {}
    cache = result_cache(index, MAX_COUNT, MAX_BYTES, MAX_SENT_BYTES)
    for call_id in ("old", "new"):
        call = slot_call(call_id, cache)
        cache.begin(call)
        cache.finish(call, b"x" * 10 * MAX_SENT_BYTES)
        cache.sent(call)
        assert list(index) == [call_id]


def test_what_is_still_to_be_fetched_stays_until_it_is_forgotten() -> None:
    index: dict[str, SlotCall] = {}
    cache = result_cache(index, MAX_COUNT, MAX_BYTES, MAX_SENT_BYTES)
    large, small = slot_call("large", cache), slot_call("small", cache)
    for call, attachments in ((large, {"stdout": (b"x" * 10 * MAX_SENT_BYTES,)}), (small, {})):
        cache.begin(call)
        cache.finish(call, b"message", attachments)
        cache.sent(call)
    assert cache.full
    assert set(index) == {"large", "small"}
    cache.forget(large)
    assert not cache.full
    assert large.attachments == {}
