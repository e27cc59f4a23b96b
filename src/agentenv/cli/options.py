"""Options shared by several verbs, so that they look and mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from agentenv.slots.backends.registry import Backend
from agentenv.wire.base import MAX_TIMEOUT_S

T = TypeVar("T")


class Isolation(StrEnum):
    """Isolation of the slots (:class:`agentenv.wire.spec.SandboxSpec`)."""

    auto = "auto"
    full = "full"
    user = "user"


JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document on stdout instead.")]
BackendOption = Annotated[
    Backend | None,
    typer.Option("--backend", "-b", help="local, nomad or fake; AGENTENV_BACKEND sets it for all verbs."),
]
JobOption = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="ID", help="Nomad: the job whose allocations are the containers.", show_default=False
    ),
]
NetworkOption = Annotated[
    bool, typer.Option("--network", help="Give the slot network access (never to this machine's loopback).")
]
IsolationOption = Annotated[
    Isolation,
    typer.Option(
        help="full: a uid and cgroup per slot (root). user: user namespaces, weaker. auto: full, or a refusal."
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.001, max=MAX_TIMEOUT_S, metavar="SECONDS", help="Time limit of a command."),
]
DownloadOption = Annotated[
    list[str] | None,
    typer.Option("--download", metavar="PATH[:LOCAL]", help="Copy this path of the workspace here afterwards."),
]
UploadOption = Annotated[
    list[Path] | None,
    typer.Option("--upload", exists=True, readable=True, help="Copy this file or directory into the workspace first."),
]
OwnOption = Annotated[
    bool, typer.Option("--own", help="Use a separate container even if a farm is running. Not with nomad.")
]


def backend_of(given: Backend | None) -> Backend:
    """The verb's option, otherwise (see :mod:`agentenv.cli.app`) the one before the verb or in the environment,
    otherwise local."""
    return given or Backend.local
