"""The command as a whole: help, version, completion, lazy public names."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import agentenv
from agentenv.cli.app import app
from agentenv.cli.options import VERBS_WITH_BACKEND

VERBS = (
    "doctor", "exec", "shell", "demo", "bench", "gc", "up", "down", "status", "slots", "logs", "metrics",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_by_example(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert f"agentenv {verb}" in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_speaks_json(verb: str) -> None:
    assert "--json" in CliRunner().invoke(app, [verb, "--help"]).stdout


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"agentenv {agentenv.__version__}\n"


def test_without_a_verb_it_says_which_there_are() -> None:
    said = CliRunner().invoke(app, [])
    assert all(verb in said.output for verb in VERBS)


def test_completion_can_be_had() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


def test_public_names_are_the_classes_themselves() -> None:
    for name in agentenv.__all__:
        value = getattr(agentenv, name)
        if name != "__version__":
            assert getattr(importlib.import_module(value.__module__), name) is value
    assert set(agentenv.__all__) == set(dir(agentenv))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'agentenv' has no attribute 'Nothing'"):
        _ = agentenv.Nothing


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, agentenv; print(sorted(m for m in sys.modules if re.match('agentenv|aiohttp|pydantic', m)))"
    done = subprocess.run([sys.executable, "-c", f"import re; {code}"], capture_output=True, text=True, check=True)
    assert re.findall(r"'([^']+)'", done.stdout) == ["agentenv", "agentenv._version"]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "doctor"])
def test_every_verb_of_a_farm_takes_a_backend(verb: str) -> None:
    assert "--backend" in CliRunner().invoke(app, [verb, "--help"]).stdout
    assert verb in VERBS_WITH_BACKEND
