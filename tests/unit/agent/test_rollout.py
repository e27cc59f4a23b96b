from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from agentenv.agent.group import outcome_of, run_group
from agentenv.agent.hooks import checked_score
from agentenv.agent.rollout import Rollout
from agentenv.agent.settings import AgentSettings
from agentenv.agent.transcript import Transcript
from agentenv.errors import AcquireTimeoutError, BadImageError, ContainerLostError, ModelServerError, TaskError
from agentenv.wire.calls import CallResult
from agentenv.wire.roots import RootSpec
from tests.unit.agent.agent_stubs import StubHooks, StubModel, StubSessions, calling, farm, ok, saying
from tests.waiting import loop_turns


async def roll(sessions: StubSessions, hooks: Any, **more: Any) -> Transcript:
    transcript = await Rollout(farm(sessions, **more), hooks, "it", "item-1").run("t-0")
    assert sessions.leased == 0
    return transcript


async def test_a_rollout_is_scored_and_timed() -> None:
    sessions = StubSessions()
    transcript = await roll(sessions, StubHooks())
    assert (transcript.score, transcript.fault, transcript.attempt) == (1.0, "none", 1)
    assert transcript.verification == {"said": "done"}
    assert transcript.workspace_meta == {"prepared": True}
    names = [phase.name for phase in transcript.phases]
    assert names == ["slot_wait", "prepare", "model", "tool", "model", "verify", "release"]
    for phase in transcript.phases:
        assert 0 <= phase.started_s <= phase.ended_s <= transcript.totals["total_s"]
    assert transcript.totals["run_s"] == 0.25
    assert transcript.totals["queue_s"] == 0.125
    assert transcript.totals["batch_wait_s"] == 0.5


async def test_an_infra_failure_is_tried_again_on_a_new_slot_and_does_not_touch_the_score() -> None:
    def die_once(trajectory: str, *_: Any) -> CallResult:
        if "try" not in trajectory:
            raise ContainerLostError("gone")
        return ok("fine")

    sessions = StubSessions(die_once)
    transcript = await roll(sessions, StubHooks())
    assert [session.trajectory for session in sessions.opened] == ["t-0", "t-0-try2"]
    assert (transcript.score, transcript.attempt, transcript.trajectory) == (1.0, 2, "t-0")
    assert transcript.earlier_attempts == ["ContainerLostError: gone"]


async def test_infra_retries_are_capped_and_then_nothing_is_scored() -> None:
    def die(*_: Any) -> CallResult:
        raise ContainerLostError("gone")

    sessions = StubSessions(die)
    transcript = await roll(sessions, StubHooks(), infra_retries=1)
    assert len(sessions.opened) == 2
    assert (transcript.score, transcript.fault, transcript.finish_reason) == (None, "infra", "fault")
    assert transcript.error == "ContainerLostError: gone"


async def test_no_slot_and_a_failing_model_are_infra_too() -> None:
    sessions = StubSessions()
    sessions.refuse = lambda _: AcquireTimeoutError("none free")
    transcript = await roll(sessions, StubHooks())
    assert (transcript.fault, transcript.score, len(transcript.earlier_attempts)) == ("infra", None, 2)
    assert [phase.name for phase in transcript.phases] == ["slot_wait"]
    transcript = await roll(StubSessions(), StubHooks(), model=lambda _: StubModel(ModelServerError("500")))
    assert (transcript.fault, transcript.error) == ("infra", "ModelServerError: 500")


@pytest.mark.parametrize("hook", ["build_task", "setup_trajectory_workspace", "verify_and_score_trajectory"])
@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(3), asyncio.CancelledError(), AssertionError()])
async def test_a_hook_that_raises_is_a_task_fault_reported_and_not_tried_again(hook: str, error: BaseException) -> None:
    hooks = StubHooks()

    def bad(*_: Any, **__: Any) -> Any:
        raise error

    setattr(hooks, hook, bad)
    sessions = StubSessions()
    transcript = await roll(sessions, hooks)
    assert (transcript.score, transcript.fault, transcript.attempt) == (None, "task", 1)
    assert hook in transcript.error
    assert type(error).__name__ in transcript.error


@pytest.mark.parametrize("hook", ["build_task", "build_agent_config", "setup_trajectory_workspace"])
async def test_a_hook_that_returns_something_else_is_a_task_fault_too(hook: str) -> None:
    hooks = StubHooks()
    setattr(hooks, hook, lambda *_, **__: 7)
    transcript = await roll(StubSessions(), hooks)
    assert (transcript.score, transcript.fault, transcript.attempt) == (None, "task", 1)
    assert f"{hook} must return" in transcript.error


