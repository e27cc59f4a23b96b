"""One record of each kind, all over one small image: the oracle scores 1, and who changes nothing 0."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv import AsyncSandbox
from agentenv.report import read_records
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from agentenv.tasks.scripted import play
from agentenv.tasks.swe import __main__ as command
from agentenv.tasks.swe.image_env import SweImageEnv
from agentenv.tasks.swe.making import image_of
from agentenv.testing import Call, Reply
from tests.debian_images import base_in_cache
from tests.integration.results import rows

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

DOCKERFILE = """\
FROM debian:bookworm-slim
RUN apt-get update -q && apt-get install -y -q --no-install-recommends git python3-pytest && apt-get clean
COPY make.sh /tmp/
RUN bash /tmp/make.sh && rm /tmp/make.sh
WORKDIR /testbed
"""
MAKE = """\
# A repository before the solution, with the solution in its history; a conda-like environment; tests of R2E-Gym's kind.
set -e
mkdir -p /testbed/tests /testbed/old /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin /r2e_tests
echo 'export CONDA_DEFAULT_ENV=$1 PATH=/opt/miniconda3/envs/$1/bin:$PATH' > /opt/miniconda3/bin/activate
ln -s /usr/bin/pytest-3 /opt/miniconda3/envs/testbed/bin/pytest
cd /testbed
git init -q -b main . && git config user.name a && git config user.email a@localhost
printf 'def add(a, b):\\n    return a - b\\n\\n\\ndef mul(a, b):\\n    return a * b\\n' > calc.py
printf 'from calc import add, mul\\n\\n\\ndef test_zero():\\n    assert add(1, 0) == 1\\n' > tests/test_calc.py
printf '\\n\\ndef test_mul():\\n    assert mul(2, 3) == 6\\n' >> tests/test_calc.py
printf '\\n\\n@pytest.mark.parametrize("x", ["0 and", "0 or"])\\ndef test_said(x):\\n    pass\\n' >> tests/test_calc.py
printf '\\n\\n@pytest.mark.xfail\\ndef test_later():\\n    assert mul(2, 3) == 7\\n' >> tests/test_calc.py
sed -i '1s/^/import pytest\\n/' tests/test_calc.py
touch conftest.py  # so pytest finds calc
printf 'import shutil\\nshutil.copy("calc.py", "built.py")\\n' > build.py
python3 build.py && echo built.py > .gitignore
git add . && git commit -q -m 'Before' && git branch before
sed -i 's/a - b/a + b/' calc.py && git commit -q -a -m 'The solution'
printf '\\n\\ndef test_add():\\n    assert add(1, 2) == 3\\n' >> tests/test_calc.py && git commit -q -a -m 'Its tests'
git checkout -q before && git branch -m main later
printf 'import calc\\n\\n\\ndef test_add():\\n    assert calc.add(1, 2) == 3\\n' > /r2e_tests/test_1.py
printf 'class TestMore:\\n    def test_known(self):\\n        assert False\\n' >> /r2e_tests/test_1.py
printf 'PYTHONPATH=. python3 -m pytest -rA r2e_tests\\n' > run_tests.sh
"""
HEAD = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
FIX = f"{HEAD}@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
BUG = f"{HEAD}@@ -5,2 +5,2 @@\n def mul(a, b):\n-    return a * b\n+    return a + b\n"
TEST = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -5,5 +5,10 @@
 def test_zero():
     assert add(1, 0) == 1
+
+
+def test_add():
+    import os
+    assert add(1, 2) == 3 and os.environ["CONDA_DEFAULT_ENV"] == "testbed"


 def test_mul():
"""
SAYS = {"problem_statement": "It computes the wrong number."}
HUNK = {
    "descriptor": {"old_range": {"start": 1, "length": 2}, "new_range": {"start": 1, "length": 2}},
    "line_group": {
        "all_lines": [
            {"type": "context", "content": "def add(a, b):"},
            {"type": "deleted", "content": "    return a - b"},
            {"type": "added", "content": "    return a + b"},
        ]
    },
}


SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
. /opt/miniconda3/bin/activate testbed
cd /testbed
python3 build.py
git checkout BASE tests/test_calc.py
git apply -v - <<'EOF_1'
{TEST}EOF_1
: '>>>>> Start Test Output'
RUN
: '>>>>> End Test Output'
git checkout BASE tests/test_calc.py
"""
"""As SWE-bench's since its version 5."""
GO = """\
python3 - <<'EOF'
import calc
for name, good in (("TestAdd", calc.add(1, 2) == 3), ("TestMul/two (x)", calc.mul(2, 3) == 6), ("TestOld", None)):
    print(f"--- {'SKIP' if good is None else 'PASS' if good else 'FAIL'}: {name} (0.00s)")
raise SystemExit(calc.add(1, 2) != 3)
EOF"""
"""Prints as Go's tests do."""
FAILURES = """\
python3 -c 'import calc; print("1) adds" if calc.add(1, 2) != 3 else "", "\\n9 specs, 0 failures")'"""
"""Prints as marked's do, which name failures only."""
BUILT = TEST.replace("def test_add():\n+    import os\n", "def test_add():\n+    import built as calc, os\n").replace(
    "assert add(1, 2)", "assert calc.add(1, 2)"
)
"""Tests what was built."""
PRO_RUN = "cd /testbed && python3 -m pytest -v -p no:cacheprovider ${1//,/ }\n"
PRO_PARSER = """\
import json, sys
found = [line.split()[:2] for line in open(sys.argv[1]) if "::" in line and len(line.split()) > 1]
tests = [{"name": name.replace("tests/test_calc.py::", "calc | "), "status": status} for name, status in found]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""


def more_records(image: str, base_commit: str, tests_commit: str) -> list[dict[str, Any]]:
    """Of SWE-bench with its scripts, Live, Pro."""
    bench = {**SAYS, "repo": "acme/calc", "base_commit": base_commit, "patch": FIX, "test_patch": TEST, "image": image}
    own = {"eval_type": "pass_and_fail", "log_parser": "parse_log_pytest", "version": "1.0", "image_assets": "{}"}
    script = SCRIPT.replace("BASE", base_commit)
    names = {"FAIL_TO_PASS": ["tests/test_calc.py::test_add"], "PASS_TO_PASS": ["tests/test_calc.py::test_later"]}
    go = {"FAIL_TO_PASS": ["TestAdd"], "PASS_TO_PASS": ["TestMul/two (x)", "TestOld"], "log_parser": "parse_log_gotest"}
    failures = {"FAIL_TO_PASS": ["adds"], "PASS_TO_PASS": ["draws"], "log_parser": "parse_log_marked"}
    return [
        {
            **bench, **own, **names, "instance_id": "acme__calc-5",
            "eval_script": script.replace("RUN", "python3 -m pytest -rA tests/test_calc.py"),
        },
        {**bench, **own, **go, "instance_id": "acme__calc-6", "eval_script": script.replace("RUN", GO)},
        {
            **bench, **own, **failures, "instance_id": "acme__calc-7", "eval_type": "fail_only",
            "eval_script": script.replace("RUN", FAILURES),
        },
        {
            **bench, "instance_id": "acme__calc-8", "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
            "PASS_TO_PASS": ["tests/test_calc.py::test_mul", "tests/test_gone.py::test_gone"], "log_parser": "pytest",
            "rebuild_cmds": ["python3 build.py"], "test_cmds": ["pytest -rA tests/test_calc.py"], "test_patch": BUILT,
        },
        {
            **bench, "instance_id": "instance_acme__calc-9-vnan", "workdir": "/testbed", "requirements": "- add adds",
            "interface": "none", "dockerhub_tag": "acme.calc-9", "selected_test_files_to_run": "['tests/test_calc.py']",
            "fail_to_pass": "['calc | test_add']", "pass_to_pass": "['calc | test_mul', \"calc | test_zero\"]",
            "before_repo_set_cmd": f"git reset --hard\ngit checkout {tests_commit} -- tests/test_calc.py",
        },
    ]  # fmt: skip


def records(image: str, base_commit: str) -> list[dict[str, Any]]:
    bench = {
        **SAYS, "repo": "acme/calc", "base_commit": base_commit, "patch": FIX, "test_patch": TEST,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_zero", "tests/test_calc.py::test_mul"]),
    }  # fmt: skip
    cut = ["tests/test_calc.py::test_said[0", "tests/test_calc.py::test_later"]  # as SWE-bench names and counts them
    fails, passes = ["tests/test_calc.py::test_mul"], ["tests/test_calc.py::test_zero"]
    return [
        {**bench, "instance_id": "acme__calc-1", "image": image},
        {
            **bench,
            "instance_id": "acme__calc-2",
            "docker_image": image,
            "install_config": json.dumps({"test_cmd": "pytest --no-header -rA", "log_parser": "parse_log_pytest"}),
        },
        {**bench, "instance_id": "acme__calc-3", "image": image, "PASS_TO_PASS": cut},
        {
            **SAYS,
            "FAIL_TO_PASS": fails,
            "PASS_TO_PASS": passes,
            "instance_id": "acme__calc.0123.mul",
            "repo": "swesmith/acme__calc.0123",
            "patch": BUG,
            "image_name": image,
        },
        {
            **SAYS,
            "repo_name": "calc",
            "commit_hash": "f" * 40,
            "docker_image": image,
            "expected_output_json": json.dumps({"test_add": "PASSED", "TestMore.test_known": "FAILED"}),
            "parsed_commit_content": json.dumps(
                {"file_diffs": [{"header": {"file": {"path": "calc.py"}}, "hunks": [HUNK]}]}
            ),
        },
    ]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a record of each kind; the image is built."""
    directory = tmp_path_factory.mktemp("kinds")
    cache = base_in_cache(directory / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(cache))
        patch.setenv("AGENTENV_STATE_DIR", str(directory / "state"))
        make_base(Store.open(store_directory()))
        image, base_commit, tests_commit = asyncio.run(built(directory))
    file = directory / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records(image, base_commit)))
    more = more_records(image, base_commit, tests_commit)
    (directory / "more.jsonl").write_text("".join(json.dumps(record) + "\n" for record in more))
    programs = directory / "run_scripts/instance_acme__calc-9-vnan"
    programs.mkdir(parents=True)
    (programs / "run_script.sh").write_text(PRO_RUN)
    (programs / "parser.py").write_text(PRO_PARSER)
    return file


