"""``agentenv view``: the page of a run, up to date while it goes on."""

from __future__ import annotations

import asyncio
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import InterruptedBySignalError, err, print_json_line, run_to_end, verb
from agentenv.cli.report import RunArgument, TitleOption, source_at
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.report.live import Pages

PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free port.")]
BrowseOption = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


@verb
def view(
    run: RunArgument,
    port: PortOption = 0,
    title: TitleOption = None,
    browse: BrowseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve the page of a run on this machine until Ctrl-C; it follows a running run.

    The page loads itself again when groups were added, and keeps its filters and what is expanded. A file may be
    missing until the first group has finished. Only this machine can connect (ssh -L forwards the port elsewhere).
    `agentenv runs view` serves a page about many runs.

    \b
    Examples:
      agentenv view runs/count-words-20260301-101500 --open
      agentenv view out/rollouts.jsonl --port 8080
    """
    from agentenv.report.live import OnePage, page_of
    from agentenv.runs.records import Source

    is_missing_file = run.suffix == ".jsonl" and not run.exists()
    source = Source.file(run) if is_missing_file else source_at(run)
    serve(OnePage(page_of(source, title)), str(run), port, browse=browse, as_json=as_json)


def serve(pages: Pages, what: str, port: int, *, browse: bool, as_json: bool) -> None:
    """Serve pages about ``what`` until a signal. Raises: ConfigError: the port cannot be used."""
    try:
        run_to_end(_serve(pages, what, port, browse=browse, as_json=as_json))
    except InterruptedBySignalError:
        return


async def _serve(pages: Pages, what: str, port: int, *, browse: bool, as_json: bool) -> None:
    from agentenv.report.live import served

    try:
        async with served(pages, port=port) as url:
            if as_json:
                print_json_line({"url": url})
            else:
                err().print(f"{what} is at {url}", soft_wrap=True, markup=False)
            if browse:
                await asyncio.to_thread(webbrowser.open, url)
            await asyncio.Event().wait()
    except OSError as error:
        raise ConfigError("--port", str(error), next_step="use another, or 0") from error
