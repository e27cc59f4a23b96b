"""agentenv: a farm of sandbox slots for reinforcement learning of LLM agents.

The public names below are imported at first use, so that ``import agentenv`` is cheap and works with any extras
installed: ``AgentEnv`` needs ``agentenv[env]``, the rest does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from agentenv._version import __version__

if TYPE_CHECKING:
    from agentenv.agent.settings import AgentSettings
    from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings
    from agentenv.env.environment import AgentEnv, AgentEnvConfig
    from agentenv.errors import AgentEnvError, InfraError
    from agentenv.executor.session import ToolSession
    from agentenv.executor.tool_executor import ToolExecutor
    from agentenv.sdk.async_sandbox import AsyncSandbox
    from agentenv.sdk.sandbox import Sandbox
    from agentenv.sdk.tool_context import ToolContext
    from agentenv.slots.backends.fake import FakeBackend
    from agentenv.slots.backends.local import LocalBackend
    from agentenv.slots.lease import SlotLease
    from agentenv.slots.pool import SlotPool
    from agentenv.tools.catalog import ToolCatalog
    from agentenv.tools.spec import ToolSpec
    from agentenv.wire.calls import CallResult

_HOMES: Final = {
    "AgentEnv": "agentenv.env.environment",
    "AgentEnvConfig": "agentenv.env.environment",
    "AgentEnvError": "agentenv.errors",
    "AgentSettings": "agentenv.agent.settings",
    "AsyncSandbox": "agentenv.sdk.async_sandbox",
    "CallResult": "agentenv.wire.calls",
    "ContainerSettings": "agentenv.config",
    "ExecutorSettings": "agentenv.config",
    "FakeBackend": "agentenv.slots.backends.fake",
    "InfraError": "agentenv.errors",
    "LocalBackend": "agentenv.slots.backends.local",
    "PoolSettings": "agentenv.config",
    "Sandbox": "agentenv.sdk.sandbox",
    "SlotLease": "agentenv.slots.lease",
    "SlotPool": "agentenv.slots.pool",
    "ToolCatalog": "agentenv.tools.catalog",
    "ToolContext": "agentenv.sdk.tool_context",
    "ToolExecutor": "agentenv.executor.tool_executor",
    "ToolSession": "agentenv.executor.session",
    "ToolSpec": "agentenv.tools.spec",
}

__all__ = [
    "AgentEnv",
    "AgentEnvConfig",
    "AgentEnvError",
    "AgentSettings",
    "AsyncSandbox",
    "CallResult",
    "ContainerSettings",
    "ExecutorSettings",
    "FakeBackend",
    "InfraError",
    "LocalBackend",
    "PoolSettings",
    "Sandbox",
    "SlotLease",
    "SlotPool",
    "ToolCatalog",
    "ToolContext",
    "ToolExecutor",
    "ToolSession",
    "ToolSpec",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
