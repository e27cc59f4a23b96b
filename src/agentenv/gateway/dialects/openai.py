"""What both of OpenAI's dialects have in common. Pure."""

from __future__ import annotations

from typing import Any, Final

from agentenv.agent.protocols import ToolDefinition
from agentenv.gateway.canonical import RefusalError
from agentenv.gateway.reading import Reading, a_text

ROLES: Final = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def role_of(given: Any, at: str, *roles: str) -> str:
    """The canonical role of a message at this path, which has one of ``roles``. Raises: RefusalError."""
    role = a_text(given, f"{at}.role")
    if role not in roles:
        raise RefusalError(f"no message has the role {role!r}; there are {', '.join(roles)}", param=f"{at}.role")
    return ROLES[role]


def chosen(reading: Reading, tools: list[ToolDefinition], choice: Any) -> list[ToolDefinition]:
    """The tools that are offered to the model; that it calls one, or a certain one, is not enforced."""
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        reading.overrule("tool_choice")
    return tools


def error(refusal: RefusalError) -> dict[str, Any]:
    """The body of a refusal."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    param, code = refusal.param or None, refusal.code or None
    return {"error": {"message": refusal.message, "type": kind, "param": param, "code": code}}
