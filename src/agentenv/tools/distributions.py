"""Distributions over toolsets: a group's tools are drawn once, from a seed, for the whole group.

A distribution gives each toolset (or tool) the probability of being in the draw; the draws are independent. A draw
depends only on the seed, the group's key and the set's own name, not on the order of sets, on other sets or on the
Python version.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.schema import closest
from agentenv.tools.toolsets import members, tools_of

_FIELD: Final = "distribution"


@dataclass(frozen=True)
class Distribution:
    """``chances``: the probability (0 to 1) of each toolset or tool.

    Raises:
        ConfigError: no chance is more than 0, or one is not a probability.
    """

    name: str
    chances: Mapping[str, float]

    def __post_init__(self) -> None:
        for toolset, chance in self.chances.items():
            number = isinstance(chance, (int, float)) and not isinstance(chance, bool)
            if not number or not math.isfinite(chance) or not 0 <= chance <= 1:
                raise ConfigError(_FIELD, f"{toolset}: {chance!r} is not a probability", next_step="allowed: 0 to 1")
        if not any(self.chances.values()):
            raise ConfigError(
                _FIELD, f"{self.name} never has a tool", next_step="give at least one toolset a probability above 0"
            )

    def draw(self, seed: int, key: str) -> tuple[str, ...]:
        """The sets drawn for ``key``, in the distribution's order. Never empty: if no set is drawn, the most
        probable one is used (the first of them)."""
        drawn = tuple(name for name, chance in self.chances.items() if _uniform(seed, key, name) < chance)
        return drawn or (max(self.chances, key=self.chances.__getitem__),)

    def without(self, disabled: Iterable[str], whole: ToolCatalog) -> Distribution:
        """The distribution of the sets that have a tool left when these sets (or tools) are disabled.

        Raises: ConfigError: none has.
        """
        removed = {tool for name in disabled for tool in members(name, whole)}
        left = {name: chance for name, chance in self.chances.items() if set(members(name, whole)) - removed}
        if not any(left.values()):
            raise ConfigError("disabled_toolsets", f"leaves no tool of {self.name}", next_step="disable fewer of them")
        return Distribution(self.name, left)

    def catalog(self, whole: ToolCatalog, seed: int, key: str) -> ToolCatalog:
        """The tools of ``whole`` drawn for ``key``. Raises ConfigError as :meth:`check` does."""
        return whole.subset(tools_of(_FIELD, self.draw(seed, key), whole))

    def check(self, whole: ToolCatalog) -> None:
        """Check that every set that could be drawn exists. Raises ConfigError naming the one that does not."""
        tools_of(_FIELD, (name for name, chance in self.chances.items() if chance), whole)


DISTRIBUTIONS: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "terminal_and_files": {"terminal": 1.0, "file": 0.5},
        "sandbox": {"terminal": 0.97, "file": 0.7, "process": 0.4, "tmux": 0.2},
        "terminal_only": {"terminal": 1.0, "file": 1.0},
        "terminal_web": {"terminal": 1.0, "file": 1.0, "web": 1.0},
        "terminal_tasks": {"terminal": 0.97, "file": 0.97, "web": 0.97, "browser": 0.75},
        "mixed_tasks": {"browser": 0.92, "terminal": 0.92, "file": 0.92, "web": 0.35},
        "development": {"terminal": 0.8, "file": 0.8, "web": 0.3},
        "science": {"web": 0.94, "terminal": 0.94, "file": 0.94, "browser": 0.5},
        "research": {"web": 0.9, "browser": 0.7, "terminal": 0.1},
        "reasoning": {"web": 0.3, "terminal": 0.2},
        "balanced": {"web": 0.5, "terminal": 0.5, "file": 0.5, "browser": 0.5},
        "default": {"web": 1.0, "terminal": 1.0, "file": 1.0, "browser": 1.0},
        "safe": {"web": 0.8, "browser": 0.7},
        "minimal": {"web": 1.0},
        "browser_use": {"browser": 1.0, "web": 0.8},
        "browser_only": {"browser": 1.0},
        "browser_tasks": {"browser": 0.97, "terminal": 0.15},
    }
)
"""All but the first two are hermes-agent's ``toolset_distributions.py``, without the toolsets that do not exist here
(:data:`agentenv.tools.toolsets.ABSENT`)."""


def distribution(text: str) -> Distribution:
    """A shipped distribution by name, or a custom one as a JSON object (``{"terminal": 1, "web": 0.5}``).

    Raises: ConfigError: the name is unknown (the closest match is named) or the object is invalid.
    """
    if text.lstrip().startswith("{"):
        return Distribution("the given distribution", _parsed(text))
    if text not in DISTRIBUTIONS:
        match = closest(text, DISTRIBUTIONS)
        hint = f"; did you mean {match!r}?" if match else ""
        allowed = f"allowed: {', '.join(DISTRIBUTIONS)}, or a JSON object of toolsets and probabilities"
        raise ConfigError(_FIELD, f"unknown distribution {text!r}{hint}", next_step=allowed)
    return Distribution(text, DISTRIBUTIONS[text])


def _parsed(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(_FIELD, f"is not a JSON object: {error}") from error
    if not isinstance(read, dict) or not read:
        raise ConfigError(_FIELD, f"got {text!r}", next_step='example: {"terminal": 1, "web": 0.5}')
    return read


def _uniform(seed: int, key: str, name: str) -> float:
    """A number in [0, 1) determined by these three values, on every machine and Python version."""
    digest = hashlib.sha256(json.dumps([seed, key, name]).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
