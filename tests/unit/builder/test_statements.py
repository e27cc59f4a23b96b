"""Statements of a Dockerfile; the expected results are those of BuildKit's parser."""

from __future__ import annotations

import pytest

from agentenv.builder.statements import Heredoc, StatementError, heredoc_of, read


def found(text: str) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(one.line, one.keyword, one.arguments) for one in read(text).found]


def only(text: str) -> tuple[str, ...]:
    (one,) = read(text).found
    return one.arguments


def test_lines_comments_and_continuations() -> None:
    text = """\
# a comment

  from  debian:trixie\t
RUN apt-get update && \\
    # a comment within

    apt-get install \\
\tgit
run echo \\\\
RUN echo a \\  \t
   b
ENTRYPOINT x"""
    assert found(text) == [
        (3, "FROM", ("debian:trixie",)),
        (4, "RUN", ("apt-get update &&     apt-get install \tgit",)),
        (9, "RUN", ("echo \\\\",)),
        (10, "RUN", ("echo a    b",)),
        (12, "ENTRYPOINT", ("x",)),
    ]


def test_line_ends_byte_order_marks_and_an_end_within_a_statement() -> None:
    assert found("\ufeffFROM a\r\nRUN b \\\r\n c\r\n") == [(1, "FROM", ("a",)), (2, "RUN", ("b  c",))]
    assert found("RUN a \\") == [(1, "RUN", ("a",))]
    assert found("RUN a \\\n# only a comment follows") == [(1, "RUN", ("a",))]
    assert found("\\\nRUN a") == [(1, "RUN", ("a",))]


def test_directives() -> None:
    statements = read("# syntax=docker/dockerfile:1\n#Escape = `\nFROM a\nRUN a `\n  \\b\n")
    assert statements.escape == "`"
    assert statements.found[1].arguments == ("a   \\b",)
    assert read("# a comment\n# escape=`\nFROM a\n").escape == "\\"
    assert read("FROM a\n# escape=`\n").escape == "\\"


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("", "no instruction", 0),
        ("# only\n# comments\n", "no instruction", 2),
        ("# escape=x\nFROM a", "escape character", 1),
        ("# escape=`\n# escape=`\nFROM a", "given twice", 2),
        ("FROM a\nRUN <<EOF\nx\n", "heredoc EOF does not end", 2),
        ("FROM a\nCMD [1]", "strings only", 2),
        ("ENV name", "name has no value", 1),
        ("ENV a=b c", "c is not of the form", 1),
    ],
)
def test_what_is_no_dockerfile(text: str, message: str, line: int) -> None:
    with pytest.raises(StatementError, match=message) as raised:
        read(text)
    assert raised.value.line == line


@pytest.mark.parametrize(
    ("text", "words", "exec_form"),
    [
        ('CMD ["a", "b c"]', ("a", "b c"), True),
        ("CMD [ ]", (), True),
        ('CMD ["a",]', ('["a",]',), False),
        ("CMD ['a']", ("['a']",), False),
        ("CMD [NaN]", ("[NaN]",), False),
        ("RUN [ -f x ] && y", ("[ -f x ] && y",), False),
        ('COPY ["a b", "c"]', ("a b", "c"), True),
        ("COPY a\t b  c", ("a", "b", "c"), False),
        (f"RUN {'[' * 100_000}", ("[" * 100_000,), False),
        ('CMD ["\\ud800"]', ("\ufffd",), True),
    ],
)
def test_exec_form_and_what_only_looks_like_it(text: str, words: tuple[str, ...], exec_form: bool) -> None:
    (one,) = read(text).found
    assert (one.arguments, one.exec_form) == (words, exec_form)


def test_pairs() -> None:
    assert only("ENV a=1 b='x y' c=\"$d e\" f=g\\ h i=") == (
        "a",
        "1",
        "b",
        "'x y'",
        "c",
        '"$d e"',
        "f",
        "g\\ h",
        "i",
        "",
    )
    assert only("ENV name a value = with spaces") == ("name", "a value = with spaces")
    assert only("LABEL a.b=c") == ("a.b", "c")
    assert only("ARG a b=c") == ("a", "b=c")


def test_flags() -> None:
    (one,) = read("COPY --from=a --chown='b c' --x\\ y -- --not").found
    assert (one.flags, one.arguments) == (("--from=a", "--chown=b c", "--x y"), ("--not",))
    (one,) = read("RUN --mount=type=cache,target=/x a --b").found
    assert (one.flags, one.arguments) == (("--mount=type=cache,target=/x",), ("a --b",))
    assert read("RUN --").found[0].flags == ()


def test_heredocs() -> None:
    text = """\
COPY <<EOF <<-"B" /x
a \\
# no comment
EOF
\tb
\tB
RUN cat <<EOF | sh
c
EOF
CMD d <<EOF
ONBUILD RUN <<EOF
e
EOF
"""
    copy, run, cmd, onbuild = read(text).found
    assert copy.heredocs == (
        Heredoc("EOF", "a \\\n# no comment\n", expand=True),
        Heredoc("B", "\tb\n", expand=False, chomp=True),
    )
    assert [heredoc.text for heredoc in copy.heredocs] == ["a \\\n# no comment\n", "b\n"]
    assert (run.line, run.heredocs[0].content) == (7, "c\n")
    assert cmd.heredocs == ()
    assert onbuild.heredocs[0].content == "e\n"


def test_what_announces_a_heredoc() -> None:
    assert heredoc_of("<<EOF") == Heredoc("EOF", "")
    assert heredoc_of("3<<-'E F'") == Heredoc("E F", "", expand=False, chomp=True)
    for word in ("<<", "a<<EOF", "<<<EOF", "<EOF", "EOF"):
        assert heredoc_of(word) is None
    assert read("RUN echo '<<EOF'\nRUN x").found[0].heredocs == ()
