"""Builds a tool server from its settings: shipped tools, custom modules, secrets."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from agentenv.api.tool_server.core import Resource, ToolServer
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool
from agentenv.api.web.fetch import WebFetcher
from agentenv.api.web.network import AllowList
from agentenv.api.web.search import HttpSearch, SearchProvider, SearchTool
from agentenv.api.web.tools import WebTools
from agentenv.errors import ConfigError

__all__ = ["tool_server"]

_NO_HOSTS = "no host may be reached: the tool server's allow list is empty ([[network.allow]] in its config)"


def tool_server(
    settings: ToolServerSettings = ToolServerSettings(),  # noqa: B008 - frozen
    tools: Iterable[ExternalTool] = (),
    *,
    search: SearchProvider | None = None,
    secrets: Secrets | None = None,
) -> ToolServer:
    """Create a server (to be entered) with the shipped tools, those of ``settings.modules``, and ``tools``.

    ``search`` replaces the configured provider; ``secrets`` replaces those the settings declare.

    Raises: ConfigError naming the setting, module or secret that is wrong.
    """
    known = secrets or Secrets(settings.secret_values())
    own = [*tools, *(tool for name in settings.modules for tool in tools_of_module(name))]
    shipped, resources = _shipped(settings, known, search) if settings.builtin_tools else ([], [])
    return ToolServer([*shipped, *own], settings, secrets=known, resources=resources)


def _shipped(
    settings: ToolServerSettings, secrets: Secrets, search: SearchProvider | None
) -> tuple[list[ExternalTool], list[Resource]]:
    allowed = AllowList(settings.network.allow, secrets)
    closed = "" if allowed else _NO_HOSTS
    fetcher = WebFetcher(settings.network, allowed)
    resources: list[Resource] = [fetcher]
    if search is None and settings.search is not None:
        configured = HttpSearch(settings.search, secrets)
        resources.append(configured)
        search = configured
    tools = [SearchTool(search).tool(), *WebTools(fetcher, closed, secrets.redactor.text).tools()]
    if settings.browser.enabled:
        try:
            from agentenv.api.web.browser import BrowserTools
            from agentenv.api.web.chromium import chromium
        except ImportError as error:
            raise ConfigError(
                "browser", f"needs Playwright: {error}", next_step="pip install 'agentenv[farm]'"
            ) from error
        missing = "" if chromium(settings.browser) else "there is no Chromium on this machine (apt install chromium)"
        browser = BrowserTools(
            settings.browser, allowed, closed or missing, secrets.redactor.text, settings.max_result_bytes
        )
        resources.append(browser.chromium)
        tools += browser.tools()
    return tools, resources


def tools_of_module(name: str) -> list[ExternalTool]:
    """The tools a module defines: its ``@tool`` functions, or the list ``TOOLS`` if it has one.

    ``name`` is a dotted name or the path of a ``.py`` file. Raises: ConfigError when it cannot be imported or has
    no tool.
    """
    module = _imported(name)
    listed = getattr(module, "TOOLS", None)
    found = list(listed) if listed is not None else list(vars(module).values())
    tools = [each for each in found if isinstance(each, ExternalTool)]
    if not tools:
        raise ConfigError(
            "modules", f"{name} has no tool", next_step="decorate a function with agentenv.api.tool_server.tool.tool"
        )
    return tools


def _imported(name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name)
        spec = importlib.util.spec_from_file_location(f"agentenv_tools_{path.stem}", path)
        if spec is None or spec.loader is None or not path.exists():
            raise ImportError("there is no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError("modules", f"{name} cannot be imported: {type(error).__name__}: {error}") from error
