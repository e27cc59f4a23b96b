"""Agent programs that others have written, as the agents of environments: how each is started, and what
runs it in a slot."""

from agentenv.agent.program import AgentProgram
from agentenv.agents.facts import RECIPES, Recipe
from agentenv.agents.recipes import claude_code, codex, gemini_cli, mini_swe_agent, opencode, openhands, qwen_code
from agentenv.agents.trees import binds

__all__ = [
    "RECIPES",
    "AgentProgram",
    "Recipe",
    "binds",
    "claude_code",
    "codex",
    "gemini_cli",
    "mini_swe_agent",
    "opencode",
    "openhands",
    "qwen_code",
]
