"""When the demo counts as failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.agent.results import Results
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.errors import ConfigError, Fault
from agentenv.subordinate_ids import Refusal
from examples.repair import demo
from examples.repair.__main__ import app
from examples.repair.settings import DemoSettings, check


def rollout(score: float | None, fault: Fault = "none", error: str = "") -> Transcript:
    return Transcript(trajectory="t", item_id="i", began_unix_s=0, score=score, fault=fault, error=error)


def played(*scores: float | None) -> tuple[list[GroupRecord], Results]:
    """One group with these scores; who has none met a failure of ours."""
    members = [rollout(score) if score is not None else rollout(None, "infra", "InfraError: lost") for score in scores]
    results = Results()
    results.add(members)
    record = GroupRecord(group="g", item_id="i", group_size=len(members), outcome="partial", trajectories=members)
    return [record], results


@pytest.mark.parametrize(
    ("scores", "scripted", "told"),
    [
        ([1.0, 0.5, 0.0, 0.0], True, ""),
        ([1.0, None, 0.0], True, "1 rollout without a score (1 × InfraError: lost)"),
        ([0.5, 0.5], True, "i was repaired, and scored 0.5"),
        ([0.0, None], True, "1 rollout without a score (1 × InfraError: lost); i was repaired, and scored 0"),
        ([0.5, None], False, ""),
    ],
)
def test_scripted_players_must_be_scored_as_they_played(scores: list[float | None], scripted: bool, told: str) -> None:
    assert demo.failure(*played(*scores), scripted=scripted) == told


@pytest.mark.parametrize("scripted", [True, False])
def test_what_is_missing_fails_it_whoever_plays(scripted: bool) -> None:
    groups, results = played(1.0)
    results.missing.no_score("other", [rollout(None, "infra", "InfraError: lost")])
    results.missing.lost.add("record", "No space left on device", "")
    told = "1 item without a score: other (1 × InfraError: lost); lost 1 record: No space left on device"
    assert demo.failure(groups, results, scripted=scripted) == told


@pytest.mark.parametrize(
    ("returned", "status", "last"),
    [("", 0, ""), ("1 item [red]", 1, "failed 1 item [red]"), (OSError(28, "No space left"), 1, "No space left")],
)
def test_its_exit_code_is_1_when_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str | OSError, status: int, last: str
) -> None:
    async def run_demo(settings: DemoSettings) -> str:
        if isinstance(returned, OSError):
            raise returned
        return returned

    monkeypatch.setattr(demo, "run_demo", run_demo)
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert last in [*result.stderr.splitlines(), ""][-2 if last else -1]


@pytest.mark.parametrize(
    ("uid", "refusal", "isolation"),
    [(0, Refusal("no ids"), "full"), (1000, Refusal("no ids"), "user"), (1000, None, "auto")],
)
def test_who_has_ids_of_his_own_plays_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, refusal: Refusal | None, isolation: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("examples.repair.settings.refusal", lambda: refusal)
    settings = DemoSettings(1, 1, 1, 1, "auto", "", "", 1, tmp_path)
    assert settings.isolation_in_use == isolation
    if refusal and uid:
        with pytest.raises(ConfigError, match="full needs root or subordinate ids: no ids"):
            check(replace(settings, isolation="full"))
    else:
        check(replace(settings, isolation="full"))
