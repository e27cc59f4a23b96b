"""The log of a container, where it is a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor.launch import log_can_be_cut, trim_log

MIB = 1024 * 1024


def test_a_long_log_keeps_its_last_lines_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        lines = [b"line %07d\n" % number for number in range(100_000)]
        os.write(fd, b"".join(lines))
        trim_log(fd)
        left = log.read_bytes()
        assert len(left) <= MIB // 4
        assert left.splitlines(keepends=True) == lines[-len(left) // len(lines[0]) :]
        os.write(fd, b"more\n")
        assert log.read_bytes() == left + b"more\n"
        trim_log(fd)
        assert log.read_bytes() == left + b"more\n"
    finally:
        os.close(fd)


def test_one_endless_line_does_not_stay(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, b"x" * (2 * MIB))
        trim_log(fd)
        assert log.read_bytes() == b""
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (os.O_RDWR | os.O_APPEND, True),
        (os.O_WRONLY | os.O_APPEND, False),  # 2>>
        (os.O_WRONLY | os.O_TRUNC, False),  # 2>
        (os.O_RDWR, False),  # its other writers would go on where they were
    ],
)
def test_only_a_log_that_is_read_and_appended_to_is_cut(tmp_path: Path, flags: int, *, expected: bool) -> None:
    fd = os.open(tmp_path / "log", flags | os.O_CREAT, 0o600)
    assert log_can_be_cut(fd) is expected
    os.close(fd)
    assert not log_can_be_cut(fd)


def test_a_pipe_is_not_cut() -> None:
    reads, writes = os.pipe()
    try:
        assert not log_can_be_cut(writes)
    finally:
        os.close(reads)
        os.close(writes)
