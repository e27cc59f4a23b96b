"""The bash tool, over the whole path, on every backend."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from base64 import b64decode

import pytest

from agentenv.deadlines import scaled
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sessions.head_tail import seam
from agentenv.wire.calls import CallResult
from tests.contract.executor.farm import until_bash
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTPUT_BYTES = 1024 * 1024


async def bash(session: ToolSession, command: str, *, timeout_s: float = 30.0, **arguments: object) -> CallResult:
    return await session.call("bash", {"command": command, **arguments}, timeout_s=timeout_s)


async def begun(session: ToolSession, command: str) -> asyncio.Task[CallResult]:
    """A call whose command runs: it has printed something."""
    printed = asyncio.Event()
    call = asyncio.create_task(
        session.call("bash", {"command": command}, timeout_s=60, on_output=lambda *_: printed.set())
    )
    async with asyncio.timeout(30):
        await printed.wait()
    return call


async def test_output_and_exit_code(session: ToolSession) -> None:
    result = await bash(session, "echo out; echo err >&2; exit 3")
    assert (result.fault, result.exit_code, result.stdout, result.stderr) == ("none", 3, "out\n", "err\n")
    assert not any((result.timed_out, result.truncated, result.cancelled, result.oom_killed))
    assert result.duration_s > 0
    assert result.error is None


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("true", 0),
        ("false", 1),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("no_such_cmd", 127),
    ],
)
async def test_exit_codes_are_what_a_shell_would_say(session: ToolSession, command: str, exit_code: int) -> None:
    assert (await bash(session, command)).exit_code == exit_code


async def test_a_syntax_error_is_the_commands_own_failure(session: ToolSession) -> None:
    result = await bash(session, "if then")
    assert result.fault == "none"
    assert result.exit_code not in (0, None)
    assert "syntax error" in result.stderr


async def test_git_commits_and_python_is_there(session: ToolSession) -> None:
    commit = "git init -q made && cd made && git commit -q --allow-empty -m one && git log --format=%an"
    result = await bash(session, commit)
    assert (result.exit_code, result.stdout) == (0, "agent\n"), result.stderr
    mine = "cd made && git config user.name Me && git commit -q --allow-empty -m two && git log -1 --format='%an %ae'"
    assert (await bash(session, mine)).stdout == "Me agent@localhost\n", "a repository's own settings win"
    said = await bash(session, "python -c 'import sys; print(sys.version_info[0])'; echo $PIP_BREAK_SYSTEM_PACKAGES")
    assert said.stdout == "3\n1\n", said.stderr
    other = "mkdir tools; printf '#!/bin/sh\\necho mine' > tools/python; chmod +x tools/python; PATH=$PWD/tools:$PATH"
    assert (await bash(session, f"{other}; python")).stdout == "mine\n"


async def test_files_stay_and_the_shells_state_does_not(session: ToolSession) -> None:
    await bash(session, "mkdir sub && cd sub && export LEFT=over && left=over && f() { :; } && echo kept > file")
    result = await bash(session, 'echo "[$LEFT$left]"; type f; basename "$PWD"; cat sub/file')
    assert result.stdout.startswith("[]\n")
    assert result.stdout.endswith("kept\n")
    assert "sub\nkept" not in result.stdout


async def test_cwd_env_and_stdin(session: ToolSession) -> None:
    await bash(session, "mkdir -p deep/er")
    result = await bash(
        session, 'basename "$PWD"; echo "$GREETING"; cat', cwd="deep/er", env={"GREETING": "hé llo"}, stdin="a\nb"
    )
    assert result.stdout == "er\nhé llo\na\nb"


async def test_stdin_is_empty_by_default(session: ToolSession) -> None:
    assert (await bash(session, "cat; echo end")).stdout == "end\n"


@pytest.mark.parametrize("size", [0, 5, 70_000, 5_000_000])
async def test_standard_input_of_any_size(session: ToolSession, size: int) -> None:
    given = ("0123456789abcde\n" * (size // 16 + 1))[:size]
    assert (await bash(session, "cksum", stdin=given)).stdout == (
        await bash(session, "cat > f; cksum < f", stdin=given)
    ).stdout
    assert (await bash(session, "wc -c < f")).stdout.strip() == str(size)


async def test_a_command_of_300_kilobytes(session: ToolSession) -> None:
    word = "x" * 300_000
    result = await bash(session, f"word={word}\necho ${{#word}}")
    assert result.stdout == "300000\n"


@pytest.mark.parametrize("command", ["printf '%s' \"a'b\\\"c\"", "printf %s 'é\N{SNOWMAN}'", "cat <<'X'\n$HOME `x`\nX"])
async def test_quoting_arrives_as_written(session: ToolSession, command: str) -> None:
    wanted = {"p": None, "c": "$HOME `x`\n"}[command[0]] or ("a'b\"c" if "a'b" in command else "é\N{SNOWMAN}")
    assert (await bash(session, command)).stdout == wanted


async def test_binary_output_becomes_text_with_replacements(session: ToolSession) -> None:
    result = await bash(session, r"printf 'a\xff\xfe\x00b\xc3\xa9\xc3'; head -c 100000 /dev/urandom >&2")
    assert result.stdout == "a\ufffd\ufffd\0bé\ufffd"
    assert len(result.stderr) > 10_000
    assert not result.truncated


async def test_all_byte_values_survive_the_way(session: ToolSession) -> None:
    result = await bash(session, r"for i in {0..127}; do printf \\x$(printf %x $i); done")
    assert result.stdout == "".join(map(chr, range(128)))


async def test_output_is_cut_in_the_middle_and_the_cut_is_counted(session: ToolSession) -> None:
    result = await bash(session, "echo first; yes é | head -c 5000000; echo; echo last; echo fine >&2")
    assert result.truncated
    missing = seam(result.stdout_dropped_bytes)
    assert result.stdout.count(missing) == 1
    kept = len(result.stdout.replace(missing, "").encode())
    assert OUTPUT_BYTES - 8 <= kept <= OUTPUT_BYTES
    assert result.stdout_dropped_bytes == 5_000_000 + 12 - kept
    assert result.stdout.startswith("first\né\né\n")
    assert result.stdout.endswith("\nlast\n")
    assert "\ufffd" not in result.stdout
    assert (result.stderr, result.stderr_dropped_bytes) == ("fine\n", 0)


async def test_output_of_exactly_the_cap_is_whole(session: ToolSession) -> None:
    result = await bash(session, f"head -c {OUTPUT_BYTES} /dev/zero | tr '\\0' y")
    assert not result.truncated
    assert result.stdout == "y" * OUTPUT_BYTES


async def test_a_timeout_ends_the_command_and_keeps_what_it_said(session: ToolSession) -> None:
    result = await bash(session, "echo before; sleep 600; echo after", timeout_s=15)
    assert (result.fault, result.timed_out, result.stdout) == ("none", True, "before\n")
    assert 14.9 < result.duration_s < scaled(60)
    assert (await bash(session, "echo alive")).stdout == "alive\n"


async def test_a_timeout_ends_the_whole_tree(session: ToolSession) -> None:
    child = "trap '' TERM INT; until [ -e go ]; do sleep 0.05; done; echo late > late"
    result = await bash(session, f'trap "" TERM INT; ({child}) & setsid bash -c "{child}" & ({child})', timeout_s=0.5)
    assert result.timed_out
    assert (await bash(session, "touch go; sleep 0.5; cat late")).exit_code != 0


async def test_the_deadline_counts_from_the_start_in_the_slot(session: ToolSession) -> None:
    first, second = await asyncio.gather(
        bash(session, "sleep 12; echo done", timeout_s=60), bash(session, "echo done", timeout_s=10)
    )
    assert (first.stdout, second.stdout, second.timed_out) == ("done\n", "done\n", False)
    assert second.queue_s > 10, "it waited for longer than it may run"


async def test_a_flood_ends_at_its_deadline_with_what_it_printed(session: ToolSession) -> None:
    result = await bash(session, "echo began; yes", timeout_s=15)
    assert (result.timed_out, result.fault, result.exit_code) == (True, "none", 137)
    assert result.stdout.startswith("began\ny\ny\n")
    assert result.stdout_dropped_bytes > 0
    assert 15 <= result.duration_s < scaled(60)


async def test_a_background_process_outlives_its_call_and_does_not_hold_it(session: ToolSession) -> None:
    # On a slow machine it ticks before its call has ended.
    result = await bash(session, "(while sleep 0.02; do echo tick; echo tick >> ticks; done) & echo now", timeout_s=20)
    assert ("now" in result.stdout.splitlines(), result.timed_out) == (
        True,
        False,
    )
    await until_bash(session, "[ -s ticks ]")
    seen = int((await bash(session, "wc -l < ticks")).stdout)
    await until_bash(session, f"[ $(wc -l < ticks) -gt {seen} ]")  # it goes on, its output drained


async def test_a_background_flood_does_not_hold_the_slot_up(session: ToolSession) -> None:
    await bash(session, "yes & yes >&2 &")
    for _ in range(10):
        result = await bash(session, "echo quick", timeout_s=20)
        assert (result.stdout, result.stderr, result.timed_out) == ("quick\n", "", False)


async def test_many_background_processes_that_hold_their_pipes(session: ToolSession) -> None:
    for number in range(20):
        assert (await bash(session, f"sleep 1000 & echo $! >> pids; echo {number}")).stdout == f"{number}\n"
    assert (await bash(session, "kill -0 $(cat pids) && wc -l < pids")).stdout.strip() == "20"


async def test_what_a_call_used_is_told(session: ToolSession) -> None:
    result = await bash(session, "for ((n = 0; n < 300000; n++)); do :; done")
    assert result.cpu_s is not None
    assert 0.02 < result.cpu_s < scaled(20)  # seconds: an emulated machine has used 24
    assert result.peak_memory_bytes is not None
    assert OUTPUT_BYTES < result.peak_memory_bytes < 100 * OUTPUT_BYTES
    assert result.oom_killed is False


async def test_cancelling_ends_the_remote_process(session: ToolSession) -> None:
    """Calls of one slot wait for each other: the next one is answered soon because this one has ended."""
    call = await begun(session, "echo begun; sleep 50; touch finished")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(30):
        assert (await bash(session, "ls")).stdout == ""


async def test_a_queued_call_that_is_cancelled_never_runs(session: ToolSession) -> None:
    first = await begun(session, "echo begun; sleep 50")
    second = asyncio.create_task(bash(session, "touch never"))
    await asyncio.sleep(0.1)
    for call in (second, first):
        call.cancel()
        await asyncio.wait({call})
    async with asyncio.timeout(30):
        assert (await bash(session, "ls")).stdout == ""


@pytest.mark.parametrize("command", ["echo a\0b", "\0"])
async def test_nul_bytes_are_refused(session: ToolSession, command: str) -> None:
    result = await bash(session, command)
    assert (result.fault, result.error) == ("model", "invalid_arguments")
    assert "NUL" in result.message


@pytest.mark.parametrize("cwd", ["sub/dir", "/workspace/sub/dir", "./sub/../sub/dir"])
async def test_a_directory_to_run_in(session: ToolSession, cwd: str) -> None:
    await bash(session, "mkdir -p sub/dir; touch sub/dir/here")
    assert (await bash(session, "ls", cwd=cwd)).stdout == "here\n"
    assert (await bash(session, "pwd", cwd="/usr/bin")).stdout == "/usr/bin\n"


@pytest.mark.parametrize(
    ("cwd", "reason"), [("nowhere", "No such file or directory"), ("file", "Not a directory"), ("x" * 300, "too long")]
)
async def test_a_directory_that_cannot_be_entered_is_data(session: ToolSession, cwd: str, reason: str) -> None:
    await bash(session, "touch file")
    result = await bash(session, "echo not reached", cwd=cwd)
    assert (result.fault, result.exit_code, result.stdout) == ("none", 1, "")
    assert result.stderr.startswith(f"bash: cd: {cwd}: ")
    assert reason in result.stderr


async def test_calls_of_a_session_run_in_order_and_one_at_a_time(session: ToolSession) -> None:
    calls = [bash(session, f"echo in {n} >> log; echo out {n} >> log") for n in range(20)]
    results = await asyncio.gather(*calls)
    assert all(result.exit_code == 0 for result in results)
    wanted = "".join(f"in {n}\nout {n}\n" for n in range(20))
    assert (await bash(session, "cat log")).stdout == wanted


async def test_a_call_that_its_caller_has_named_runs_once(session: ToolSession) -> None:
    counting = {"command": "echo ran >> log; wc -l < log"}
    named = [await session.call("bash", counting, call_id="named-by-its-caller") for _ in range(3)]
    assert [result.stdout for result in named] == ["1\n"] * 3
    assert (await session.call("bash", counting)).stdout == "2\n"
    assert (await session.call("bash", counting, call_id="another")).stdout == "3\n"


async def test_sessions_do_not_share_a_workspace(executor: ToolExecutor) -> None:
    async with executor.open("a") as one, executor.open("b") as other:
        await bash(one, "echo secret > file")
        assert (await bash(other, "cat file")).exit_code != 0


async def test_a_released_slot_is_empty_for_the_next(executor: ToolExecutor) -> None:
    mark = secrets.token_hex(8)
    for _ in range(6):  # more than there are slots
        async with executor.open("t") as session:
            assert (await bash(session, "ls -A")).stdout == ""
            await bash(session, f"touch {mark} .{mark}")


async def test_slow_calls_do_not_delay_other_sessions(executor: ToolExecutor) -> None:
    async with executor.open("slow") as slow, executor.open("fast") as fast:
        waiting = asyncio.create_task(bash(slow, "until test -e go; do sleep 0.05; done; echo went", timeout_s=600))
        for index in range(20):
            assert (await bash(fast, f"echo {index}")).stdout == f"{index}\n"
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_many_sessions_more_than_slots(executor: ToolExecutor) -> None:
    async def trajectory(index: int) -> None:
        async with executor.open(f"t{index}", acquire_timeout_s=START_S) as session:
            for turn in range(3):
                result = await bash(session, f"echo {index} >> f; wc -l < f")
                assert result.stdout.strip() == str(turn + 1)

    await asyncio.gather(*(trajectory(index) for index in range(20)))
    assert executor.statistics().sessions_now == 0


async def test_seal_ends_processes_and_keeps_files(session: ToolSession) -> None:
    await bash(session, "echo kept > file; (while :; do date +%N > beat; sleep 0.05; done) >/dev/null 2>&1 &")
    await until_bash(session, "test -s beat")
    await session.seal()
    result = await bash(session, 'cat file; a=$(cat beat); sleep 0.4; test "$a" = "$(cat beat)" && echo still')
    assert result.stdout == "kept\nstill\n"


async def test_wrong_calls_are_answered_for_the_model(session: ToolSession) -> None:
    unknown = await session.call("no_such_tool", {"command": "ls"})
    wrong = await session.call("bash", {"cmd": "ls"})
    assert (unknown.fault, unknown.error) == ("model", "unknown_tool")
    assert (wrong.fault, wrong.error) == ("model", "invalid_arguments")


async def test_commands_hear_signals_that_the_trainer_was_told_to_ignore(session: ToolSession) -> None:
    """As under ``nohup``, or started by a script with ``&``."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        result = await session.call("bash", {"command": "kill -INT $$; echo deaf"})
        in_session = await session.call("terminal", {"command": "bash -c 'kill -INT $$; echo deaf'"})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (result.stdout, result.exit_code) == ("", 130)
    assert "deaf" not in in_session.stdout


