from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.hooks import call_hook, check_signatures, checked_score, finite, misspelt
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


class WithoutRollouts(Fine):
    setup_agent_env = get_next_item = build_tools = build_tool_server = build_backend = evaluate = lambda self: None


class WantsMore(Fine):
    def verify_and_score_trajectory(self, item: Any, response: str, *, container: str) -> float:  # type: ignore[override]
        return 1.0


class TakesNothing(Fine):
    def build_task(self) -> str:  # type: ignore[override]
        return ""


def test_signatures_are_checked_before_anything_runs() -> None:
    check_signatures(Fine())
    with pytest.raises(
        TypeError, match=r"WantsMore.verify_and_score_trajectory: .*'container' \(write def .*agent_result"
    ):
        check_signatures(WantsMore())
    with pytest.raises(TypeError, match=r"TakesNothing.build_task: cannot .* \(write def build_task\(self, item\)\)$"):
        check_signatures(TakesNothing())


class Misspelt(WithoutRollouts):
    def score_destroyed_slots(self, item: Any) -> float:
        return 0.0

    def setup_trajectory_workspce(self, item: Any) -> None:
        pass

    def helper(self) -> None:
        pass

    def _build_taskk(self) -> None:
        pass


class Corrected(Misspelt):
    def setup_trajectory_workspace(self, item: Any, **_: Any) -> Any:
        return {}


def test_a_misspelt_hook_is_found_unless_the_hook_is_written_too() -> None:
    assert misspelt(Misspelt, WithoutRollouts) == {
        "score_destroyed_slots": "score_destroyed_slot",
        "setup_trajectory_workspce": "setup_trajectory_workspace",
    }
    assert misspelt(Corrected, WithoutRollouts) == {"score_destroyed_slots": "score_destroyed_slot"}
    assert misspelt(WithoutRollouts, WithoutRollouts) == {}


@pytest.mark.parametrize("value", [None, "1.0", float("nan"), float("inf"), (0.5, {}), [1.0]])
def test_a_wrong_score_names_the_hook_that_returned_it_and_what_it_was(value: Any) -> None:
    with pytest.raises(TaskError) as found:
        finite("score_trajectory", value)
    assert str(found.value) == f"score_trajectory must return a finite number, got {value!r}"


def test_a_verifier_that_keeps_something_else_than_a_dict_is_named() -> None:
    with pytest.raises(TaskError, match="verify must return a score and a dict, got list for the dict"):
        checked_score("verify", (1.0, []))
