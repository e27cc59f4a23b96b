"""Who builds: slots whenever they can."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import DockerfileError
from agentenv.store.dockerfile.choice import choose_builder, installed_tools, tool_argv
from agentenv.store.dockerfile.parser import parse
from agentenv.store.dockerfile.plan import Options

PLAIN = parse("FROM a\nRUN x\n")
MOUNTS = parse(
    "FROM a AS plain\nRUN x\nFROM a\nRUN --mount=type=cache,target=/c x\nADD https://host/file /\n", "my/File"
)


def test_slots_build_what_they_can_whatever_is_installed() -> None:
    assert choose_builder(PLAIN, Options(), ("docker", "buildah")) == "slots"
    assert choose_builder(MOUNTS, Options(target="plain"), ("docker",)) == "slots"


def test_a_tool_builds_what_slots_lack() -> None:
    assert choose_builder(MOUNTS, Options(), ("buildah", "docker")) == "docker"
    assert choose_builder(MOUNTS, Options(), ("buildah",)) == "buildah"


def test_without_a_tool_the_refusal_names_what_is_lacking_and_both_tools() -> None:
    with pytest.raises(DockerfileError) as raised:
        choose_builder(MOUNTS, Options(), ())
    assert str(raised.value) == (
        "my/File:4: RUN: --mount is not supported when building on slots; also line 5 (ADD); neither docker (with an "
        "engine that answers) nor buildah is here to build it instead (build it where docker or buildah is "
        "installed, or leave this out)"
    )
    assert (raised.value.line, raised.value.instruction) == (4, "RUN")


def test_the_tool_s_command() -> None:
    options = Options("t", {"B": "2", "A": "x y"})
    assert tool_argv("buildah", Path("/c/Dockerfile"), Path("/c"), options, "name") == [
        *("buildah", "build", "--file", "/c/Dockerfile", "--tag", "name"),
        *("--target", "t", "--build-arg", "A=x y", "--build-arg", "B=2", "/c"),
    ]


@pytest.mark.parametrize(("ending", "found"), [("exit 0", ("docker", "buildah")), ("exit 1", ("buildah",))])
async def test_docker_counts_only_with_an_engine_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, found: tuple[str, ...]
) -> None:
    for name, text in (("docker", ending), ("buildah", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await installed_tools() == found


async def test_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await installed_tools() == ()
