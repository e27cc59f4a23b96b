"""Options several verbs share, so that they read and mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentenv.wire.base import MAX_TIMEOUT_S


class Isolation(StrEnum):
    """How slots are kept apart (:class:`agentenv.wire.spec.SandboxSpec`)."""

    auto = "auto"
    full = "full"
    user = "user"


JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document on stdout instead.")]
NetworkOption = Annotated[
    bool, typer.Option("--network", help="Let the slot reach the outside (never this machine's loopback).")
]
IsolationOption = Annotated[
    Isolation,
    typer.Option(help="full: a uid and cgroup per slot (root). user: user namespaces. auto: the best there is."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.001, max=MAX_TIMEOUT_S, metavar="SECONDS", help="The longest a command may run."),
]
UploadOption = Annotated[
    list[Path] | None,
    typer.Option("--upload", exists=True, readable=True, help="Copy this file or directory into the workspace first."),
]
