"""Whatever a broken peer sends, the agent goes on or leaves cleanly: never undefined behaviour."""

from __future__ import annotations

import errno
import os
import random
import struct
from contextlib import suppress

import pytest

from agentenv.sandbox.slotagent.protocol import PROGRAM, TEXT_FD, Kind, encode, receive, send, spawn_text
from tests.unit.sandbox.slotagent.agent_box import ENV, WAIT_S, AgentBox, sanitized

MALFORMED_EXIT = 65
TRUE = spawn_text(["true"], ENV, "/")


def _spawn(run: int, flags: int, payload: bytes = TRUE) -> bytes:
    return encode(Kind.SPAWN, run, flags, payload)


# Packets (with a count of descriptors) that end the agent.
MALFORMED: dict[str, tuple[bytes, int]] = {
    "shorter than a header": (b"\1\0\0\0", 0),
    "less payload than said": (struct.pack("<IIiI", 1, 1, 0, 100) + TRUE, 0),
    "more payload than said": (encode(Kind.PING) + b"x", 0),
    "unknown kind": (struct.pack("<IIiI", 0, 0, 0, 0), 0),
    "a kind of its own": (encode(Kind.HELLO), 0),
    "larger than a packet": (_spawn(1, 0)[:12] + struct.pack("<I", 65536) + b"x" * 65536, 0),
    "run 0": (_spawn(0, 0), 0),
    "unknown flag": (_spawn(1, 8), 0),
    "negative flags": (_spawn(1, -1), 0),
    "both scripts": (_spawn(1, 6), 1),
    "stdin without descriptor": (_spawn(1, 1), 0),
    "descriptor without flag": (_spawn(1, 0), 1),
    "one descriptor of two": (_spawn(1, 5), 1),
    "too many descriptors": (_spawn(1, 1), 5),
    "descriptor with PING": (encode(Kind.PING), 1),
    "payload with KILL": (encode(Kind.KILL, 1, 0, b"x"), 0),
    "signal with half a tick": (encode(Kind.SIGNAL, 1, 2, b"1234"), 0),
    "signal with two ticks": (encode(Kind.SIGNAL, 1, 2, bytes(16)), 0),
    "signal 0": (encode(Kind.SIGNAL, 1, 0), 0),
    "signal 65": (encode(Kind.SIGNAL, 1, 65), 0),
    "signal -9": (encode(Kind.SIGNAL, 1, -9), 0),
    "empty payload": (_spawn(1, 0, b""), 0),
    "counts only": (_spawn(1, 0, b"\1\0\0\0\0\0\0\0"), 0),
    "no argv": (_spawn(1, 0, bytes(8) + b"/\0"), 0),
    "unterminated": (_spawn(1, 0, TRUE[:-1]), 0),
    "a string too few": (_spawn(1, 0, b"\2\0" + TRUE[2:]), 0),
    "a string too many": (_spawn(1, 0, TRUE + b"x\0"), 0),
    "counts far beyond": (_spawn(1, 0, b"\xff" * 8 + TRUE[8:]), 0),
    "env without =": (_spawn(1, 0, b"\1\0\0\0\1\0\0\0/\0true\0PATH\0"), 0),
    "text in a file and in the packet": (_spawn(1, TEXT_FD), 1),
    "an empty file of text": (_spawn(1, TEXT_FD, b""), 1),
    "no file of text": (_spawn(1, TEXT_FD, b""), 0),
}


@pytest.fixture(scope="module", params=["release", "sanitized"])
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _box(build: str) -> AgentBox:
    return AgentBox(binary=sanitized().agent if build == "sanitized" else None)


def _send_with(box: AgentBox, packet: bytes, count: int) -> None:
    with open("/dev/null") as null:  # noqa: PTH123
        send(box.socket, packet, [null.fileno()] * count)


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_packet_ends_the_agent_and_all_it_runs(build: str, name: str) -> None:
    with _box(build) as box:
        run = box.bash("setsid sleep 1000 & echo ready; sleep 1000")
        assert run.line() == "ready"
        keep = os.dup(run.fds[0])
        _send_with(box, *MALFORMED[name])
        assert box.process.wait(WAIT_S) == MALFORMED_EXIT
        with open(keep, "rb") as output:  # noqa: PTH123
            assert output.read() == b""
        box.process.returncode = 0  # as expected: nothing for the context manager to complain about
        assert box.close() == 0
        assert box.stderr == b""


def test_odd_but_valid_spawns_work(build: str) -> None:
    with _box(build) as box:
        assert box.spawn("env", env={}, flags=2).output() == b""
        many = box.spawn("echo", *["x"] * 20_000)
        assert len(many.output()) == 40_000
        assert len(box.spawn("env", env={f"v{n}": "" for n in range(5000)} | ENV).output().splitlines()) == 5002
        box.send(Kind.SPAWN, 77, 0, b"\1\0\0\0\0\0\0\0/\0\0")  # an empty argv[0]: no such program
        assert box.expect(Kind.SPAWN_FAILED, run=77).arg == 2
        long = "/x" * 20_000
        assert box.fail(long)[0] == box.fail("true", cwd=long)[0] == 36  # ENAMETOOLONG
        assert box.fail("true", env={"PATH": long})[0] == 2
        assert box.spawn("true", env={"PATH": f"{'y' * 5000}:/bin"}).pid > 0


