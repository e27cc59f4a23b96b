"""``agentenv runs view``: one page about many runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, out, print_json, print_problems, verb
from agentenv.cli.runs_compare import PriceInOption, PriceOutOption, RunsDirOption, SuccessOption, loaded, prices_of
from agentenv.cli.view import BrowseOption, PortOption, serve
from agentenv.errors import ConfigError


@verb
def view(
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
