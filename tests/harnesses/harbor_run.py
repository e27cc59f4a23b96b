"""``harbor run`` over tasks of our own, one for each feature of real ones (tests/integration/task_corpus.py).

The oracle scores 1, and who does nothing 0. What slots cannot have is refused by its name before a trial begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.task_corpus import CASES, HARBOR

REFUSED = {
    "docker-in-docker": "services.main.privileged",
    "an-init-system": "services.server.command",
    "a-device": "services.main.devices",
    "a-gpu": "Task requires 1 GPU",
}
WITHOUT_AN_IMAGE = {"compose-of-the-verifier": "neither docker_image nor tests/Dockerfile"}
"""Played by agentenv.tasks.harbor, whose verifiers may have the agent's image; here the trial fails in the end."""
KINDS = {"own": ["-n", "2"], "shared": ["-n", "4", "--ek", "slots=4"]}
PLAYED = {name for name, case in CASES.items() if case.of is HARBOR and not case.refused}


def harbor_run(tmp_path: Path, names: set[str], agent: str, options: list[str]) -> subprocess.CompletedProcess[str]:
    for name in names:
        CASES[name].write(tmp_path / "tasks" / name)
    command = [
        *(str(Path(sys.executable).parent / "harbor"), "run", "--yes", "--quiet", "--path", str(tmp_path / "tasks")),
        *("--env", "agentenv.harnesses.harbor:AgentEnvEnvironment", "--ek", "storage=memory", "--agent", agent),
        *("--force-build", "--override-cpus", "1", "--override-memory-mb", "1024", *options),
        *("--jobs-dir", str(tmp_path), "--job-name", "job"),
    ]
    env = {
        **os.environ,
        "HOME": str(tmp_path),  # what Harbor keeps there
        "COLUMNS": "200",
        "A_KEY": "secret",
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True)


def results(tmp_path: Path) -> dict[str, Any]:
    """What became of each trial, by its task."""
    found = (json.loads(file.read_text()) for file in (tmp_path / "job").glob("*/result.json"))
    return {result["task_name"]: result for result in found}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_played(tmp_path: Path, kind: str, agent: str) -> None:
    ran = harbor_run(tmp_path, PLAYED, agent, KINDS[kind])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "sys.meta_path is None" not in ran.stderr  # the shared farm ends quietly
    found = results(tmp_path)
    assert found.keys() == PLAYED
    for name, why in WITHOUT_AN_IMAGE.items():
        raised = found[name]["exception_info"]
        assert raised["exception_type"] == "ConfigError"
        assert why in raised["exception_message"]
    scores = {
        name: result["exception_info"] or result["verifier_result"]["rewards"].get("reward")
        for name, result in found.items()
        if name not in WITHOUT_AN_IMAGE
    }
    assert scores == dict.fromkeys(scores, 1.0 if agent == "oracle" else 0.0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_slots_cannot_have_is_refused_before_a_trial_begins(tmp_path: Path, name: str) -> None:
    ran = harbor_run(tmp_path, {"usual", name}, "oracle", [])
    assert ran.returncode == 1
    assert REFUSED[name] in ran.stdout + ran.stderr
    assert results(tmp_path) == {}
