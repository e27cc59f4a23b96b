"""The wheel as its users have it: installed without any extra, where no compiler is and nobody may write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DIRECTORIES = ("src", "docker", "nomad")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt")
NOT_SHIPPED = shutil.ignore_patterns("bin", "__pycache__", "*.egg-info")

ASKED = """
import json
from typer.testing import CliRunner
from agentenv.cli.app import VERBS, app, imported

def helps():
    yield []
    for name in VERBS:
        yield [name]
        yield from ([name, sub] for sub in getattr(imported(name), "commands", ()))

def ran(words):
    done = CliRunner().invoke(app, words)
    return [" ".join(words), done.exit_code, done.output]

others = [["image", "status"], ["tool-server", "--check"], ["-b", "nomad", "status"]]
print(json.dumps([ran(words) for words in [*([*words, "--help"] for words in helps()), *others]]))
"""


def required(requirements: list[str]) -> set[str]:
    """The distributions that pip would install for these, by canonical name."""
    found: set[str] = set()
    ask = [Requirement(text) for text in requirements]
    while ask:
        name = canonicalize_name(ask.pop().name)
        if name not in found:
            found.add(name)
            further = [Requirement(text) for text in metadata.requires(name) or ()]
            ask += [one for one in further if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def link_only(names: set[str], site: Path) -> None:
    """Make these distributions importable from ``site``, as links to where they are installed; and their programs."""
    for name in names:
        installed = metadata.distribution(name)
        for file in installed.files or ():
            if file.parts[0] == ".." and file.parent.name == "bin":
                (site / file).symlink_to(Path(str(installed.locate_file(file))).resolve())
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(installed.locate_file(top))))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and the base dependencies, and nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    sources = place / "sources"
    for directory in DIRECTORIES:
        shutil.copytree(ROOT / directory, sources / directory, symlinks=True, ignore=NOT_SHIPPED)
    for file in FILES:
        shutil.copy(ROOT / file, sources)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    made = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(place), str(sources)]
    subprocess.run(made, check=True)
    (wheel,) = place.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    (site,) = place.glob("venv/lib/python*/site-packages")
    subprocess.run([*pip, "install", *offline, "--no-compile", "--target", str(site), str(wheel)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    link_only(required(project["dependencies"]), site)
    return place / "venv/bin/python"


def run(python: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AGENTENV_"))}
    return subprocess.run(
        [python, *arguments], env={**kept, **env}, cwd=python.parent, capture_output=True, text=True, check=False
    )


def test_every_verb_explains_itself_without_any_extra_and_names_the_one_it_needs(python: Path) -> None:
    done = run(python, "-c", ASKED)
    assert done.returncode == 0, done.stderr[-2000:]
    ran = {words: (code, output) for words, code, output in json.loads(done.stdout)}
    explained = [words for words in ran if words.endswith("--help")]
    assert len(explained) > 20, "every verb, those of `dev` and `image` too"
    assert [words for words in explained if ran[words][0]] == []
    for words in ran.keys() - explained:
        code, output = ran[words]
        assert code == 2, words
        assert "needs agentenv[farm]" in output, words
        assert "pip install 'agentenv[farm]'" in output, words


def test_an_environment_names_its_extra(python: Path) -> None:
    done = run(python, "-c", "try: from agentenv import AgentEnv\nexcept ImportError as error: print(error)")
    assert (
        done.stdout.strip()
        == "AgentEnv: needs agentenv[env] (atroposlib is not installed) (pip install 'agentenv[env]')"
    )


def test_what_developers_run_is_in_a_source_checkout_only(python: Path) -> None:
    found = run(python, "-c", "from importlib.util import find_spec; print(find_spec('agentenv.dev'))")
    assert found.stdout == "None\n", found.stderr
    done = run(python, "-c", "from agentenv.cli import main; main()", "dev", "status")
    assert done.returncode == 2
    assert "src/agentenv/dev: requires a source checkout" in done.stderr


@pytest.mark.parametrize(
    ("named", "command"),
    [
        ("agentenv tasks check", ("-c", "from agentenv.cli import main; main()", "tasks", "check")),
        ("python -m agentenv.tasks.swe", ("-m", "agentenv.tasks.swe")),
    ],
    ids=["harbor", "swe"],
)
def test_a_check_of_tasks_explains_itself_and_names_its_extra(
    python: Path, named: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    assert named in run(python, *command, "--help").stdout
    done = run(python, *command, str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "needs agentenv[env]" in done.stderr.splitlines()[0]
    assert "pip install 'agentenv[env]'" in done.stderr


def test_its_programs_run_where_there_is_no_compiler(python: Path, tmp_path: Path) -> None:
    """The fake farm's slot agents are the real ones."""
    (tmp_path / "bash").symlink_to(shutil.which("bash") or "")
    code = "from agentenv.cli import main; main()"
    done = run(python, "-c", code, "-b", "fake", "exec", "echo $((6 * 7))", PATH=str(tmp_path), HOME=str(tmp_path))
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"bash"}, "nothing was built"


def test_it_searches_with_the_ripgrep_that_came_with_it(python: Path, tmp_path: Path) -> None:
    code = (
        "from agentenv import Sandbox\n"
        "with Sandbox(backend='fake') as box:\n"
        "    box.write_file('src/a.py', 'needle')\n"
        "    print(box.search('n(?i:E)+dle', glob='*.{py,ts}').matches[0].path)"
    )
    done = run(python, "-c", code, PATH="/usr/bin:/bin", HOME=str(tmp_path))
    assert (done.stdout, done.returncode) == ("src/a.py\n", 0), done.stderr
