"""What waits in one slot: charged, bounded, given back, whatever becomes of it."""

from __future__ import annotations

import os

import pytest

from agentenv.errors import InvalidArgumentsError, SandboxUnavailableError, StaleLeaseError
from agentenv.sandbox.server.uploads import MAX_UPLOADS, Upload, UploadBuffer
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import Attachment


class Buffer(UploadBuffer):
    """One whose lease may hold ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_FILE_BYTES) -> None:
        super().__init__(self._hold, self._release)
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def _hold(self, size_bytes: int) -> None:
        if self.held_bytes + size_bytes > self.max_bytes:
            raise SandboxUnavailableError("too much")
        self.held_bytes += size_bytes

    def _release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def received(buffer: UploadBuffer, call_id: str, content: bytes, at: int = 0) -> Upload:
    upload = buffer.receive(call_id, "text", at)
    assert upload is not None
    upload.feed(content, upload.begin(at))
    return upload


def taken(buffer: UploadBuffer, call_id: str, size_bytes: int) -> Upload:
    return buffer.take(call_id, (Attachment(field="text", size_bytes=size_bytes),))["text"]


def test_pieces_are_joined_where_they_belong() -> None:
    buffer = Buffer()
    received(buffer, "a", b"abcdef")
    received(buffer, "a", b"XYZ", at=4)
    assert (buffer.held_bytes, buffer.size_of("a", "text")) == (7, 7)
    assert buffer.receive("a", "text", 8) is None
    assert buffer.receive("b", "text", 1) is None
    upload = taken(buffer, "a", 7)
    assert upload.content("text", 100) == b"abcdXYZ"
    upload.close()
    upload.close()
    assert buffer.held_bytes == 0


def test_what_was_taken_cannot_be_changed_by_anybody() -> None:
    buffer = Buffer()
    upload = received(buffer, "a", b"abc")
    turn = upload.begin(3)
    upload = taken(buffer, "a", 3)
    with pytest.raises(StaleLeaseError):
        upload.feed(b"x", turn)
    for change in (lambda: os.pwrite(upload.fd, b"x", 0), lambda: os.ftruncate(upload.fd, 0)):
        with pytest.raises(PermissionError):
            change()
    upload.close()


def test_who_began_before_may_not_go_on() -> None:
    buffer = Buffer()
    upload = buffer.receive("a", "text", 0)
    assert upload is not None
    before = upload.begin(0)
    received(buffer, "a", b"abc")
    with pytest.raises(StaleLeaseError):
        upload.feed(b"x", before)
    assert buffer.size_of("a", "text") == 3


def test_a_lease_that_holds_too_much_takes_no_upload_and_everything_is_released() -> None:
    buffer = Buffer(max_bytes=9)
    received(buffer, "a", b"12345")
    with pytest.raises(SandboxUnavailableError, match="too much"):
        received(buffer, "b", b"12345")
    with pytest.raises(SandboxUnavailableError, match="did not arrive"):
        taken(buffer, "a", 6)
    upload = taken(buffer, "a", 5)
    received(buffer, "b", b"1234")
    buffer.close()
    assert buffer.held_bytes == 5, "what was taken belongs to its call"
    upload.close()
    assert (buffer.held_bytes, buffer.open_count) == (0, 0)


def test_the_number_of_attachments_is_bounded() -> None:
    buffer = Buffer()
    for number in range(MAX_UPLOADS):
        received(buffer, str(number), b"x")
    with pytest.raises(SandboxUnavailableError):
        buffer.receive("one more", "text", 0)
    buffer.drop("0")
    received(buffer, "one more", b"x")
    buffer.close()
    assert buffer.held_bytes == 0


def test_one_is_no_larger_than_a_file_may_be() -> None:
    buffer = Buffer()
    upload = buffer.receive("a", "text", 0)
    assert upload is not None
    upload.size_bytes = MAX_FILE_BYTES
    with pytest.raises(InvalidArgumentsError):
        upload.feed(b"x", upload.begin(MAX_FILE_BYTES))
    upload.size_bytes = 0
    buffer.close()
