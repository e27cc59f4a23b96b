"""The tmux tool, over the whole path, on every backend."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sessions.asciicast import recordings
from agentenv.wire.calls import CallResult
from tests.contract.executor.farm import OWN
from tests.waiting import DEADLINE_S, START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def tmux(slot: ToolSession, action: str, /, **arguments: Any) -> CallResult:
    return await slot.call("tmux", {"action": action, **arguments}, timeout_s=60)


def reply(result: CallResult) -> dict[str, Any]:
    assert isinstance(result.content, dict), result
    return result.content


def state(result: CallResult) -> dict[str, Any]:
    found: dict[str, Any] = reply(result)["session"]
    return found


async def until_it_runs(slot: ToolSession, program: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while state(await tmux(slot, "capture"))["command"] != program:
            await asyncio.sleep(0.05)


async def test_typing_waiting_and_looking(session: ToolSession) -> None:
    started = await tmux(session, "start")
    assert (started.fault, state(started)["state"], state(started)["rows"]) == ("none", "running", 40)
    typed = await tmux(session, "send_keys", text="echo 'it'\"'\"'s' ünï $((40+2));\n", block=True)
    assert "it's ünï 42\n" in typed.stdout
    assert state(typed)["idle"] is True
    blocked = await tmux(session, "send_keys", text="sleep 0.6; echo aft''er", keys=["Enter"], block=True)
    assert "after\n" in blocked.stdout
    assert reply(blocked)["waited_s"] >= 0.6
    await tmux(session, "send_keys", text="(sleep 0.5; echo lat''er)\n")
    waited = await tmux(session, "wait", text="later", max_wait_s=50)
    assert (reply(waited)["matched"], waited.timed_out) == (True, False)
    missed = await tmux(session, "wait", text="never", max_wait_s=0.3)
    assert (reply(missed)["matched"], missed.timed_out) == (False, True)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("x=$(sleep 0.6)", id="the shell reads from a command"),
        pytest.param("sleep 0.6 & wait", id="the shell waits for a job"),
    ],
)
async def test_blocked_until_the_shell_reads_again(session: ToolSession, line: str) -> None:
    await tmux(session, "start")
    blocked = await tmux(session, "send_keys", text=f"{line}\necho aft''er\n", block=True)
    assert ("after\n" in blocked.stdout, state(blocked)["idle"]) == (True, True)


async def test_a_program_that_does_not_end_is_interrupted(session: ToolSession) -> None:
    await tmux(session, "start")
    running = await tmux(session, "send_keys", text="sleep 60\n", block=True, max_wait_s=0.5)
    assert (running.timed_out, state(running)["idle"]) == (True, False)
    await until_it_runs(session, "sleep")
    await tmux(session, "send_keys", keys=["C-c"])
    assert reply(await tmux(session, "wait", until="idle", max_wait_s=50))["matched"] is True


async def test_text_of_any_size_arrives_as_it_is(session: ToolSession) -> None:
    await tmux(session, "start")
    text = "".join(f"line {index} ünï 日本 ;' \\ \" $x `y` #{{z}} %0 ~\n" for index in range(1_500)) + ";\n"
    await tmux(session, "send_keys", text="stty -echo; cat > typed\n")
    await until_it_runs(session, "cat")
    sent = await tmux(session, "send_keys", text=text, keys=["C-d"], block=True, max_wait_s=60)
    assert reply(sent)["sent_bytes"] == len(text.encode())
    read = await session.call("read_file", {"path": "typed"})
    assert isinstance(read.content, dict)
    assert read.content["text"] == text


async def test_a_full_screen_program(session: ToolSession) -> None:
    drawn = "w.addstr('ready'), w.addstr(3, 5, 'hello ' + w.getkey()), w.refresh(), w.getkey()"
    script = f"import curses; curses.wrapper(lambda w: ({drawn}))"
    await session.call("write_file", {"path": "app.py", "text": script})
    await tmux(session, "start", command="python3 app.py", rows=10, columns=40)
    await tmux(session, "wait", text="ready", max_wait_s=50)
    await tmux(session, "send_keys", keys=["Up"])
    await tmux(session, "wait", text="hello KEY_UP", max_wait_s=50)
    screen = await tmux(session, "capture")
    assert screen.stdout == "ready\n\n\n     hello KEY_UP\n"
    await tmux(session, "send_keys", text="q")
    ended = await tmux(session, "wait", until="exit", max_wait_s=50)
    assert (reply(ended)["matched"], ended.exit_code, state(ended)["state"]) == (True, 0, "exited")


async def test_screen_scrollback_and_difference(session: ToolSession) -> None:
    await tmux(session, "start", rows=10, columns=60, command="bash --norc")
    await tmux(session, "send_keys", text="PS1='$ '; clear\n", block=True)
    await tmux(session, "capture", what="difference")
    await tmux(session, "send_keys", text="seq 1 100\n", block=True)
    assert (await tmux(session, "capture")).stdout.split()[0] == "92"
    everything = (await tmux(session, "capture", what="scrollback")).stdout.splitlines()
    assert everything[-101:] == [*map(str, range(1, 101)), "$"]
    await tmux(session, "send_keys", text="echo new\n", block=True)
    assert (await tmux(session, "capture", what="difference")).stdout == "$ echo new\nnew\n$\n"
    assert (await tmux(session, "capture", what="difference")).stdout in ("", "$\n")


async def test_resize(session: ToolSession) -> None:
    await tmux(session, "start", rows=20, columns=50)
    await tmux(session, "resize", rows=12, columns=90)
    sized = await tmux(session, "send_keys", text="stty size\n", block=True)
    assert "12 90\n" in sized.stdout
    assert (state(sized)["rows"], state(sized)["columns"]) == (12, 90)


async def test_the_recording_plays(session: ToolSession) -> None:
    results = [await tmux(session, "start", rows=10, columns=60, command="bash --norc")]
    results.append(await tmux(session, "send_keys", text="echo rec''orded ünï\n"))
    # tmux may drop what a program prints in the moment of its end.
    results.append(await tmux(session, "wait", text="recorded ünï", max_wait_s=50))
    results.append(await tmux(session, "send_keys", text="exit 3\n"))
    results.append(await tmux(session, "wait", until="exit", max_wait_s=50))
    results.append(await tmux(session, "stop"))
    cast = recordings(result.content for result in results)["main"]
    header, *events = [json.loads(line) for line in cast.splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 60, 10)
    assert "recorded ünï\r\n" in "".join(text for _, kind, text in events if kind == "o")
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    unrecorded = await tmux(session, "start", session="quiet", record=False)
    assert "recording" not in reply(unrecorded)


async def test_several_sessions_and_their_ends(session: ToolSession) -> None:
    for name in ("one", "two"):
        await tmux(session, "start", session=name)
    quick = await tmux(session, "start", session="three", command="echo said; sleep 1; exit 5;")
    ended = await tmux(session, "wait", session="three", until="exit")
    assert (ended.exit_code, "said" in (quick.stdout + ended.stdout)) == (5, True)
    listed = reply(await tmux(session, "list"))["sessions"]
    assert [(found["session"], found["state"]) for found in listed] == [
        ("one", "running"),
        ("two", "running"),
        ("three", "exited"),
    ]
    for name in ("one", "two", "three"):
        assert state(await tmux(session, "stop", session=name))["state"] == "exited"
    assert "sessions" not in reply(await tmux(session, "list"))
    await tmux(session, "start", session="one", env={"E": "again"})
    assert "[again]" in (await tmux(session, "send_keys", session="one", text="echo [$E]\n", block=True)).stdout


async def test_started_while_the_server_of_the_last_one_goes(session: ToolSession) -> None:
    for _ in range(12):
        started = await tmux(session, "start")
        assert state(started)["state"] == "running", started
        await tmux(session, "stop")


async def test_a_session_killed_behind_our_back_is_told(session: ToolSession) -> None:
    await tmux(session, "start")
    await tmux(session, "send_keys", text="tmux kill-server\n")
    async with asyncio.timeout(DEADLINE_S):
        while (gone := await tmux(session, "capture")).fault == "none" and state(gone)["state"] == "running":
            await asyncio.sleep(0.05)
    assert (await tmux(session, "start")).fault == "none"


async def test_a_flood_holds_up_nothing(session: ToolSession) -> None:
    await tmux(session, "start", command="yes")
    assert (await session.call("terminal", {"command": "echo on"})).stdout == "on\n"
    await tmux(session, "send_keys", keys=["C-c"])
    ended = await tmux(session, "wait", until="exit", max_wait_s=30)
    assert ended.exit_code == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action": "capture", "session": "never"}, "no tmux session 'never'"),
        ({"action": "send_keys"}, "text or keys"),
        ({"action": "wait", "until": "text"}, "requires text"),
        ({"action": "start", "rows": 0}, "rows"),
        ({"action": "start", "session": "a:b"}, "session"),
        ({"action": "wait", "max_wait_s": -1}, "greater than or equal to 0"),
        ({"action": "send_keys", "text": "x", "min_wait_s": 5, "max_wait_s": 1}, "min_wait_s"),
        ({"action": "send_keys", "text": "x" * (10 * 1024 * 1024)}, "at most"),
        ({"action": "type"}, "action"),
    ],
)
async def test_bad_input_is_refused_clearly(session: ToolSession, arguments: dict[str, Any], said: str) -> None:
    result = await session.call("tmux", arguments)
    assert result.fault == "model"
    assert said in result.message


async def test_keys_may_be_text_and_one_key_needs_no_list(session: ToolSession) -> None:
    await tmux(session, "start")
    typed = await tmux(session, "send_keys", keys=["echo $((40 + 2))", "Enter"], block=True)
    assert "\n42\n" in typed.stdout
    await tmux(session, "send_keys", text="sleep 60\n")
    await until_it_runs(session, "sleep")
    await tmux(session, "send_keys", keys="C-c")
    assert reply(await tmux(session, "wait", until="idle", max_wait_s=50))["matched"] is True


@pytest.mark.parametrize("end", ["exit 3", "exec bash -c 'exit 3'", "kill -9 $$"])
async def test_no_wait_outlasts_the_session(session: ToolSession, end: str) -> None:
    for _ in range(6):
        await tmux(session, "start")
        ended = await tmux(session, "send_keys", text=f"{end}\n", block=True)
        assert (ended.timed_out, reply(ended)["waited_s"] < 30) == (False, True), ended
        waited = await tmux(session, "wait", text="never", max_wait_s=50)
        assert (reply(waited)["matched"], waited.timed_out, reply(waited)["waited_s"] < 40) == (False, False, True)
        assert reply(waited)["note"] == "the session ended before that"
        await tmux(session, "stop")


async def test_a_directory_that_is_not_there_is_refused(session: ToolSession) -> None:
    started = await tmux(session, "start", workdir="no/such")
    assert (started.exit_code, state(started)["state"]) == (1, "exited")
    assert "no/such: No such file or directory" in started.stderr


async def test_a_bad_key_types_nothing(session: ToolSession) -> None:
    await tmux(session, "start")
    refused = await tmux(session, "send_keys", text="typed", keys=["C-Enter"])
    assert (refused.fault, "unknown key 'C-Enter'" in refused.message) == ("model", True)
    assert "typed" not in (await tmux(session, "capture")).stdout
    assert (await tmux(session, "start")).error == "invalid_arguments"


async def test_sealing_ends_tmux(executor: ToolExecutor) -> None:
    async with executor.open("first", acquire_timeout_s=START_S) as opened:
        await tmux(opened, "start", command=f"sleep 304{OWN}")
        await opened.seal()
        left = await opened.call("bash", {"command": f"ps -eo args | grep -cE '^(sleep|tmux) .*304{OWN}' || true"})
        assert left.stdout == "0\n"
        assert (await tmux(opened, "capture")).error == "unknown_session"
        assert (await tmux(opened, "start")).fault == "none"
