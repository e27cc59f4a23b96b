"""agentenv: a farm of sandbox slots for reinforcement learning of LLM agents.

The public names below are imported at first use, so that ``import agentenv`` is cheap and works with any extras
installed: ``AgentEnv`` needs ``agentenv[env]``, the rest does not. A name whose extra is not installed raises
:class:`agentenv.errors.MissingExtraError`, an ImportError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentenv._version import __version__
from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.agent.loop import AgentLoop
    from agentenv.agent.program import AgentProgram
    from agentenv.agent.result import AgentResult
    from agentenv.agent.settings import AgentSettings
    from agentenv.agent.tool_call import ToolCall, ToolResult
    from agentenv.agent.transcript import ConversationRecord
    from agentenv.config import ContainerSettings, ExecutorSettings, NomadSettings, PoolSettings
    from agentenv.containers.live_output import OutputBytes
    from agentenv.env.environment import AgentEnv, AgentEnvConfig
    from agentenv.errors import (
        AcquireTimeoutError,
        AgentEnvError,
        BadImageError,
        CheckpointError,
        ConfigError,
        ContainerLostError,
        ImageUnavailableError,
        InfraError,
        InvalidArgumentsError,
        ModelServerError,
        PolicyRefusalError,
        PoolClosedError,
        SandboxUnavailableError,
        SlotDestroyedError,
        TaskError,
        ToolCallError,
        UserUnsupportedError,
    )
    from agentenv.executor.session import Checkpoint, ToolSession
    from agentenv.executor.tool_executor import ToolExecutor
    from agentenv.sdk.async_sandbox import AsyncFarm, AsyncSandbox
    from agentenv.sdk.roots import ImageRoot, Service
    from agentenv.sdk.sandbox import Farm, Sandbox
    from agentenv.sdk.shared import SharedFarm, shared_farm
    from agentenv.sdk.tool_context import ToolContext
    from agentenv.slots.backends.fake import FakeBackend
    from agentenv.slots.backends.local import LocalBackend
    from agentenv.slots.backends.nomad.backend import NomadBackend
    from agentenv.slots.lease import SlotLease
    from agentenv.slots.pool import SlotPool
    from agentenv.tools.catalog import ToolCatalog
    from agentenv.tools.spec import ToolSpec
    from agentenv.wire.calls import CallResult
    from agentenv.wire.network import NetworkPolicy
    from agentenv.wire.spec import Bind, SlotLimits

_HOMES: Final = {
    "AcquireTimeoutError": "agentenv.errors",
    "AgentEnv": "agentenv.env.environment",
    "AgentEnvConfig": "agentenv.env.environment",
    "AgentEnvError": "agentenv.errors",
    "AgentLoop": "agentenv.agent.loop",
    "AgentProgram": "agentenv.agent.program",
    "AgentResult": "agentenv.agent.result",
    "AgentSettings": "agentenv.agent.settings",
    "AsyncFarm": "agentenv.sdk.async_sandbox",
    "AsyncSandbox": "agentenv.sdk.async_sandbox",
    "BadImageError": "agentenv.errors",
    "Bind": "agentenv.wire.spec",
    "CallResult": "agentenv.wire.calls",
    "Checkpoint": "agentenv.executor.session",
    "CheckpointError": "agentenv.errors",
    "ConfigError": "agentenv.errors",
    "ContainerLostError": "agentenv.errors",
    "ContainerSettings": "agentenv.config",
    "ConversationRecord": "agentenv.agent.transcript",
    "ExecutorSettings": "agentenv.config",
    "FakeBackend": "agentenv.slots.backends.fake",
    "Farm": "agentenv.sdk.sandbox",
    "ImageRoot": "agentenv.sdk.roots",
    "Service": "agentenv.sdk.roots",
    "ImageUnavailableError": "agentenv.errors",
    "InfraError": "agentenv.errors",
    "InvalidArgumentsError": "agentenv.errors",
    "LocalBackend": "agentenv.slots.backends.local",
    "ModelServerError": "agentenv.errors",
    "NetworkPolicy": "agentenv.wire.network",
    "NomadBackend": "agentenv.slots.backends.nomad.backend",
    "NomadSettings": "agentenv.config",
    "OutputBytes": "agentenv.containers.live_output",
    "PolicyRefusalError": "agentenv.errors",
    "PoolClosedError": "agentenv.errors",
    "PoolSettings": "agentenv.config",
    "Sandbox": "agentenv.sdk.sandbox",
    "SandboxUnavailableError": "agentenv.errors",
    "SharedFarm": "agentenv.sdk.shared",
    "SlotDestroyedError": "agentenv.errors",
    "SlotLease": "agentenv.slots.lease",
    "SlotLimits": "agentenv.wire.spec",
    "SlotPool": "agentenv.slots.pool",
    "TaskError": "agentenv.errors",
    "ToolCall": "agentenv.agent.tool_call",
    "ToolCallError": "agentenv.errors",
    "ToolCatalog": "agentenv.tools.catalog",
    "ToolContext": "agentenv.sdk.tool_context",
    "ToolExecutor": "agentenv.executor.tool_executor",
    "ToolResult": "agentenv.agent.tool_call",
    "ToolSession": "agentenv.executor.session",
    "ToolSpec": "agentenv.tools.spec",
    "UserUnsupportedError": "agentenv.errors",
    "shared_farm": "agentenv.sdk.shared",
}

__all__ = [
    "AcquireTimeoutError",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentEnvError",
    "AgentLoop",
    "AgentProgram",
    "AgentResult",
    "AgentSettings",
    "AsyncFarm",
    "AsyncSandbox",
    "BadImageError",
    "Bind",
    "CallResult",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "ContainerLostError",
    "ContainerSettings",
    "ConversationRecord",
    "ExecutorSettings",
    "FakeBackend",
    "Farm",
    "ImageRoot",
    "ImageUnavailableError",
    "InfraError",
    "InvalidArgumentsError",
    "LocalBackend",
    "ModelServerError",
    "NetworkPolicy",
    "NomadBackend",
    "NomadSettings",
    "OutputBytes",
    "PolicyRefusalError",
    "PoolClosedError",
    "PoolSettings",
    "Sandbox",
    "SandboxUnavailableError",
    "Service",
    "SharedFarm",
    "SlotDestroyedError",
    "SlotLease",
    "SlotLimits",
    "SlotPool",
    "TaskError",
    "ToolCall",
    "ToolCallError",
    "ToolCatalog",
    "ToolContext",
    "ToolExecutor",
    "ToolResult",
    "ToolSession",
    "ToolSpec",
    "UserUnsupportedError",
    "__version__",
    "shared_farm",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)
