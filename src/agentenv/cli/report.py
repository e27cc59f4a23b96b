"""``agentenv report``: the HTML page of a run, and its rollouts in the format of others."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, escape, out, print_json, print_problems, verb
from agentenv.cli.runs_compare import read_source
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.agent.transcript import GroupRecord
    from agentenv.runs.records import Run, Source

RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run's directory or name, or a file of rollouts (--env.rollouts_path)."),
]
TitleOption = Annotated[
    str | None, typer.Option("--title", help="The page's title; by default environment, model and date.")
]


@verb
def report(
    run: RunArgument,
    page: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PAGE",
            help="Output file; by default report.html in the run's directory, or FILE with the suffix .html.",
        ),
    ] = None,
    title: TitleOption = None,
    only: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Only this run's groups; last: the newest run's.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    atif: Annotated[
        Path | None,
        typer.Option(
            "--atif", metavar="DIR", help="Also write each rollout as DIR/NAME.json, in Harbor's format ATIF."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the HTML page of a run's rollouts: scores, errors, every turn and call.

    The page is one file that needs no network. It can be written while a run goes on; `agentenv view` keeps it up to
    date. Several runs may have written to a file: each is listed, unless --run chooses one. `agentenv runs view` makes
    a page about many runs.

    \b
    Examples:
      agentenv report runs/count-words-20260301-101500 --open
      agentenv report out/rollouts.jsonl --out /tmp/page.html --title "Second try"
      agentenv report out/rollouts.jsonl --atif out/trajectories
    """
    from agentenv.report import write_report
    from agentenv.report.page import title_of
    from agentenv.report.summary import run_row

    source = source_at(run)
    runs = read_source(source)
    if only is not None:
        runs = [_named(runs, only)]
    groups = [group for each in runs for group in each.groups]
    try:
        facts = runs[0].facts() if len(runs) == 1 else None
        written = write_report(groups, page or _beside(source), title=title or title_of(runs, source.path), run=facts)
    except OSError as error:
        raise ConfigError("--out", str(error), next_step="name a file in a directory you can write to") from error
    if atif is not None:
        _write_atif(groups, atif)
    rollouts = sum(len(group.trajectories) for group in groups)
    rows = [run_row(each) for each in runs]
    problems = [problem for each in runs for problem in each.problems]
    if as_json:
        found = {"page": written, "groups": len(groups), "rollouts": rollouts, "runs": rows}
        print_json(found | {"left_out": problems, "atif": atif})
    else:
        _print_counts(rollouts, len(groups), rows)
        print_problems(problems)
        for place in (written, *([atif] if atif is not None else [])):
            out().print(str(place), markup=False, soft_wrap=True)
    if browse:
        webbrowser.open(written.resolve().as_uri())


def _write_atif(groups: list[GroupRecord], directory: Path) -> None:
    from agentenv.runs.atif import write_trajectories

    try:
        write_trajectories(groups, directory)
    except OSError as error:
        raise ConfigError("--atif", str(error), next_step="name a directory you can write to") from error


def source_at(given: Path) -> Source:
    """One run's directory, or a file. Raises: ConfigError: there is none, or there are several."""
    from agentenv.runs.records import find

    sources = find(given)
    if len(sources) != 1:
        what = f"{given} stands for {len(sources)} runs"
        raise ConfigError("RUN", what, next_step="name one, or: agentenv runs view")
    return sources[0]


def _beside(source: Source) -> Path:
    return source.path / "report.html" if source.is_directory else source.path.with_suffix(".html")


def _named(runs: list[Run], name: str) -> Run:
    """The run of this id, or the last one. Raises: ConfigError when there is none."""
    found = [run for run in runs if run.id]
    chosen = [run for run in found if run.id == name] or (found[-1:] if name == "last" else [])
    if not chosen:
        known = ", ".join(run.id for run in found) or "none; these records name no run"
        raise ConfigError("--run", f"no run is named {name}", next_step=f"allowed: last, {known}")
    return chosen[0]


def _print_counts(rollouts: int, groups: int, runs: list[dict[str, Any]]) -> None:
    from agentenv.agent.results import counted

    console = err()
    console.print(f"{counted(rollouts, 'rollout')} in {counted(groups, 'group')}", soft_wrap=True)
    if len(runs) > 1:
        console.print(
            f"[yellow]note[/] {len(runs)} runs have records here; --run ID (or last) chooses one:", soft_wrap=True
        )
        for run in runs:
            mean = "no score" if run["mean"] is None else f"mean {run['mean']:.3f}"
            about = f"{run['environment']}, model {run['model'] or '?'}" if run["id"] else "records that name no run"
            console.print(escape(f"  {run['id'] or '–'}  {about}: {run['groups']} groups, {mean}"), soft_wrap=True)
