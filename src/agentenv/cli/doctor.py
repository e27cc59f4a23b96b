"""``agentenv doctor``: what works on this machine, what is weaker, and how to fix it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from agentenv.cli.options import JsonOption
from agentenv.cli.output import out, print_json, run_to_end, verb
from agentenv.doctor.facts import Facts, gather
from agentenv.doctor.rules import Finding, Level, judge, worst
from agentenv.errors import AgentEnvError
from agentenv.farm import open
from agentenv.wire.server import Proof

_WORDS = {Level.ok: "[green]ok[/]", Level.weaker: "[yellow]weaker[/]", Level.broken: "[red]broken[/]"}
_VERDICTS = {
    Level.ok: "[green]Everything agentenv promises holds on this machine.[/]",
    Level.weaker: "[yellow]Slots work here; what is marked weaker provides less than agentenv promises.[/]",
    Level.broken: "[red]Slots cannot run here until what is marked broken is fixed.[/]",
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

    [bold]Examples[/bold]

      agentenv doctor

      agentenv doctor --cure | sudo sh

      agentenv doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    facts = gather()
    findings = judge(facts)
    proofs: tuple[Proof, ...] = ()
    if start:
        finding, proofs = try_container(facts)
        findings.append(finding)
    level = worst(findings)
    if cure:
        _show_cures(findings)
    elif as_json:
        print_json(report(facts, findings, proofs))
    else:
        _show(findings, proofs)
    raise typer.Exit(int(level))


def try_container(facts: Facts) -> tuple[Finding, tuple[Proof, ...]]:
    """Start one container with one slot, run a command in it, and return its proofs."""
    try:
        return run_to_end(_probe("full" if facts.root else "user"))
    except AgentEnvError as error:
        return Finding("a real slot", Level.broken, error.message, error.next_step), ()


async def _probe(isolation: str) -> tuple[Finding, tuple[Proof, ...]]:
    settings = open.container_settings(slots_per_container=1, isolation=isolation)
    async with open.open_executor(settings) as executor, executor.open("agentenv-doctor") as session:
        result = await session.call("bash", {"command": "echo $((6 * 7))"}, timeout_s=20)
        described = await open.describe(session)
    if result.stdout != "42\n" or result.exit_code != 0:
        detail = f"started, but `echo` gave {result.exit_code}: {result.stdout!r} {result.stderr!r} {result.message}"
        return Finding("a real slot", Level.broken, detail), described.proofs
    if described.weaker:
        detail = "\n".join(("runs, with less than promised:", *(f"· {sentence}" for sentence in described.weaker)))
        return Finding("a real slot", Level.weaker, detail), described.proofs
    return Finding("a real slot", Level.ok, f"runs; a command took {result.duration_s * 1e3:.1f} ms"), described.proofs


def report(facts: Facts, findings: list[Finding], proofs: tuple[Proof, ...]) -> dict[str, Any]:
    """The ``--json`` document."""
    told = dataclasses.asdict(facts)
    told["cgroups"] = {name: sorted(v) if isinstance(v, frozenset) else v for name, v in told["cgroups"].items()}
    return {
        "verdict": worst(findings).name,
        "findings": [{**dataclasses.asdict(finding), "level": finding.level.name} for finding in findings],
        "proofs": [proof.model_dump(mode="json") for proof in proofs],
        "facts": told,
    }


def _show_cures(findings: list[Finding]) -> None:
    commands = dict.fromkeys(command for finding in findings for command in finding.commands)  # once each, in order
    for command in commands:
        typer.echo(command)


def _show(findings: list[Finding], proofs: tuple[Proof, ...]) -> None:
    table = Table("what", "", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(finding.name, _WORDS[finding.level], escape(finding.detail))
        cures = [finding.cure, *finding.commands] if finding.level is not Level.ok else []
        for cure in filter(None, cures):
            table.add_row("", "", f"[bold]→[/] {escape(cure)}")
    console = out()
    console.print(table)
    if proofs:
        console.print(f"\n[bold]What the container proved about itself[/] ({len(proofs)})")
        console.print(_proof_table(proofs))
    console.print(f"\n{_VERDICTS[worst(findings)]}")


def _proof_table(proofs: tuple[Proof, ...]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for proof in proofs:
        failed = "[red]no[/]" if proof.required else "[yellow]no[/]"
        table.add_row(proof.name, "[green]yes[/]" if proof.holds else failed, escape(proof.detail))
        if not proof.holds and proof.cure:
            table.add_row("", "", f"[bold]→[/] {escape(proof.cure)}")
    return table
