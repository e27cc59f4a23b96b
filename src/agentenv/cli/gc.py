"""``agentenv gc``: clear away what dead containers left."""

from __future__ import annotations

import subprocess
import sys

import typer

from agentenv.cli.doctor_facts import current_stale_containers
from agentenv.cli.options import JsonOption
from agentenv.cli.present import EXIT_INFRA, out, print_json, verb
from agentenv.config import state_dir
from agentenv.errors import SandboxUnavailableError

_SWEEP_TIMEOUT_S = 120


@verb
def gc(as_json: JsonOption = False) -> None:
    """Remove what dead containers left behind: cgroups, directories. The living are not touched.

    Never needed in the ordinary way: the next container to start does the same.

    [bold]Examples[/bold]

      agentenv gc

      agentenv gc --json
    """
    state = state_dir()
    before = current_stale_containers(state)
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.sandbox.sweep", str(state)],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SWEEP_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SandboxUnavailableError(
            f"the sweep of {state} failed: {done.stderr.strip() or done.returncode}",
            next_step="run it as the user who started those containers",
        )
    after = current_stale_containers(state)
    removed = [name for name in before if name not in after]
    if as_json:
        print_json({"state_dir": str(state), "removed": removed, "left": list(after)})
    else:
        out().print(f"{len(removed)} dead containers removed from {state}, {len(after)} left", soft_wrap=True)
    raise typer.Exit(EXIT_INFRA if after else 0)