async def test_output_is_shown_as_it_comes(session: ToolSession) -> None:
    """The command waits for a file that is written when its first line has been seen."""
    seen: dict[str, str] = {"stdout": "", "stderr": ""}
    first = asyncio.Event()

    def show(stream: str, text: str) -> None:
        seen[stream] += text
        if seen == {"stdout": "one é\n", "stderr": "two\n"}:
            first.set()

    fifo = "mkfifo go; echo one é; echo two >&2; read -r word < go; echo $word; exit 3"
    call = asyncio.create_task(session.call("bash", {"command": fifo}, timeout_s=60, on_output=show))
    async with asyncio.timeout(30):
        await first.wait()
    assert not call.done()
    await session.call("terminal", {"command": "echo three > go"})
    result = await call
    assert (result.exit_code, result.stdout, result.stderr) == (3, "one é\nthree\n", "two\n")
    assert seen == {"stdout": result.stdout, "stderr": result.stderr}


@pytest.mark.parametrize(
    "command", ["true", "printf x", "seq 100000", "head -c 3000000 /dev/zero | tr '\\0' x; echo end"]
)
async def test_what_is_shown_ends_as_the_result_does(session: ToolSession, command: str) -> None:
    pieces: list[str] = []
    result = await session.call(
        "bash", {"command": command}, timeout_s=60, on_output=lambda _, text: pieces.append(text)
    )
    shown = "".join(pieces)
    if result.stdout_dropped_bytes:
        assert shown[-1000:] == result.stdout[-1000:]
        assert len(shown) >= len(result.stdout) - 100
    else:
        assert shown == result.stdout


