"""What the packages of the datasets read in the logs of ``swe_cases.py``: ``swe_answers.json``, which a test compares
with what is read here.

SWE-bench's and SWE-smith's packages are on PyPI, those of the others are files of their repositories, which git shows.
In an environment of their own:

    python3.12 -m venv SWE && SWE/bin/pip install swebench==5.0.2 swesmith==0.0.9
    rm -r SWE/lib/python3.12/site-packages/tests       # swesmith's, which would hide these
    SWE/bin/python -m tests.golden.swe_answers CLONES  # writes the file anew; --check CLONES: compares it

``CLONES`` has a clone, or its git directory, of each of ``FILES`` as ``owner+name``.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.swe_cases import LINES, logs

ANSWERS = Path(__file__).with_suffix(".json")
FILES = {
    "rebench_v2": (
        "SWE-rebench/SWE-bench-fork",
        "39316f79cd51c144fb0c62c157ef4739e7653577",
        "swebench/harness/log_parsers/python.py",
        "parse_log_pytest_v2",
    ),
    "gym_pydantic": (
        "SWE-Gym/SWE-Bench-Fork",
        "242429c188fcfd06aad13fce9a54d450470bf0ac",
        "swebench/harness/log_parsers.py",
        "parse_log_pytest_pydantic",
    ),
    "r2e": (
        "R2E-Gym/R2E-Gym",
        "69bc953542b428d1e4c8a59ce3ea1a32e50ef0f0",
        "src/r2egym/repo_analysis/execution_log_parser.py",
        "parse_log_pytest",
    ),
}
"""Where the parsers of other datasets are: repository, commit, file, function."""


def answers(clones: Path) -> dict[str, Any]:
    """The statuses of each log; None: the parser fails."""
    from swebench.harness.log_parsers import PARSER_REGISTRY

    spec = types.SimpleNamespace(instance_id="a__b-1", version="1.0", repo="a/b")
    readers: dict[str, Callable[[str], dict[str, str]]] = {
        name.removeprefix("parse_log_"): partial(_with_spec, parse, spec) for name, parse in PARSER_REGISTRY.items()
    }
    readers["smith"] = _of_swesmith()
    for name in FILES:
        readers[name] = _of_file(clones, name)
    return {
        "swebench": importlib.metadata.version("swebench"),
        "swesmith": importlib.metadata.version("swesmith"),
        **{name: f"{repo}@{commit}:{file}" for name, (repo, commit, file, _) in FILES.items()},
        "parsers": sorted(PARSER_REGISTRY),
        "statuses": {name: [_or_none(readers[name], log) for log in logs(name)] for name in LINES},
    }


def _with_spec(parse: Callable[[str, Any], dict[str, str]], spec: object, log: str) -> dict[str, str]:
    return parse(log, spec)


def _of_swesmith() -> Callable[[str], dict[str, str]]:
    """The parser of its Python repositories, without its package, which does not import with swebench 5."""
    from swebench.harness.constants import TestStatus

    file = importlib.metadata.distribution("swesmith").locate_file("swesmith/profiles/python.py")
    tree = ast.parse(Path(str(file)).read_text())
    profile = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PythonProfile")
    method = next(node for node in profile.body if isinstance(node, ast.FunctionDef) and node.name == "log_parser")
    names: dict[str, Any] = {"re": re, "TestStatus": TestStatus}
    exec(compile(ast.Module([method], []), str(file), "exec"), names)
    return lambda log: names["log_parser"](None, log)


def _of_file(clones: Path, name: str) -> Callable[[str], dict[str, str]]:
    repo, commit, file, function = FILES[name]
    place = clones / repo.replace("/", "+")
    command = ["git", "-C", str(place / "repo" if (place / "repo").is_dir() else place), "show", f"{commit}:{file}"]
    source = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for module in ("swebench.harness.test_spec", "swebench.harness.test_spec.test_spec"):  # which swebench 5 has not
        sys.modules.setdefault(module, types.ModuleType(module)).TestSpec = object  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    parse = names[function]
    takes_spec = parse.__code__.co_argcount > 1
    read = (lambda log: parse(log, None)) if takes_spec else parse
    if name != "r2e":
        return read
    return lambda log: {key.split(" - ")[0]: status for key, status in read(log).items()}  # as its reward does


def _or_none(read: Callable[[str], dict[str, str]], log: str) -> dict[str, str] | None:
    try:
        return read(log)
    except Exception:
        return None


def main() -> int:
    """See the module. Returns the exit code: 1 when the file is not what the packages say."""
    text = json.dumps(answers(Path(sys.argv[-1])), indent=0, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        kept = ANSWERS.read_text()
        sys.stderr.writelines(difflib.unified_diff(kept.splitlines(True), text.splitlines(True), "kept", "packages"))
        return int(kept != text)
    ANSWERS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
