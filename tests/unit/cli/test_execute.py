"""``agentenv exec`` over the fake farm: arguments, streams, exit codes, uploads."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentenv.cli.app import app
from agentenv.cli.execute import notes, shell_exit_code, waiting_bytes
from agentenv.config import ContainerSettings
from agentenv.farm import open
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.calls import CallResult


@pytest.fixture(autouse=True)
def fake_farm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open, "make_backend", lambda _, settings, **__: FakeBackend(settings))


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["exec", *arguments], input=stdin)


def test_streams_and_exit_code_are_the_commands() -> None:
    result = run("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)


@pytest.mark.parametrize("size", [0, 1, 65_537, 262_145, 2**20 - 1, 2**20, 2**20 + 1, 5_000_003])
def test_bytes_pass_through_as_through_bash(size: int, tmp_path: Path) -> None:
    """Of any length, in both directions, the two outputs apart."""
    data = random.Random(size).randbytes(size)
    command = "tee >(tr '\\000-\\377' '\\377\\000-\\376' >&2; echo end >&2); printf '\\342'; wait $!; exit 3"
    here = subprocess.run(["bash", "-c", command], input=data, capture_output=True, check=False)
    result = run("--stdin", command, stdin=data)
    assert result.stdout_bytes == here.stdout
    assert result.stderr_bytes == here.stderr
    assert result.exit_code == here.returncode == 3


def test_several_arguments_are_one_quoted_command() -> None:
    assert run("--", "printf", "%s|", "a b", "$HOME", "-x").stdout == "a b|$HOME|-x|"


def test_arguments_are_bytes() -> None:
    word = b"".join(bytes((byte,)) for byte in range(1, 256))
    assert run("printf", "%s", os.fsdecode(word)).stdout_bytes == word
    assert run(os.fsdecode(b"printf caf\xe9")).exit_code == 2  # bash text is text
    assert "surrogate" in run(os.fsdecode(b"printf caf\xe9")).stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(closed: str) -> None:
    """The others get what is theirs, and the exit code is the command's."""
    text = "from agentenv.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        text,
        "exec",
        "--own",
        "--backend",
        "fake",
        "--stdin",
        "cat; echo out; echo err >&2; exit 3",
    ]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *command], input=b"in", capture_output=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout == (b"" if ">&-" in closed.split() else b"out\n" if "<&-" in closed else b"inout\n")
    assert done.stderr == (b"" if "2>&-" in closed else b"err\n")


def test_standard_input_is_given_only_when_asked_for() -> None:
    assert run("--stdin", "--", "tr", "a-z", "A-Z", stdin="hello").stdout == "HELLO"
    assert run("cat", stdin="hello").stdout == ""


def test_the_first_word_begins_the_command_and_what_follows_is_its_own() -> None:
    assert run("printf", "%s|", "-la", "--json").stdout == "-la|--json|"


def test_a_pipe_that_nobody_reads_is_noticed(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as other:
        assert waiting_bytes(pipe) == 0, "an empty pipe, as many programs are started with"
        other.write("hello")
        other.flush()
        assert waiting_bytes(pipe) == 5
    (tmp_path / "file").write_text("four")
    with (tmp_path / "file").open() as file, Path("/dev/null").open() as nothing:
        assert (waiting_bytes(file), waiting_bytes(nothing)) == (4, 0)
    assert waiting_bytes(io.StringIO("no file")) == 0


def test_a_deadline_is_124_and_said() -> None:
    result = run("--timeout", "0.2", "--", "sleep", "60")
    assert result.exit_code == 124
    assert "timed out" in result.stderr


def slow_farm(monkeypatch: pytest.MonkeyPatch, start_s: float) -> None:
    monkeypatch.setattr(open, "make_backend", lambda _, settings, **__: FakeBackend(settings, start_delay_s=start_s))


def test_a_slot_is_waited_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_farm(monkeypatch, 60.0)
    result = run("--wait", "0.2", "--", "true")
    assert result.exit_code == 125
    assert "no slot became free within 0.2 s" in result.stderr
    assert "agentenv exec --wait" in result.stderr


def test_a_container_may_take_as_long_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()

    def made(_: str, settings: ContainerSettings, *, start_timeout_s: float, **__: object) -> FakeBackend:
        asked.append(start_timeout_s)
        return FakeBackend(settings)

    monkeypatch.setattr(open, "make_backend", made)
    assert run("--wait", "300", "--", "true").exit_code == 0
    assert run("--", "true").exit_code == 0
    assert asked == [300.0, 60.0]


def test_json_is_the_whole_result() -> None:
    result = run("--json", "echo hi; exit 3")
    told = json.loads(result.stdout)
    assert (told["stdout"], told["exit_code"], told["fault"], result.exit_code) == ("hi\n", 3, "none", 3)


def test_json_has_the_bytes_that_are_no_text(tmp_path: Path) -> None:
    told = json.loads(run("--json", "printf 'a\\377'; printf 'b\\376' >&2").stdout)
    assert (told["stdout"], told["stderr"]) == ("a\ufffd", "b\ufffd")
    assert (b64decode(told["content"]["data"]), told["content"]["parts"]) == (b"a\xffb\xfe", [2, 0, 2, 0])
    assert json.loads(run("--json", "--stdin", "cat", stdin=b"\xc3\xa9").stdout)["content"] is None


def test_uploads_are_in_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.txt").write_text("deep")
    (tmp_path / "b.txt").write_text("flat")
    result = run("--upload", str(tmp_path / "pkg"), "--upload", str(tmp_path / "b.txt"), "cat pkg/a.txt b.txt")
    assert (result.stdout, result.exit_code) == ("deepflat", 0)


@pytest.mark.parametrize(
    "wrong", [["--timeout", "-1", "true"], ["--isolation", "none", "true"], ["--upload", "/nope", "true"], []]
)
def test_wrong_usage_is_2(wrong: list[str]) -> None:
    assert run(*wrong).exit_code == 2


def test_help_promises_no_weaker_isolation_than_is_given() -> None:
    assert "auto: full, or a refusal" in " ".join(run("--help").stdout.replace("│", " ").split())


def test_a_nul_byte_is_refused_with_a_message() -> None:
    result = run("echo a\0b")
    assert result.exit_code == 2
    assert "NUL" in result.stderr


def test_what_an_exit_code_hides_is_noted() -> None:
    assert notes(CallResult(id="c", exit_code=0, stdout="x")) == []
    assert "memory" in notes(CallResult(id="c", exit_code=137, oom_killed=True))[0]
    assert notes(CallResult(id="c", exit_code=0, stderr_dropped_bytes=5, truncated=True)) == [
        "5 bytes were cut from the middle of stderr"
    ]


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (CallResult(id="c", exit_code=0), 0),
        (CallResult(id="c", exit_code=137, timed_out=True), 124),
        (CallResult(id="c", fault="model", error="invalid_arguments"), 2),
        (CallResult(id="c", fault="policy", error="refused"), 2),
        (CallResult(id="c", fault="infra", error="infra"), 125),
    ],
)
def test_exit_codes(result: CallResult, code: int) -> None:
    assert shell_exit_code(result) == code
