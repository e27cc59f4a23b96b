"""One agent on a separate slot, outside any group: for an evaluation, or for a hook that runs another agent."""

from __future__ import annotations

import uuid

from agentenv.agent.culprit import of_another_slot
from agentenv.agent.hook_slot_gate import holds_slot
from agentenv.agent.loop import AgentLoop
from agentenv.agent.protocols import opened
from agentenv.agent.result import AgentResult
from agentenv.agent.rollout import RolloutServices
from agentenv.agent.settings import AgentSettings
from agentenv.errors import SlotDestroyedError


async def run_single(
    farm: RolloutServices, settings: AgentSettings, task: str, trajectory: str | None = None
) -> AgentResult:
    """Run an agent until it answers; nothing is scored. ``trajectory`` names its slot.

    Raises: InfraError; ConfigError when the first prompt does not fit the model, or in a hook without slots
    reserved for that (``hook_slots``); SlotDestroyedError (in a hook InfraError, because the slot is not that of
    the rollout being judged).
    """
    trajectory, in_hook = trajectory or f"agent-{uuid.uuid4().hex[:12]}", holds_slot()
    try:
        async with (
            farm.slot_gate.enter(),
            farm.sessions.open(trajectory, acquire_timeout_s=farm.acquire_timeout_s) as session,
            opened(farm.model_for(trajectory)) as model,
        ):
            loop = AgentLoop(model, session, farm.tools, settings.completed(farm.agent))
            return await loop.run(loop.opening(task))
    except SlotDestroyedError as error:
        if not in_hook:
            raise
        raise of_another_slot(error) from error
