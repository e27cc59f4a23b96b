"""Tools as values: adding a tool means adding one :class:`ToolSpec` to a catalog."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_TIMEOUT_S

ToolKind = Literal["slot", "external"]
"""``slot``: runs in the trajectory's own slot. ``external``: runs outside, on a tool server."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool: its name, its description for a language model, and the pydantic model of its arguments.

    ``arguments`` should forbid unknown fields, so that a misspelt one is reported and not ignored.
    ``default_timeout_s`` None: the executor's default.

    Raises: ConfigError: the name is not one that model APIs accept, or the timeout is out of range.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    default_timeout_s: float | None = None
    kind: ToolKind = "slot"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "tool.name", f"got {self.name!r}", next_step="use 1 to 64 letters, digits, underscores or hyphens"
            )
        if self.default_timeout_s is not None and not 0 < self.default_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"{self.name}.default_timeout_s",
                f"got {self.default_timeout_s!r}",
                next_step=f"allowed: more than 0, at most {MAX_TIMEOUT_S:g} seconds",
            )
