"""Statements become instructions; what Docker refuses is refused, what slots lack is kept as data."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.builder.instructions import Arg, Cmd, Command, Copy, Env, Instruction, Noted, Run, Unsupported
from agentenv.builder.machine import ImageConfig
from agentenv.builder.parser import parse
from agentenv.builder.patterns import Ignore, PatternError
from agentenv.builder.plan import Options, base_images, plan
from agentenv.errors import ConfigError, DockerfileError


def only(text: str) -> Instruction:
    (instruction,) = parse(f"FROM a\n{text}\n").stages[0].instructions
    return instruction


def test_stages_and_arguments_before_them() -> None:
    found = parse("ARG V=1 W\nfrom --platform=linux/amd64 a:$V As Build\nRUN x\nFROM build\n", "sub/Dockerfile")
    assert [arg.defaults for arg in found.arguments] == [(("V", "1"), ("W", None))]
    first, second = found.stages
    assert (first.image, first.name, first.platform, len(first.instructions)) == ("a:$V", "build", "linux/amd64", 1)
    assert (second.image, second.name, second.instructions) == ("build", "", ())
    assert (second.place.file, second.place.line) == ("sub/Dockerfile", 4)


def test_instructions() -> None:
    run = only("RUN a b")
    assert isinstance(run, Run)
    assert run.command == Command(("a b",), in_shell=True)
    cmd = only('CMD ["a", "b"]')
    assert isinstance(cmd, Cmd)
    assert cmd.command == Command(("a", "b"), in_shell=False)
    env = only("ENV a=1 b='2 3'")
    assert isinstance(env, Env)
    assert env.pairs == (("a", "1"), ("b", "'2 3'"))
    arg = only("ARG a b= c=d=e")
    assert isinstance(arg, Arg)
    assert arg.defaults == (("a", None), ("b", ""), ("c", "d=e"))
    copy = only("COPY --from=x --chown=a:b --chmod=755 --link p q /r/")
    assert isinstance(copy, Copy)
    assert (copy.sources, copy.destination, copy.origin) == (("p", "q"), "/r/", "x")
    assert (copy.chown, copy.chmod, copy.unpack) == ("a:b", "755", False)


@pytest.mark.parametrize(
    ("text", "line", "instruction", "message"),
    [
        ("", 0, "Dockerfile", "no instruction"),
        ("ARG x", 1, "Dockerfile", "FROM is missing"),
        ("RUN x\nFROM a", 1, "RUN", "no build stage has started"),
        ("FROM a b", 1, "FROM", "takes an image, or an image, AS and a name"),
        ("FROM a AS 1x", 1, "FROM", "1x cannot be a stage's name"),
        ("FROM --pull a", 1, "FROM", "unknown flag --pull"),
        ("FROM a\n\nRUNN x", 3, "RUNN", "is not a Dockerfile instruction"),
        ("FROM a\nRUN a &&\n  b", 3, "B", "is not a Dockerfile instruction"),
        ("FROM a\nCOPY x", 2, "COPY", "at least one source"),
        ("FROM a\nCOPY --chown x /", 2, "COPY", "--chown has no value"),
        ("FROM a\nCOPY --chown=a --chown=b x /", 2, "COPY", "given twice"),
        ("FROM a\nCOPY --link=maybe x /", 2, "COPY", "true or false"),
        ("FROM a\nCOPY --owner=x a /", 2, "COPY", "unknown flag --owner"),
        ("FROM a\nADD --from=b x /", 2, "ADD", "unknown flag --from"),
        ("FROM a\nCOPY x <<EOF\nEOF\n", 2, "COPY", "cannot be a heredoc"),
        ("FROM a\nUSER", 2, "USER", "exactly one"),
        ("FROM a\nENV", 2, "ENV", "at least one"),
        ("FROM a\nENV =x", 2, "ENV", "a name is empty"),
        ("FROM a\nARG =x", 2, "ARG", "a name is empty"),
        ("FROM a\nSHELL bash -c", 2, "SHELL", "JSON array"),
        ("FROM a\nSHELL []", 2, "SHELL", "JSON array"),
        ("FROM a\nRUN", 2, "RUN", "has no command"),
        ("FROM a\nCMD [1]", 2, "CMD", "strings only"),
        ("FROM a\nRUN <<EOF\n", 2, "RUN", "does not end"),
    ],
)
def test_what_docker_refuses_too(text: str, line: int, instruction: str, message: str) -> None:
    with pytest.raises(DockerfileError, match=message) as raised:
        parse(text, "my/Dockerfile")
    error = raised.value
    assert (error.file, error.line, error.instruction) == ("my/Dockerfile", line, instruction)
    place = f"my/Dockerfile:{line}" if line else "my/Dockerfile"
    assert str(error).startswith(f"{place}: {instruction}: ")
    assert error.next_step
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN --mount=type=cache,target=/c x", "--mount is not supported"),
        ("RUN --network=none x", "--network is not supported"),
        ("RUN --security=insecure x", "--security is not supported"),
        ("COPY --parents a /", "--parents is not supported"),
        ("COPY --exclude=b a /", "--exclude is not supported"),
        ("ADD --checksum=sha256:0 a /", "--checksum is not supported"),
        ("ADD https://host/file.tar.gz /", "https://host/file.tar.gz is a URL"),
        ("ADD git@host:a/b.git /", "is a URL"),
        ("ONBUILD RUN x", "ONBUILD: images that run instructions in later builds"),
    ],
)
def test_what_only_docker_has(text: str, message: str) -> None:
    instruction = only(text)
    assert isinstance(instruction, Unsupported)
    assert message in str(instruction.error)
    assert (instruction.error.line, bool(instruction.error.next_step)) == (2, True)


def test_what_changes_nothing_is_noted() -> None:
    check = only("HEALTHCHECK --interval=5s CMD curl localhost")
    assert isinstance(check, Noted)
    assert check.note == "line 2: HEALTHCHECK is ignored: nothing checks a slot's services"
    assert isinstance(only("MAINTAINER somebody"), Noted)


WORDS = ("FROM a", "FROM scratch AS b", "RUN", "COPY", "ADD", "ENV", "ARG", "LABEL", "CMD", "EXPOSE", "USER", "WORKDIR")
PARTS = (
    *(
        "\n",
        "\\\n",
        " ",
        "\t",
        "'",
        '"',
        "$x",
        "${x",
        "${x:-",
        "}",
        "\\",
        "`",
        "[",
        '["a", "b"]',
        "<<EOF",
        "EOF\n",
        "#",
    ),
    *(
        "# escape=`\n",
        "--from=",
        "--chown=",
        "x=1",
        "/",
        "..",
        "*",
        "**",
        "!",
        "é",
        "\u2003",
        "\0",
        "\ud800",
        "80",
        "-",
    ),
)
TEXTS = st.lists(st.sampled_from(WORDS + PARTS), max_size=25).map("".join)


def refusal(text: str) -> DockerfileError | None:
    try:
        dockerfile = parse(text)
        plan(dockerfile, Options(), dict.fromkeys(base_images(dockerfile, Options()), ImageConfig()))
    except DockerfileError as error:
        return error
    return None


@given(TEXTS | st.text(max_size=60))
def test_any_text_is_planned_or_refused_by_its_place(text: str) -> None:
    error = refusal(text)
    assert error is None or (error.next_step and 0 <= error.line <= text.count("\n") + 1)


@given(TEXTS | st.text(max_size=60))
def test_any_text_is_rules_or_no_pattern(text: str) -> None:
    with suppress(PatternError):
        Ignore(text).excludes("a/b")
