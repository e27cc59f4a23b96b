"""The command where the plain wheel is installed: the base dependencies, and no extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PLAIN = """
import json, sys, tomllib
from importlib import metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def closure(requirements):
    found, ask = set(), [Requirement(text) for text in requirements]
    while ask:
        wanted = ask.pop()
        for extra in wanted.extras or {""}:
            if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(wanted.name)
            if (name, extra) not in found:
                found.add((name, extra))
                here = [Requirement(text) for text in metadata.requires(name) or ()]
                ask += [one for one in here if not one.marker or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}

with open("pyproject.toml", "rb") as file:
    installed = closure(tomllib.load(file)["project"]["dependencies"])
modules = metadata.packages_distributions()
hidden = {name for name, homes in modules.items() if not installed & {canonicalize_name(home) for home in homes}}
hidden -= {"agentenv"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())

from typer.testing import CliRunner
from agentenv.cli.app import VERBS, app, imported

def verbs():
    yield []
    for name in VERBS:
        yield [name]
        yield from ([name, sub] for sub in getattr(imported(name), "commands", ()))

def ran(words):
    done = CliRunner().invoke(app, words)
    return [words, done.exit_code, done.output]

asked = [["--version"], ["image", "status"], ["dev", "status"]]
asked += [[*words, "--help"] for words in verbs()]
print(json.dumps({"hidden": sorted(hidden), "ran": [ran(words) for words in asked]}))
"""


def test_every_verb_explains_itself_without_any_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert {"docker", "fastapi", "httpx", "nomad", "prometheus_client", "atroposlib", "uvicorn"} <= {*said["hidden"]}
    ran = {" ".join(words): (code, output) for words, code, output in said["ran"]}
    assert [words for words, (code, _) in ran.items() if code and not words.endswith("status")] == []
    assert len(ran) > 20, "every verb, those of `dev` and `image` too"
    for words in ("image status", "dev status"):
        code, output = ran[words]
        assert code == 2
        assert "docker" in output
        assert "pip install 'agentenv[farm]'" in output
