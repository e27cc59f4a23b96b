"""What Harbor makes of the cases: ``tests/golden/harbor_answers.json``, which a test compares with what is read here.

Harbor needs a newer Python than this project. In an environment that has it:

    python3.12 -m venv HARBOR && HARBOR/bin/pip install harbor==0.26.0
    HARBOR/bin/python -m tests.golden.harbor_answers           # writes the file anew; --check: compares it
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.golden.harbor_cases import HOST_ENV, INSTRUCTIONS, REWARDS, SHORTFALLS, STEP_REWARDS, STEPS, TOML

ANSWERS = Path(__file__).with_suffix(".json")


def answers() -> dict[str, Any]:
    """Harbor's answer to each case; None: it refuses it."""
    warnings.simplefilter("ignore")
    from harbor.models.task.task import strip_canary

    return {
        "harbor": importlib.metadata.version("harbor"),
        "toml": {name: _or_none(_read, text) for name, text in TOML.items()},
        "instructions": {name: strip_canary(text) for name, text in INSTRUCTIONS.items()},
        "rewards": {name: _or_none(_rewards, files) for name, files in REWARDS.items()},
        "steps": {name: _or_none(_steps, text) for name, text in STEPS.items()},
        "step_rewards": {name: _together(rewards) for name, rewards in STEP_REWARDS.items()},
        "shortfalls": {name: _falls_short(*case) for name, case in SHORTFALLS.items()},
    }


def _or_none(read: Any, case: Any) -> Any:
    try:
        return read(case)
    except Exception:
        return None


def _read(text: str) -> dict[str, Any]:
    from harbor.models.task.config import TaskConfig
    from harbor.models.task.verifier_mode import resolve_effective_verifier_env_config
    from harbor.utils.env import resolve_env_vars

    config = TaskConfig.model_validate_toml(text)
    environment, apart = config.environment, resolve_effective_verifier_env_config(config, None)
    baseline = (apart or environment).resolve_baseline()
    agent = config.agent.explicit_phase_policy() or environment.resolve_baseline()
    verifier = config.verifier.explicit_phase_policy() or baseline
    check = environment.healthcheck
    return {
        "agent_timeout_s": config.agent.timeout_sec,
        "verifier_timeout_s": config.verifier.timeout_sec,
        "build_timeout_s": environment.build_timeout_sec,
        "limits": [environment.cpus, environment.memory_mb, environment.storage_mb],
        "networks": [[policy.network_mode.value, policy.allowed_hosts] for policy in (agent, verifier)],
        "users": [config.agent.user, config.verifier.user],
        "env": [resolve_env_vars(each.env) for each in (environment, config.verifier, config.solution)],
        "healthcheck": check and [check.command, check.interval_sec, check.start_period_sec, check.retries],
        "separate": apart is not None,
        "separate_cpus": apart and apart.cpus,
        "workdir": environment.workdir,
    }


def _steps(text: str) -> dict[str, Any]:
    """What holds in each step, as a trial resolves it."""
    from harbor.models.task.config import MultiStepRewardStrategy, TaskConfig
    from harbor.models.task.verifier_mode import resolve_effective_verifier_env_config, resolve_step_verifier_mode
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
    from harbor.trial.network_policy import resolve_trial_network_plan
    from harbor.utils.env import resolve_env_vars

    config = TaskConfig.model_validate_toml(text)
    found = []
    for step in config.steps or []:
        mode = resolve_step_verifier_mode(config, step)
        runs = AgentConfig(), EnvironmentConfig(), VerifierConfig()
        plan = resolve_trial_network_plan(config, *runs, step, verifier_mode=mode)
        apart = resolve_effective_verifier_env_config(config, step)
        check, least = step.healthcheck, step.min_reward
        limits = [step.agent.timeout_sec, config.agent.timeout_sec], [step.verifier.timeout_sec, 0.0]
        users = [step.agent.user, config.agent.user], [step.verifier.user, config.verifier.user]
        found.append(
            {
                "name": step.name,
                "timeouts_s": [next((each for each in pair if each is not None), None) for pair in limits],
                "users": [next((each for each in pair if each is not None), None) for pair in users],
                "env": resolve_env_vars({**config.verifier.env, **step.verifier.env}),
                "networks": [
                    [each.network_mode.value, each.allowed_hosts] for each in (plan.agent_phase, plan.verifier_phase)
                ],
                "separate_cpus": apart and [apart.cpus],
                "healthcheck": check and [check.command, check.retries],
                "min_reward": least if isinstance(least, dict) or least is None else {"reward": least},
                "artifacts": [
                    each if isinstance(each, str) else each.source for each in [*config.artifacts, *step.artifacts]
                ],
            }
        )
    return {"steps": found, "final": config.multi_step_reward_strategy is MultiStepRewardStrategy.FINAL}


def _together(rewards: list[dict[str, float]]) -> dict[str, Any]:
    from harbor.models.task.config import MultiStepRewardStrategy
    from harbor.models.verifier.result import VerifierResult
    from harbor.trial.multi_step import MultiStepTrial

    trial = MultiStepTrial.__new__(MultiStepTrial)
    results = [SimpleNamespace(verifier_result=VerifierResult(rewards=each)) for each in rewards]
    trial._result = SimpleNamespace(step_results=results)
    found = {}
    for strategy in MultiStepRewardStrategy:
        trial.task = SimpleNamespace(config=SimpleNamespace(multi_step_reward_strategy=strategy))
        found[strategy.value] = dict(sorted(trial._select_multi_step_reward().rewards.items()))
    return found


def _falls_short(least: float | dict[str, float], rewards: dict[str, float]) -> bool:
    from harbor.trial.multi_step import MultiStepTrial

    return MultiStepTrial._min_reward_failure(rewards, least) is not None


def _rewards(files: dict[str, str]) -> dict[str, float]:
    from harbor.models.verifier.result import VerifierResult
    from harbor.verifier.verifier import Verifier

    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            Path(directory, name).write_text(text)
        verifier = Verifier.__new__(Verifier)
        json_path, text_path = Path(directory, "reward.json"), Path(directory, "reward.txt")
        verifier.trial_paths = SimpleNamespace(reward_json_path=json_path, reward_text_path=text_path)
        read = verifier._parse_reward_json if json_path.exists() else verifier._parse_reward_text
        found = VerifierResult(rewards=read()).rewards
        return {name: float(value) for name, value in found.items()}


def main() -> int:
    """See the module. Returns the exit code: 1 when the file is not what Harbor says."""
    os.environ |= HOST_ENV
    os.environ.pop("MISSING", None)
    text = json.dumps(answers(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        kept = ANSWERS.read_text()
        sys.stderr.writelines(difflib.unified_diff(kept.splitlines(True), text.splitlines(True), "kept", "Harbor"))
        return int(kept != text)
    ANSWERS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
