"""The tools of an environment's groups, and what runs those that do not run in the slot.

Separate from ``environment.py`` so that it does not depend on atroposlib.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentenv.agent.protocols import ToolDefinition
from agentenv.agent.rollout import RolloutServices
from agentenv.env.config import AgentFields
from agentenv.errors import ConfigError
from agentenv.executor.session import ExternalTools
from agentenv.executor.tool_executor import GroupSessions, ToolExecutor
from agentenv.executor.toolserver_client import ToolServerClient
from agentenv.farm_client.access import token_of
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.distributions import Distribution, distribution
from agentenv.tools.remote import remote_spec
from agentenv.tools.spec import ToolSpec
from agentenv.tools.toolsets import TOOLSETS, choose
from agentenv.wire.leases import RunKind
from agentenv.wire.toolserver import ToolDescription

if TYPE_CHECKING:
    from agentenv.api.tool_server.core import ToolServer

logger = logging.getLogger(__name__)

INPROCESS: Final = "inprocess"
_MOST_ITEM_CHARS: Final = 256


@dataclass(frozen=True)
class OutsideTools:
    """The tools of a tool server, and what runs them; without a server both are empty."""

    run: ExternalTools | None = None
    tools: tuple[ToolDescription, ...] = ()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """All of them: hooks may call unavailable ones, and get the reason."""
        return tuple(remote_spec(tool) for tool in self.tools)

    def known(self, named: Iterable[str]) -> ToolCatalog:
        """The built-in tools and those available here, to offer to a model.

        ``named`` are the toolsets and tools requested by name. Raises: ConfigError, with the server's reason, when
        one of them is not available; for a set that is partly unavailable there is only a warning.
        """
        why = {tool.name: tool.unavailable for tool in self.tools if tool.unavailable}
        for name in named:
            outside = [tool for tool in TOOLSETS.get(name, (name,)) if tool in {each.name for each in self.tools}]
            lacking = [tool for tool in outside if tool in why]
            if lacking and len(lacking) == len(outside):
                raise ConfigError(name, f"{lacking[0]} cannot be used: {why[lacking[0]]}")
        for tool, reason in why.items():
            logger.warning("the tool %s is not offered: %s", tool, reason)
        return ToolCatalog.builtin().extended(*(spec for spec in self.specs if spec.name not in why))

    def runnable(self, offered: ToolCatalog) -> ToolCatalog:
        """Everything hooks may call: built-in tools, here or there, and those the environment added."""
        theirs = {tool.name for tool in self.tools}
        builtin = ToolCatalog.builtin()
        own = [spec for spec in offered.specs if spec.name not in builtin and spec.name not in theirs]
        return builtin.extended(*own, *self.specs)


@asynccontextmanager
async def outside_tools(config: AgentFields, build: Callable[[], ToolServer]) -> AsyncIterator[OutsideTools]:
    """Connect to the tool server in the config, or run one here (created by ``build``).

    Raises: ConnectionLostError when there is no answer; ConfigError when the token or the server's config is wrong.
    """
    url = config.tool_server_url
    if url is None:
        yield OutsideTools()
    elif url == INPROCESS:
        from agentenv.api.tool_server.inprocess import InProcessTools  # late: its tools need [farm]

        async with build() as server:
            here = InProcessTools(server)
            yield OutsideTools(here, here.tools)
    else:
        async with ToolServerClient(url, token_of(config.tool_server_token or "", "tool_server_token")) as client:
            yield OutsideTools(client, client.tools)


def default_tool_server(config: AgentFields) -> ToolServer:
    """The tool server of ``tool_server_config``; without a file, one that may reach nothing. Raises: ConfigError."""
    from agentenv.api.assembly import tool_server
    from agentenv.api.tool_server.settings import ToolServerSettings

    path = config.tool_server_config
    return tool_server(ToolServerSettings.from_file(Path(path)) if path else ToolServerSettings())


class GroupTools:
    """Determines each group's tools: all that are offered, or drawn from a distribution once per group.

    With the same seed, the n-th group of an item gets the same draw in every run.
    """

    def __init__(self, offered: ToolCatalog, distribution: Distribution | None, seed: int) -> None:
        """Raises: ConfigError when the distribution names a tool that is not offered."""
        if distribution is not None:
            distribution.check(offered)
        self._offered = offered
        self._distribution = distribution
        self._seed = seed
        self._groups: Counter[str] = Counter()

    def draw(self, item: str) -> ToolCatalog:
        """The tools of the next group of this item."""
        if self._distribution is None:
            return self._offered
        number = self._groups[item]
        self._groups[item] += 1
        return self._distribution.catalog(self._offered, self._seed, f"{item}#{number}")


@dataclass(frozen=True)
class GroupServices:
    """Services shared by a group's rollouts: the environment's, with the group's own tools and name."""

    farm: RolloutServices
    executor: ToolExecutor
    draws: GroupTools

    def of(self, group: str, tools: Sequence[ToolDefinition], item: str, kind: RunKind = "train") -> RolloutServices:
        """The services of this group, with these tools. Long item ids are replaced by their digest for tool servers.
        ``kind``: what its slots are for, which a shared farm divides by."""
        label = item if len(item) <= _MOST_ITEM_CHARS else hashlib.sha256(item.encode("utf-8", "replace")).hexdigest()
        sessions = GroupSessions(self.executor, group, label, kind)
        return replace(self.farm, sessions=sessions, tools=tuple(tools))


class EnvTools:
    """The tools of one environment: those its config names that are available once :meth:`opened`."""

    def __init__(self, config: AgentFields) -> None:
        """Raises: ConfigError when the distribution is unknown."""
        self._config = config
        self._distribution = distribution(config.distribution) if config.distribution else None
        self._outside = OutsideTools()

    def check_names(self) -> None:
        """Raises: ConfigError for a toolset or tool that is unknown or not here. With a tool server nothing is: what it
        has is known once :meth:`opened`."""
        if self._config.tool_server_url is None:
            self._group_tools(self.offered())

    @asynccontextmanager
    async def opened(self, build: Callable[[], ToolServer]) -> AsyncIterator[None]:
        """Connect to the tool server, or run one. Raises as :func:`outside_tools` does."""
        async with outside_tools(self._config, build) as self._outside:
            yield

    def offered(self) -> ToolCatalog:
        """The tools the config enables, built in or outside. Raises: ConfigError."""
        config, drawn = self._config, self._distribution.chances if self._distribution else {}
        named = config.enabled_toolsets or [name for name, chance in drawn.items() if chance]
        known = self._outside.known(name for name in named if name not in (config.disabled_toolsets or ()))
        return choose(known, config.enabled_toolsets, config.disabled_toolsets)

    def runnable(self, offered: ToolCatalog) -> tuple[ToolCatalog, ExternalTools | None]:
        """Everything hooks may call, and what runs the tools outside the slot."""
        return self._outside.runnable(offered), self._outside.run

    def group_farms(self, farm: RolloutServices, executor: ToolExecutor, offered: ToolCatalog) -> GroupServices:
        """Raises: ConfigError when the distribution names a tool that is not offered, or none that is left."""
        return GroupServices(farm, executor, self._group_tools(offered))

    def _group_tools(self, offered: ToolCatalog) -> GroupTools:
        config, drawn = self._config, self._distribution
        if drawn is not None and config.disabled_toolsets:
            drawn = drawn.without(config.disabled_toolsets, offered)
        return GroupTools(offered, drawn, config.distribution_seed)
