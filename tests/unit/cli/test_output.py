"""What all verbs share: errors as messages, exit codes, and unwinding on signals."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from agentenv.cli.output import InterruptedBySignalError, announce, exit_code_of, run_to_end, verb
from agentenv.errors import AgentEnvError, ConfigError, InvalidArgumentsError, SandboxUnavailableError


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_that_listens_is_announced_to_systemd(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"@agentenv-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        announce({"url": "http://here"}, "listening on http://here", as_json=True)
        assert manager.recv(100) == b"READY=1"
    assert json.loads(capsys.readouterr().out) == {"event": "ready", "url": "http://here"}


def test_a_service_is_announced_where_systemd_has_gone_or_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (str(tmp_path / "gone"), "", "vsock:2:1"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        announce({}, "listening on http://here", as_json=False)
    assert capsys.readouterr().err.count("listening on http://here") == 3


@verb
def failing(error: BaseException, as_json: bool = False) -> None:
    raise error


def exit_code(error: Exception, *, as_json: bool = False) -> int:
    with pytest.raises(typer.Exit) as ended:
        failing(error=error, as_json=as_json)
    return ended.value.exit_code


NO_BWRAP = SandboxUnavailableError("bwrap [is] missing", next_step="apt-get install bubblewrap")


def test_an_error_is_a_message_and_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(NO_BWRAP) == 125
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[:2] == ["error bwrap [is] missing", "next  apt-get install bubblewrap"]
    assert "AGENTENV_DEBUG=1" in lines[2]


def test_a_mistake_of_the_caller_needs_no_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(ConfigError("slots", "too many")) == 2
    assert capsys.readouterr().err == "error slots: too many\n"


def test_as_json_it_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(NO_BWRAP, as_json=True) == 125
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "error": "sandbox_unavailable",
        "message": "bwrap [is] missing",
        "next_step": "apt-get install bubblewrap",
        "fault": "infra",
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("slots", "too many"), 2), (InvalidArgumentsError("no"), 2), (NO_BWRAP, 125)],
)
def test_whose_failure_decides_the_exit_code(error: AgentEnvError, code: int) -> None:
    assert exit_code_of(error) == code


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_DEBUG", "1")
    with pytest.raises(SandboxUnavailableError):
        failing(error=NO_BWRAP)


def test_an_unknown_exception_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        failing(error=ZeroDivisionError())


def test_a_signal_is_128_plus_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(InterruptedBySignalError(signal.SIGTERM)) == 143
    assert "SIGTERM" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_before_it_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    steps: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing may wait
            steps.append("closed")

    with pytest.raises(InterruptedBySignalError) as ended:
        run_to_end(work())
    assert ended.value.number == number
    assert steps == ["closed"]
    assert signal.getsignal(number) is before


STUCK = """
import asyncio
from agentenv.cli.output import run_to_end

async def work():
    print("working", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("closing", flush=True)
        await asyncio.Event().wait()

run_to_end(work())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once_and_without_a_traceback(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stuck:
        assert stuck.stdout is not None
        for line in ("working", "closing"):
            assert stuck.stdout.readline().strip() == line
            stuck.send_signal(number)
        assert stuck.communicate(timeout=60) == ("", "")
    assert stuck.returncode == -number


def test_ctrl_c_in_a_verb_without_a_loop_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        failing(error=KeyboardInterrupt())
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted by SIGINT\n"


def test_work_that_ends_by_itself_gives_its_value() -> None:
    async def work() -> int:
        return 7

    assert run_to_end(work()) == 7


def test_cancellation_that_no_signal_caused_is_passed_on() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_to_end(work())
