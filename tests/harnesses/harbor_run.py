"""``harbor run`` over tasks of our own, one for each feature of real ones (tests/integration/task_corpus.py). The oracle
scores 1, who does nothing 0, and what slots cannot have is refused by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.task_corpus import CASES, HARBOR

OF_COMPOSE = {"docker-in-docker", "an-init-system", "a-device"}
"""Refused here; what else is refused Harbor refuses itself."""
WITHOUT_AN_IMAGE = {"compose-of-the-verifier": "neither docker_image nor tests/Dockerfile"}
"""Played by agentenv.tasks.harbor, whose verifiers may have the agent's image."""
KINDS = {"own": ["-n", "2"], "shared": ["-n", "4", "--ek", "slots=4"]}
PLAYED = {name for name, case in CASES.items() if case.of is HARBOR and (name in OF_COMPOSE or not case.refused)}


def results(tmp_path: Path, agent: str, options: list[str]) -> dict[str, Any]:
    """What became of each trial, by its task."""
    for name in PLAYED:
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
        "A_KEY": "secret",
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "sys.meta_path is None" not in ran.stderr  # the shared farm ends quietly
    found = (json.loads(file.read_text()) for file in (tmp_path / "job").glob("*/result.json"))
    return {result["task_name"]: result for result in found}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_played_or_refused_by_name(tmp_path: Path, kind: str, agent: str) -> None:
    found = results(tmp_path, agent, KINDS[kind])
    assert found.keys() == PLAYED
    refused = {name: CASES[name].refused for name in OF_COMPOSE} | WITHOUT_AN_IMAGE
    for name, why in refused.items():
        raised = found[name]["exception_info"]
        assert raised["exception_type"] == "ConfigError"
        assert why in raised["exception_message"]
    said = {name: found[name]["exception_info"] or found[name]["verifier_result"]["rewards"] for name in PLAYED}
    scores = {name: rewards.get("reward", rewards) for name, rewards in said.items() if name not in refused}
    assert scores == dict.fromkeys(PLAYED - refused.keys(), 1.0 if agent == "oracle" else 0.0)
