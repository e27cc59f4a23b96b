"""Dockerfiles as task sets have them (written for these tests, in their styles) are parsed and planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.builder.machine import DEFAULT_PATH, ImageConfig
from agentenv.builder.parser import parse
from agentenv.builder.plan import Options, Plan, base_images, plan
from agentenv.builder.steps import CopyStep, RunStep, WorkdirStep
from agentenv.errors import DockerfileError

FILES = sorted((Path(__file__).parent / "dockerfiles").glob("*.Dockerfile"))
LETTERS = {RunStep: "R", CopyStep: "C", WorkdirStep: "W"}
BASE = ImageConfig(env=(("PATH", DEFAULT_PATH),))


def planned(name: str, text: str | None = None, **arguments: str) -> Plan:
    path = Path(__file__).parent / f"dockerfiles/{name}.Dockerfile"
    dockerfile, options = parse(text or path.read_text(), path.name), Options(arguments=arguments)
    return plan(dockerfile, options, dict.fromkeys(base_images(dockerfile, options), BASE))


def shape(found: Plan) -> dict[int, str]:
    """R, C or W for each step, by stages."""
    return {number: "".join(LETTERS[type(step)] for step in stage.steps) for number, stage in found.stages.items()}


EXPECTED = {
    "swe_base": ({0: "RRRRR"}, "ubuntu:22.04"),
    "swe_environment": ({0: "CRRRWR"}, "sweb.base.py.x86_64:latest"),
    "swe_instance": ({0: "CRRW"}, "sweb.env.py.x86_64.0123456789abcdef:latest"),
    "terminal_bench": ({0: "RWCCR"}, "registry.example/t-bench/python-3-13:20250620"),
    "harbor": ({0: "RRWCCR"}, "ubuntu:24.04"),
    "challenge": ({0: "RWCR", 1: "RCRW"}, "alpine:3.20"),
    "service": ({0: "R", 1: "CCR"}, "debian:trixie-slim"),
}


def test_every_file_is_expected_to_be_something() -> None:
    assert {path.name.removesuffix(".Dockerfile") for path in FILES} == EXPECTED.keys() | {"inspect_tool"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_has_its_steps_and_its_base(name: str) -> None:
    steps, base = EXPECTED[name]
    found = planned(name)
    assert (shape(found), found.stages[0].base) == (steps, base)


def test_what_the_styles_are_for() -> None:
    swe = planned("swe_base").stages[0]
    assert dict(swe.config.env) == {"PATH": f"/opt/miniconda3/bin:{DEFAULT_PATH}", "TZ": "Etc/UTC"}
    (first, *_) = swe.steps
    assert isinstance(first, RunStep)
    assert dict(first.env)["DEBIAN_FRONTEND"] == "noninteractive"
    assert first.argv[2].startswith("apt update && apt install -y wget git ")

    terminal = planned("terminal_bench").stages[0]
    assert dict(terminal.config.env)["LONG"] == "two words"
    (install, _, copy, *_) = terminal.steps
    assert isinstance(install, RunStep)
    assert "tests" not in install.argv[2]
    assert isinstance(copy, CopyStep)
    assert (copy.sources, copy.destination) == (("task-deps/server.py", "task-deps/data-?.csv"), "/app/")

    harbor = planned("harbor")
    assert harbor.notes == ("line 19: HEALTHCHECK is ignored: nothing checks a slot's services",)
    assert harbor.stages[0].config.ports == ("6379/tcp",)


def test_a_challenge_with_stages_heredocs_and_a_user() -> None:
    found = planned("challenge", FLAG="flag{real}")
    build, target = found.stages[0], found.stages[1]
    source = build.steps[2]
    assert isinstance(source, CopyStep)
    assert source.inline[0].name == "EOF"
    assert "%s\\n" in source.inline[0].content
    script = target.steps[0]
    assert isinstance(script, RunStep)
    assert script.argv[:4] == ("/bin/bash", "-euo", "pipefail", "-c")
    assert script.argv[4].count("\n") == 4
    assert dict(script.env)["FLAG"] == "flag{real}"
    assert (target.config.user, target.config.stop_signal) == ("ctf", "SIGKILL")
    assert target.config.entrypoint is not None
    assert target.config.entrypoint[:2] == ("/bin/bash", "-euo")
    assert found.notes == ("line 25: VOLUME is ignored: its directories are part of the image",)


def test_a_file_that_needs_docker_says_where_and_builds_without_that() -> None:
    path = Path(__file__).parent / "dockerfiles/inspect_tool.Dockerfile"
    with pytest.raises(DockerfileError, match=r"^inspect_tool.Dockerfile:21: RUN: --mount is not supported"):
        planned("inspect_tool")
    found = planned("inspect_tool", path.read_text().replace("--mount=type=cache,target=/root/.cache/pip ", ""))
    assert shape(found) == {0: "RRRCCRW"}
    stage = found.stages[0]
    assert stage.base == "registry.example/library/python:3.12-bookworm"
    assert dict(stage.config.env) == {
        "PATH": f"/opt/venv/bin:{DEFAULT_PATH}",
        "PYTHONPATH": "/opt/tool:/opt/lib with spaces",
        "VIRTUAL_ENV": "/opt/venv",
    }
    assert [step.unpack for step in stage.steps if isinstance(step, CopyStep)] == [False, True]
