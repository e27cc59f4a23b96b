"""``agentenv view`` and ``agentenv runs view``: the page of a run, and one about many, up to date while they go on."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import (
    InterruptedBySignalError,
    err,
    out,
    print_json,
    print_json_line,
    print_problems,
    run_to_end,
    verb,
)
from agentenv.cli.report import RunArgument, TitleOption, source_at
from agentenv.cli.runs_compare import PriceInOption, PriceOutOption, RunsDirOption, SuccessOption, loaded, prices_of
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


@verb
def view_runs(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]", help="Directories or names of runs, or files of rollouts; by default all in ./runs."
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PAGE", help="Write one file, with every rollout, instead of serving."),
    ] = None,
    port: PortOption = 0,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "Runs",
    runs_dir: RunsDirOption = Path("runs"),
    success: SuccessOption = 1.0,
    price_in: PriceInOption = None,
    price_out: PriceOutOption = None,
    browse: BrowseOption = False,
    as_json: JsonOption = False,
) -> None:
    """One page about runs: scores over time, pass@k, errors, two runs side by side, every task's attempts.

    It is served on this machine until Ctrl-C, and follows runs that still play and runs that begin. A run's name leads
    to its rollouts, an attempt to its turns and calls. With --out the page is one file that needs no network.

    \b
    Examples:
      agentenv runs view --open
      agentenv runs view repair-small repair-large --price-in 0.5 --price-out 2
      agentenv runs view --out out/runs.html
    """
    from agentenv.report.live import RunsPages
    from agentenv.report.overview import OverviewSettings
    from agentenv.report.page import write_overview
    from agentenv.runs.records import find

    names = given or []
    settings = OverviewSettings(success, prices_of(price_in, price_out))
    if page is None:
        find(*names, below=runs_dir)  # refuses a name of no run at once
        pages = RunsPages(lambda: find(*names, below=runs_dir), title, settings)
        serve(pages, ", ".join(names) or f"{runs_dir}/", port, browse=browse, as_json=as_json)
        return
    if not (runs := loaded(names, runs_dir)):
        raise ConfigError("RUN", f"there is no run in {runs_dir.resolve()}", next_step="name a run's directory")
    try:
        write_overview(runs, page, title=title, settings=settings)
    except OSError as error:
        raise ConfigError("--out", str(error), next_step="name a file in a directory you can write to") from error
    problems = [problem for run in runs for problem in run.problems]
    if as_json:
        print_json({"page": page, "runs": [run.label for run in runs], "left_out": problems})
    else:
        err().print(f"{len(runs)} runs, {sum(len(run.transcripts) for run in runs)} rollouts", soft_wrap=True)
        print_problems(problems)
        out().print(str(page), markup=False, soft_wrap=True)
    if browse:
        webbrowser.open(page.resolve().as_uri())


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