async def test_an_infra_fault_a_verifier_swallowed_still_is_no_score() -> None:
    class Swallowing(StubHooks):
        async def verify_and_score_trajectory(
            self, item: Any, final_response: str, *, exec_tool: Any = None, **_: Any
        ) -> Any:
            try:
                await exec_tool.terminal("pytest")
            except Exception:
                return 0.0, {}
            return 1.0, {}

    def die_in_verify(_: str, tool: str, arguments: Any) -> CallResult:
        if arguments.get("command") == "pytest":
            raise ContainerLostError("gone")
        return ok()

    transcript = await roll(StubSessions(die_in_verify), Swallowing())
    assert (transcript.score, transcript.fault, len(transcript.earlier_attempts)) == (None, "infra", 2)


async def test_an_infra_fault_a_verifier_wrapped_is_infra() -> None:
    class Wrapping(StubHooks):
        async def setup_trajectory_workspace(self, *_: Any, exec_tool: Any, **__: Any) -> Any:
            try:
                await exec_tool.terminal("make")
            except Exception as error:
                raise RuntimeError("could not prepare") from error

    def die(*_: Any) -> CallResult:
        raise ContainerLostError("gone")

    transcript = await roll(StubSessions(die), Wrapping(), infra_retries=0)
    assert (transcript.fault, transcript.error) == ("infra", "ContainerLostError: gone")


async def test_the_slot_is_sealed_before_a_sealed_verification_only() -> None:
    for verification, expected in (("sealed", 1), ("live", None)):
        sessions = StubSessions()
        await roll(sessions, StubHooks(), verification=verification)
        assert sessions.opened[0].sealed_after == expected


@pytest.mark.parametrize("returned", [None, "1", math.nan, math.inf, (None, {}), (1.0, "x"), (1.0, {}, 3)])
async def test_a_score_that_is_none_is_a_task_fault_not_a_zero(returned: Any) -> None:
    hooks = StubHooks()
    hooks.verify_and_score_trajectory = lambda *_, **__: returned  # type: ignore[method-assign]
    transcript = await roll(StubSessions(), hooks)
    assert (transcript.score, transcript.fault) == (None, "task")


async def test_a_score_that_is_no_single_number_is_the_task_s_fault_and_not_tried_again() -> None:
    class Several:
        def __float__(self) -> float:
            raise TypeError("only arrays of length 1 can be numbers")

    hooks = StubHooks()
    hooks.verify_and_score_trajectory = lambda *_, **__: (Several(), {})  # type: ignore[method-assign, assignment]
    transcript = await roll(StubSessions(), hooks)
    assert (transcript.score, transcript.fault, transcript.attempt) == (None, "task", 1)
    assert "only arrays of length 1" in transcript.error


def test_plain_numbers_are_scores() -> None:
    assert checked_score("hook", True) == (1.0, {})
    assert checked_score("hook", (0, None)) == (0.0, {})
    with pytest.raises(TaskError):
        checked_score("hook", (float("nan"), {}))


class Asking(StubHooks):
    """Three tasks in one conversation: the second with its own limits, the third with those of the second."""

    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_steps=2)

    def continue_task(self, item: Any, *, agent_result: Any = None, workspace_meta: Any = None, **_: Any) -> Any:
        ends = workspace_meta.setdefault("ends", [])
        ends.append((agent_result.finish_reason, len(agent_result.steps)))
        further: list[Any] = [("second", AgentSettings(max_steps=1)), "third", None]
        return further[len(ends) - 1]


async def test_a_conversation_goes_on_with_further_tasks_whose_limits_are_counted_anew() -> None:
    model = StubModel(calling(("bash", '{"command": "ls"}')))
    transcript = await roll(StubSessions(), Asking(), model=lambda _: model, continues=True)
    assert transcript.workspace_meta["ends"] == [["max_steps", 2], ["max_steps", 3], ["max_steps", 4]]
    assert [m["content"] for m in transcript.messages if m["role"] == "user"] == ["do it", "second", "third"]
    assert [step.index for step in transcript.steps] == [0, 1, 2, 3]
    assert [phase.label for phase in transcript.phases if phase.name == "verify"] == ["between tasks"] * 3 + [""]
    assert (transcript.score, transcript.fault) == (1.0, "none")


async def test_an_environment_with_one_task_is_not_asked_for_more() -> None:
    transcript = await roll(StubSessions(), Asking())
    assert "ends" not in transcript.workspace_meta


