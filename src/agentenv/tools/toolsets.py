"""Named sets of tools, for ``enabled_toolsets`` and ``disabled_toolsets``. A tool's own name works too.

A set names every tool that belongs to it, wherever that runs; what a catalog does not have (the web
tools, without a tool server) is simply not in it. A set of which *nothing* is there is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.schema import closest
from agentenv.wire.sessions import SLOT_TOOLS


def _slot_tools(toolset: str) -> tuple[str, ...]:
    return tuple(one.name for one in SLOT_TOOLS if one.toolset == toolset)


TOOLSETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{toolset: _slot_tools(toolset) for toolset in dict.fromkeys(one.toolset for one in SLOT_TOOLS)},
        "files": _slot_tools("file"),  # the same set, by the name of the first version
        "web": ("web_search", "web_extract", "http_fetch"),
        "browser": ("browser_navigate", "browser_snapshot"),
    }
)

_EXTERNAL: Final = frozenset((*TOOLSETS["web"], *TOOLSETS["browser"]))


def tools_of(field: str, names: Iterable[str], catalog: ToolCatalog) -> set[str]:
    """The tools of ``catalog`` these sets (or tools) name.

    Raises:
        ConfigError: a name is neither a toolset nor a tool (the closest match is named), or the catalog
            has nothing of what it names. ``field`` says in which setting.
    """
    chosen: set[str] = set()
    for name in names:
        if name not in TOOLSETS and name not in catalog:
            raise _unknown(field, name, catalog)
        found = {tool for tool in TOOLSETS.get(name, (name,)) if tool in catalog}
        if not found:
            cure = "set tool_server_url" if _EXTERNAL.intersection(TOOLSETS[name]) else "leave it out"
            raise ConfigError(field, f"no tool of the toolset {name!r} is here", next_step=cure)
        chosen |= found
    return chosen


def choose(catalog: ToolCatalog, enabled: Sequence[str] | None, disabled: Sequence[str] | None) -> ToolCatalog:
    """The tools an agent gets: those enabled (None: all) without those disabled.

    Disabling a set of which nothing is there is allowed; a name nobody knows is not.

    Raises: ConfigError when a name is unknown, an enabled set is empty, or nothing is left.
    """
    wanted = set(catalog.names) if enabled is None else tools_of("enabled_toolsets", enabled, catalog)
    for name in disabled or ():
        if name not in TOOLSETS and name not in catalog:
            raise _unknown("disabled_toolsets", name, catalog)
        wanted -= set(TOOLSETS.get(name, (name,)))
    if not wanted:
        raise ConfigError("enabled_toolsets", "no tool is left", next_step=f"choose some of: {', '.join(TOOLSETS)}")
    return catalog.subset(wanted)


def _unknown(field: str, name: str, catalog: ToolCatalog) -> ConfigError:
    known = [*TOOLSETS, *(tool for tool in catalog.names if tool not in TOOLSETS)]
    if name in _EXTERNAL:
        return ConfigError(field, f"the tool {name!r} runs on a tool server", next_step="set tool_server_url")
    match = closest(name, known)
    hint = f"; did you mean {match!r}?" if match else ""
    return ConfigError(field, f"no toolset or tool is named {name!r}{hint}", next_step=f"allowed: {', '.join(known)}")
