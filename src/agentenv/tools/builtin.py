"""The tools every slot has, as a catalog offers them: made from their rows in the wire vocabulary."""

from __future__ import annotations

from typing import Final

from agentenv.tools.spec import ToolSpec
from agentenv.wire.sessions import SLOT_TOOLS

BUILTIN: Final = tuple(ToolSpec(one.name, one.description, one.arguments) for one in SLOT_TOOLS)
