"""What a terminal session does about input: programs that ask, text nobody reads, shells changed by their commands."""

from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from agentenv.executor.session import ToolSession
from tests.contract.executor.farm import UNTIL_GO, go
from tests.contract.executor.terminals import LONG_S, finished, state, terminal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def lines_in(session: ToolSession, path: str, count: int) -> None:
    """Wait until the file has so many lines."""
    text = f"for _ in $(seq 300); do [ $(wc -l < {path}) -ge {count} ] && exit; sleep 0.1; done; exit 1"
    assert (await session.call("bash", {"command": text})).exit_code == 0


@pytest.mark.parametrize(
    "command",
    ["read -p 'name? ' x", "cat", "python3 -c 'input()'", "python3 -q", "(sleep 0.8; cat) | cat", "bash -c 'read x'"],
)
async def test_a_program_that_waits_for_input_is_told_at_once(session: ToolSession, command: str) -> None:
    began_s = time.monotonic()
    asked = await terminal(session, command, pty=True)
    assert time.monotonic() - began_s < LONG_S / 2
    assert (state(asked)["waiting_for_input"], state(asked)["state"]) == (True, "running")
    assert "is waiting for input" in state(asked)["note"]
    again = await terminal(session, "", timeout_s=50)  # still does
    assert state(again)["waiting_for_input"]
    assert time.monotonic() - began_s < LONG_S
    await terminal(session, keys=["C-c"], timeout_s=20)
    await terminal(session, keys=["C-d"], timeout_s=20) if command == "python3 -q" else None
    assert (await terminal(session, "echo on")).stdout.endswith("on\n")


@pytest.mark.parametrize(
    "command",
    [
        "sleep 2",
        "for i in 1 2; do sleep 1; done; read -t 0.01",
        "python3 -c 'import time; time.sleep(2)'",
        "end=$((SECONDS+2)); while [ $SECONDS -lt $end ]; do :; done",
        "python3 -c 'import socket; a, b = socket.socketpair(); a.settimeout(2)\ntry: a.recv(1)\nexcept OSError: pass'",
        "python3 -c 'import select, sys; select.select([], [], [], 2)'",
        "sleep 2 | cat",
        "(sleep 2; echo x) | (read y)",
        "x=$(sleep 2); read y < <(sleep 1; echo y)",
    ],
)
async def test_a_program_that_sleeps_or_works_does_not_pass_for_one_that_asks(
    session: ToolSession, command: str
) -> None:
    result = await terminal(session, command, pty=True)
    assert "waiting_for_input" not in state(result)
    assert (state(result)["state"], result.exit_code is not None) == ("idle", True)


async def test_input_and_keys_say_whether_more_is_asked(session: ToolSession) -> None:
    await terminal(session, "read a; sleep 1.5; read b; echo $a$b", pty=True)
    first = await terminal(session, input="x\n", timeout_s=LONG_S)
    assert state(first)["waiting_for_input"]
    assert first.duration_s >= 1
    second = await terminal(session, input="y", keys=["Enter"], timeout_s=LONG_S)
    assert (second.stdout, second.exit_code) == ("y\nxy\n", 0)
    assert "waiting_for_input" not in state(second)
    await terminal(session, "cat")
    assert state(await terminal(session, keys=["Enter"]))["waiting_for_input"]


async def test_text_is_refused_where_nothing_would_read_it(session: ToolSession) -> None:
    """It would stay in the terminal and answer the next program's question."""
    await terminal(session, "touch precious", pty=True)
    for typed in (
        {"input": "y\n"},
        {"input": "y"},
        {"keys": ["Enter"]},
        {"keys": ["C-d"]},
        {"input": "y", "keys": ["C-c"]},
    ):
        refused = await terminal(session, **typed)
        assert (refused.fault, refused.error) == ("model", "invalid_arguments"), typed
        assert "nothing is running" in refused.message
    asked = await terminal(session, "rm -i precious")
    assert state(asked)["waiting_for_input"]
    assert (await terminal(session, input="n\n", timeout_s=LONG_S)).exit_code == 0
    assert (await terminal(session, "ls precious")).stdout == "precious\n"


async def test_harmless_keys_at_an_idle_terminal_show_in_their_own_result(session: ToolSession) -> None:
    await terminal(session, "true", pty=True)
    pressed = await terminal(session, keys=["C-c"], timeout_s=20)
    assert (pressed.fault, pressed.stdout) == ("none", "^C")
    assert (await terminal(session, "echo next")).stdout == "next\n"


