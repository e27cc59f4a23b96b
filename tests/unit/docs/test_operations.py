"""Numbers, settings and commands that operators read are those of the code."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agentenv.cli.app import app
from agentenv.cli.gc import gc
from agentenv.config import PoolSettings
from agentenv.farm.orphans import IDLE_JOB_AFTER_S, UNATTENDED_AFTER_S
from agentenv.sandbox.server.call_queue import MAX_WAITING_BYTES

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    *("README.md", "docs/operations.md", "docs/nomad.md", "docs/metrics.md", "docs/scaling.md"),
    *("docs/images.md", "docs/recipes.md"),
)


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_scaling_policys_settings_have_the_defaults_that_are_documented() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page("docs/scaling.md"), re.MULTILINE))
    assert len(rows) == 5
    assert {name: float(value) for name, value in rows.items()} == {
        name: getattr(PoolSettings(), name) for name in rows
    }


def test_a_cut_is_noticed_in_time_with_the_defaults() -> None:
    """A silence is measured at every half of ``suspect_after_s``: so late it may be."""
    settings = PoolSettings()
    assert settings.gone_after_s + settings.suspect_after_s / 2 < 15
    assert f"`gone_after_s` ({settings.gone_after_s:g} s)" in page("docs/operations.md")


def test_what_gc_and_the_alerts_say_in_numbers() -> None:
    text = page("docs/operations.md")
    observed_s = inspect.signature(gc).parameters["observe_s"].default
    assert f"has received a heartbeat for {UNATTENDED_AFTER_S:g} s (`--unattended-after`)" in text
    assert f"no container is running {IDLE_JOB_AFTER_S:g} s after the job was last submitted" in text
    assert f"({observed_s:g} s, `--observe`)" in text
    assert f"once those waiting in one slot exceed {MAX_WAITING_BYTES >> 20} MiB" in text


def variables(job_file: str) -> dict[str, str]:
    """The variables of a job file with their defaults as they are written."""
    found = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', page(job_file), re.DOTALL | re.MULTILINE)
    defaults = {name: re.search(r"^ +default +=(.*)$", block, re.MULTILINE) for name, block in found}
    return {name: default[1].strip() for name, default in defaults.items() if default is not None}


def test_every_variable_of_the_job_is_documented_with_its_default() -> None:
    table = page("docs/nomad.md").partition("| variable | default |")[2].partition("\n\n")[0]
    documented: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", table, re.MULTILINE):
        values = [value.strip("`") for value in defaults.strip().split(", ")]
        known = re.findall(r"`(\w+)`", names)
        documented |= dict(zip(known, values if values != [""] else ["*"] * len(known), strict=True))
    given = variables("nomad/sandbox.nomad.hcl")
    assert documented.keys() == given.keys()
    shown = {
        name: value if value.startswith(("[", "{")) or value == '""' else value.strip('"')
        for name, value in given.items()
    }
    assert {name: value for name, value in documented.items() if value not in ("*", shown[name])} == {}


def test_the_capabilities_to_allow_are_those_the_job_asks_for() -> None:
    asked = re.search(r"cap_add += (\[.*\])", page("nomad/sandbox.nomad.hcl"))
    assert asked is not None
    for name in ("docs/operations.md", "nomad/dev.hcl"):
        allowed = re.search(r"allow_caps += (\[.*\])", page(name))
        assert allowed is not None
        assert json.loads(allowed[1]) == json.loads(asked[1]), name


@pytest.mark.parametrize("name", ["docs/operations.md", "nomad/policies/agentenv.policy.hcl"])
def test_the_policy_is_given_to_tokens_and_not_to_every_job_of_a_namespace(name: str) -> None:
    """What `-namespace` does there: its policies are those of every workload identity in that namespace."""
    (command,) = re.findall(r"nomad acl policy apply .*", page(name))
    assert "-namespace" not in command


def commands(name: str) -> Iterator[str]:
    """What a page says to type: in code spans, and on lines of their own."""
    text = page(name).replace("\\\n", " ")
    yield from re.findall(r"`((?:agentenv|make) [^`]+)`", text)
    yield from re.findall(r"^    (?:sudo |\.venv/bin/)?((?:agentenv|make) [^#\n]+)", text, re.MULTILINE)
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^(agentenv [^#\n]+)", block, re.MULTILINE)


def told(words: list[str]) -> str:
    """What is wrong with an ``agentenv`` command line; empty when the verb and its options exist."""
    command: Any = typer.main.get_command(app)
    options = {option for parameter in command.params for option in parameter.opts}
    options |= {"--install-completion", "--help"}
    for word in words:
        if word == "--":
            break
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                return f"no option {word}"
        elif hasattr(command, "commands") and word in command.commands:
            command = command.resolve_command(typer.Context(command), [word])[1]
            options |= {option for parameter in command.params for option in parameter.opts}
        elif hasattr(command, "commands") and word not in ("VERB", "nomad", "local"):
            return f"no verb {word}"
    return ""


@pytest.mark.parametrize("name", PAGES)
def test_every_command_that_is_printed_is_one(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    wrong = []
    for line in commands(name):
        first, *words = shlex.split(line)
        if first == "make":
            wrong += [line for word in words if "=" not in word and word not in targets]
        elif problem := told([word.strip("[]") for word in words if word not in ("|", "·")]):
            wrong.append(f"{line}: {problem}")
    assert wrong == []
    assert list(commands(name)), "there are some"


def test_a_command_that_is_none_is_noticed() -> None:
    assert told(["status", "--wach"]) == "no option --wach"
    assert told(["stats"]) == "no verb stats"
    assert told(["--backend", "nomad", "up", "-n", "3"]) == ""
