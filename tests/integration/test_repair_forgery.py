"""What a policy may leave behind to be scored for work it has not done. Each gets 0, none breaks the verifier."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.testing import Call, Player, Reply
from examples.repair import moves
from tests.integration.repair_tasks import package, recorded, repairing, with_bugs

SOURCE = "inflection/__init__.py"
PASSING_HOOK = """\
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    report = (yield).get_result()
    report.outcome = "passed"
"""
PATCHED_PYTEST = """
from _pytest import reports
_true = reports.TestReport.from_item_and_call.__func__
def _lie(cls, item, call):
    report = _true(cls, item, call)
    report.outcome = "passed"
    return report
reports.TestReport.from_item_and_call = classmethod(_lie)
"""
FORGED_REPORT = """
import json, os
for _fd in range(3, 64):
    try:
        os.write(_fd, b'["test_inflection.py::test_x", "passed"]\\n[0, "finished"]\\n')
    except OSError:
        pass
"""


def append(text: str, path: str = SOURCE) -> str:
    return f"cat >> {path} <<'EOF'\n{text}\nEOF"


TRICKS = {
    "tests replaced": "echo 'def test_all(): pass' > test_inflection.py",
    "tests removed": "rm test_inflection.py",
    "conftest": append(PASSING_HOOK, "conftest.py"),
    "sitecustomize": append(PASSING_HOOK, "sitecustomize.py") + "; cp sitecustomize.py usercustomize.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; cp pytest.ini tox.ini",
    "pth": "mkdir -p .local/lib/python3.11/site-packages; echo 'import os; os._exit(0)' > "
    ".local/lib/python3.11/site-packages/x.pth; cp .local/lib/python3.11/site-packages/x.pth .",
    "shell startup": "for f in .bashrc .bash_profile .profile .bash_env; do echo 'echo forged; exit 0' > $f; done",
    "a module in pytest's place": "mkdir _pytest; echo 'def main(*a, **k): return 0' > pytest.py",
    "exit at import": append("import os; os._exit(0)"),
    "pytest patched from the source": append(PATCHED_PYTEST),
    "forged report": append(FORGED_REPORT),
    "never ends the import": append("raise KeyboardInterrupt"),
    "a directory for a source": f"rm {SOURCE}; mkdir {SOURCE}",
    "a link out of the workspace": f"rm {SOURCE}; ln -s /etc/passwd {SOURCE}",
    "a pipe for a source": f"rm {SOURCE}; mkfifo {SOURCE}",
    "an enormous source": f"head -c 5000000 /dev/zero >> {SOURCE}",
    "not text": f"head -c 3000 /dev/urandom > {SOURCE}",
    "no source": "rm -rf inflection",
    "locked directories": "mkdir -p a/b/c; chmod 000 a/b a; chmod 000 inflection",
    "locked workspace": "chmod 000 .",
    "full disk": "head -c 3000000000 /dev/zero > big; true",
    "many files": "mkdir many; cd many; seq 1 20000 | xargs touch",
    "a process that puts it back": "(while :; do cp -f nothing conftest.py; sleep 0.01; done) >/dev/null 2>&1 & true",
}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


async def test_no_trick_is_scored_and_each_has_a_reason(tmp_path: Path) -> None:
    task = with_bugs(1)[0]
    players: list[Player] = [
        [Reply("", (Call("bash", {"command": trick}),)), Reply("done")] for trick in TRICKS.values()
    ]
    async with repairing(tmp_path, {task.id: players}, [task], group_size=len(players), tool_timeout_s=20.0) as env:
        await env.collect_trajectories(await env.get_next_item())
    found = dict(zip(TRICKS, recorded(tmp_path)[task.id], strict=True))
    assert {name: (t.score, t.fault, t.error) for name, t in found.items()} == dict.fromkeys(TRICKS, (0.0, "none", ""))
    reasons = {name: str(t.verification.get("reason", "")) for name, t in found.items()}
    assert all(reasons.values()), reasons
    assert "control tests" in reasons["pytest patched from the source"]


async def test_what_is_left_around_a_real_repair_takes_nothing_from_it(tmp_path: Path) -> None:
    task = with_bugs(1)[0]
    harmless = [
        "echo 'raise SystemExit' > conftest.py; echo 'import os; os._exit(1)' > sitecustomize.py; rm pytest.ini",
        "rm test_inflection.py README.rst; echo 'exit 1' > .bashrc; chmod 000 .bashrc",
        "head -c 3000000000 /dev/zero > big; mkdir -p a/b; chmod 000 a",
    ]
    mending = Call("patch", {"patch": moves.diff(moves.mended(task, package(), task.bugs))})
    players: list[Player] = [
        [Reply("", (mending, Call("bash", {"command": command}))), Reply("done")] for command in harmless
    ]
    async with repairing(tmp_path, {task.id: players}, [task], group_size=len(players)) as env:
        await env.collect_trajectories(await env.get_next_item())
    found = recorded(tmp_path)[task.id]
    assert [(t.score, t.verification.get("reason")) for t in found] == [(1.0, None)] * len(harmless)
