"""The codec: what is encoded is decoded, and nothing malformed gets through or leaks a descriptor."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ProtocolError
from agentenv.sandbox.slotagent.protocol import (
    MAX_PACKET_BYTES,
    MAX_PACKET_FDS,
    MAX_PAYLOAD_BYTES,
    Kind,
    Message,
    SpawnStep,
    Usage,
    decode,
    encode,
    exit_status,
    exit_usage,
    failed_step,
    receive,
    send,
    spawn_text,
)

RUNS = st.integers(0, 2**32 - 1)
ARGS = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.sampled_from(Kind), RUNS, ARGS, st.binary(max_size=200))
def test_what_is_encoded_is_decoded(kind: Kind, run: int, arg: int, payload: bytes) -> None:
    assert decode(encode(kind, run, arg, payload)) == Message(kind, run, arg, payload)


def test_the_bytes_are_as_documented() -> None:
    assert encode(Kind.KILL, 7, -2, b"xyz").hex() == "0200000007000000feffffff0300000078797a"
    assert spawn_text(["a", "b"], {"N": "v"}, "/w") == b"\2\0\0\0\1\0\0\0/w\0a\0b\0N=v\0"


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(packet: bytes) -> None:
    try:
        message = decode(packet)
    except ProtocolError:
        return
    assert encode(message.kind, message.run, message.arg, message.payload) == packet


@pytest.mark.parametrize(
    "packet", [b"", b"x" * 15, struct.pack("<IIiI", 2, 1, 0, 1), struct.pack("<IIiI", 99, 1, 0, 0)]
)
def test_malformed_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(packet)


@pytest.mark.parametrize(("run", "arg"), [(-1, 0), (2**32, 0), (0, 2**31), (0, -(2**31) - 1)])
def test_numbers_that_do_not_fit_are_refused(run: int, arg: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode(Kind.KILL, run, arg)


def test_the_packet_limit_is_exact() -> None:
    assert len(encode(Kind.SPAWN, 1, 0, b"x" * MAX_PAYLOAD_BYTES)) == MAX_PACKET_BYTES
    with pytest.raises(ValueError, match="fit in a packet"):
        encode(Kind.SPAWN, 1, 0, b"x" * (MAX_PAYLOAD_BYTES + 1))


@given(
    st.lists(TEXTS, min_size=1, max_size=5).filter(lambda argv: argv[0]),
    st.dictionaries(NAMES, TEXTS, max_size=5),
    TEXTS,
)
def test_a_spawn_text_has_every_string(argv: list[str], env: dict[str, str], cwd: str) -> None:
    payload = spawn_text(argv, env, cwd)
    assert struct.unpack("<II", payload[:8]) == (len(argv), len(env))
    expected = [cwd, *argv, *(f"{name}={value}" for name, value in env.items())]
    assert payload[8:].split(b"\0") == [*(text.encode() for text in expected), b""]


@pytest.mark.parametrize(
    ("argv", "env", "cwd"),
    [
        ([], {}, "/"),
        ([""], {}, "/"),
        (["a\0b"], {}, "/"),
        (["a"], {"": "x"}, "/"),
        (["a"], {"n=m": "x"}, "/"),
        (["a"], {"n": "\0"}, "/"),
        (["a"], {}, "/\0"),
    ],
)
def test_a_spawn_that_cannot_be_said_is_refused(argv: list[str], env: dict[str, str], cwd: str) -> None:
    with pytest.raises(ValueError, match=r"argv|variable"):
        spawn_text(argv, env, cwd)


def test_the_largest_spawn_text_fits() -> None:
    argv = ["a", "x" * (MAX_PAYLOAD_BYTES - 8 - 2 - 2 - 1)]
    assert len(encode(Kind.SPAWN, 1, 0, spawn_text(argv, {}, "/"))) == MAX_PACKET_BYTES


def test_usage_and_step_are_read_exactly() -> None:
    assert exit_usage(struct.pack("<QQQ", 1_500_000, 250_000, 2)) == Usage(1.5, 0.25, 2048)
    assert failed_step(struct.pack("<I", 2)) is SpawnStep.CWD
    for payload in (b"", b"x" * 23, b"x" * 25):
        with pytest.raises(ProtocolError):
            exit_usage(payload)
    for payload in (b"", b"\0\0\0\0", b"\1\0\0\0\0"):
        with pytest.raises(ProtocolError):
            failed_step(payload)


def test_only_an_end_is_an_exit_status() -> None:
    for status in (0, 9, 0x8B, 0x0300, 0xFF00, 64):
        assert exit_status(status) == status
    for stopped in (0x137F, 0x057F, 0xFFFF, 0x3057F, -1, 1 << 20):
        with pytest.raises(ProtocolError):
            exit_status(stopped)


# ---- over a socket ----


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def _open_count() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_arrive_close_on_exec(pair: tuple[socket.socket, socket.socket]) -> None:
    source, sink = os.pipe()
    send(pair[0], encode(Kind.SPAWNED, 1, 2), [source, sink])
    message = receive(pair[1])
    assert message is not None
    assert (message.kind, message.run, message.arg, len(message.fds)) == (Kind.SPAWNED, 1, 2, 2)
    assert not any(os.get_inheritable(fd) for fd in message.fds)
    os.write(message.fds[1], b"through")
    assert os.read(source, 10) == b"through"
    for fd in (source, sink, *message.fds):
        os.close(fd)


def test_the_end_and_emptiness_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(pair[1])
    pair[0].close()
    assert receive(pair[1]) is None


@pytest.mark.parametrize(
    ("packet", "fds"),
    [
        (b"too short", 2),
        (encode(Kind.SPAWNED, 1), MAX_PACKET_FDS + 1),
        (encode(Kind.SPAWN, 1, 0, b"x" * MAX_PAYLOAD_BYTES) + b"x", 0),
        (encode(Kind.SPAWN, 1, 0, b"x" * MAX_PAYLOAD_BYTES) + b"x", 1),
    ],
)
def test_malformed_packets_leak_no_descriptor(
    pair: tuple[socket.socket, socket.socket], packet: bytes, fds: int
) -> None:
    before = _open_count()
    with open("/dev/null") as null:  # noqa: PTH123
        send(pair[0], packet, [null.fileno()] * fds)
        with pytest.raises(ProtocolError):
            receive(pair[1])
    assert _open_count() == before
