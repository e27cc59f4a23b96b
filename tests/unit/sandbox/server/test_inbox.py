"""What waits in one slot: charged, bounded, given back, whatever becomes of it."""

from __future__ import annotations

import os

import pytest

from agentenv.errors import InvalidArgumentsError, SandboxUnavailableError, StaleLeaseError
from agentenv.sandbox.server.inbox import MAX_ATTACHED, Attached, Inbox
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import Attachment


def received(inbox: Inbox, call_id: str, content: bytes, at: int = 0) -> Attached:
    attached = inbox.receive(call_id, "text", at)
    assert attached is not None
    attached.feed(content, attached.begin(at))
    return attached


def taken(inbox: Inbox, call_id: str, size_bytes: int) -> Attached:
    return inbox.take(call_id, (Attachment(field="text", size_bytes=size_bytes),))["text"]


def test_pieces_are_joined_where_they_belong() -> None:
    inbox = Inbox()
    received(inbox, "a", b"abcdef")
    received(inbox, "a", b"XYZ", at=4)
    assert (inbox.held_bytes, inbox.size_of("a", "text")) == (7, 7)
    assert inbox.receive("a", "text", 8) is None
    assert inbox.receive("b", "text", 1) is None
    attached = taken(inbox, "a", 7)
    assert attached.content("text", 100) == b"abcdXYZ"
    attached.close()
    attached.close()
    assert inbox.held_bytes == 0


def test_what_was_taken_cannot_be_changed_by_anybody() -> None:
    inbox = Inbox()
    attached = received(inbox, "a", b"abc")
    turn = attached.begin(3)
    attached = taken(inbox, "a", 3)
    with pytest.raises(StaleLeaseError):
        attached.feed(b"x", turn)
    for change in (lambda: os.pwrite(attached.fd, b"x", 0), lambda: os.ftruncate(attached.fd, 0)):
        with pytest.raises(PermissionError):
            change()
    attached.close()


def test_who_began_before_may_not_go_on() -> None:
    inbox = Inbox()
    attached = inbox.receive("a", "text", 0)
    assert attached is not None
    before = attached.begin(0)
    received(inbox, "a", b"abc")
    with pytest.raises(StaleLeaseError):
        attached.feed(b"x", before)
    assert inbox.size_of("a", "text") == 3


def test_the_budget_is_the_slots_own_and_everything_comes_back() -> None:
    counted: list[int] = []
    inbox = Inbox(counted.append, max_bytes=10)
    received(inbox, "a", b"12345")
    inbox.hold(4)
    with pytest.raises(SandboxUnavailableError, match="hold 9 bytes; at most 10"):
        received(inbox, "b", b"12")
    inbox.let_go(4)
    with pytest.raises(SandboxUnavailableError, match="did not arrive"):
        taken(inbox, "a", 6)
    attached = taken(inbox, "a", 5)
    received(inbox, "b", b"12345")
    inbox.close()
    assert inbox.held_bytes == 5, "what was taken is its call's"
    attached.close()
    assert (inbox.held_bytes, sum(counted)) == (0, 0)


def test_the_number_of_attachments_is_bounded() -> None:
    inbox = Inbox()
    for number in range(MAX_ATTACHED):
        received(inbox, str(number), b"x")
    with pytest.raises(SandboxUnavailableError):
        inbox.receive("one more", "text", 0)
    inbox.drop("0")
    received(inbox, "one more", b"x")
    inbox.close()
    assert inbox.held_bytes == 0


def test_one_is_no_larger_than_a_file_may_be() -> None:
    inbox = Inbox()
    attached = inbox.receive("a", "text", 0)
    assert attached is not None
    attached.size_bytes = MAX_FILE_BYTES
    with pytest.raises(InvalidArgumentsError):
        attached.feed(b"x", attached.begin(MAX_FILE_BYTES))
    attached.size_bytes = 0
    inbox.close()
