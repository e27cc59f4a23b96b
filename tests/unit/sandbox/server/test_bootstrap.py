"""A waiting shell must be `bash -c` for whoever runs in it: a table of scripts, run both ways."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.sandbox.server.tools.bash import BOOTSTRAP, encode_script, needs_cold_shell
from agentenv.sandbox.supervisor import static_bash
from agentenv.sandbox.supervisor.static_bash import BASH
from tests.waiting import START_S

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "FRUIT": "pear"}


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A program that starts slowly is not taken for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_bash, "_TIMEOUT_S", START_S)
        yield


# What both shells must do alike: stdout, exit code, and (unless listed below) stderr.
SCRIPTS = [
    "",
    "# only a comment",
    "\n\n  \n",
    "echo hello",
    "echo one\necho two",
    "echo no newline at the end",
    "printf 'a  b\\n'; echo '  leading and trailing  '",
    'echo $0 $# "$@" $- $? "$!" $_',
    "echo $LINENO\n\necho $LINENO",
    'f() { echo "$LINENO ${BASH_LINENO[@]} ${FUNCNAME[@]} ${BASH_SOURCE[@]}"; caller 0; caller; }\n\nf',
    "[ $$ = $BASHPID ] && echo same; echo $BASH_SUBSHELL $SHLVL",
    'echo "$BASH_EXECUTION_STRING"',
    "echo ${#IFS}; a='x y'; set -- $a; echo $#",
    "set -- a 'b c'; echo $# $2",
    "[ $SECONDS -lt 30 ] && echo just begun",
    "echo $FRUIT; export FRUIT=fig; sh -c 'echo $FRUIT'",
    "declare -F; declare -f; alias; trap; hash",
    "echo ${REPLY-unset} ${TMOUT-unset} ${script-unset}",
    "ls /proc/self/fd | wc -l; ls /proc/$$/fd; :",
    "exec 9>&1; echo nine >&9",
    "exit 3",
    "exit 300",
    "exit abc",
    "(exit 7)",
    "false",
    "! true",
    "! exit 3",
    "return 3; echo after",
    "exec true; echo never",
    "exec /nonexistent; echo never",
    "exec sh -c 'exit 6'",
    "/nonexistent",
    "/tmp",
    "nosuchcommand; echo $?",
    "set -e; false; echo never",
    "set -e; false || echo caught; (exit 4); echo never",
    "set -e\ntrap 'echo trapped $?' EXIT\nfalse\necho never",
    "set -euo pipefail; false | cat; echo never",
    "set -u; echo $nope; echo never",
    "echo ${x?missing}; echo never",
    "echo $((1/0)); echo never",
    "echo $((1/0))\necho next line",
    "readonly r=1; r=2; echo never",
    "readonly r=1; r=2\necho next line",
    "let 1/0; echo $?",
    "trap 'echo bye' EXIT; echo hi",
    "trap 'exit 9' EXIT; exit 2",
    "trap 'echo got; exit 5' TERM; kill -TERM $$; echo never",
    "trap 'echo E $LINENO $BASH_COMMAND' ERR; false; f() { false; }; f; (false); true && false",
    "set -eE; trap 'echo E $LINENO' ERR; f() { false; }; f",
    "trap 'echo D $LINENO $BASH_COMMAND' DEBUG; false; echo hi",
    "trap 'echo R' RETURN; f() { :; }; f; . /dev/null",
    "trap 'echo x' 0; exec true",
    "kill -9 $$",
    "kill -TERM $$; echo never",
    "kill -INT $$; echo never",
    "sh -c 'kill -9 $$'; echo $?",
    "cat <<END\nhere $HOME\nEND",
    "cat <<'END'\nhere $HOME\nEND\necho after",
    "cat <<END\nunterminated",
    "echo 'unterminated",
    'echo hi\necho "unterminated\necho more',
    "foo(",
    "echo first\nfoo(\necho never",
    "if true; then echo x",
    "echo }",
    "}",
    ";",
    "&& echo x",
    "echo a \\",
    "echo a \\\n",
    "echo a\r\necho b\r\n",
    "shopt -s extglob\necho !(nothing)* | wc -w | grep -c .",
    "shopt -s extglob; echo !(zz)",
    "alias ll='echo L'\nll",
    "shopt -s expand_aliases\nalias ll='echo L'\nll",
    "shopt -s lastpipe; echo a | read x; echo $x",
    "coproc cat; echo hi >&${COPROC[1]}; read -u ${COPROC[0]} line; echo $line",
    "cat <(echo substituted)",
    "sleep 0.01 & wait $!; echo $?; wait; echo $?; jobs",
    "read x; echo $? $x; [ -t 0 ]; echo $?",
    "break; continue; echo on",
    "local x; echo on",
    "unset BASH_EXECUTION_STRING; echo on",
    "x=$(exit 4); echo $?; eval 'echo $LINENO'; eval 'foo('; echo $?",
    "source /dev/stdin <<<'return 5'; echo $?",
    "set -o posix; . /nonexistent; echo never",
    "shopt; set -o; ulimit -a; umask",
    "declare -p BASH_VERSINFO OPTIND HOME FRUIT DIRSTACK GROUPS",
    "printf '\udce4\udcff'; printf %s '\udcf0\udc9f' | od -c",
    "#\udce4",
    "#\udcf0\udc9f",
    "printf %s '" + "".join(chr(c) for c in range(1, 128) if c != 39) + "äöü€😀' | od -c",
    "printf %s '" + bytes(range(128, 256)).decode("utf-8", "surrogateescape") + "' | od -c",
    "echo äöü 😀 | wc -m",
    "cd /; pwd; echo $OLDPWD$PWD",
]


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    stderr: bytes


def _outcome(done: subprocess.CompletedProcess[bytes]) -> Outcome:
    """With the exit code as a shell would say it, syntax errors named alike, and no pids of children."""
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    stderr = done.stderr.replace(b"bash: eval: ", b"bash: -c: ")
    return Outcome(code, done.stdout, re.sub(rb"(line \d+: ) *\d+ (Killed|Terminated)", rb"\1PID \2", stderr))


def plain(script: str, env: dict[str, str] = ENV) -> Outcome:
    argv: list[bytes] = [b"bash", b"-c", script.encode("utf-8", "surrogateescape")]
    return _outcome(subprocess.run(argv, env=env, cwd="/tmp", stdin=subprocess.DEVNULL, capture_output=True))


def warm(content: bytes, env: dict[str, str] = ENV, *, by_pipe: bool = True, program: Path = BASH) -> Outcome:
    """Runs BOOTSTRAP with ``content`` on descriptor 9."""
    if by_pipe:
        source, sink = os.pipe()
        os.write(sink, content)
        os.close(sink)
    else:
        source = os.memfd_create("script")
        os.write(source, content)
        os.lseek(source, 0, os.SEEK_SET)
    try:
        # preexec runs before subprocess closes what is not in pass_fds.
        done = subprocess.run(
            ["bash", "-c", BOOTSTRAP],
            executable=program,
            env=env,
            cwd="/tmp",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[9],
            preexec_fn=lambda: os.dup2(source, 9) and None,
        )
    finally:
        os.close(source)
    return _outcome(done)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_waiting_shell_is_bash_c(script: str) -> None:
    assert not needs_cold_shell(script)
    assert warm(encode_script(script)) == plain(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_fast_build_of_bash_is_bash_too(script: str) -> None:
    program = static_bash.find()
    assert program is not None, "install Debian's bash-static: `make setup` does"
    assert warm(encode_script(script), program=program) == plain(script)


@pytest.mark.parametrize("by_pipe", [True, False])
def test_both_kinds_of_descriptor_carry_the_script(by_pipe: bool) -> None:
    assert warm(encode_script("echo $LINENO; exit 4"), by_pipe=by_pipe) == Outcome(4, b"1\n", b"")


def test_a_300_kb_script_runs_from_a_memfd() -> None:
    script = "x='" + "y" * 300_000 + "'\necho ${#x} $LINENO\n# " + "z" * 1000
    assert warm(encode_script(script), by_pipe=False) == Outcome(0, b"300000 2\n", b"")


def test_half_a_script_is_never_run() -> None:
    done = warm(b"echo half; echo ")
    assert done.stdout == b""
    assert done.code != 0


def test_seconds_count_from_the_script(tmp_path: Path) -> None:
    source, sink = os.pipe()
    with subprocess.Popen(
        ["bash", "-c", BOOTSTRAP],
        env=ENV,
        stdout=subprocess.PIPE,
        pass_fds=[9],
        preexec_fn=lambda: os.dup2(source, 9) and None,
    ) as shell:
        os.close(source)
        # bash counts whole seconds since its start: by now it must have counted to 5.
        with pytest.raises(subprocess.TimeoutExpired):
            shell.wait(5.1)
        os.write(sink, encode_script("echo $SECONDS"))
        os.close(sink)
        assert shell.stdout is not None
        assert int(shell.stdout.read()) < 5


@pytest.mark.parametrize("extra", [{"TMOUT": "1"}, {"IFS": "x"}, {"BASH_ENV": "/dev/null"}, {"POSIXLY_CORRECT": "1"}])
def test_the_environment_cannot_break_the_waiting_shell(extra: dict[str, str]) -> None:
    script = "a=1x2; set -- $a; echo $# ${#IFS} ${TMOUT-unset} ${BASH_ENV-unset}"
    assert warm(encode_script(script), ENV | extra) == plain(script, ENV | extra)


@pytest.mark.parametrize(
    "script",
    [
        "set -x; echo a",
        "set -euxo pipefail",
        "set -e -x",
        "set -v\necho hi",
        "set +x",
        "set -o xtrace",
        "set -o verbose",
        "shopt -so xtrace",
        "PS4='> '; echo",
        "a | b; echo ${PIPESTATUS[@]}",
        "export SHELLOPTS",
        "compgen -v",
    ],
)
def test_scripts_that_could_tell_get_a_cold_shell(script: str) -> None:
    assert needs_cold_shell(script)


@pytest.mark.parametrize("script", ["pip install -v x", "set -e; ls -x", "make verbose=1", "echo reset -x", "set -- x"])
def test_ordinary_scripts_do_not(script: str) -> None:
    assert not needs_cold_shell(script)


PIECES = ["set", " ", "-", "+", "x", "v", "a", "\n", ";", "&", "|", "\t", "o", "verbose", "_", "é", "xtrace", "reset"]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_check_finds_what_one_slow_expression_does(script: str) -> None:
    slow = r"\bset\b[^\n;&|]*[ \t][-+][A-Za-z]*[xv]|xtrace|-[A-Za-z]*o[ \t]+verbose"
    assert needs_cold_shell(script) == bool(re.search(slow, script))


@pytest.mark.parametrize("piece", ["set ", "set\t-", "set -o", "-o", "-o \t", "set-", "-"])
def test_the_check_takes_linear_time(piece: str) -> None:
    """In CPU time, which other processes do not change. 32 KB of "set set" took 2.3 s."""
    script = piece * (32_000 // len(piece))
    began_s = time.process_time()
    assert not needs_cold_shell(script)
    assert time.process_time() - began_s < 0.2


def test_xtrace_is_a_difference_that_the_check_is_for() -> None:
    """If bash ever traces eval as top level, this fails and the pattern can go."""
    assert warm(encode_script("set -x; echo a")) != plain("set -x; echo a")


def test_a_script_with_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        encode_script("echo \0")


def test_a_command_ended_by_a_signal_gives_the_shells_code() -> None:
    assert (
        warm(encode_script("sh -c 'kill -TERM $$'")).code == 128 + signal.SIGTERM == plain("sh -c 'kill -TERM $$'").code
    )
