"""F13: a group with a long preparation, and the same item in the next epoch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from agentenv.agent.failure_log import FailureLog
from agentenv.agent.group import run_group
from agentenv.agent.hook_slot_gate import HookSlotGate
from agentenv.agent.preparation import Preparations
from agentenv.agent.protocols import Completion, Message, ToolDefinition
from agentenv.agent.result import AgentResult
from agentenv.agent.rollout import Rollout, RolloutServices
from agentenv.agent.settings import AgentSettings
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.roots import RootSpec
from benchmarks.image_farm import ImageFarm, image_farm
from benchmarks.measure import Outcome, at_most
from benchmarks.targets.effort import Effort

GROUP: Final = 8
PREPARATION_S: Final = 60.0


async def f13_once(effort: Effort) -> list[Outcome]:
    """Preparations of a group of 8 and of the next epoch, and how long each takes beside a preparation."""
    took_s = PREPARATION_S if effort.rounds > 1 else PREPARATION_S / 12
    prepared, again, added, second = [], [], [], []
    async with image_farm(GROUP) as farm:
        for number in range(effort.rounds):
            hooks, counts = _Hooks(took_s), Counter[str]()
            group = _Group(farm, hooks, counts, f"item-{number}")
            added.append(await group.run(1) - took_s)
            prepared.append(float(hooks.prepared))
            second.append(await group.run(2))
            again.append(hooks.prepared - prepared[-1])
            assert counts["prepared_reused"] == 2 * GROUP - 1
    what = f"preparations ({took_s:g} s each) of a group of {GROUP}"
    return [
        at_most("F13", what, "x", 1).outcome(prepared),
        at_most("F13.again", "preparations of the next epoch", "x", 0).outcome(again),
        at_most("F13.added", "the group's time beyond one preparation", "s", 2).outcome(added),
        at_most("F13.second", "the time of the group in the next epoch", "s", 2).outcome(second),
    ]


class _Group:
    """A group of rollouts that say one word after their preparation."""

    def __init__(self, farm: ImageFarm, hooks: _Hooks, counts: Counter[str], item: str) -> None:
        failures = FailureLog()

        async def root_of(_: Any) -> RootSpec:
            return farm.root

        self._services = RolloutServices(
            sessions=farm.executor,
            tools=(),
            model_for=lambda _: _Model(),
            handle_for=ToolContext,
            slot_gate=HookSlotGate(farm.slots),
            failures=failures,
            root_of=root_of,
            preparations=Preparations(failures, counts),
        )
        self._hooks = hooks
        self._item = item

    async def run(self, epoch: int) -> float:
        """Seconds."""
        rollout = Rollout(self._services, self._hooks, self._item, self._item)
        began = time.perf_counter()
        names = [f"{self._item}-{epoch}-{number}" for number in range(GROUP)]
        transcripts = await run_group(names, rollout.run, self._item)
        took_s = time.perf_counter() - began
        assert [one.score for one in transcripts] == [1.0] * GROUP, [one.error for one in transcripts]
        return took_s


class _Hooks:
    """A preparation of so many seconds; the score says whether a rollout has what it made."""

    def __init__(self, took_s: float) -> None:
        self._took_s = took_s
        self.prepared = 0

    def build_task(self, item: Any) -> str:
        return str(item)

    def build_agent_config(self, item: Any) -> AgentSettings:  # noqa: ARG002
        return AgentSettings()

    def agent_program(self, item: Any) -> None:  # noqa: ARG002
        return None

    def trains_conversation(self, conversation: Any) -> bool:
        return bool(conversation.trained)

    def task_image(self, item: Any) -> str:
        return str(item)

    def prepare_key(self, item: Any) -> str:
        return str(item)

    async def prepare(self, item: Any, *, exec_tool: Any) -> None:  # noqa: ARG002
        self.prepared += 1
        done = await exec_tool.terminal(f"sleep {self._took_s}; echo made > /opt/made", 2 * self._took_s + 60)
        assert done.exit_code == 0, done

    def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> None:  # noqa: ARG002
        return None

    def continue_task(self, item: Any, **_: Any) -> None:  # noqa: ARG002
        return None

    async def verify_and_score_trajectory(
        self,
        item: Any,  # noqa: ARG002
        final_response: str,  # noqa: ARG002
        *,
        trajectory_id: str,  # noqa: ARG002
        exec_tool: Any,
        agent_result: AgentResult,  # noqa: ARG002
        workspace_meta: dict[str, Any],  # noqa: ARG002
    ) -> tuple[float, dict[str, Any]]:
        return float(await exec_tool.read_file("/opt/made") == "made\n"), {}

    def score_destroyed_slot(
        self,
        item: Any,  # noqa: ARG002
        agent_result: AgentResult,  # noqa: ARG002
        *,
        trajectory_id: str,  # noqa: ARG002
        workspace_meta: dict[str, Any],  # noqa: ARG002
    ) -> None:
        return None


class _Model:
    async def complete(
        self,
        messages: Sequence[Message],  # noqa: ARG002
        tools: Sequence[ToolDefinition],  # noqa: ARG002
        **_: Any,
    ) -> Completion:
        return Completion({"role": "assistant", "content": "done"})
