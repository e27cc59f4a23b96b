"""``python -m examples.repair`` in which the first task cannot be prepared; run as a process."""

from __future__ import annotations

from typing import Any

from agentenv import ToolContext
from examples.repair.__main__ import app
from examples.repair.env import RepairEnv

prepared = RepairEnv.setup_trajectory_workspace
broken: list[str] = []


async def prepared_unless_first(env: RepairEnv, item: Any, *, exec_tool: ToolContext, **more: Any) -> dict[str, Any]:
    """Raises for every rollout of the task that is asked for first."""
    broken.append(item["id"])
    if item["id"] == broken[0]:
        raise ValueError("it was garbled")
    return await prepared(env, item, exec_tool=exec_tool, **more)


if __name__ == "__main__":
    RepairEnv.setup_trajectory_workspace = prepared_unless_first  # type: ignore[assignment]
    app()