def _mutated(random_: random.Random, packet: bytes) -> bytes:
    """The packet with a few bytes changed, cut or doubled; half of the time with an honest length."""
    body = bytearray(packet)
    for _ in range(random_.choice([0, 0, 1, 1, 2, 5])):
        if body:
            body[random_.randrange(len(body))] = random_.choice(
                [0, 1, 2, 4, 9, 0x7F, 0x80, 0xFF, random_.randrange(256)]
            )
    if random_.random() < 0.2:
        del body[random_.randrange(len(body) + 1) :]
    if random_.random() < 0.1:
        body += random_.randbytes(random_.randrange(200))
    if random_.random() < 0.5 and len(body) >= 16:
        body[12:16] = struct.pack("<I", len(body) - 16)
    return bytes(body)


def _some_packet(random_: random.Random) -> tuple[bytes, int]:
    run = random_.choice([1, 2, 3, 4, 5, 5_000_000 if random_.random() < 0.9 else 0])
    strings = [random_.choice(["true", "false", "", "/bin/true", "x" * 300]) for _ in range(random_.randrange(1, 4))]
    payload = spawn_text(
        ["true", *strings], random_.choice([ENV, {}, {"PATH": "::/bin"}]), random_.choice(["/", ".", "/no"])
    )
    flags = random_.randrange(6 if random_.random() < 0.98 else 9)
    wanted = bool(flags & 1) + bool(flags & 4)
    packets = [
        (_spawn(run, flags, payload), wanted if random_.random() < 0.98 else random_.randrange(6)),
        (encode(Kind.KILL, run), 0),
        (encode(Kind.KILL_ALL), 0),
        (encode(Kind.PING, 0, random_.randrange(-5, 5)), 0),
        (encode(Kind.SIGNAL, run, random_.randrange(1, 65 + (random_.random() < 0.1))), 0),
    ]
    packet, fds = random_.choices(packets, [6, 2, 1, 1, 1])[0]
    return (packet if random_.random() < 0.96 else _mutated(random_, packet)), fds


def _spawn_by_file(box: AgentBox, run: int, flags: int, text: bytes) -> None:
    file = os.memfd_create("text")
    os.write(file, text)
    box.send(Kind.SPAWN, run, flags | TEXT_FD, b"", [file])
    os.close(file)


def test_a_text_in_a_file_is_what_it_would_be_in_the_packet(build: str) -> None:
    """Any number of arguments, of any size that the kernel takes; an end that is not on a page's, and one that is."""
    with _box(build) as box:
        for run, argv in enumerate([["true"], ["echo", *["x"] * 150_000], ["echo", *["y" * 131_000] * 14]], start=1):
            _spawn_by_file(box, run, 0, spawn_text(argv, ENV, "/"))
            spawned = box.expect(Kind.SPAWNED, run=run)
            os.set_blocking(spawned.fds[0], True)
            with open(spawned.fds[0], "rb") as output:  # noqa: PTH123
                assert output.read().split() == [text.encode() for text in argv[1:]]
            os.close(spawned.fds[1])
            assert box.expect(Kind.EXIT, run=run).arg == 0
        page = spawn_text(["true", "x" * 5000], ENV, "/")
        padded = spawn_text(["true", "x" * (5000 + -len(page) % 4096)], ENV, "/")
        assert len(padded) % 4096 == 0
        _spawn_by_file(box, 10, 0, padded)
        assert box.expect(Kind.SPAWNED, run=10).arg > 0
        _spawn_by_file(box, 11, int(PROGRAM), spawn_text(["true", "a name", "x" * 131_072], ENV, "/"))
        assert box.expect(Kind.SPAWN_FAILED, run=11).arg == errno.E2BIG


@pytest.mark.parametrize("text", [TRUE[:-1], TRUE + b"x\0", b"\xff" * 8 + TRUE[8:], b"\0"])
def test_a_malformed_file_of_text_ends_the_agent(build: str, text: bytes) -> None:
    with _box(build) as box:
        _spawn_by_file(box, 1, 0, text)
        assert box.process.wait(WAIT_S) == MALFORMED_EXIT
        box.process.returncode = 0
        assert box.close() == 0
        assert box.stderr == b""


@pytest.mark.parametrize("seed", range(40))
def test_random_packets_never_break_the_agent(seed: int) -> None:
    random_ = random.Random(seed)
    box = AgentBox(binary=sanitized().agent)
    with suppress(BrokenPipeError, ConnectionResetError):
        with_box = box.__enter__()
        for _ in range(60):
            _send_with(with_box, *_some_packet(random_))
            with_box.socket.settimeout(0.002)
            with suppress(TimeoutError):
                while (message := receive(with_box.socket)) is not None:
                    for fd in message.fds:
                        os.close(fd)
            with_box.socket.settimeout(WAIT_S)
    code = box.close()
    assert code in (0, MALFORMED_EXIT), (seed, code, box.stderr)
    assert box.stderr == b"", "a sanitizer would speak here"


def test_the_sanitizers_are_really_in() -> None:
    program = sanitized().agent.read_bytes()
    assert b"__asan_init" in program
    assert b"__ubsan_handle" in program