@pytest.mark.parametrize("left", ["y\n", "y", "a\nb\nc", "y\n" * 300])
async def test_what_a_program_left_unread_answers_no_other(session: ToolSession, left: str) -> None:
    await terminal(session, UNTIL_GO, pty=True, timeout_s=0.2)
    await terminal(session, input=left, timeout_s=0)
    await go(session)
    await finished(session)
    asked = await terminal(session, "read -t 1 answer; echo [$answer]")
    said = asked.stdout  # where 1 s is long, that the program waits for input has been said before it gives up
    if state(asked)["state"] == "running":
        said += (await finished(session)).stdout
    assert said.strip() == "[]"
    assert (await terminal(session, "set -u; (exit 4)")).exit_code == 4
    assert (await terminal(session, "echo $?; set -u; trap")).stdout == "4\n"


async def test_input_of_any_size_arrives_in_order(session: ToolSession) -> None:
    text = "".join(f"{number:07d} {'x' * 50}\n" for number in range(12_000))
    await terminal(session, "stty -echo; cat > there", pty=True)
    sent = await terminal(session, input=text)
    assert (sent.fault, sent.message) == ("none", "")
    await lines_in(session, "there", 12_000)
    ended = await terminal(session, keys=["C-d"], timeout_s=20)
    assert (state(ended)["state"], ended.exit_code) == ("idle", 0)
    summed = await session.call("bash", {"command": "sha256sum < there"})
    assert summed.stdout.split()[0] == hashlib.sha256(text.encode()).hexdigest()


async def test_what_is_not_read_is_said_with_how_much_was(session: ToolSession) -> None:
    await terminal(session, "true", pty=True)  # its shell has started
    await terminal(session, "sleep 600", timeout_s=0.2)
    text = "line\n" * 200_000
    refused = await terminal(session, input=text)
    assert (refused.fault, refused.error) == ("model", "invalid_arguments")
    assert f"of {len(text)} bytes" in refused.message
    assert 0 < int(refused.message.split(" took ")[1].split()[0]) < len(text)
    await terminal(session, reset=True)


@pytest.mark.parametrize("end", ["exit 3", "set -e; false", "kill -9 $$"])
async def test_a_shell_that_ends_is_followed_by_one_like_it(session: ToolSession, end: str) -> None:
    await session.call("bash", {"command": "mkdir -p there"})
    await terminal(session, "kept=no", pty=True, workdir="there", env={"E": "e"})
    ended = await terminal(session, end)
    assert (state(ended)["state"], state(ended)["pty"]) == ("exited", True)
    fresh = await terminal(session, 'tty >/dev/null && echo "$E [$kept] ${PWD##*/}"')
    assert (fresh.stdout, state(fresh)["started"], state(fresh)["pty"]) == ("e [] there\n", True, True)
    assert "new shell" in state(fresh)["note"]
    assert "note" not in state(await terminal(session, "true"))
    plain = await terminal(session, 'tty; echo "[$E] ${PWD##*/}"', reset=True, pty=False, env={}, workdir=".")
    assert plain.stdout.splitlines()[0] == "not a tty"
    assert plain.stdout.splitlines()[1].startswith("[] ")
    assert not plain.stdout.endswith(" there\n")


async def test_a_start_that_failed_is_not_repeated(session: ToolSession) -> None:
    failed = await terminal(session, "true", workdir="no/such/place")
    assert (state(failed)["state"], failed.exit_code) == ("exited", 1)
    assert (await terminal(session, "echo on")).stdout == "on\n"


async def test_a_reset_alone_says_what_it_did(session: ToolSession) -> None:
    await terminal(session, "sleep 600", timeout_s=0.1)
    done = await terminal(session, reset=True)
    assert (done.fault, state(done)["state"]) == ("none", "none")
    assert "were killed" in state(done)["note"]
    assert "no such session" in state(await terminal(session, reset=True))["note"]


async def test_a_stopped_shell_is_told_what_helps(session: ToolSession) -> None:
    stopped = await terminal(session, "kill -STOP $$", timeout_s=0.5)
    assert (state(stopped)["state"], "reset" in state(stopped)["note"]) == ("running", True)
    assert (await terminal(session, "echo on", reset=True)).stdout == "on\n"


