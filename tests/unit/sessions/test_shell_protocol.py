"""What is typed to a session's shell: against a real bash where its parser must agree."""

from __future__ import annotations

import random
import subprocess

import pytest

from agentenv.errors import InvalidArgumentsError
from agentenv.sessions import shell_protocol
from agentenv.sessions.keys import key_bytes

TOKENS = (
    *(
        "echo",
        "a",
        "x=1",
        "$x",
        "$?",
        '"$x y"',
        "'it'",
        "'",
        '"',
        "`",
        "$(",
        "$(date)",
        "$((1+2))",
        "${x}",
        "${x:-",
        ")",
    ),
    *(
        "}",
        "{",
        "(",
        ";",
        "&&",
        "||",
        "|",
        "&",
        "\n",
        " ",
        "\\",
        "#",
        "<",
        "<<EOF",
        ">f",
        "2>&1",
        ">",
        "if",
        "then",
        "fi",
    ),
    *(
        "for",
        "do",
        "done",
        "in",
        "case",
        "esac",
        "[[",
        "]]",
        "[",
        "]",
        "!",
        '"$(',
        'if x)"',
        "if)",
        "time",
        "function",
        "f()",
        "*",
        "~",
        "%",
        "é",
    ),
)


def generated(count: int) -> list[str]:
    chosen = random.Random(7)
    return [
        "".join(chosen.choice(TOKENS) + chosen.choice((" ", " ", "")) for _ in range(chosen.randint(1, 9)))
        for _ in range(count)
    ]


def test_what_is_taken_for_plain_is_whole_to_bash() -> None:
    """Were it not, the shell would take what is typed behind it for a part of it."""
    plain = [text for text in generated(80_000) if shell_protocol.is_plain(text)]
    assert len(plain) > 300
    for start in range(0, len(plain), 200):
        some = plain[start : start + 200]
        script = "".join(f"( {{ {text}\n\n}} <&253 253<&- )\n" for text in some)
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, (checked.stderr, some)
        assert not checked.stderr


@pytest.mark.parametrize(
    "command",
    [
        "true", "cd /tmp && make -j4", "x=1; echo $x", "a | b || c", "echo 'a b' \"c $d\"", "ls *.py > out 2>&1",
        "echo $?", "export A=b\nexport C=d\n", "n=$((n+1))", "echo ${x} $(date +%s)", "[ -f x ] && echo y;",
        "grep foo < file",
    ],
)  # fmt: skip
def test_everyday_commands_are_plain(command: str) -> None:
    assert shell_protocol.is_plain(command)


@pytest.mark.parametrize(
    "command",
    [
        "", "echo 'a", "echo \"a", "if true", "a |", "&& a", "echo a # b", "cat <<E", "f() { :; }", "alias a=b", "(a)",
        "a &", "! a", "time a", "echo `a`", "a\\", "x=(1 2)", "a; } ; { b", "while", "[[ a ]]", "echo $'a'", "x" * 5000,
    ],
)  # fmt: skip
def test_what_bash_must_be_asked_about(command: str) -> None:
    assert not shell_protocol.is_plain(command)


def test_a_pathological_text_is_decided_quickly() -> None:
    for text in ("a" * 4000 + "'", "a " * 2000 + "(", "a;" * 2000 + "(", '"$x' * 1001, "$x" * 2000 + "`"):
        assert not shell_protocol.is_plain(text)


def test_an_answer_is_known_by_its_nonce_alone() -> None:
    said = b"bash: /abc/3/,1 ,0 ,3/himB//tmp/a b/abc/: No such file or directory\n"
    assert shell_protocol.report("abc", said) == shell_protocol.ShellReport(3, (1, 0, 3), "himB", "/tmp/a b")
    assert shell_protocol.report("abd", said) is None
    assert shell_protocol.report("abc", said[:30]) is None
    odd = shell_protocol.report("abc", b"noise /abc/0/,0/h//a\n/b/abc/ rest")
    assert odd is not None
    assert odd.cwd == "/a\n/b"


@pytest.mark.parametrize(
    ("exit_code", "statuses", "typed"),
    [
        (0, (0,), ""),
        (0, (), ""),
        (3, (3,), r"( \builtin exit 3 ) && "),
        (4, (1, 4), r"( \builtin exit 1 ) | ( \builtin exit 4 ) && "),
        (0, (1, 0), r"( \builtin exit 1 ) | ( \builtin exit 0 ) || "),
        (1, (0,), r"( \builtin exit 1 ) && "),
    ],
)
def test_the_last_status_is_put_back(exit_code: int, statuses: tuple[int, ...], typed: str) -> None:
    restored = shell_protocol.restored(shell_protocol.ShellReport(exit_code, statuses, "", "/"))
    assert restored == (f"{typed}{shell_protocol.NOTHING}\n" if typed else "")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("C-c", b"\x03"), ("c-C", b"\x03"), ("^C", b"\x03"), ("Ctrl-d", b"\x04"), ("C-\\", b"\x1c"), ("C-Space", b"\0"),
        ("C-[", b"\x1b"), ("Enter", b"\r"), ("enter", b"\r"), ("Up", b"\x1b[A"), ("M-x", b"\x1bx"),
        ("M-Enter", b"\x1b\r"), ("F12", b"\x1b[24~"), ("BSpace", b"\x7f"), ("PageUp", b"\x1b[5~"), ("C-?", b"\x7f"),
        ("x", b"x"), (":wq", b":wq"), ("C-cc", b"C-cc"), ("Up Down", b"Up Down"), ("é", "é".encode()),
    ],
)  # fmt: skip
def test_keys(name: str, sent: bytes) -> None:
    assert key_bytes(name) == sent


@pytest.mark.parametrize("name", ["C-é", "M-F13", "F13", "C-Up", "Ctrl-Enter"])
def test_what_is_no_key(name: str) -> None:
    with pytest.raises(InvalidArgumentsError) as refused:
        key_bytes(name)
    assert "Enter" in refused.value.next_step
