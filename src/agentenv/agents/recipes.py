"""How agent programs that others have written are started in a slot without network, with the gateway as their model.

A recipe is what a program is given to run by itself: its words, variables and settings; nothing of a program's own is
here. :mod:`agentenv.agents.facts` says of each which version was run, and how that went.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final, Literal

from agentenv.agent.program import AgentProgram

AT: Final = "/opt/agents"
"""Where recipes look for programs: ``scripts/agent-programs`` puts each into a directory of its name there."""
STATE: Final = "/tmp/agent-program"  # noqa: S108 - a slot's
"""Directory of a slot for what a program keeps for itself, which is no part of what it works on: a slot's home may be
its workspace."""

CODEX_HOME: Final = "/dev/shm/codex"  # noqa: S108 - a slot's
"""The same of Codex, which below /tmp does not put its ``apply_patch`` on the PATH of commands."""

_QUIET: Final = {"NO_COLOR": "1", "DO_NOT_TRACK": "1", "NO_UPDATE_NOTIFIER": "1"}
"""For any program; commands that a program starts inherit them, so there are no more than these."""


def mini_swe_agent(*, step_limit: int | None = None, at: str | None = AT) -> AgentProgram:
    """mini-swe-agent, which works with one tool, bash, and ends when the model runs the command that its prompt names.

    ``step_limit``: it ends by itself after so many turns. ``at``: see AT; None: its command ``mini`` is on the slot's
    PATH. It cannot be told how long a conversation may be, and ends with 1 when it is told that a prompt is too long.
    """
    words = ["-m", "openai/{model}", "-t", "{task}", "--yolo", "--exit-immediately", "-o", f"{STATE}/mini.traj.json"]
    words += ["-c", "mini.yaml", "-c", "model.cost_tracking=ignore_errors"]
    if step_limit is not None:
        words += ["-c", f"agent.step_limit={step_limit}"]
    env = {
        "OPENAI_BASE_URL": "{url}",
        "OPENAI_API_BASE": "{url}",
        "OPENAI_API_KEY": "{key}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": f"{STATE}/mini",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return _program("mini-swe-agent", "mini", words, env, {}, at)


def codex(*, at: str | None = AT) -> AgentProgram:
    """OpenAI's Codex CLI. ``at``: see AT; None: its command ``codex`` is on the slot's PATH. It has no limit of turns;
    it summarises a conversation that nears the rollout's limit of tokens."""
    settings = """\
model = "{model}"
model_provider = "gateway"
model_context_window = {context_tokens}
check_for_update_on_startup = false
web_search = "disabled"

[agents]
enabled = false

[analytics]
enabled = false

[model_providers.gateway]
name = "gateway"
base_url = "{url}"
env_key = "GATEWAY_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2
"""
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "--", "{task}"]
    env = {"CODEX_HOME": CODEX_HOME, "GATEWAY_KEY": "{key}"}
    return _program("codex", "codex", words, env, {f"{CODEX_HOME}/config.toml": settings}, at)


def opencode(api: Literal["chat", "messages", "responses"] = "chat", *, at: str | None = AT) -> AgentProgram:
    """opencode, which speaks three dialects, each by another client. ``at``: see AT; None: its command ``opencode`` is
    on the slot's PATH. Its limit of turns is a request to the model to end, so none is set; it summarises a
    conversation that nears the rollout's limit of tokens. It is given a title, so that it asks the model for none."""
    clients = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic", "responses": "@ai-sdk/openai"}
    settings: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
        "provider": {
            "gateway": {
                "npm": clients[api],
                "name": "gateway",
                "options": {"baseURL": "{url}", "apiKey": "{key}"},
                "models": {
                    "{model}": {
                        "name": "{model}",
                        "tool_call": True,
                        "limit": {"context": "{context_tokens}", "output": "{turn_tokens}"},
                    }
                },
            }
        },
    }
    words = ["run", "--auto", "--format", "json", "--title", "task", "-m", "gateway/{model}"]
    env = {
        "OPENCODE_CONFIG": f"{STATE}/opencode.json",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_SHARE": "1",
        **{f"XDG_{kind}_HOME": f"{STATE}/{kind.lower()}" for kind in ("CONFIG", "DATA", "CACHE", "STATE")},
    }
    # A task that is an argument would come into quotation marks.
    task = f"{STATE}/task"
    program = _program(
        "opencode", "opencode", words, env, {f"{STATE}/opencode.json": _json(settings), task: "{task}"}, at
    )
    return replace(program, argv=["sh", "-c", f'exec "$0" "$@" <{task}', *program.argv])