@pytest.mark.parametrize("returned", [3, ("text", 3), (3, AgentSettings())])
async def test_a_further_task_that_is_none_is_the_task_s_fault(returned: Any) -> None:
    class Wrong(StubHooks):
        def continue_task(self, item: Any, **_: Any) -> Any:
            return returned

    transcript = await roll(StubSessions(), Wrong(), continues=True)
    assert (transcript.score, transcript.fault) == (None, "task")
    assert transcript.error.startswith("TaskError: continue_task must return")


async def test_a_context_is_closed_after_its_hook() -> None:
    kept: list[Any] = []

    class Keeping(StubHooks):
        def setup_trajectory_workspace(self, *_: Any, exec_tool: Any, **__: Any) -> Any:
            kept.append(exec_tool)

    await roll(StubSessions(), Keeping())
    with pytest.raises(Exception, match="closed"):
        await kept[0].terminal("ls")


async def test_cancelling_a_rollout_gives_the_slot_back_and_goes_through() -> None:
    sessions = StubSessions()
    started = asyncio.Event()

    class Hanging(StubHooks):
        async def verify_and_score_trajectory(self, *_: Any, **__: Any) -> Any:
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(Rollout(farm(sessions), Hanging(), "it", "i").run("t-0"))
    await started.wait()
    assert sessions.leased == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sessions.leased == 0


async def test_a_member_that_raises_anything_loses_no_sibling_and_no_slot() -> None:
    sessions = StubSessions()
    rollout = Rollout(farm(sessions), StubHooks(), "it", "i")

    async def run(trajectory: str) -> Transcript:
        if trajectory == "m-1":
            raise RuntimeError("bug outside every guard")
        if trajectory == "m-2":
            raise asyncio.CancelledError
        return await rollout.run(trajectory)

    transcripts = await run_group([f"m-{n}" for n in range(4)], run, "i")
    assert [transcript.score for transcript in transcripts] == [1.0, None, None, 1.0]
    assert transcripts[1].fault == "infra"
    assert "bug outside" in transcripts[1].error
    assert outcome_of(transcripts) == "partial"
    assert sessions.leased == 0


@pytest.mark.parametrize("twice", [False, True])
async def test_cancelling_a_group_ends_all_members_first(twice: bool) -> None:
    sessions = StubSessions()
    reached = asyncio.Event()

    class Hanging(StubHooks):
        async def verify_and_score_trajectory(self, *_: Any, **__: Any) -> Any:
            if sessions.leased == 3:
                reached.set()
            await asyncio.Event().wait()

    rollout = Rollout(farm(sessions), Hanging(), "it", "i")
    group = asyncio.create_task(run_group(["a-0", "a-1", "a-2"], rollout.run, "i"))
    await reached.wait()
    group.cancel()
    if twice:
        await asyncio.sleep(0)
        group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert sessions.leased == 0


async def test_cancelling_at_every_await_leaks_nothing() -> None:
    """Step the loop k times, then cancel: for every k until the group finishes by itself."""
    for steps in range(400):
        sessions = StubSessions()
        model = lambda _: StubModel(calling(("bash", "{}"), ("bash", "{}")), saying("done"))  # noqa: E731
        rollout = Rollout(farm(sessions, model), StubHooks(), "it", "i")
        group = asyncio.create_task(run_group(["a-0", "a-1"], rollout.run, "i"))
        await loop_turns(steps)
        if group.done():
            assert steps >= 10
            return
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert sessions.leased == 0
    raise AssertionError("the group never finished")


async def test_the_slot_is_made_from_the_image_of_the_item() -> None:
    class Hooks(StubHooks):
        def task_image(self, item: Any) -> str:
            return f"oci:{item}"

    asked: list[str] = []
    root = RootSpec("sha256:" + "0" * 64)

    async def root_of(image: str) -> RootSpec:
        asked.append(image)
        return root

    sessions = StubSessions()
    assert (await roll(sessions, Hooks(), root_of=root_of)).score == 1.0
    assert (asked, sessions.roots) == (["oci:it"], [root])


async def test_an_image_that_is_malformed_is_the_tasks_fault_and_asks_for_no_slot() -> None:
    class Hooks(StubHooks):
        def task_image(self, item: Any) -> str:
            return "bad"

    async def root_of(image: str) -> RootSpec:
        raise BadImageError(f"{image} has no layers")

    sessions = StubSessions()
    transcript = await roll(sessions, Hooks(), root_of=root_of)
    assert (transcript.score, transcript.fault, transcript.attempt) == (None, "task", 1)
    assert sessions.opened == []
