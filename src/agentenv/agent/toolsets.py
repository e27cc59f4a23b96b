"""Named sets of tools, for ``enabled_toolsets`` and ``disabled_toolsets``. A tool's own name works too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog

TOOLSETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "terminal": ("bash",),
        "files": ("read_file", "write_file", "list_files", "artifacts"),
    }
)


def _tools_of(field: str, names: Sequence[str], catalog: ToolCatalog) -> set[str]:
    chosen: set[str] = set()
    for name in names:
        if name not in TOOLSETS and name not in catalog:
            allowed = ", ".join([*TOOLSETS, *catalog.names])
            raise ConfigError(field, f"no toolset or tool is named {name!r}", next_step=f"allowed: {allowed}")
        chosen.update(TOOLSETS.get(name, (name,)))
    return chosen


def choose(catalog: ToolCatalog, enabled: Sequence[str] | None, disabled: Sequence[str] | None) -> ToolCatalog:
    """The tools an agent gets: those enabled (None: all) without those disabled.

    Raises: ConfigError when a name is unknown, or nothing is left.
    """
    wanted = set(catalog.names) if enabled is None else _tools_of("enabled_toolsets", enabled, catalog)
    wanted -= _tools_of("disabled_toolsets", disabled or (), catalog)
    if not wanted:
        raise ConfigError("enabled_toolsets", "no tool is left", next_step=f"choose some of: {', '.join(TOOLSETS)}")
    return catalog.subset(wanted)
