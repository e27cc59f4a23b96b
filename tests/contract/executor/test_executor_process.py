"""The process tool, over the whole path, on every backend."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.wire.calls import CallResult
from tests.contract.executor.farm import OWN, UNTIL_GO, go, until_bash
from tests.waiting import DEADLINE_S, START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def process(slot: ToolSession, action: str, name: str | None = None, /, **arguments: Any) -> CallResult:
    given = {"action": action, **({} if name is None else {"process": name}), **arguments}
    return await slot.call("process", given, timeout_s=60)


def reply(result: CallResult) -> dict[str, Any]:
    assert isinstance(result.content, dict), result
    return result.content


def state_of(name: str, listed: CallResult) -> dict[str, Any]:
    (state,) = (each for each in reply(listed)["processes"] if each["process"] == name)
    return dict(state)


async def start(slot: ToolSession, command: str, **arguments: Any) -> str:
    started = await process(slot, "start", command=command, **arguments)
    assert started.fault == "none", started
    name: str = reply(started)["process"]["process"]
    return name


async def printed(slot: ToolSession, name: str, text: str) -> str:
    """Poll until the process has printed ``text``."""
    out = ""
    async with asyncio.timeout(DEADLINE_S):
        while text not in out:
            out += (await process(slot, "poll", name)).stdout
            await asyncio.sleep(0.02)
    return out


async def test_from_start_to_end(session: ToolSession) -> None:
    name = await start(session, "echo one; read x; echo got $x >&2; exit 3")
    assert name == "p1"
    assert await printed(session, name, "one") == "one\n"
    assert reply(await process(session, "list"))["processes"][0]["state"] == "running"
    assert reply(await process(session, "submit", name, input="word"))["written_bytes"] == 5
    ended = await process(session, "wait", name, timeout_s=30)
    assert (ended.exit_code, ended.stdout, ended.timed_out) == (3, "got word\n", False)
    state = reply(ended)["process"]
    assert (state["state"], state["exit_code"], state["total_bytes"]) == ("exited", 3, 13)
    assert (await process(session, "poll", name)).exit_code == 3


async def test_it_starts_where_and_with_what_it_is_told(session: ToolSession) -> None:
    await session.call("bash", {"command": "mkdir there"})
    name = await start(session, "basename $PWD; echo $E", workdir="there", env={"E": "e"})
    assert (await process(session, "wait", name)).stdout == "there\ne\n"
    nowhere = await process(session, "start", command="true", workdir="no/such")
    assert (nowhere.fault, nowhere.exit_code) == ("none", 1)
    assert "No such file or directory" in nowhere.stdout, "the answer says why, without a poll"
    long = await start(session, "\n".join(f"x{n}={n}" for n in range(10_000)) + "\necho $x9999")
    assert (await process(session, "wait", long)).stdout == "9999\n"


async def test_the_terminal_starts_them_too(session: ToolSession) -> None:
    started = await session.call("terminal", {"command": "echo $PWD; sleep 30", "background": True})
    name = reply(started)["process"]["process"]
    assert reply(started)["state"] == "none"
    note = reply(started)["note"]
    assert re.fullmatch(rf"started as background process {name} in /\S+", note), "of no tool that may not be offered"
    assert "/" in await printed(session, name, "\n")
    assert (await process(session, "kill", name)).exit_code == 137


async def test_wait_is_clamped_and_says_so(session: ToolSession) -> None:
    name = await start(session, "sleep 30")
    result = await session.call("process", {"action": "wait", "process": name, "timeout_s": 3000}, timeout_s=0.5)
    assert result.timed_out
    assert 0 < reply(result)["clamped_to_s"] <= 0.5
    assert "instead of 3000 s" in reply(result)["note"]
    short = await process(session, "wait", name, timeout_s=0.1)
    assert (short.timed_out, reply(short).get("clamped_to_s")) == (True, None)
    loud = await start(session, "seq -w 1 50000; touch printed; sleep 30")
    await until_bash(session, "[ -e printed ]")
    both = await session.call("process", {"action": "wait", "process": loud, "timeout_s": 3000}, timeout_s=0.5)
    assert "were discarded; " in reply(both)["note"]
    assert "; waited " in reply(both)["note"], "neither hides the other"
    ended = await start(session, "true")
    await process(session, "wait", ended, timeout_s=30)
    long = await session.call("process", {"action": "wait", "process": ended, "timeout_s": 3000}, timeout_s=0.5)
    assert (long.exit_code, reply(long).get("clamped_to_s")) == (0, None), "nothing was waited for"


async def test_a_wait_shows_the_end_and_says_where_the_rest_is(session: ToolSession) -> None:
    name = await start(session, "seq -w 1 9999; echo the error; exit 2")
    ended = await process(session, "wait", name, timeout_s=30, limit=20)
    assert (ended.exit_code, ended.stdout) == (2, "9998\n9999\nthe error\n")
    assert "49985 earlier bytes were skipped: read them with action=log, offset=0" in reply(ended)["note"]
    first = await process(session, "log", name, offset=0, limit=5)
    assert first.stdout == "0001\n"


async def test_kill_sends_the_signal_that_is_asked_for(session: ToolSession) -> None:
    handled = await start(session, "trap 'echo term; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    await printed(session, handled, "ready")
    killed = await process(session, "kill", handled, signal="TERM")
    ended = await process(session, "wait", handled, timeout_s=50)
    assert (ended.exit_code, (killed.stdout + ended.stdout).endswith("term\n")) == (7, True)
    deaf = await start(session, "trap '' INT; echo ready; while :; do sleep 0.05; done")
    await printed(session, deaf, "ready")
    goes_on = await process(session, "kill", deaf, signal="INT")
    assert (goes_on.exit_code, "still running" in reply(goes_on)["note"]) == (None, True)
    loud = await start(session, "trap '' TERM; seq -w 1 9999; echo ready; while :; do sleep 0.05; done")
    async with asyncio.timeout(60):
        while state_of(loud, await process(session, "list")).get("total_bytes", 0) < 50_001:
            await asyncio.sleep(0.02)
    both = await process(session, "kill", loud, signal="TERM", limit=6)
    assert both.stdout == "ready\n"
    assert reply(both)["note"] == (
        "49995 earlier bytes were skipped: read them with action=log, offset=0; "
        "TERM was sent; the process is still running"
    )
    assert (await process(session, "kill", deaf)).exit_code == 137


async def test_the_last_200_kb_are_kept_and_the_rest_is_counted(session: ToolSession) -> None:
    name = await start(session, "seq -w 1 50000")  # 6 bytes a line
    ended = await process(session, "wait", name, timeout_s=30, limit=6)
    state = reply(ended)["process"]
    assert (ended.stdout, state["total_bytes"], state["dropped_bytes"]) == ("50000\n", 300_000, 100_000)
    assert reply(ended)["note"].startswith("100000 earlier bytes were discarded; 199994 earlier bytes were")
    last = await process(session, "log", name, limit=12)
    assert (last.stdout, reply(last)["offset"], reply(last)["next_offset"]) == ("49999\n50000\n", 299_988, 300_000)
    middle = await process(session, "log", name, offset=240_000, limit=6)
    assert (middle.stdout, reply(middle)["truncated"]) == ("40001\n", True)
    gone = await process(session, "log", name, offset=0, limit=1000)
    assert reply(gone)["offset"] == 100_000
    assert "bytes discarded" in reply(gone)["note"]


async def test_a_terminal_for_a_program_that_wants_one(session: ToolSession) -> None:
    name = await start(session, "tty; read -p 'name? ' n; echo hello $n", pty=True)
    await printed(session, name, "name? ")
    await process(session, "submit", name, input="bob")
    ended = await process(session, "wait", name, timeout_s=30)
    assert (ended.stdout.endswith("hello bob\n"), ended.exit_code) == (True, 0)


async def test_the_last_line_end_of_a_terminal_is_kept(session: ToolSession) -> None:
    name = await start(session, "stty raw; printf 'abc\\r'", pty=True)
    assert (await process(session, "wait", name, timeout_s=30)).stdout == "abc\r"


async def test_no_poll_splits_a_character(session: ToolSession) -> None:
    """Between two halves of one, a poll has neither; at the end, what is no character is replaced."""
    name = await start(session, f"printf 'a\\n\\342'; {UNTIL_GO}; printf '\\202\\254b\\303'")
    assert await printed(session, name, "a\n") == "a\n"
    polled = await process(session, "poll", name)
    assert (polled.stdout, reply(polled).get("truncated", False)) == ("", False)
    assert (await process(session, "log", name)).stdout == "a\n"
    await go(session)
    ended = await process(session, "wait", name, timeout_s=30)
    assert ended.stdout == "€b\ufffd"


async def test_input_is_ended_and_what_is_not_read_is_told(session: ToolSession) -> None:
    name = await start(session, "cat | wc -c")
    await process(session, "write", name, input="x" * 500_000)
    await process(session, "close", name)
    assert (await process(session, "wait", name, timeout_s=30)).stdout.strip() == "500000"
    deaf = await start(session, "sleep 30")
    written = await session.call("process", {"action": "write", "process": deaf, "input": "x" * 500_000}, timeout_s=1)
    assert 0 < reply(written)["written_bytes"] < 500_000
    assert "does not read" in reply(written)["note"]
    await process(session, "close", deaf)
    refused = await process(session, "write", deaf, input="x")
    assert (refused.fault, "takes no input" in refused.message) == ("model", True)


async def test_later_results_tell_how_it_stands(session: ToolSession) -> None:
    began_s = time.monotonic()
    name = await start(session, f"{UNTIL_GO}; echo out", check_interval=1)
    async with asyncio.timeout(60):
        while "notices" not in (said := reply(await session.call("terminal", {"command": "true"}))):
            await asyncio.sleep(0.05)
    assert time.monotonic() - began_s >= 1, "not before its interval has passed"
    (notice,) = said["notices"]
    assert re.search(rf"{name} \({re.escape(UNTIL_GO)}; echo out\) has been running for [1-9]\d* s", notice)
    await go(session)
    async with asyncio.timeout(60):
        while "ended with exit code 0" not in str(reply(await process(session, "list")).get("notices")):
            await asyncio.sleep(0.05)
    assert "notices" not in reply(await process(session, "list"))


async def test_kill_takes_the_whole_tree(session: ToolSession) -> None:
    name = await start(session, f"(trap '' TERM INT HUP; sleep 301{OWN}) & sleep 301{OWN}; wait")
    await until_bash(session, f"[ $(ps -eo args | grep -c '^sleep 301{OWN}') = 2 ]")
    assert (await process(session, "kill", name)).exit_code == 137
    await until_bash(session, f"! ps -eo args | grep '^sleep 301{OWN}'")
    again = await process(session, "kill", name)
    assert (again.exit_code, again.fault) == (137, "none")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action": "poll", "process": "p9"}, "no background process 'p9'"),
        ({"action": "poll"}, "requires a process"),
        ({"action": "start"}, "requires a command"),
        ({"action": "start", "command": "  "}, "requires a command"),
        ({"action": "start", "command": "echo \0"}, "NUL"),
        ({"action": "stop", "process": "p1"}, "action"),
        ({"action": "wait", "process": "p1", "timeout_s": -1}, "greater than or equal to 0"),
        ({"action": "log", "process": "p1", "offset": -1}, "greater than or equal to 0"),
        ({"action": "write", "process": "p1"}, "requires input"),
        ({"action": "write", "process": "p1", "input": "x" * (10 * 1024 * 1024)}, "at most"),
    ],
)
async def test_bad_input_is_refused_clearly(session: ToolSession, arguments: dict[str, Any], said: str) -> None:
    result = await session.call("process", arguments)
    assert result.fault == "model"
    assert said in result.message


async def test_they_do_not_hold_up_each_other_or_anything_else(session: ToolSession) -> None:
    names = [await start(session, "yes") for _ in range(3)]
    longest = [{"action": "wait", "process": name, "timeout_s": 300} for name in names]
    waiting = [asyncio.ensure_future(session.call("process", each, timeout_s=400)) for each in longest]
    assert (await session.call("bash", {"command": "echo bash"})).stdout == "bash\n"
    assert (await session.call("terminal", {"command": "echo term"})).stdout == "term\n"
    assert not any(each.done() for each in waiting)
    for name in names:
        await process(session, "kill", name)
    assert [result.exit_code for result in await asyncio.gather(*waiting)] == [137] * 3


async def test_rounds_of_start_and_kill_leave_nothing(session: ToolSession) -> None:
    for index in range(40):
        name = await start(session, f"sleep 302{OWN}", pty=index % 4 == 0)
        assert (await process(session, "kill", name)).exit_code == 137
    listed = reply(await process(session, "list"))["processes"]
    assert 0 < len(listed) <= 17
    await until_bash(session, f"! ps -eo args | grep '^sleep 302{OWN}'")


async def test_sealing_ends_them(executor: ToolExecutor) -> None:
    async with executor.open("first", acquire_timeout_s=START_S) as opened:
        await start(opened, f"trap '' TERM HUP INT; (setsid sleep 303{OWN} &); sleep 303{OWN}")
        await until_bash(opened, f"[ $(ps -eo args | grep -c '^sleep 303{OWN}') -ge 2 ]")
        await opened.seal()
        left = await opened.call("bash", {"command": f"ps -eo args | grep -c '^sleep 303{OWN}' || true"})
        assert left.stdout == "0\n"
        assert "processes" not in reply(await process(opened, "list"))
