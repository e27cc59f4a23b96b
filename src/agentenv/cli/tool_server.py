"""``agentenv tool-server``: external tools, outside the sandbox, for trainers on other machines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import announce, debugging, escape, out, print_json_line, run_to_end, verb

if TYPE_CHECKING:  # their imports are in [farm]; they are imported when the verb runs
    from agentenv.api.tool_server.settings import ToolServerSettings
    from agentenv.wire.toolserver import ToolList


@verb
def tool_server(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file: secrets, allow list, search, cassettes.")
    ] = None,
    token_file: Annotated[
        Path, typer.Option(help="File of the bearer token; created, readable only by you, if it does not exist.")
    ] = Path("tool-server.token"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8790,
    check: Annotated[bool, typer.Option("--check", help="Read the configuration, list the tools and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run external tools (web search, web pages, a browser, your own) outside the sandbox.

    They have network access and secrets, which the policy never sees. Serves until Ctrl-C; an environment uses it
    with tool_server_url and tool_server_token=file:PATH.

    \b
    Examples:
      agentenv tool-server --config tools.toml
      agentenv tool-server --config tools.toml --check
    """
    from agentenv.api.tool_server.auth import token_from
    from agentenv.api.tool_server.settings import ToolServerSettings

    settings = ToolServerSettings.from_file(config) if config else ToolServerSettings()
    if check:
        run_to_end(_check(settings, as_json))
        return
    token = token_from(token_file)
    if not debugging():  # the operator should see why a tool is broken (without secrets: the server removes them)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    run_to_end(_serve(settings, token, token_file, host, port, as_json))


async def _check(settings: ToolServerSettings, as_json: bool) -> None:
    from agentenv.api.assembly import tool_server as assembled

    _show(assembled(settings).describe(), as_json)


async def _serve(
    settings: ToolServerSettings, token: str, token_file: Path, host: str, port: int, as_json: bool
) -> None:
    from agentenv.api.assembly import tool_server as assembled
    from agentenv.api.tool_server.app import served

    async with assembled(settings) as server, served(server, token, host=host, port=port) as url:
        names = [tool.name for tool in server.describe().tools if not tool.unavailable]
        if not as_json:
            _show(server.describe(), as_json=False)
        line = f"[green]listening[/] on {url} · token in {escape(str(token_file))} · Ctrl-C stops it"
        announce({"url": url, "token_file": str(token_file), "tools": names}, line, as_json=as_json)
        await asyncio.Event().wait()


def _show(listed: ToolList, as_json: bool) -> None:
    if as_json:
        tools = [{"name": tool.name, "unavailable": tool.unavailable} for tool in listed.tools]
        print_json_line({"version": listed.version, "tools": tools})
        return
    for tool in listed.tools:
        mark = (
            f"[yellow]no[/]  {tool.name}: {escape(tool.unavailable)}"
            if tool.unavailable
            else f"[green]yes[/] {tool.name}"
        )
        out().print(mark, soft_wrap=True)