@pytest.mark.parametrize("command", ["printf 'é x'", "seq 100000", "head -c 3000000 /dev/zero | tr '\\0' x; echo end"])
async def test_what_is_shown_of_bytes_ends_as_they_do(session: ToolSession, command: str) -> None:
    pieces: list[str] = []
    result = await session.call(
        "bash", {"command": command, "binary": True}, timeout_s=60, on_output=lambda _, text: pieces.append(text)
    )
    assert isinstance(result.content, dict)
    data = b64decode(str(result.content["data"])).decode()
    if result.stdout_dropped_bytes:
        assert "".join(pieces)[-1000:] == data[-1000:]
        assert len("".join(pieces)) >= len(data) - 100
    else:
        assert "".join(pieces) == data


@pytest.mark.parametrize("byte", ["x", "\\377"])
@pytest.mark.parametrize("size", [999, 1000, 1001, 5000])
async def test_each_byte_is_shown_once_whatever_it_is(session: ToolSession, size: int, byte: str) -> None:
    """Around the limit of what a result holds, with time for the view to see the output before the end."""
    pieces: list[str] = []
    command = f"head -c {size} /dev/zero | tr '\\0' '{byte}'; sleep 0.3"
    result = await session.call(
        "bash", {"command": command, "output_bytes": 1000}, on_output=lambda _, text: pieces.append(text)
    )
    shown = "".join(pieces)
    marks = [int(each) for each in re.findall(r"(\d+) bytes dropped", shown)]
    assert len(re.findall("[x\ufffd]", shown)) + sum(marks) == size
    assert len(re.findall("[x\ufffd]", result.stdout)) + result.stdout_dropped_bytes == size
    assert result.content is None


async def test_a_view_ends_with_its_command(session: ToolSession) -> None:
    """At its deadline, cancelled, or when the callback fails."""
    pieces: list[str] = []
    forever = {"command": "echo $$ >> pids; echo begun; sleep 600"}
    result = await session.call("bash", forever, timeout_s=15, on_output=lambda _, text: pieces.append(text))
    assert result.timed_out
    assert pieces == ["begun\n"]
    call = await begun(session, forever["command"])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    def broken(*_: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await session.call("bash", {"command": "echo x"}, on_output=broken)
    async with asyncio.timeout(30):
        with pytest.raises(ZeroDivisionError):
            await session.call("bash", forever, timeout_s=60, on_output=broken)
    assert (await bash(session, "xargs -n 1 kill -0 < pids")).stderr.count("No such process") == 3
