"""Options shared by several verbs, so that they look and mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend

if TYPE_CHECKING:
    from agentenv.store import Store

LONGEST_TIMEOUT_S: Final = 24 * 3600.0
"""The wire's MAX_TIMEOUT_S, whose import would cost every Tab press that of pydantic."""


class Group(TyperGroup):
    """A group of verbs that is listed with their whole summaries; click cuts each to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the list."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, (one.help or "").partition("\n\n")[0]) for name, one in self.commands.items()])


def group(about: str) -> typer.Typer:
    """A verb that has verbs of its own; ``about`` is its help."""
    return typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=about)


class Isolation(StrEnum):
    """Isolation of the slots (:class:`agentenv.wire.spec.SandboxSpec`)."""

    auto = "auto"
    full = "full"
    user = "user"


JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document on stdout instead.")]
BackendOption = Annotated[
    Backend | None,
    typer.Option("--backend", "-b", help="Where slots run; AGENTENV_BACKEND sets it for all verbs."),
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
        help="full: a uid and cgroup per slot (root). user: user namespaces, weaker. auto: full, or a refusal; "
        "AGENTENV_ISOLATION=user makes it user."
    ),
]
FarmUrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The farm's address; by default AGENTENV_FARM_URL, else the service of this machine."),
]
FarmTokenOption = Annotated[
    str | None,
    typer.Option("--token", help="A token of the farm, or file:PATH; by default AGENTENV_FARM_TOKEN."),
]
FarmOption = Annotated[
    bool,
    typer.Option(
        "--farm",
        help="Take the slot from a farm service: AGENTENV_FARM_URL and AGENTENV_FARM_TOKEN, else that of this machine.",
    ),
]
GuestOption = Annotated[
    bool,
    typer.Option("--guest", help="Take a slot of a job that a service or a trainer controls, past its queue."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Time limit of a command, at most a day; inf: none."),
]
WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        min=0.001,
        max=LONGEST_TIMEOUT_S,
        metavar="SECONDS",
        help="How long to wait for a container to start, or for a free slot of a farm; 30 by default.",
    ),
]
DownloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--download",
        metavar="PATH[:LOCAL]",
        help="Copy this path (relative to the workspace) to this machine afterwards.",
    ),
]
UploadOption = Annotated[
    list[Path] | None,
    typer.Option("--upload", exists=True, readable=True, help="Copy this file or directory into the workspace first."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting of the containers (of up: and of the pool), as in a farm's file: limits.open_files=1024, "
        "spare_shells=false (docs/settings.md); repeatable, and stronger than the other options.",
    ),
]
OwnOption = Annotated[
    bool, typer.Option("--own", help="Use a separate container even if a farm is running. Not with nomad.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The store's directory; by default store in the cache directory."),
]
AuthFileOption = Annotated[
    Path | None,
    typer.Option("--auth-file", metavar="FILE", help="Credentials, as docker login and skopeo login write them."),
]
TlsVerifyOption = Annotated[
    bool, typer.Option("--tls-verify/--no-tls-verify", help="Require a valid certificate of registries.")
]
MirrorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror", metavar="PREFIX=OTHER", help="Fetch images that begin with PREFIX from OTHER; repeatable."
    ),
]


def backend_of(given: Backend | None) -> Backend:
    """The verb's option, otherwise (see :mod:`agentenv.cli.app`) the one before the verb or in the environment,
    otherwise local."""
    return given or Backend.local


def opened_store(
    directory: Path | None = None,
    auth_file: Path | None = None,
    tls_verify: bool = True,
    mirror: list[str] | None = None,
) -> Store:
    """The image store of ``--store``, whose registries are asked as the other options say. Raises ConfigError."""
    from agentenv.config import cache_dir
    from agentenv.store import RegistrySettings, Store

    registries = RegistrySettings(auth_file, tls_verify, _mirrors(mirror or []))
    return Store.open(directory or cache_dir() / "store", registries=registries)


def _mirrors(given: list[str]) -> dict[str, str]:
    """``--mirror`` options. Raises ConfigError."""
    found = {}
    for text in given:
        prefix, equals, other = text.partition("=")
        if not prefix or not equals or not other:
            raise ConfigError("--mirror", f"got {text!r}", next_step="write PREFIX=OTHER: docker.io=mirror.example/hub")
        found[prefix.rstrip("/")] = other.rstrip("/")
    return found
