"""The command as a whole: help, version, completion, lazy public names."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentenv
from agentenv.cli import options
from agentenv.cli.app import VERBS, VERBS_WITH_BACKEND, app, imported
from agentenv.wire.base import MAX_TIMEOUT_S

RUN = [verb for verb in VERBS if verb not in ("agents", "image", "images", "dev", "farm", "runs", "sandboxes", "tasks")]
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
        "finally: print(sorted(m for m in sys.modules if re.match(r'agentenv|aiohttp$|asyncio$|pydantic$|rich$', m)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert re.findall(r"'([^']+)'", done.stdout.splitlines()[-1]) == [
        "agentenv", "agentenv._version", "agentenv.cli", "agentenv.cli.app", "agentenv.cli.options",
        "agentenv.deadlines", "agentenv.errors", "agentenv.exports", "agentenv.slots",
        "agentenv.slots.backends", "agentenv.slots.backends.registry",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_fits_a_terminal_of_80_columns(words: list[str]) -> None:
    said = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout.splitlines()
    assert [line for line in said if len(line) > 80] == []
    assert "[bold]" not in "".join(said)


@pytest.mark.parametrize("words", [["-b", "fake", "doctor"], ["--backend", "fake", "doctor"]])
def test_a_backend_may_stand_before_the_verb(words: list[str]) -> None:
    seen = CliRunner().invoke(app, [*words, "--help"])
    assert seen.exit_code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_completion_of_a_verb_wait_for_nothing_it_needs_to_run(verb: str) -> None:
    code = (
        f"import sys\nfrom agentenv.cli.app import imported\nimported({verb!r})\n"
        "print(*{'aiohttp', 'pydantic', 'docker', 'nomad', 'fastapi', 'atroposlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback() -> None:
    code = (
        "import os, signal, sys\nfrom agentenv.cli import main\n"
        "class Imports:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'agentenv.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Imports())\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_longest_timeout_is_the_wires() -> None:
    assert options.LONGEST_TIMEOUT_S == MAX_TIMEOUT_S


def test_completion_can_be_had() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


def test_public_names_are_the_classes_themselves() -> None:
    for name in agentenv.__all__:
        value = getattr(agentenv, name)
        if name != "__version__":
            assert getattr(importlib.import_module(value.__module__), name) is value
    assert set(agentenv.__all__) == set(dir(agentenv))


def test_a_type_checker_knows_the_lazy_names_and_no_others(tmp_path: Path) -> None:
    root = Path(agentenv.__file__).parent
    lazy = [init for init in root.rglob("__init__.py") if "= exported(" in init.read_text()]
    packages = [".".join(init.parent.relative_to(root.parent).parts) for init in lazy]
    assert "agentenv" in packages
    assert "agentenv.api" in packages
    program = tmp_path / "program.py"
    names = {package: ", ".join(importlib.import_module(package).__all__) for package in packages}
    program.write_text("".join(f"from {package} import Nothing, {names[package]}\n" for package in packages))
    options = ("--config-file=", "--follow-imports=skip", "--namespace-packages", "--explicit-package-bases")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={os.devnull}", *lazy, program],
        env={**os.environ, "MYPYPATH": str(root.parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = re.findall(r"error: (.*)  \[", done.stdout)
    assert wrong == [f'Module "{package}" has no attribute "Nothing"' for package in packages], (
        done.stdout + done.stderr
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'agentenv' has no attribute 'Nothing'"):
        _ = agentenv.Nothing  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, agentenv; print(sorted(m for m in sys.modules if re.match('agentenv|aiohttp|pydantic', m)))"
    done = subprocess.run([sys.executable, "-c", f"import re; {code}"], capture_output=True, text=True, check=True)
    assert re.findall(r"'([^']+)'", done.stdout) == [
        "agentenv",
        "agentenv._version",
        "agentenv.errors",
        "agentenv.exports",
    ]


@pytest.mark.parametrize("verb", RUN)
def test_a_backend_before_the_verb_is_given_to_every_verb_that_takes_one(verb: str) -> None:
    assert ("--backend" in CliRunner().invoke(app, [verb, "--help"]).stdout) == (verb in VERBS_WITH_BACKEND)
