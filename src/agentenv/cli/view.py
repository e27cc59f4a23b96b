"""``agentenv view``: the page of a rollouts file, up to date while its run goes on."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import InterruptedBySignalError, err, print_json_line, run_to_end, verb
from agentenv.cli.report import RunArgument, TitleOption
from agentenv.errors import ConfigError


@verb
def view(
    file: RunArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free port.")] = 0,
    title: TitleOption = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve the page of a rollouts file on this machine until Ctrl-C; it follows a running run.

    The page loads itself again when groups were added, and keeps its filters and what is expanded. FILE may be
    missing until the first group has finished. Only this machine can connect (ssh -L forwards the port elsewhere).

    \b
    Examples:
      agentenv view out/rollouts.jsonl --open
      agentenv view out/rollouts.jsonl --port 8080
    """
    if file.is_dir():
        raise ConfigError("FILE", f"{file} is a directory", next_step="give the file of --env.rollouts_path")
    try:
        run_to_end(_serve(file, title or file.name, port, browse=browse, as_json=as_json))
    except InterruptedBySignalError:
        return


async def _serve(file: Path, title: str, port: int, *, browse: bool, as_json: bool) -> None:
    from agentenv.report.live import served

    try:
        async with served(file, title=title, port=port) as url:
            if as_json:
                print_json_line({"url": url})
            else:
                err().print(f"{file} is at {url}", soft_wrap=True)
            if browse:
                await asyncio.to_thread(webbrowser.open, url)
            await asyncio.Event().wait()
    except OSError as error:
        raise ConfigError("--port", str(error), next_step="use another, or 0") from error
