"""The typer application: the verbs, and the options that belong to none of them."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv._version import __version__
from agentenv.cli.bench import bench
from agentenv.cli.demo import demo
from agentenv.cli.dev import dev
from agentenv.cli.doctor import doctor
from agentenv.cli.down import down
from agentenv.cli.execute import execute
from agentenv.cli.gc import gc
from agentenv.cli.image import image
from agentenv.cli.logs import logs
from agentenv.cli.metrics import metrics
from agentenv.cli.options import RootBackendOption, for_every_verb
from agentenv.cli.output import WAYS_TO_END
from agentenv.cli.shell import shell
from agentenv.cli.slots import slots
from agentenv.cli.status import status
from agentenv.cli.tool_server import tool_server
from agentenv.cli.up import up

app = typer.Typer(
    name="agentenv",
    no_args_is_help=True,
    rich_markup_mode="rich",
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
    backend: RootBackendOption = None,
    version: Annotated[  # noqa: ARG001 - its callback has acted
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A farm of sandbox slots for reinforcement learning of LLM agents.

    Start with [bold]agentenv doctor[/bold]: what works on this machine, what is weaker, and how to fix it. Then
    [bold]agentenv exec -- uname -a[/bold]: one command in a fresh slot.

    [bold]agentenv up[/bold] runs a farm for others; [bold]status[/bold], [bold]slots[/bold] and [bold]logs[/bold]
    inspect it, [bold]down[/bold] ends it, here or on a Nomad cluster (--backend nomad).
    """
    for_every_verb(context, backend)


app.command()(doctor)
app.command(name="exec")(execute)
app.command()(shell)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(demo)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
app.command()(gc)
app.command()(up)
app.command()(down)
app.command()(status)
app.command()(slots)
app.command()(logs)
app.command()(metrics)
app.command(name="tool-server")(tool_server)
app.add_typer(image, name="image")
app.add_typer(dev, name="dev")