@pytest.mark.parametrize("pty", [False, True])
@pytest.mark.parametrize("how", ["set -o vi", "set -o emacs", "f() { set -o vi; }; f", "set -o vi; (exit 7)"])
async def test_turning_a_line_editor_on_hangs_no_session(session: ToolSession, how: str, pty: bool) -> None:
    result = await terminal(session, how, pty=pty)
    assert (state(result)["state"], result.exit_code) == ("idle", 7 if "exit" in how else 0)
    told = await terminal(session, "echo one\ttwo; (exit 5)")
    assert (told.stdout, told.stderr, told.exit_code) == ("one two\n", "", 5)


@pytest.mark.parametrize("pty", [False, True])
@pytest.mark.parametrize("limit", [6, 12, 16, 64, 128, 253, 254, 255, 256, 1024])
async def test_a_limit_of_open_files_harms_no_session(session: ToolSession, limit: int, pty: bool) -> None:
    first = await terminal(session, f"ulimit -n {limit}; echo set", pty=pty)
    assert (first.stdout, first.exit_code) == ("set\n", 0)
    second = await terminal(session, "echo next; echo err >&2; f() { return 5; }; f")
    assert (second.stdout + second.stderr, second.exit_code, state(second)["state"]) == ("next\nerr\n", 5, "idle")
    assert (await terminal(session, "ulimit -n")).stdout == f"{limit}\n"


@pytest.mark.parametrize("pty", [False, True])
@pytest.mark.parametrize("how", ["ulimit -n 3; echo set", "alias for=:; echo set"])
async def test_a_shell_that_cannot_answer_is_told_long_before_the_deadline(
    session: ToolSession, how: str, pty: bool
) -> None:
    mute = await terminal(session, how, pty=pty)
    assert mute.duration_s < LONG_S / 2
    assert ("set\n" in mute.stdout, state(mute)["state"]) == (True, "running")
    assert "no longer responds" in state(mute)["note"]
    assert "reset" in state(mute)["note"]
    assert (await terminal(session, "echo on", reset=True)).stdout == "on\n"


async def test_numbered_descriptors_of_the_commands_own_stay(session: ToolSession) -> None:
    await terminal(session, "exec {out}>kept 10>ten 200>lock")
    await terminal(session, "echo kept >&$out; echo ten >&10; flock -n 200 && echo locked >&200; exec {out}>&- 10>&-")
    read = await session.call("bash", {"command": "cat kept ten lock"})
    assert read.stdout == "kept\nten\nlocked\n"


async def test_a_background_process_begins_where_the_session_is(session: ToolSession) -> None:
    await terminal(session, "mkdir -p app/deep; cd app/deep; export LATER=1", env={"MODE": "prod"})
    began = await terminal(session, 'echo "${PWD##*/} $MODE [$LATER]"', background=True)
    assert state(began)["cwd"].endswith("/app/deep")
    ended = await session.call("process", {"action": "wait", "process": state(began)["process"]["process"]})
    assert ended.stdout == "deep prod []\n"
    elsewhere = await terminal(session, 'echo "${PWD##*/} $MODE"', background=True, workdir="app", env={"MODE": "dev"})
    ended = await session.call("process", {"action": "wait", "process": state(elsewhere)["process"]["process"]})
    assert ended.stdout == "app dev\n"


@pytest.mark.parametrize("pty", [False, True])
async def test_pagers_print_and_end(session: ToolSession, pty: bool) -> None:
    await terminal(session, "seq 5 > five", pty=pty)
    shown = await terminal(session, 'echo "$TERM"; $PAGER five; $GIT_PAGER five; less five')
    assert shown.exit_code == 0
    assert "WARNING" not in shown.stdout
    out = shown.stdout.splitlines()
    assert out[0] == ("vt100" if pty else "dumb")
    assert "".join(out[1:11]) == "12345" * 2
    assert (await session.call("bash", {"command": 'echo "$PAGER $MANPAGER $GIT_PAGER $TERM"'})).stdout == (
        "cat cat cat dumb\n"
    )
    began = await session.call("process", {"action": "start", "command": "echo $TERM", "pty": pty})
    name = state(began)["process"]["process"]
    ended = await session.call("process", {"action": "wait", "process": name})
    assert ended.stdout == ("vt100\n" if pty else "dumb\n")


async def test_many_sessions_may_ask_at_once(session: ToolSession) -> None:
    asked = await asyncio.gather(*(terminal(session, "read x", session=f"s{n}", pty=True) for n in range(8)))
    assert all(state(each)["waiting_for_input"] for each in asked)
