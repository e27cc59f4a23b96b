"""The typer application: the verbs, and the options that belong to none of them."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from agentenv._version import __version__
from agentenv.cli.options import Group
from agentenv.slots.backends.registry import Backend

VERBS: Final = {
    "doctor": "Show what works on this machine, what is weaker, and how to fix it. Changes nothing.",
    "exec": "Run one command in a fresh slot; its output and exit code become this command's.",
    "shell": "A terminal in a fresh slot; leaving wipes it.",
    "new": "Start a project: an environment, its test and its settings.",
    "demo": "Repair real programs in a farm, on this machine or on a Nomad cluster, and write a page about it.",
    "bench": "Measure throughput, latency and isolation against their baselines, in one run.",
    "gc": "Remove orphaned resources. Anything still in use is left alone.",
    "up": "Start a farm and wait until every container is ready.",
    "down": "End the farm and everything that runs in it. Does nothing if there is none.",
    "status": "Show containers, nodes, slots by state, the queue, recent failures, and what Nomad is waiting for.",
    "slots": "List every slot: its state and age, its lease and expiry, and the running command.",
    "logs": "Show what the farm's containers log: supervisor, sandbox server, reasons of failed starts.",
    "metrics": "Serve the Prometheus metrics of a farm's containers at one address, until Ctrl-C.",
    "mcp": "Give clients of the Model Context Protocol a slot each: its shell, its files, its terminals.",
    "tool-server": "Run external tools (web search, web pages, a browser, your own) outside the sandbox.",
    "tasks": "Task directories of Harbor and Terminal-Bench: list, check and play them.",
    "agents": "Agent programs of others, as the agents of environments: list their recipes, and try one in a slot.",
    "report": "Write the HTML page of a run's rollouts: scores, errors, every turn and call.",
    "view": "Serve the page of a run on this machine until Ctrl-C; it follows a running run.",
    "runs": "Runs of environments: list and show them, resume one, compare several, see them on one page.",
    "image": "Manage the image that containers of a Nomad farm run.",
    "images": "Manage this machine's store of images, which slots use as their root.",
    "farm": "A farm service: one farm of slots for many training runs.",
    "sandboxes": "Sandboxes with names, of a farm service: list, pause, resume and kill them.",
    "dev": "A Nomad cluster on this machine, for development.",
}
"""The verbs and the first paragraph of their help, so that listing them imports none."""
VERBS_WITH_BACKEND: Final = (
    "up", "down", "status", "slots", "logs", "metrics", "exec", "shell", "mcp", "gc", "demo", "bench",
)  # fmt: skip
_FUNCTIONS: Final = {"exec": "execute", "tool-server": "tool_server"}
"""Names of verbs that are not names of Python. A verb's module has the name of its function."""
_ABOVE: Final = {"tasks": "agentenv.tasks.command"}
"""Modules of verbs that are no part of the package ``cli``, since what they do imports environments."""
_FORWARDING: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_PARSING: Final = {"exec": {"allow_interspersed_args": False}, "demo": _FORWARDING, "bench": _FORWARDING}
"""Of `exec`, everything from the command on is the command's, as with docker and ssh; `demo` and `bench` pass on the
arguments they do not know."""
WAYS_TO_END: Final = (
    "Exit codes: 0 done · 1 something is degraded · 2 wrong usage or setting · 124 the command timed out · "
    "125 agentenv itself failed · 128+n ended by signal n. AGENTENV_DEBUG=1 shows logs and tracebacks."
)


class Verbs(Group):
    """The verbs, listed from the table; a verb's module is imported when the verb is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, summary in VERBS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The verb itself in place of its entry in the list."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else imported(name), rest


def imported(name: str) -> Any:
    """The command of this verb: what it does, its options and its help."""
    function = _FUNCTIONS.get(name, name)
    verb = getattr(importlib.import_module(_ABOVE.get(name, f"agentenv.cli.{function}")), function)
    if isinstance(verb, typer.Typer):
        return typer.main.get_command(verb)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, context_settings=_PARSING.get(name))(verb)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="agentenv",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich would cost more than all the rest of it, and wraps no paragraphs
    pretty_exceptions_enable=False,  # our own errors are presented; all others get a plain traceback
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=WAYS_TO_END,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"agentenv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    backend: Annotated[
        Backend | None,
        typer.Option(
            "--backend",
            "-b",
            envvar="AGENTENV_BACKEND",
            show_envvar=True,
            help="Where containers run. local (the default): processes on this machine; nomad: a cluster "
            "(NOMAD_ADDR, NOMAD_TOKEN, …); fake: no isolation, for tests. Applies to every verb with --backend.",
        ),
    ] = None,
    version: Annotated[  # noqa: ARG001 - its callback has acted
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A farm of sandbox slots for reinforcement learning of LLM agents.

    Start with `agentenv doctor`: what works on this machine, what is weaker, and how to fix it. Then
    `agentenv exec uname -a`: one command in a fresh slot.

    `agentenv up` runs a farm for others; `status`, `slots` and `logs` inspect it, `down` ends it, here or on a Nomad
    cluster (--backend nomad).
    """
    if backend is not None:
        context.default_map = {name: {"backend": backend.value} for name in VERBS_WITH_BACKEND}
