"""``agentenv doctor``: what works on this machine, what is weaker, and how to fix it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from agentenv.cli.options import JsonOption
from agentenv.cli.output import escape, out, print_json, run_to_end, verb
from agentenv.errors import AgentEnvError

if TYPE_CHECKING:
    from agentenv.doctor.facts import Facts
    from agentenv.doctor.rules import Finding
    from agentenv.wire.server import Proof


_WORDS = {"ok": "[green]ok[/]", "weaker": "[yellow]weaker[/]", "broken": "[red]broken[/]"}
_VERDICTS = {
    "ok": "[green]Everything agentenv promises holds on this machine.[/]",
    "weaker": "[yellow]Slots work here; what is marked weaker provides less than agentenv promises.[/]",
    "broken": "[red]Slots do not start here until what is marked broken is fixed, or accepted where it can be.[/]",
}


@verb
def doctor(
    start: Annotated[
        bool, typer.Option("--start/--no-start", help="Start a container with one slot and show its proofs.")
    ] = True,
    cure: Annotated[bool, typer.Option("--cure", help="Print only the commands that fix what was found.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what works on this machine, what is weaker, and how to fix it. Changes nothing.

    Finally starts a container with one slot, which tests its own promises. Exit code 0: everything holds · 1: slots
    work, something is weaker · 2: slots do not work.

    \b
    Examples:
      agentenv doctor
      agentenv doctor --cure | sudo sh
      agentenv doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    from agentenv.doctor.facts import gather
    from agentenv.doctor.rules import judge, worst

    facts = gather()
    findings = judge(facts)
    proofs: tuple[Proof, ...] = ()
    if start:
        found, proofs = try_container(facts)
        findings += found
    level = worst(findings)
    if cure:
        _show_cures(findings)
    elif as_json:
        print_json(report(facts, findings, proofs))
    else:
        _show(findings, proofs, unaccepted=facts.subordinate is not None and not facts.one_id_accepted)
    raise typer.Exit(int(level))


def try_container(facts: Facts) -> tuple[list[Finding], tuple[Proof, ...]]:
    """Start one container with one slot, run a command in it, and return its proofs."""
    from agentenv.doctor.rules import Finding, Level

    try:
        one_id = facts.subordinate is not None
        return run_to_end(_probe("user" if one_id else "auto"))
    except AgentEnvError as error:
        return [Finding("a real slot", Level.broken, error.message, error.next_step)], ()


async def _probe(isolation: str) -> tuple[list[Finding], tuple[Proof, ...]]:
    from agentenv.config import ContainerSettings
    from agentenv.doctor.rules import Finding, Level, image_slots, workspaces
    from agentenv.farm import open

    settings = ContainerSettings.made_of({"slots_per_container": 1, "isolation": isolation})
    async with open.open_executor(settings) as executor, executor.open("agentenv-doctor") as session:
        result = await session.call("bash", {"command": "echo $((6 * 7))"}, timeout_s=20)
        described = await open.describe(session)
    if result.stdout != "42\n" or result.exit_code != 0:
        detail = f"started, but `echo` gave {result.exit_code}: {result.stdout!r} {result.stderr!r} {result.message}"
        slot = Finding("a real slot", Level.broken, detail)
    elif described.weaker:
        detail = "\n".join(("runs, with less than promised:", *(f"· {sentence}" for sentence in described.weaker)))
        slot = Finding("a real slot", Level.weaker, detail)
    else:
        slot = Finding("a real slot", Level.ok, f"runs; a command took {result.duration_s * 1e3:.1f} ms")
    found = [slot, image_slots(described.image_format, described.image_weaker), workspaces(described.workspaces_copied)]
    return found, described.proofs


def report(facts: Facts, findings: list[Finding], proofs: tuple[Proof, ...]) -> dict[str, Any]:
    """The ``--json`` document."""
    from agentenv.doctor.rules import worst

    facts_json = dataclasses.asdict(facts, dict_factory=_lists_for_sets)
    return {
        "verdict": worst(findings).name,
        "findings": [{**dataclasses.asdict(finding), "level": finding.level.name} for finding in findings],
        "proofs": [proof.model_dump(mode="json") for proof in proofs],
        "facts": facts_json,
    }


def _lists_for_sets(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields}


def _show_cures(findings: list[Finding]) -> None:
    commands = dict.fromkeys(command for finding in findings for command in finding.commands)  # once each, in order
    for command in commands:
        typer.echo(command)


def _show(findings: list[Finding], proofs: tuple[Proof, ...], *, unaccepted: bool) -> None:
    from agentenv.doctor.rules import worst

    table = Table("what", "", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(finding.name, _WORDS[finding.level.name], escape(finding.detail))
        cures = [finding.cure, *finding.commands] if finding.level.name != "ok" else []
        for cure in filter(None, cures):
            table.add_row("", "", f"[bold]→[/] {escape(cure)}")
    console = out()
    console.print(table)
    if proofs:
        console.print(f"\n[bold]What the container proved about itself[/] ({len(proofs)})")
        console.print(_proof_table(proofs))
    level = worst(findings).name
    console.print(f"\n{_VERDICTS[level]}")
    if unaccepted:
        console.print(
            "As an ordinary user with one id, accept it by name: --isolation user, isolation='user' in Python, or "
            "AGENTENV_ISOLATION=user for all.",
            soft_wrap=True,
        )


def _proof_table(proofs: tuple[Proof, ...]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for proof in proofs:
        failed = "[red]no[/]" if proof.required else "[yellow]no[/]"
        table.add_row(proof.name, "[green]yes[/]" if proof.holds else failed, escape(proof.detail))
        if not proof.holds and proof.cure:
            table.add_row("", "", f"[bold]→[/] {escape(proof.cure)}")
    return table
