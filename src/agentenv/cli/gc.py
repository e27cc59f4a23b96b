"""``agentenv gc``: clear away what dead containers left."""

from __future__ import annotations

import typer
from rich.markup import escape

from agentenv.cli.doctor_facts import swept_directories
from agentenv.cli.options import JsonOption
from agentenv.cli.present import EXIT_NOT_ALL_WELL, err, out, print_json, verb
from agentenv.config import state_dir
from agentenv.sandbox.sweep import sweep


@verb
def gc(as_json: JsonOption = False) -> None:
    """Remove what dead containers left behind: cgroups, directories. The living are not touched.

    Never needed in the ordinary way: the next container to start does the same.

    [bold]Examples[/bold]

      agentenv gc

      agentenv gc --json
    """
    state = state_dir()
    found = [swept for directory in swept_directories(state) for swept in sweep(directory)]
    removed = [swept.container for swept in found if not swept.left]
    left = [path for swept in found for path in swept.left]
    if as_json:
        print_json({"state_dir": str(state), "removed": removed, "left": left})
    else:
        out().print(f"{escape(str(state))}: removed what {len(removed)} dead containers left", soft_wrap=True)
        for path in left:
            err().print(f"[yellow]could not be removed:[/] {escape(path)}", soft_wrap=True)
    raise typer.Exit(EXIT_NOT_ALL_WELL if left else 0)