async def built(directory: Path) -> tuple[str, str, str]:
    """The image, the commit that it has checked out, and that of the solution's tests."""
    image = await image_of(directory / "image", {"Dockerfile": DOCKERFILE, "make.sh": MAKE}, "an image of tests")
    async with AsyncSandbox(image=image) as box:
        base_commit, tests_commit = (await box.run("git rev-parse HEAD later")).stdout.split()
        return image, base_commit, tests_commit


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(dataset.parent / "cache"))


def test_the_solution_of_each_kind_scores_1_and_nothing_scores_0(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["swe", "--images", str(dataset), "--out", str(tmp_path)])
    assert command.main() == 0, capsys.readouterr().out
    names = ["acme__calc-1", "acme__calc-2", "acme__calc-3", "acme__calc.0123.mul", f"calc-{'f' * 40}"]
    assert rows(capsys.readouterr().out) == [*(f"ok {name} 1 0 S" for name in names), "5 of 5 ok"]


def test_each_shape_that_has_its_own_script_is_run_and_read_by_it(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["swe", "--images", str(dataset.parent / "more.jsonl")]
    monkeypatch.setattr(sys, "argv", [*given, "--strict"])
    assert command.main() == 2
    assert "record instance_acme__calc-9-vnan: cannot be read as one of SWE-bench Pro: run_scripts is not set" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(
        sys, "argv", [*given, "--oracle", "--only-instances", "acme__calc-7,instance_acme__calc-9-vnan"]
    )
    assert command.main() == 0
    *played, left_out, end = rows(capsys.readouterr().out)
    assert (played, end) == (["ok acme__calc-7 1 S"], "1 of 1 ok, 1 refused")
    assert left_out.startswith(
        "-- instance_acme__calc-9-vnan refused: record instance_acme__calc-9-vnan: cannot be read"
    )
    monkeypatch.setattr(sys, "argv", [*given, "--run-scripts", str(dataset.parent / "run_scripts")])
    assert command.main() == 0, capsys.readouterr().out
    names = [*(f"acme__calc-{number}" for number in (5, 6, 7, 8)), "instance_acme__calc-9-vnan"]
    assert rows(capsys.readouterr().out) == [*(f"ok {name} 1 0 S" for name in names), "5 of 5 ok"]


async def test_a_policy_sees_one_commit_and_not_what_runs_the_tests(dataset: Path, tmp_path: Path) -> None:
    look = "git log --all --format=%s; git status --porcelain; ls -d /eval.sh /workspace 2> /dev/null"
    fields = {"run_scripts": str(dataset.parent / "run_scripts")}
    for instance in ("acme__calc-5", "instance_acme__calc-9-vnan"):
        place = tmp_path / instance
        place.mkdir()
        member = await looked(dataset.parent / "more.jsonl", place, instance, look, **fields)
        assert member.messages[3]["content"].partition("stdout:\n")[2] == "The repository before the task"
        assert (member.score, member.fault) == (0.0, "none")


async def looked(dataset: Path, tmp_path: Path, instance: str, text: str, **fields: Any) -> Any:
    """What a policy with one command finds."""
    await play(
        tmp_path,
        SweImageEnv,
        {"dataset_name": str(dataset), "only_instances": [instance], "group_size": 1, **fields},
        lambda env: env.records,
        lambda _: [[Reply("", (Call("bash", {"command": text}),)), Reply("done")]],
    )
    ((member,),) = (group.trajectories for group in read_records(tmp_path / "rollouts.jsonl"))
    return member


async def test_a_policy_finds_neither_the_solution_nor_the_state_before_the_bug(dataset: Path, tmp_path: Path) -> None:
    history = (
        "git log --all --format=%s; git status --porcelain; git fsck --unreachable; git grep -c 'a + b' -- calc.py"
    )
    member = await looked(dataset, tmp_path, "acme__calc.0123.mul", f"{history}; ls run_tests.sh")
    shown = "The repository before the task\ncalc.py:1\nrun_tests.sh"
    assert member.messages[3]["content"].partition("stdout:\n")[2].partition("\nstderr")[0] == shown
    assert (member.score, member.fault) == (0.0, "none")


async def test_hidden_tests_are_there_for_the_verifier_only(dataset: Path, tmp_path: Path) -> None:
    solve = "sed -i 's/a - b/a + b/' calc.py; mkdir -p /r2e_tests; echo 'def test_add(): pass' > /r2e_tests/test_1.py"
    find = "find / -xdev \\( -name run_tests.sh -o -name r2e_tests \\)"
    member = await looked(dataset, tmp_path, f"calc-{'f' * 40}", f"{find}; {solve}; git status --porcelain")
    assert member.messages[3]["content"] == "exit code: 0\nstdout:\n M calc.py"
    assert (member.score, member.verification["changed"]) == (1.0, ["calc.py"])
