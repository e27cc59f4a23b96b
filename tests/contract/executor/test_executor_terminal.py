"""The terminal tool, over the whole path, on every backend."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sessions.head_tail import seam
from tests.contract.executor.farm import OWN, UNTIL_GO, go, until_bash
from tests.contract.executor.terminals import LONG_S, finished, state, terminal
from tests.waiting import DEADLINE_S, START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_shell_stays(session: ToolSession) -> None:
    first = await terminal(session, "mkdir -p sub; cd sub; export A=5; b=6; f() { echo f$1; }; alias ll='echo aliased'")
    assert (first.exit_code, first.fault, state(first)["started"], state(first)["state"]) == (0, "none", True, "idle")
    assert state(first)["cwd"].endswith("/sub")
    second = await terminal(session, 'f 3; ll; echo $A$b; echo err >&2; basename "$PWD"')
    assert (second.stdout, second.stderr) == ("f3\naliased\n56\nsub\n", "err\n")
    assert "started" not in state(second)


async def test_status_pipe_status_and_last_argument_carry_over(session: ToolSession) -> None:
    assert (await terminal(session, "(exit 3)")).exit_code == 3
    assert (await terminal(session, "echo $?")).stdout == "3\n"
    assert (await terminal(session, "echo $?")).stdout == "0\n"
    await terminal(session, "false | true")
    assert (await terminal(session, 'echo "${PIPESTATUS[@]}"')).stdout == "1 0\n"
    await terminal(session, "set -o pipefail; (exit 4) | true")
    assert (await terminal(session, "echo $?; set +o pipefail")).stdout == "4\n"
    await terminal(session, "true some words")
    assert (await terminal(session, "echo $_")).stdout == "words\n"


@pytest.mark.parametrize(
    ("command", "stdout"),
    [
        ("cat <<EOF\nhello $((1+1))\nEOF", "hello 2\n"),
        ("cat <<'EOF'\n$x \\ ' \"\nEOF", "$x \\ ' \"\n"),
        ("echo one # a 'comment", "one\n"),
        ("# nothing but a comment", ""),
        ("   \n  ", ""),
        ("for i in 1 2; do\n  echo $i\ndone\necho end", "1\n2\nend\n"),
        ("echo 'it'\"'\"'s' \\\n  two", "it's two\n"),
        ("echo back\\", "back\n"),
        ("echo !! a!b", "!! a!b\n"),
        ("g() {\n  echo in g\n}\ng", "in g\n"),
        ("echo ünïcödé 日本 🙂", "ünïcödé 日本 🙂\n"),
        ("cat", ""),
        ("break; continue; return; echo on", "on\n"),
        ("x='a\nb'; echo \"$x\"", "a\nb\n"),
        ("echo $'tab\\there'", "tab\there\n"),
    ],
)
async def test_any_text_that_a_shell_understands(session: ToolSession, command: str, stdout: str) -> None:
    result = await terminal(session, command)
    assert (result.stdout, state(result)["state"]) == (stdout, "idle")
    assert (await terminal(session, "echo still here")).stdout == "still here\n"


@pytest.mark.parametrize(
    "command",
    [
        'echo "abc',
        "echo 'abc",
        "if true; then",
        "for",
        ")",
        "}",
        "echo `x",
        "echo $(x",
        "a=(1",
        "f() {",
        "cat <<X &&",
        "| x",
        "echo a; }; { echo b",
        "echo a); (echo b",
    ],
)
async def test_what_is_not_whole_is_an_error_and_the_session_goes_on(session: ToolSession, command: str) -> None:
    result = await terminal(session, command)
    assert result.exit_code not in (0, None)
    assert "bash: " in result.stderr
    assert "__" not in result.stderr
    assert (await terminal(session, "echo on")).stdout == "on\n"


async def test_nothing_of_ours_shows(session: ToolSession) -> None:
    """Traces, traps, functions, variables, history, descriptors, files: none knows of us."""
    traced = await terminal(session, "set -x; echo hi; x=$(echo y)")
    assert traced.stderr == "+ echo hi\n++ echo y\n+ x=y\n"
    assert (await terminal(session, "echo 'two words'")).stderr == "+ echo 'two words'\n"
    assert (await terminal(session, "set +x")).stderr == "+ set +x\n"
    await terminal(session, "trap 'echo \"D:$BASH_COMMAND\"' DEBUG; trap 'echo E' ERR")
    assert (await terminal(session, "echo a; false")).stdout == "D:echo a\na\nD:false\nD:false\nE\n"
    assert (await terminal(session, "trap - DEBUG ERR")).stdout == "D:trap - DEBUG ERR\n"
    assert (await terminal(session, "trap; history; declare -F; jobs")).stdout == ""
    listed = await terminal(session, "ls /proc/self/fd; compgen -v | grep -ic agentenv; set | grep -c '&25[234]'")
    assert listed.stdout.split() == ["0", "1", "2", "3", *listed.stdout.split()[4:]]
    assert listed.stdout.split()[-1] == "0"
    assert (await terminal(session, "ls -A")).stdout == ""
    verbose = await terminal(session, "set -v")
    assert (await terminal(session, "echo v; set +v")).stderr == verbose.stderr == ""
    await terminal(session, "PS1='prompt> '; PROMPT_COMMAND=true")
    prompted = await terminal(session, "echo p")
    assert (prompted.stdout, prompted.stderr) == ("p\n", "")


async def test_set_e_and_u_mean_what_they_mean(session: ToolSession) -> None:
    await terminal(session, "set -eu; false && true")
    kept = await terminal(session, "echo kept $?")
    assert (kept.stdout, kept.exit_code) == ("kept 1\n", 0)
    ended = await terminal(session, "false; echo not reached")
    assert (ended.exit_code, state(ended)["state"], ended.stdout) == (1, "exited", "")


async def test_a_command_that_takes_longer_goes_on(session: ToolSession) -> None:
    result = await terminal(session, f"echo begun; {UNTIL_GO}; echo done; (exit 9)", timeout_s=0.3)
    assert (result.exit_code, result.timed_out) == (None, True)
    assert state(result)["state"] == "running"
    assert state(result)["command"].startswith("echo begun")
    await go(session)
    more = await finished(session)
    assert (result.stdout + more.stdout, more.exit_code) == ("begun\ndone\n", 9)
    assert (await terminal(session, "echo $?")).stdout == "9\n"


async def test_a_calls_own_deadline_is_as_soft(session: ToolSession) -> None:
    result = await session.call("terminal", {"command": f"echo x; {UNTIL_GO}; echo y"}, timeout_s=0.5)
    assert (result.timed_out, result.fault) == (True, "none")
    await go(session)
    assert result.stdout + (await finished(session)).stdout == "x\ny\n"


async def test_a_busy_session_refuses_at_once_and_says_what_runs(session: ToolSession) -> None:
    await terminal(session, "cat; sleep 600 # and a question", timeout_s=0)
    began = time.monotonic()
    refused = await terminal(session, "echo typed into it")
    assert time.monotonic() - began < LONG_S / 2
    assert (refused.fault, refused.error) == ("model", "session_busy")
    assert "sleep 600 # and a question" in refused.message
    assert (await terminal(session, reset=True)).fault == "none"
    fresh = await terminal(session, "echo fresh")
    assert (fresh.stdout, state(fresh)["started"]) == ("fresh\n", True)


@pytest.mark.parametrize("pty", [False, True])
@pytest.mark.parametrize(
    "command", ["sleep 30", "while :; do :; done", "while :; do sleep 0.1; done", "(sleep 30; echo no)"]
)
async def test_an_interrupt_ends_the_command_and_not_the_shell(session: ToolSession, command: str, pty: bool) -> None:
    await terminal(session, "kept=yes", pty=pty)
    await terminal(session, f"{command}; echo not reached", timeout_s=0.5)
    printed = ""
    for _ in range(5):  # bash goes on where the program that ran had just ended by itself: then once more
        printed += (await terminal(session, keys=["C-c"])).stdout
        after = await terminal(session, "", timeout_s=10)
        printed += after.stdout
        if state(after)["state"] != "running":
            break
    assert "not reached" not in printed
    assert (await terminal(session, "echo $? $kept")).stdout == "130 yes\n"


BACKGROUND = {
    "list": "mkdir -p app && cd app && sleep 1000 &",
    "subshell": "(sleep 1000) &",
    "group": "{ sleep 1000; :; } &",
    "function": "serve() { sleep 1000; :; }; serve &",
    "program": "python3 -c 'import time; time.sleep(1000)' >log 2>&1 & true",
}


@pytest.mark.parametrize("form", BACKGROUND)
async def test_an_interrupt_spares_the_background(session: ToolSession, form: str) -> None:
    await terminal(session, f"{BACKGROUND[form]}\nprintf %s $! > pid")
    alive = "ps -o pid=,args= --ppid $(cat pid) -p $(cat pid) | grep 1000"
    async with asyncio.timeout(DEADLINE_S):
        while "1000" not in (before := (await terminal(session, alive)).stdout):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)  # start times are in ticks of 10 ms
    for command in ("sleep 30", "while :; do sleep 0.1; done", "sleep 30 | cat"):
        await terminal(session, command, timeout_s=0.2)
        # Again where it came between a fork and its exec: no shell takes note of that one.
        while state(await terminal(session, "", timeout_s=0.2))["state"] == "running":
            await terminal(session, keys=["C-c"])
    assert (await terminal(session, alive)).stdout == before
    assert "T" not in (await terminal(session, "ps -o stat= --ppid $(cat pid) -p $(cat pid)")).stdout, "all go on"


async def test_keys_need_something_that_reads_them(session: ToolSession) -> None:
    await terminal(session, "true")
    idle = await terminal(session, keys=["C-c"])
    assert (idle.fault, "nothing is running" in idle.message) == ("model", True)
    await terminal(session, "sleep 600", timeout_s=0)
    for wrong, said in (
        ({"keys": ["C-d"]}, "without a pty"),
        ({"input": "x"}, "without a pty"),
        ({"keys": ["C-Enter"]}, "unknown key 'C-Enter'"),
    ):
        refused = await terminal(session, **wrong)
        assert (refused.fault, refused.error) == ("model", "invalid_arguments")
        assert said in refused.message


async def test_exit_and_a_killed_shell_are_told_and_the_next_command_starts_afresh(session: ToolSession) -> None:
    for command, code in (("echo bye; exit 7", 7), ("kill -9 $$", 137)):
        await terminal(session, "left=over")
        ended = await terminal(session, command)
        assert (ended.exit_code, state(ended)["state"]) == (code, "exited")
        fresh = await terminal(session, "echo [$left]")
        assert (fresh.stdout, state(fresh)["started"]) == ("[]\n", True)


async def test_a_shell_that_is_replaced_is_told(session: ToolSession) -> None:
    replaced = await terminal(session, f"exec bash -c '{UNTIL_GO}'")
    assert state(replaced)["state"] == "running"
    assert "exec" in state(replaced)["note"]
    await go(session)
    assert state(await finished(session))["state"] == "exited"


async def test_sessions_are_apart_and_do_not_wait_for_each_other(session: ToolSession) -> None:
    await terminal(session, "v=1; sleep 600", session="stuck", timeout_s=0)
    longest = {"command": "", "session": "stuck", "timeout_s": 500}
    waiting = asyncio.ensure_future(session.call("terminal", longest, timeout_s=600))
    for index in range(10):
        result = await terminal(session, f"v={index}; echo $v", session=f"s{index}")
        assert result.stdout == f"{index}\n"
    assert (await session.call("bash", {"command": "echo bash"})).stdout == "bash\n"
    assert (await terminal(session, "echo $v", session="s3")).stdout == "3\n"
    assert not waiting.done()
    while not waiting.done():  # again where it came between a fork and its exec
        await terminal(session, session="stuck", keys=["C-c"])
        await asyncio.wait({waiting}, timeout=5)
    assert (await waiting).exit_code == 130


async def test_a_terminal_that_asks_questions(session: ToolSession) -> None:
    sized = await terminal(session, "tty >/dev/null && stty size", pty=True)
    assert (sized.stdout, sized.exit_code) == ("40 120\n", 0)
    asked = await terminal(session, "read -p 'name? ' name; echo hello $name", timeout_s=20)
    assert (asked.stdout, asked.timed_out) == ("name? ", True)
    answered = await terminal(session, input="bob", keys=["Enter"])
    assert "hello bob\n" in answered.stdout + (await terminal(session, "")).stdout
    assert (await terminal(session, "printf 'no newline'; echo err >&2")).stdout == "no newlineerr\n"
    await terminal(session, "cat")
    typed = await terminal(session, input="line\n", timeout_s=LONG_S)
    assert typed.stdout == "line\nline\n"
    await terminal(session, keys=["C-d"], timeout_s=20)
    assert (await terminal(session, "echo $?; echo 'set -x' >/dev/null")).stdout == "0\n"
    await terminal(session, f"sleep 30{OWN}", timeout_s=0.2)
    await until_bash(session, f"ps -eo args | grep '^sleep 30{OWN}'")
    stopped = await terminal(session, keys=["C-z"], timeout_s=20)
    assert "Stopped" in stopped.stdout
    assert (await terminal(session, "kill %1; echo killed")).stdout.endswith("killed\n")


async def test_what_is_decided_at_the_start_is_not_changed_silently(session: ToolSession) -> None:
    await session.call("bash", {"command": "mkdir there"})
    made = await terminal(session, "basename $PWD; echo $E", workdir="there", env={"E": "e"})
    assert made.stdout == "there\ne\n"
    for later in ({"pty": True}, {"env": {"X": "1"}}):
        assert (await terminal(session, "true", **later)).error == "invalid_arguments"
    assert (await terminal(session, "tty", pty=True, reset=True)).stdout.startswith("/dev/pts/")
    nowhere = await terminal(session, "true", session="other", workdir="no/such/place")
    assert (nowhere.fault, nowhere.exit_code, state(nowhere)["state"]) == ("none", 1, "exited")
    assert "No such file" in nowhere.stderr


@pytest.mark.parametrize("pty", [False, True])
async def test_a_workdir_is_entered_before_the_command(session: ToolSession, pty: bool) -> None:
    await terminal(session, "mkdir -p 'a b/c' ~/'at home' && kept=yes", pty=pty)
    entered = await terminal(session, "echo ${PWD##*/}; echo $kept; (exit 3)", workdir="a b/c")
    assert (entered.stdout, entered.exit_code) == ("c\nyes\n", 3)
    assert (await terminal(session, "echo ${PWD##*/}", timeout_s=20)).stdout == "c\n", "it stays there"
    assert (await terminal(session, "echo ${PWD##*/}", workdir="a b")).stdout == "a b\n", "relative to the workspace"
    missing = await terminal(session, "touch was_run", workdir="no/such/place")
    assert (missing.fault, missing.exit_code, state(missing)["state"]) == ("none", 1, "idle")
    assert "No such file or directory" in missing.stdout + missing.stderr
    assert "was not run" in state(missing)["note"]
    assert (await terminal(session, "[ -e was_run ] || echo ${PWD##*/}", workdir="~/at home")).stdout == "at home\n"
    await terminal(session, "sleep 30", timeout_s=0)
    assert (await terminal(session, "true", workdir=".")).error == "session_busy"


async def test_output_is_capped_and_the_session_lives_through_a_flood(session: ToolSession) -> None:
    big = await terminal(session, "head -c 5000000 /dev/zero | tr '\\0' x; echo end")
    assert big.truncated
    missing = seam(big.stdout_dropped_bytes)
    assert big.stdout.count(missing) == 1
    assert len(big.stdout) - len(missing) + big.stdout_dropped_bytes == 5_000_004
    assert big.stdout.endswith("xend\n")
    await terminal(session, "yes", timeout_s=0.3)
    while state(await terminal(session, "", timeout_s=0.2))["state"] == "running":
        await terminal(session, keys=["C-c"], timeout_s=5)
    assert (await terminal(session, "echo ok")).stdout.endswith("ok\n")


async def test_a_character_in_two_parts_arrives_whole(session: ToolSession) -> None:
    first = await terminal(session, f"printf '\\xe2\\x82'; {UNTIL_GO}; printf '\\xac'; printf '\\xff'", timeout_s=0.4)
    await go(session)
    rest = await finished(session)
    assert first.stdout + rest.stdout == "€\ufffd"


async def test_large_commands(session: ToolSession) -> None:
    text = "a" * 500_000
    assert (await terminal(session, f"x='{text}'; echo ${{#x}}")).stdout == "500000\n"
    lines = "\n".join(f"x{n}={n}" for n in range(20_000))
    assert (await terminal(session, f"{lines}\necho $x19999")).stdout == "19999\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": "echo \0"}, "NUL"),
        ({"command": "x" * (10 * 1024 * 1024)}, "at most"),
        ({"command": "true", "timeout_s": -1}, "greater than or equal to 0"),
        ({"command": "true", "session": "../x"}, "session"),
        ({"command": "true", "session": ""}, "session"),
        ({}, "command"),
        ({"command": "true", "keys": ["C-c"]}, "either"),
        ({"keys": ["C-c"], "reset": True}, "either"),
        ({"background": True}, "background"),
        ({"command": "true", "env": {"A=B": "c"}}, "environment"),
        ({"command": ""}, "no session"),
        ({"command": "", "session": "never"}, "'never'"),
        ({"command": "true", "sesion": "x"}, "did you mean 'session'"),
    ],
)
async def test_bad_input_is_refused_clearly(session: ToolSession, arguments: dict[str, Any], said: str) -> None:
    result = await session.call("terminal", arguments)
    assert result.fault == "model"
    assert said in result.message


async def test_sealing_and_release_end_every_session(executor: ToolExecutor) -> None:
    async with executor.open("first", acquire_timeout_s=START_S) as opened:
        await terminal(opened, f"mine=1; (trap '' TERM HUP; sleep 300{OWN}) & echo kept > kept")
        waiting = asyncio.ensure_future(terminal(opened, f"sleep 300{OWN}", session="other"))
        await until_bash(opened, f"[ $(ps -eo args | grep -c '^sleep 300{OWN}') = 2 ]")
        await opened.seal()
        assert (await waiting).cancelled
        assert (await terminal(opened, "")).error == "unknown_session"
        left = await opened.call("bash", {"command": f"cat kept; ps -eo args | grep -c '^sleep 300{OWN}' || true"})
        assert left.stdout == "kept\n0\n"
        fresh = await terminal(opened, "echo [$mine]")
        assert (fresh.stdout, state(fresh)["started"]) == ("[]\n", True)


async def test_a_cancelled_call_leaves_the_command_running(session: ToolSession) -> None:
    call = asyncio.ensure_future(terminal(session, f"touch begun; {UNTIL_GO}; echo b"))
    await until_bash(session, "[ -e begun ]")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await go(session)
    assert (await finished(session)).stdout.endswith("b\n")
