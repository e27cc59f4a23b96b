"""A streamed program without asyncio: blocking files, as those of subprocess.Popen."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentenv import Sandbox
from agentenv.errors import InfraError, InvalidArgumentsError, PoolClosedError

PROGRAM = """while read -r line; do echo "got $line"; echo log >&2; done
printf '\\377end'; head -c 3000000 /dev/zero >&2"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox("fake", require_sandbox=False) as opened:
        yield opened


def test_it_is_what_popen_is(box: Sandbox) -> None:
    given = b"one\ntwo\n"
    here = subprocess.run(["bash", "-c", PROGRAM], input=given, capture_output=True, check=False)
    with box.start(PROGRAM, output="stream") as program, ThreadPoolExecutor() as threads:
        stderr = threads.submit(program.stderr.read)
        program.write("one\n")
        assert program.stdout.readline() == b"got one\n"
        program.write(b"two\n")
        program.close_stdin()
        assert b"got one\n" + program.stdout.read() == here.stdout
        assert stderr.result() == here.stderr
        assert (program.wait(), program.exit_code, program.timed_out) == (here.returncode, 0, False)
        assert program.pid > 1


@pytest.mark.parametrize("given", [{"command": ["printf", "\udce9"]}, {"command": "true", "env": {"A": "\ud800"}}])
def test_what_is_no_text_is_refused(box: Sandbox, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentsError, match="surrogate"):
        box.start(**given, output="stream")


def test_its_output_is_a_file(box: Sandbox) -> None:
    with box.start(["seq", "100000"], output="stream") as program:
        lines = io.TextIOWrapper(program.stdout)
        assert sum(map(int, lines)) == sum(range(100001))
    with box.start(["printf", "%s", "a" * 10], output="stream", timeout_s=60) as program:
        assert (program.stdout.read(3), program.stdout.peek(1)[:1], program.stdout.read()) == (b"aaa", b"a", b"aaaaaaa")


def test_it_is_killed_and_closed(box: Sandbox) -> None:
    program = box.start("echo begun; sleep 600", output="stream")
    assert program.stdout.readline() == b"begun\n"
    with pytest.raises(TimeoutError):
        program.wait(0.01)
    program.kill()
    assert program.wait() == 137
    assert program.stdout.read() == b""
    program.close()
    other = box.start("sleep 600", output="stream")
    other.close()
    for use in (other.stdout.read, other.wait):
        with pytest.raises(InfraError, match="closed"):
            use()


def test_it_ends_with_its_sandbox() -> None:
    with Sandbox("fake", require_sandbox=False) as box:
        program = box.start(["cat"], output="stream")
        box.seal()
        with pytest.raises(InfraError):
            program.wait()
    with pytest.raises(PoolClosedError):
        program.write(b"x")


def test_what_does_not_go_together_is_refused(box: Sandbox) -> None:
    with pytest.raises(InvalidArgumentsError, match="terminal"):
        box.start("true", output="stream", pty=True)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentsError, match="timeout_s"):
        box.start("true", timeout_s=1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentsError, match="command"):
        box.start(" ", output="stream")
