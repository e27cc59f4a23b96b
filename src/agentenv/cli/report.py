"""``agentenv report``: the HTML page of a rollouts file."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, out, print_json, verb
from agentenv.errors import ConfigError

RolloutsArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="What --env.rollouts_path named: a group of rollouts per line.")
]
TitleOption = Annotated[str | None, typer.Option("--title", help="The page's title; by default the file's name.")]


@verb
def report(
    file: RolloutsArgument,
    page: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PAGE", help="Where to write it; by default beside FILE, as .html."),
    ] = None,
    title: TitleOption = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the HTML page of anyone's rollouts: scores, errors, every turn and call.

    The page is one file that needs no network. It can be written while a run goes on; `agentenv view` keeps it up to
    date.

    \b
    Examples:
      agentenv report out/rollouts.jsonl --open
      agentenv report out/rollouts.jsonl --out /tmp/page.html --title "Second try"
    """
    from agentenv.report import read_records, write_report
    from agentenv.report.page import RecordError

    if not file.is_file():
        raise ConfigError("FILE", f"{file} is not a file", next_step="name what --env.rollouts_path named")
    try:
        groups = list(read_records(file))
        written = write_report(groups, page or file.with_suffix(".html"), title=title or file.name)
    except RecordError as error:
        raise ConfigError("FILE", str(error).splitlines()[0], next_step="name a rollouts file") from error
    except OSError as error:
        raise ConfigError("--out", str(error), next_step="name a file in a directory you can write to") from error
    rollouts = sum(len(group.trajectories) for group in groups)
    if as_json:
        print_json({"page": written, "groups": len(groups), "rollouts": rollouts})
    else:
        err().print(f"{rollouts} rollouts in {len(groups)} groups", soft_wrap=True)
        out().print(str(written), markup=False, soft_wrap=True)
    if browse:
        webbrowser.open(written.resolve().as_uri())
