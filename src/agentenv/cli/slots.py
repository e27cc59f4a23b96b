"""``agentenv slots``: every slot and its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import EXIT_NOT_ALL_WELL, err, escape, out, print_json, run_to_end, short, verb
from agentenv.durations import duration
from agentenv.errors import SandboxUnavailableError
from agentenv.wire.states import SlotState

if TYPE_CHECKING:
    from agentenv.farm.view import FarmView


_COLOURS = {"free": "green", "leased": "cyan", "resetting": "yellow"}


@verb
def slots(
    backend: BackendOption = None,
    job: JobOption = None,
    state: Annotated[list[SlotState] | None, typer.Option(help="Only slots in this state. May be repeated.")] = None,
    trajectory: Annotated[str, typer.Option(metavar="TEXT", help="Only trajectories with this text.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List every slot: its state and age, its lease and expiry, and the running command.

    A lease lasts as long as its owner renews it, several times per lease duration. If its remaining time only
    decreases, its owner is gone and it will expire (`agentenv gc --end-leases` ends it at once). Exit
    code 1 when a container did not answer.

    \b
    Examples:
      agentenv slots
      agentenv slots --state leased --backend nomad
      agentenv slots --json | jq '[.[] | select(.state == "leased")] | length'
    """
    from agentenv.farm.access import access_to
    from agentenv.farm.look import look
    from agentenv.farm.view import slot_rows

    sight = run_to_end(look(access_to(backend_of(backend), job)))
    if not sight.census.exists:
        raise SandboxUnavailableError(f"{sight.census.where}: no farm is running", next_step=sight.census.next_step)
    chosen = [
        row
        for row in slot_rows(sight)
        if (not state or row["state"] in state) and trajectory in (row["trajectory"] or "")
    ]
    if as_json:
        print_json(chosen)
    else:
        _show(chosen)
    silent = _silent(sight)
    raise typer.Exit(EXIT_NOT_ALL_WELL if silent else 0)


def _show(rows: list[dict[str, object]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("container", "slot", "state", "for", "trajectory", "calls", "ends in", "reason"):
        table.add_column(heading, no_wrap=heading not in ("trajectory", "reason"), overflow="fold")
    for row in rows:
        state = str(row["state"])
        table.add_row(
            short(str(row["container"])), str(row["slot"]), f"[{_COLOURS.get(state, 'red')}]{state}[/]",
            duration(_seconds(row["in_state_s"])), escape(str(row["trajectory"] or "")),
            str(row["running_calls"] or ""), duration(_seconds(row["expires_in_s"])) if row["trajectory"] else "",
            escape(str(row["reason"])),
        )  # fmt: skip
    out().print(table)
    err().print(f"{len(rows)} slots")


def _seconds(value: object) -> float | None:
    return value if isinstance(value, float | int) else None


def _silent(sight: FarmView) -> bool:
    silent = [container for container in sight.containers if not container.answers]
    for container in silent:
        err().print(
            f"[yellow]unreachable:[/] {escape(container.place.id)}: {escape(container.problem)}", soft_wrap=True
        )
    return bool(silent)