def qwen_code(*, step_limit: int | None = None, at: str | None = AT) -> AgentProgram:
    """Qwen Code. ``step_limit``: it ends by itself after so many turns. ``at``: see AT; None: its command ``qwen`` is
    on the slot's PATH. It summarises a conversation that nears the rollout's limit of tokens."""
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": "{context_tokens}"}},
    }
    words = ["--yolo", "--auth-type", "openai", "-m", "{model}", "--output-format", "json"]
    if step_limit is not None:
        words += ["--max-session-turns", str(step_limit)]
    words += ["--prompt={task}"]
    env = {
        "OPENAI_BASE_URL": "{url}",
        "OPENAI_API_KEY": "{key}",
        "OPENAI_MODEL": "{model}",
        "QWEN_HOME": f"{STATE}/qwen",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "{turn_tokens}",
        "QWEN_CODE_NO_RELAUNCH": "true",
    }
    return _program("qwen-code", "qwen", words, env, {f"{STATE}/qwen/settings.json": _json(settings)}, at)


def gemini_cli(*, step_limit: int | None = None, at: str | None = AT) -> AgentProgram:
    """Google's Gemini CLI. ``step_limit``: it ends by itself after so many turns. ``at``: see AT; None: its command
    ``gemini`` is on the slot's PATH. It does not ask how long a conversation may be."""
    settings: dict[str, Any] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    if step_limit is not None:
        settings["model"] = {"maxSessionTurns": step_limit}
    words = ["--yolo", "-m", "{model}", "--output-format", "json", "--prompt={task}"]
    env = {
        "GEMINI_API_KEY": "{key}",
        "GOOGLE_GEMINI_BASE_URL": "{root}",
        "GEMINI_CLI_HOME": f"{STATE}/gemini",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    return _program("gemini-cli", "gemini", words, env, {f"{STATE}/gemini/.gemini/settings.json": _json(settings)}, at)


def claude_code(*, step_limit: int | None = None, at: str | None = None) -> AgentProgram:
    """Anthropic's Claude Code, which is not free software: whoever has the right to run it installs it. By default its
    command ``claude`` is on the slot's PATH; with ``at`` it is AT/claude-code/bin/claude. ``step_limit``: it ends by
    itself after so many turns. It refuses to work without questions as root, unless it is told that it is in a sandbox.
    """
    words = ["-p", "{task}", "--model", "{model}", "--output-format", "json", "--dangerously-skip-permissions"]
    if step_limit is not None:
        words += ["--max-turns", str(step_limit)]
    env = {
        "ANTHROPIC_BASE_URL": "{root}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "CLAUDE_CONFIG_DIR": f"{STATE}/claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{turn_tokens}",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    return _program("claude-code", "claude", words, env, {}, at)


def openhands(*, at: str | None = None) -> AgentProgram:
    """OpenHands' command line. By default its command ``openhands`` is on the slot's PATH, which takes Python 3.12;
    with ``at`` it is AT/openhands/bin/openhands. It has no limit of turns that a caller sets."""
    words = ["--headless", "--json", "--override-with-envs", "--task", "{task}"]
    env = {
        "LLM_MODEL": "openai/{model}",
        "LLM_BASE_URL": "{url}",
        "LLM_API_KEY": "{key}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "PERSISTENCE_DIR": f"{STATE}/openhands",
        "OPENHANDS_PERSISTENCE_DIR": f"{STATE}/openhands",
        "HOME": f"{STATE}/openhands",  # its commands inherit it, but it keeps more there than it can be told of
    }
    return _program("openhands", "openhands", words, env, {}, at)


def _program(
    name: str, command: str, words: list[str], env: dict[str, str], files: dict[str, str], at: str | None
) -> AgentProgram:
    first = command if at is None else f"{at}/{name}/bin/{command}"
    return AgentProgram([first, *words], {**_QUIET, **env}, files, name=name)


def _json(settings: dict[str, Any]) -> str:
    """With the places of numbers as numbers."""
    text = json.dumps(settings)
    for place in ("{context_tokens}", "{turn_tokens}"):
        text = text.replace(f'"{place}"', place)
    return text
