"""The reply memory, against random histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentenv.sandbox.server import replies
from agentenv.sandbox.server.replies import RememberedReply, ReplyMemory

MAX_COUNT, MAX_BYTES, MAX_SENT_BYTES = 4, 100, 150


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index: dict[str, RememberedReply] = {}
        self.memory = ReplyMemory(
            self.index, max_count=MAX_COUNT, max_unsent_bytes=MAX_BYTES, max_sent_bytes=MAX_SENT_BYTES
        )
        self.began: list[RememberedReply] = []

    def pick(self, data: st.DataObject, wanted: Callable[[RememberedReply], bool]) -> RememberedReply | None:
        found = [reply for reply in self.began if wanted(reply) and reply.call_id in self.index]
        return data.draw(st.sampled_from(found)) if found else None

    @rule()
    def begin(self) -> None:
        reply = RememberedReply(f"call-{len(self.began)}", self.memory)
        self.memory.begin(reply)
        self.began.append(reply)

    @rule(data=st.data(), size=st.integers(0, 150))
    def finish(self, data: st.DataObject, size: int) -> None:
        if (reply := self.pick(data, lambda r: r.message is None)) is not None:
            self.memory.finish(reply, b"x" * size)

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        if (reply := self.pick(data, lambda r: r.message is not None)) is not None:
            self.memory.sent(reply)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if (reply := self.pick(data, lambda r: True)) is not None:
            self.memory.forget(reply)

    @precondition(lambda self: self.began)
    @rule(data=st.data())
    def beginning_a_known_call_is_refused(self, data: st.DataObject) -> None:
        reply = data.draw(st.sampled_from(self.began))
        with pytest.raises(ValueError, match="known already"):
            self.memory.begin(RememberedReply(reply.call_id, self.memory))

    @invariant()
    def every_call_is_running_or_answered_or_known_to_have_ended(self) -> None:
        for reply in self.began:
            known = self.index.get(reply.call_id)
            assert (known is reply) != self.memory.has_ended(reply.call_id)

    @invariant()
    def unsent_answers_are_never_dropped(self) -> None:
        for reply in self.began:
            if reply.message is not None and not reply.delivered and not self.memory.has_ended(reply.call_id):
                assert self.index[reply.call_id] is reply

    @invariant()
    def sent_answers_are_bounded(self) -> None:
        sent = [r for r in self.began if r.delivered and r.call_id in self.index]
        assert len(sent) <= MAX_COUNT
        assert len(sent) <= 1 or sum(r.size_bytes for r in sent) <= MAX_SENT_BYTES

    @invariant()
    def full_is_told_from_what_was_not_sent(self) -> None:
        unsent = [r for r in self.index.values() if r.message is not None and not r.delivered]
        size = sum(len(r.message or b"") for r in unsent)
        assert self.memory.full == (size >= MAX_BYTES or len(unsent) >= MAX_COUNT)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_lease_leaves_nothing_in_the_index() -> None:
    index: dict[str, RememberedReply] = {}
    memory = ReplyMemory(index, max_count=10, max_unsent_bytes=100, max_sent_bytes=100)
    running, unsent, sent = (RememberedReply(name, memory) for name in "abc")
    for reply in (running, unsent, sent):
        memory.begin(reply)
    memory.finish(unsent, b"1")
    memory.finish(sent, b"2")
    memory.sent(sent)
    memory.clear()
    assert index == {}
    assert repr(memory) == "ReplyMemory(running=0, unsent=0, sent=0)"
    memory.sent(unsent)  # a connection that still had it in hand
    memory.forget(sent)
    assert index == {}


def test_the_ids_of_ended_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MAX_ENDED_IDS", 3)
    memory = ReplyMemory({}, max_count=10, max_unsent_bytes=100, max_sent_bytes=100)
    for number in range(5):
        reply = RememberedReply(str(number), memory)
        memory.begin(reply)
        memory.finish(reply, b"")
        memory.forget(reply)
    assert [memory.has_ended(str(number)) for number in range(5)] == [False, False, True, True, True]


def test_a_running_call_is_not_forgotten() -> None:
    memory = ReplyMemory({}, max_count=10, max_unsent_bytes=100, max_sent_bytes=100)
    reply = RememberedReply("a", memory)
    memory.begin(reply)
    memory.forget(reply)
    assert memory._running == {"a": reply}
    assert repr(reply) == "Reply('a', running)"


def test_the_newest_answer_is_remembered_whatever_its_size() -> None:
    index: dict[str, RememberedReply] = {}
    memory = ReplyMemory(index, max_count=MAX_COUNT, max_unsent_bytes=MAX_BYTES, max_sent_bytes=MAX_SENT_BYTES)
    for call_id in ("old", "new"):
        reply = RememberedReply(call_id, memory)
        memory.begin(reply)
        memory.finish(reply, b"x" * 10 * MAX_SENT_BYTES)
        memory.sent(reply)
        assert list(index) == [call_id]


def test_what_is_still_to_be_fetched_stays_until_it_is_forgotten() -> None:
    index: dict[str, RememberedReply] = {}
    memory = ReplyMemory(index, max_count=MAX_COUNT, max_unsent_bytes=MAX_BYTES, max_sent_bytes=MAX_SENT_BYTES)
    large, small = RememberedReply("large", memory), RememberedReply("small", memory)
    for reply, attachments in ((large, {"stdout": (b"x" * 10 * MAX_SENT_BYTES,)}), (small, {})):
        memory.begin(reply)
        memory.finish(reply, b"message", attachments)
        memory.sent(reply)
    assert memory.full
    assert set(index) == {"large", "small"}
    memory.forget(large)
    assert not memory.full
    assert large.attachments == {}
