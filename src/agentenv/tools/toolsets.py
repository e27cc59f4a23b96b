"""Named sets of tools, for ``enabled_toolsets`` and ``disabled_toolsets``. A tool's own name works too.

A set names all of its tools, wherever they run; what a catalog does not have (the web
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


_WEB: Final = ("web_search", "web_extract", "http_fetch")
_BROWSER: Final = (
    "browser_navigate",
    "browser_snapshot",
    "browser_click",
    "browser_type",
    "browser_select_option",
    "browser_press",
    "browser_scroll",
    "browser_back",
    "browser_screenshot",
)
_TERMINAL: Final = (*_slot_tools("terminal"), *_slot_tools("process"))
_FILES: Final = ("read_file", "write_file")

TOOLSETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{toolset: _slot_tools(toolset) for toolset in dict.fromkeys(one.toolset for one in SLOT_TOOLS)},
        "terminal": _TERMINAL,  # with process, which the terminal's background commands need
        "web": _WEB,
        "browser": _BROWSER,
        # Names of other harnesses
        "files": _slot_tools("file"),
        "filesystem": _FILES,
        "sandbox": (*_TERMINAL, *_FILES),
        "default": (*_TERMINAL, *_FILES),
        "terminal_stateful": (*_TERMINAL, *_slot_tools("tmux")),
        "debugging": (*_TERMINAL, *_slot_tools("file"), *_WEB),
    }
)
EVERYTHING: Final = frozenset({"all", "full", "*"})
"""Names of the set of all tools that are here."""
ABSENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("vision", "image_gen", "tts"), "the results of tools are text"),
        **dict.fromkeys(("moa", "delegation"), "a rollout has one model"),
        **dict.fromkeys(
            ("skills", "memory", "session_search", "todo"), "a rollout has no notes of its own or of others"
        ),
        **dict.fromkeys(("clarify", "cronjob"), "a rollout has no user to ask and no later time"),
        "code_execution": "bash runs programs in the slot",
    }
)
"""Toolsets of other harnesses that do not exist here, and why."""
TOOL_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"terminal_stateful": "terminal", "bash_stateful": "terminal"}
)
"""Tool names of other harnesses that calls may use, if a setting allows it."""

EXTERNAL: Final = frozenset((*_WEB, *_BROWSER))
"""The shipped tools that run on a tool server."""


def members(name: str, catalog: ToolCatalog) -> tuple[str, ...]:
    """The tools that a toolset (or a tool's own name) names, whether or not they are in ``catalog``."""
    return catalog.names if name in EVERYTHING else TOOLSETS.get(name, (name,))


def refuse_absent(field: str, names: Iterable[str]) -> None:
    """Raises: ConfigError for a set of another harness that does not exist here, whatever a catalog has."""
    for name in names:
        if name in ABSENT:
            raise ConfigError(field, f"unknown toolset {name!r}: {ABSENT[name]}", next_step="leave it out")


def tools_of(field: str, names: Iterable[str], catalog: ToolCatalog) -> set[str]:
    """The tools of ``catalog`` these sets (or tools) name.

    Raises:
        ConfigError: a name is neither a toolset nor a tool (the closest match is named), or the catalog
            has no tool of a toolset. ``field`` is the setting.
    """
    names = tuple(names)
    refuse_absent(field, names)
    chosen: set[str] = set()
    for name in names:
        if not _known(name, catalog):
            raise _unknown(field, name, catalog)
        available = {tool for tool in members(name, catalog) if tool in catalog}
        if not available:
            cure = "set tool_server_url" if EXTERNAL.intersection(TOOLSETS[name]) else "leave it out"
            raise ConfigError(field, f"toolset {name!r} is not available", next_step=cure)
        chosen |= available
    return chosen


def choose(catalog: ToolCatalog, enabled: Sequence[str] | None, disabled: Sequence[str] | None) -> ToolCatalog:
    """The tools an agent gets: those enabled (None: all) without those disabled.

    Disabling a set of which nothing is there is allowed; an unknown name is not.

    Raises: ConfigError when a name is unknown, an enabled set is empty, or nothing is left.
    """
    wanted = set(catalog.names) if enabled is None else tools_of("enabled_toolsets", enabled, catalog)
    for name in disabled or ():
        if not (_known(name, catalog) or name in ABSENT):
            raise _unknown("disabled_toolsets", name, catalog)
        wanted -= set(members(name, catalog))
    if not wanted:
        raise ConfigError("enabled_toolsets", "no tool is left", next_step=f"choose some of: {', '.join(TOOLSETS)}")
    return catalog.subset(wanted)


def _known(name: str, catalog: ToolCatalog) -> bool:
    return name in TOOLSETS or name in EVERYTHING or name in catalog


def _unknown(field: str, name: str, catalog: ToolCatalog) -> ConfigError:
    known = [*TOOLSETS, *(tool for tool in catalog.names if tool not in TOOLSETS)]
    if name in EXTERNAL:
        return ConfigError(field, f"the tool {name!r} runs on a tool server", next_step="set tool_server_url")
    match = closest(name, known)
    hint = f"; did you mean {match!r}?" if match else ""
    return ConfigError(field, f"no toolset or tool is named {name!r}{hint}", next_step=f"allowed: {', '.join(known)}")
