"""No session call waits for ever, whatever becomes of the programs in the slot that it asks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv import AsyncSandbox
from agentenv.errors import UnknownSessionError
from agentenv.sandbox.server import slot_sessions
from agentenv.sessions import foreground, terminal_calls
from agentenv.sessions.host import Host
from agentenv.sessions.run_once import output_of
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TerminalReply, TmuxArguments, TmuxReply
from tests.unit.sessions.session_box import WAIT_S, BoxHost, BoxSessions
from tests.waiting import eventually, until

MIB = 1024 * 1024
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[BoxHost]:
    opened = BoxHost(tmp_path, ENV | {"HOME": str(tmp_path)})
    yield opened
    opened.close()


async def all_ended(host: BoxHost) -> None:
    await until(lambda: not host.busy, WAIT_S)


async def test_a_helper_that_fails_says_nothing_and_one_that_is_stopped_is_not_known(host: BoxHost) -> None:
    assert await output_of(host, "echo", "said", longest_s=WAIT_S) == b"said\n"
    assert await output_of(host, "false", longest_s=WAIT_S) == b""
    assert await output_of(host, "bash", "-c", "kill -STOP $$", longest_s=0.2) is None
    await all_ended(host)


async def test_a_helper_nobody_waits_for_any_more_is_killed(host: BoxHost) -> None:
    asking = asyncio.ensure_future(output_of(host, "sleep", "600", longest_s=600))
    await until(lambda: host.busy, WAIT_S)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await all_ended(host)


async def test_a_shell_that_cannot_be_looked_at_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "_LOOK_S", 0.2)
    programs, workspace = tmp_path / "bin", tmp_path / "workspace"
    programs.mkdir()
    workspace.mkdir()
    (programs / "bash").write_text("#!/bin/sh\nkill -STOP $$\n")
    (programs / "bash").chmod(0o755)
    sessions = BoxSessions(workspace, {"PATH": f"{programs}:{ENV['PATH']}", "HOME": str(tmp_path)}, MIB)
    blocked = {"action": "send_keys", "text": "true\n", "block": True, "max_wait_s": 1}
    answers = []
    for more in ({"action": "start"}, blocked, {"action": "stop"}):
        call = sessions.call(TmuxArguments.model_validate(more), asyncio.get_running_loop().time() + 30)
        answers.append(await asyncio.wait_for(call, 40))
    sessions.close()
    answer = answers[1]
    assert isinstance(answer.content, TmuxReply)
    assert answer.content.session is not None
    assert (answer.content.session.idle, answer.fields.get("timed_out")) == (False, True)


async def test_a_call_that_nothing_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_sessions, "LATE_S", 0.2)
    sessions = BoxSessions(tmp_path, ENV | {"HOME": str(tmp_path)}, MIB)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sessions._processes, "call", never)
    listing = sessions.call(ProcessArguments(action="list"), asyncio.get_running_loop().time() + 0.1)
    with pytest.raises(UnknownSessionError, match="does not respond"):
        await asyncio.wait_for(listing, 20)
    sessions.close()


async def test_a_check_of_the_shell_that_takes_too_long_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other check is cut off, as on a very slow machine: a shell that cannot answer is told all the same."""
    monkeypatch.setattr(terminal_calls, "_LOOK_S", 0.01)
    monkeypatch.setattr(terminal_calls, "_LONGEST_LOOK_S", 0.02)
    checks = itertools.count()
    real = foreground.seen

    async def seen(host: Host, **asked: int | None) -> foreground.Waits | None:
        return None if next(checks) % 2 else await real(host, **asked)

    monkeypatch.setattr(foreground, "seen", seen)
    async with AsyncSandbox("fake") as box:
        mute = await box.terminal("alias for=:; echo set", timeout_s=30)
    assert "no longer responds" in str(mute.content)


@pytest.mark.parametrize("pty", [False, True])
async def test_a_shell_that_an_interrupt_helps_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pty: bool
) -> None:
    """The shell drops a question that a C-c meets, the repeated one too; here it takes them all for errors."""
    monkeypatch.setattr(terminal_calls, "_LOOK_S", 0.01)
    monkeypatch.setattr(terminal_calls, "_LONGEST_LOOK_S", 0.02)
    sessions = BoxSessions(tmp_path, ENV | {"HOME": str(tmp_path)}, MIB)

    async def terminal(**arguments: Any) -> TerminalReply:
        call = TerminalArguments.model_validate(arguments)
        reply = (await sessions.call(call, asyncio.get_running_loop().time() + 30)).content
        assert isinstance(reply, TerminalReply)
        return reply

    mute = await terminal(command="trap 'unalias for' INT; alias for=:", pty=pty)
    assert "no longer responds" in mute.note
    notes = list[str]()

    async def helped() -> bool:
        reply = await terminal(keys=["C-c"], timeout_s=10)
        notes.append(reply.note)
        return reply.state == "idle"

    await eventually(helped)
    assert notes[-1] == ""
    sessions.close()
