"""``agentenv report``: the HTML page of a rollouts file."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, escape, out, print_json, verb
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.agent.transcript import GroupRecord

RolloutsArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of rollouts (--env.rollouts_path): a group per line.")
]
TitleOption = Annotated[str | None, typer.Option("--title", help="The page's title; by default the file's name.")]


@verb
def report(
    file: RolloutsArgument,
    page: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PAGE", help="Output file; by default FILE with the suffix .html."),
    ] = None,
    title: TitleOption = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Only this run's groups; last: the newest run's.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the HTML page of anyone's rollouts: scores, errors, every turn and call.

    The page is one file that needs no network. It can be written while a run goes on; `agentenv view` keeps it up to
    date. Several runs may have written to FILE: each is listed, unless --run chooses one.

    \b
    Examples:
      agentenv report out/rollouts.jsonl --open
      agentenv report out/rollouts.jsonl --out /tmp/page.html --title "Second try"
    """
    from agentenv.report import read_records, write_report
    from agentenv.report.page import RecordError
    from agentenv.report.summary import runs_of

    if not file.is_file():
        raise ConfigError("FILE", f"{file} is not a file", next_step="give the file of --env.rollouts_path")
    cut: list[int] = []
    try:
        groups = list(read_records(file, on_cut=cut.append))
        if run is not None:
            groups = _of_run(groups, run)
        written = write_report(groups, page or file.with_suffix(".html"), title=title or file.name)
    except RecordError as error:
        raise ConfigError(
            "FILE", str(error).splitlines()[0], next_step="give the file of --env.rollouts_path"
        ) from error
    except OSError as error:
        raise ConfigError("--out", str(error), next_step="name a file in a directory you can write to") from error
    rollouts = sum(len(group.trajectories) for group in groups)
    rows = [each.row() for each in runs_of(groups)]
    if as_json:
        found = {"page": written, "groups": len(groups), "rollouts": rollouts, "runs": rows}
        print_json(found | {"cut_line": cut[0] if cut else None})
    else:
        _print_counts(rollouts, len(groups), rows, cut)
        out().print(str(written), markup=False, soft_wrap=True)
    if browse:
        webbrowser.open(written.resolve().as_uri())


def _of_run(groups: list[GroupRecord], name: str) -> list[GroupRecord]:
    """The groups of the run of this id, or of the last one. Raises: ConfigError when there is none."""
    from agentenv.report.summary import runs_of

    found = [run for run in runs_of(groups) if run.id]
    chosen = [run for run in found if run.id == name] or (found[-1:] if name == "last" else [])
    if not chosen:
        known = ", ".join(run.id for run in found) or "none; these records name no run"
        raise ConfigError("--run", f"no run is named {name}", next_step=f"allowed: last, {known}")
    return chosen[0].groups


def _print_counts(rollouts: int, groups: int, runs: list[dict[str, Any]], cut: list[int]) -> None:
    console = err()
    console.print(f"{rollouts} rollouts in {groups} groups", soft_wrap=True)
    if len(runs) > 1:
        console.print(
            f"[yellow]note[/] {len(runs)} runs have records here; --run ID (or last) chooses one:", soft_wrap=True
        )
        for run in runs:
            mean = "no score" if run["mean"] is None else f"mean {run['mean']:.3f}"
            about = f"{run['environment']}, model {run['model'] or '?'}" if run["id"] else "records that name no run"
            console.print(escape(f"  {run['id'] or '–'}  {about}: {run['groups']} groups, {mean}"), soft_wrap=True)
    if cut:
        console.print(f"[yellow]note[/] line {cut[0]}, the last, is incomplete and left out", soft_wrap=True)
