"""slotlisten with AddressSanitizer and UBSan: programs that connect, half-close and break off at random, and a client
that breaks the rules."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from agentenv.containers.frames import Frame, FrameReader, packed
from agentenv.wire.connections import MAX_CONNECTIONS, MAX_DATA_BYTES, ROOM_BYTES, WINDOW_BYTES, FrameKind
from tests.unit.sandbox.slotagent.agent_box import sanitized
from tests.waiting import wait_for

K = FrameKind
WAIT_S: Final = 120.0
ENV: Final = {"ASAN_OPTIONS": "detect_leaks=0"}
AT_ONCE: Final = struct.pack("ii", 1, 0)
FEW_PORTS: Final = """
import fcntl, socket, struct, subprocess, sys
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as ports:
    ports.write("40000 40007")
with socket.socket() as any_of_them:
    fcntl.ioctl(any_of_them, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
taken = [socket.create_server(("::1", port), family=socket.AF_INET6) for port in (40003, 40005)]
for _ in range(10):
    with subprocess.Popen([sys.argv[1], "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listening:
        print(struct.unpack("<I", listening.stdout.read(9)[1:5])[0])
        listening.stdin.close()
"""


class Listening:
    """One slotlisten, and its frames."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sanitized().listen, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENV,
            bufsize=0,
        )
        self._reader = FrameReader()
        self._read: list[Frame] = []
        self.port = 0

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        assert self.process.stdout.read(1) == b"\0"
        self.port = self.next(K.PORT).connection
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def send(self, *frames: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # how it ended is looked at
            data = memoryview(b"".join(frames))
            while data:
                data = data[self.process.stdin.write(data) :]

    def next(self, kind: FrameKind | None = None) -> Frame:
        """The next frame; of this kind, if one is named. Raises EOFError."""
        assert self.process.stdout is not None
        while not self._read:
            readable, _, _ = select.select([self.process.stdout], [], [], WAIT_S)
            assert readable, "no frame came"
            if not (piece := os.read(self.process.stdout.fileno(), 65536)):
                raise EOFError
            self._read += self._reader.read(piece)
        frame = self._read.pop(0)
        assert kind is None or frame.kind is kind, frame
        return frame

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def code(self) -> int:
        """With what it ended; no sanitizer has said anything."""
        assert self.process.stderr is not None
        code = self.process.wait(WAIT_S)
        said = self.process.stderr.read().decode(errors="replace")
        assert said == ""
        return code

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Echo(threading.Thread):
    """A client that sends back what comes, in pieces of any length, and now and then breaks a connection off."""

    def __init__(self, listening: Listening, seed: int) -> None:
        super().__init__(daemon=True)
        self._listening = listening
        self._chance = random.Random(seed)
        self._room: dict[int, int] = {}
        self._waiting: dict[int, bytearray] = {}
        """Of the connections for which there is anything left to send."""
        self._over: dict[int, bool] = defaultdict(bool)
        self.opened = 0
        self.resets = 0

    def run(self) -> None:
        with suppress(EOFError):
            while True:
                self._obey(self._listening.next())

    def _obey(self, frame: Frame) -> None:
        number = frame.connection
        if frame.kind is K.OPEN:
            self.opened += 1
            self._room[number], self._waiting[number] = WINDOW_BYTES, bytearray()
        elif number not in self._waiting:
            return
        elif frame.kind is K.RESET:
            self._listening.send(packed(number, K.OVER))  # for one that has gone
            del self._waiting[number]
            return
        elif frame.kind is K.DATA:
            if self._chance.random() < 0.002:
                self.resets += 1
                self._listening.send(packed(number, K.RESET), packed(number, K.DATA, b"for one that has gone"))
                del self._waiting[number]
                return
            self._waiting[number] += frame.data
            self._listening.send(packed(number, K.ROOM, room=frame.count))
        elif frame.kind is K.OVER:
            self._over[number] = True
        elif frame.kind is K.ROOM:
            self._room[number] += frame.count
        self._send_back(number)

    def _send_back(self, number: int) -> None:
        waiting = self._waiting[number]
        while size := min(len(waiting), self._room[number], self._chance.choice([1, 100, MAX_DATA_BYTES])):
            self._listening.send(packed(number, K.DATA, waiting[:size]))
            del waiting[:size]
            self._room[number] -= size
        if self._over[number] and not waiting:
            self._listening.send(packed(number, K.OVER))
            del self._waiting[number]


def echoed(listening: Listening, seed: int) -> str:
    """What a program found: its bytes, a connection that was broken off, or that it broke off itself."""
    chance = random.Random(seed)
    data = chance.randbytes(100) * chance.choice([0, 1, 50, 3000])
    with listening.connect() as sock:
        if chance.random() < 0.2:
            sock.sendall(data[:500])
            if chance.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            return "left"

        def send() -> None:
            with suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        got = bytearray()
        try:
            while piece := sock.recv(65536):
                got += piece
        except ConnectionResetError:
            return "reset"
        finally:
            sending.join()
        return "whole" if bytes(got) == data else "wrong"


@pytest.mark.parametrize("seed", range(2))
def test_what_is_echoed_is_what_was_sent(seed: int) -> None:
    with Listening() as listening, ThreadPoolExecutor(12) as programs:
        echo = Echo(listening, seed)
        echo.start()
        found = [*programs.map(lambda n: echoed(listening, 1000 * seed + n), range(300))]
        assert "wrong" not in found
        assert found.count("whole") > 150
        assert found.count("reset") <= echo.resets
        wait_for(lambda: echo.opened == 300 and not echo._waiting, explain="it has nothing left to send")
        assert listening.process.poll() is None
        assert listening.process.stdin is not None
        listening.process.stdin.close()
        assert listening.code() == 0
        echo.join()


@pytest.mark.parametrize(
    "frames",
    [
        (struct.pack("<II", 1, 0),),
        (struct.pack("<II", 77, 99 << 24),),
        (packed(1, K.PORT),),
        (packed(2, K.OPEN),),
        (packed(1, K.DATA),),
        (struct.pack("<II", 1, K.DATA << 24 | MAX_DATA_BYTES + 1),),
        (packed(1, K.OVER, room=1),),
        (packed(1, K.ROOM),),
        (packed(1, K.ROOM, room=1),),
        (packed(0, K.OVER),),
        (packed(2, K.OVER),),
        (packed(1, K.OVER), packed(1, K.OVER)),
        (packed(1, K.OVER), packed(1, K.DATA, b"x")),
    ],
)
def test_a_client_that_breaks_the_rules_ends_it(frames: tuple[bytes, ...]) -> None:
    with Listening() as listening, listening.connect():
        assert listening.next(K.OPEN).connection == 1
        listening.send(*frames)
        assert listening.code() == errno.EPROTO


def test_more_than_its_window_ends_it() -> None:
    with Listening() as listening, listening.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.next(K.OPEN)
        listening.send(*[packed(1, K.DATA, b"x" * MAX_DATA_BYTES)] * 400)  # no socket's buffer has so much room
        assert listening.code() == errno.EPROTO


def test_frames_cut_anywhere_are_the_same_frames() -> None:
    data = random.Random(1).randbytes(20_000)
    with Listening() as listening, listening.connect() as program:
        listening.next(K.OPEN)
        sent = packed(1, K.DATA, data) + packed(1, K.DATA, data) + packed(1, K.OVER)
        for at in range(0, len(sent), 997):
            listening.send(sent[at : at + 997])
        assert program.makefile("rb").read() == data * 2
        program.sendall(b"answer")
        taken = 0
        while (frame := listening.next()).kind is K.ROOM:
            taken += frame.count
        assert (taken, frame.data) == (len(data) * 2, b"answer")


def test_room_is_given_by_the_quarter_window_and_in_time() -> None:
    with Listening() as listening, listening.connect() as program, program.makefile("rb") as reading:
        listening.next(K.OPEN)
        listening.send(packed(1, K.DATA, b"x" * (ROOM_BYTES - 1)))
        assert len(reading.read(ROOM_BYTES - 1)) == ROOM_BYTES - 1
        program.sendall(b"answer")
        assert listening.next(K.DATA).data == b"answer"  # and there was no frame before it
        listening.send(packed(1, K.DATA, b"x"))
        assert listening.next() == Frame(1, K.ROOM, ROOM_BYTES)
        assert reading.read(1) == b"x"
        room, size = WINDOW_BYTES, 999
        for _ in range(20):  # all that it may send, in pieces that fit no quarter
            wanted = room
            while room:
                piece = min(room, size)
                listening.send(packed(1, K.DATA, b"y" * piece))
                room, size = room - piece, size % 20_000 + 999
            assert len(reading.read(wanted)) == wanted
            while room <= WINDOW_BYTES - ROOM_BYTES:
                room += listening.next(K.ROOM).count


def test_the_end_of_stdin_ends_it_though_nobody_reads_its_stdout() -> None:
    with Listening() as listening:
        programs = [listening.connect() for _ in range(16)]
        for program in programs:
            program.setblocking(False)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            for program in programs:
                with suppress(BlockingIOError):
                    program.send(b"x" * MAX_DATA_BYTES)
            time.sleep(0.01)
        listening.send(packed(1, K.DATA, b"y"))
        assert listening.process.poll() is None
        assert listening.process.stdin is not None
        listening.process.stdin.close()
        assert listening.code() == 0
        for program in programs:
            program.close()


def test_connections_of_which_nothing_can_be_read_do_not_keep_it_busy() -> None:
    with Listening() as listening:
        full, over = listening.connect(), listening.connect()
        assert (listening.next(K.OPEN).connection, listening.next(K.OPEN).connection) == (1, 2)
        over.shutdown(socket.SHUT_WR)
        assert listening.next() == Frame(2, K.OVER)
        full.settimeout(0.3)
        with suppress(TimeoutError):
            full.sendall(b"x" * 20_000_000)
        sent = 0
        while sent < WINDOW_BYTES:
            sent += listening.next(K.DATA).count
        full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        full.close()
        before = listening.cpu_s()
        time.sleep(1)
        assert listening.cpu_s() - before < 0.3
        over.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        over.close()
        assert listening.next() == Frame(2, K.RESET)  # it had sent everything, and then broke off
        listening.send(packed(1, K.ROOM, room=WINDOW_BYTES))
        while (frame := listening.next()).kind is K.DATA:  # what had come before that
            listening.send(packed(1, K.ROOM, room=frame.count))
        assert frame == Frame(1, K.RESET)
        before = listening.cpu_s()
        time.sleep(1)
        assert listening.cpu_s() - before < 0.3


def test_connections_beyond_the_most_wait() -> None:
    with Listening() as listening:
        programs = [listening.connect() for _ in range(MAX_CONNECTIONS + 20)]
        assert [listening.next(K.OPEN).connection for _ in range(MAX_CONNECTIONS)] == [*range(1, MAX_CONNECTIONS + 1)]
        listening.send(packed(5, K.RESET))
        assert listening.next() == Frame(MAX_CONNECTIONS + 1, K.OPEN)
        for program in programs:
            program.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken_in_either_family(family: socket.AddressFamily) -> None:
    with socket.socket(family) as taken:
        if family is socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(("127.0.0.1" if family is socket.AF_INET else "::1", 0))
        taken.listen()
        listening = Listening(taken.getsockname()[1])
        assert listening.code() == errno.EADDRINUSE
        listening.close()


def test_any_free_port_is_free_in_both_families() -> None:
    # IPv4 has the odd ports first: every other try finds one that ::1 has in use.
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        sys.executable,
        "-c",
        FEW_PORTS,
        str(sanitized().listen),
    ]
    done = subprocess.run(
        command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 10
    assert not {"40003", "40005"} & {*done.stdout.split()}


@pytest.mark.parametrize("given", [[], ["1", "2"], ["x"], ["-1"], ["65536"], [""]])
def test_what_is_no_port(given: list[str]) -> None:
    assert subprocess.run([sanitized().listen, *given], env=ENV, check=False).returncode == errno.EINVAL


def test_both_addresses_of_the_loopback() -> None:
    with Listening() as listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.port), timeout=WAIT_S).close()
            listening.next(K.OPEN)
            listening.next(K.OVER)
