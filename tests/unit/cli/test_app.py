"""The command as a whole: help, version, completion, lazy public names."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import agentenv
from agentenv.cli.app import VERBS, VERBS_WITH_BACKEND, app, imported

OF_A_FARM = [verb for verb in VERBS if verb not in ("doctor", "tool-server", "image", "dev")]
RUN = [verb for verb in VERBS if verb not in ("image", "dev")]
"""Those that are no group of others."""


@pytest.mark.parametrize("verb", RUN)
def test_every_verb_teaches_by_example(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert f"agentenv {verb}" in result.stdout


@pytest.mark.parametrize("verb", RUN)
def test_every_verb_speaks_json(verb: str) -> None:
    assert "--json" in CliRunner().invoke(app, [verb, "--help"]).stdout


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"agentenv {agentenv.__version__}\n"


def test_without_a_verb_it_says_which_there_are() -> None:
    said = CliRunner().invoke(app, [])
    assert all(verb in said.output for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_listed_with_the_first_paragraph_of_its_help(verb: str) -> None:
    first, _, _ = imported(verb).help.partition("\n\n")
    assert " ".join(first.split()) == VERBS[verb]


def test_a_verb_that_is_not_there_is_answered_with_one_that_is() -> None:
    result = CliRunner().invoke(app, ["exce"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "No such command 'exce'. Did you mean 'exec'" in result.output


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("agentenv st", "status"), ("agentenv exec --upl", "--upload"), ("agentenv dev st", "status")],
)
def test_verbs_and_their_options_are_completed(typed: str, wanted: str) -> None:
    asked = {"_AGENTENV_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert wanted in CliRunner().invoke(app, [], prog_name="agentenv", env=asked).output.split()


def test_listing_the_verbs_imports_none_of_them() -> None:
    code = (
        "import re, sys\nfrom agentenv.cli import main\ntry: main()\n"
        "finally: print(sorted(m for m in sys.modules if re.match(r'agentenv|aiohttp$|pydantic$', m)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert re.findall(r"'([^']+)'", done.stdout.splitlines()[-1]) == [
        "agentenv", "agentenv._version", "agentenv.cli", "agentenv.cli.app", "agentenv.errors", "agentenv.slots",
        "agentenv.slots.backends", "agentenv.slots.backends.registry",
    ]  # fmt: skip


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


@pytest.mark.parametrize("verb", OF_A_FARM)
def test_every_verb_of_a_farm_takes_a_backend(verb: str) -> None:
    assert "--backend" in CliRunner().invoke(app, [verb, "--help"]).stdout
    assert verb in VERBS_WITH_BACKEND
