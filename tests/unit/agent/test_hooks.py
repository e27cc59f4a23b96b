from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.hooks import call_hook, check_signatures
from agentenv.errors import TaskError
from tests.unit.agent.agent_stubs import StubHooks

GIVEN = {"trajectory_id": "t", "exec_tool": "tools", "agent_result": "result", "workspace_meta": {"a": 1}}


async def test_a_hook_is_given_the_keywords_it_declares() -> None:
    def few(item: Any, final_response: str, *, exec_tool: Any) -> tuple[Any, ...]:
        return item, final_response, exec_tool

    def rest(item: Any, final_response: str, *, agent_result: Any = None, **more: Any) -> tuple[Any, ...]:
        return agent_result, sorted(more)

    assert await call_hook("few", few, "i", "r", **GIVEN) == ("i", "r", "tools")
    assert await call_hook("rest", rest, "i", "r", **GIVEN) == (
        "result",
        ["exec_tool", "trajectory_id", "workspace_meta"],
    )


async def test_a_keyword_that_is_missing_is_the_task_s_fault() -> None:
    def wants_more(item: Any, *, container: str) -> None:
        raise AssertionError("not called")

    with pytest.raises(TaskError, match="missing 1 required keyword-only argument: 'container'"):
        await call_hook("wants_more", wants_more, "i", **GIVEN)


class Fine(StubHooks):
    def score_trajectory(self, item: Any, final_response: str) -> float:
        return 0.0

    async def verify_and_score_trajectory(  # type: ignore[override]
        self, item: Any, final_response: str, *, trajectory_id: str, exec_tool: Any, agent_result: Any = None
    ) -> tuple[float, dict[str, Any]]:
        return 1.0, {}


class WantsMore(Fine):
    def verify_and_score_trajectory(self, item: Any, response: str, *, container: str) -> float:  # type: ignore[override]
        return 1.0


class TakesNothing(Fine):
    def build_task(self) -> str:  # type: ignore[override]
        return ""


def test_signatures_are_checked_before_anything_runs() -> None:
    check_signatures(Fine())
    with pytest.raises(TypeError, match=r"WantsMore.verify_and_score_trajectory .*'container'; .* agent_result"):
        check_signatures(WantsMore())
    with pytest.raises(TypeError, match=r"TakesNothing.build_task cannot be called: too many positional"):
        check_signatures(TakesNothing())
