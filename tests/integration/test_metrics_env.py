"""An environment with ``metrics_port`` serves its pool and its calls, and ``agentenv status`` finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.farm import look
from agentenv.farm.look import pools_seen
from tests.unit.env.env_stubs import SOLVE, AnswerEnv, environment
from tests.waiting import START_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ANSWER_TIMEOUT_S", START_S)


async def test_rollouts_are_counted_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    async with environment(AnswerEnv, tmp_path, {"*": [SOLVE]}, metrics_port=0) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
        assert scored is not None
        (pool,) = await pools_seen()
    rollouts = len(scored["scores"])
    assert pool.samples.one("agentenv_pool_leases_granted_total") == rollouts + 1  # one proved that slots can be had
    assert (pool.samples.one("agentenv_executor_calls_total", tool="bash", fault="none") or 0) >= rollouts
    assert pool.samples.by("agentenv_build_info", "backend") == {"fake": 1.0}
    assert await pools_seen() == ()


async def test_without_it_nothing_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    async with environment(AnswerEnv, tmp_path, {"*": [SOLVE]}):
        assert await pools_seen() == ()
