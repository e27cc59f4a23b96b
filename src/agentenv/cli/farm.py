"""``agentenv farm serve | page | token | runs``: one farm of slots for many training runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import FarmTokenOption, FarmUrlOption, JsonOption, group
from agentenv.cli.output import (
    InterruptedBySignalError,
    debugging,
    err,
    escape,
    out,
    print_json,
    print_json_line,
    run_to_end,
    verb,
)
from agentenv.errors import ConfigError

if TYPE_CHECKING:  # their imports are in [farm]; they are imported when a verb runs
    from agentenv.api.farm_server.service import Listening, Service
    from agentenv.api.farm_server.settings import FarmSettings, SettingsFile

farm = group("A farm service: one farm of slots for many training runs.")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Its TOML file: containers, shares, keys (docs/farm.md)."),
]


@farm.command()
@verb
def serve(
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8700,
    url: Annotated[str, typer.Option(help="Its address for others, if that is not where it listens.")] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): speak TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the farm until Ctrl-C.

    Its containers and their leases stay when it ends, however it ends: the next one adopts them. Without a config the
    containers run on this machine.

    \b
    Examples:
      agentenv farm serve
      agentenv farm serve --config farm.toml --host 0.0.0.0
      agentenv farm token --run exp7 > exp7.token
    """
    from agentenv.api.farm_server.service import Listening

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert, --tls-key", "only one is given", next_step="give both, or neither")
    if not debugging():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        run_to_end(_serve(config, Listening(host, port, tls_cert, tls_key), url, as_json))
    except InterruptedBySignalError as ended:
        err().print(f"interrupted by {ended}; containers and leases stay for the next service")


@farm.command()
@verb
def token(
    run: Annotated[str, typer.Option(help="The run: exp7, team/exp7, team/* (every run of the team), * (every run).")],
    scope: Annotated[
        str, typer.Option(help="read: look. run: lease, too. admin: everything.", metavar="read|run|admin")
    ] = "run",
    cap: Annotated[int | None, typer.Option(min=1, help="Most slots at once by this token.")] = None,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="How long it is valid.")] = 30.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token for a run, on the machine that has the farm's key. It is printed on stdout.

    \b
    Examples:
      agentenv farm token --run exp7 > exp7.token
      agentenv farm token --run 'vision/*' --days 7 --config farm.toml
    """
    from agentenv.api.farm_server.audit import FarmAudit
    from agentenv.api.farm_server.tokens import TokenKeys

    scopes = {"read": "read", "run": "run", "admin": "admin"}
    if scope not in scopes:
        raise ConfigError("--scope", f"got {scope!r}", next_step="allowed: read, run, admin")
    settings = _settings(config)
    keys = TokenKeys.read(settings.tokens.key_files)
    expires_s = days * 86_400
    made = keys.mint(run, scope, cap=cap, expires_s=expires_s)  # type: ignore[arg-type]  # checked above
    right = keys.verify(made)
    audit = FarmAudit(settings.audit_log)
    audit.token_minted("operator", run, right.jti, scope=scope, cap=cap, expires_s=expires_s)
    audit.close()
    if as_json:
        print_json({"token": made, "jti": right.jti, "run": run, "scope": scope, "cap": cap, "days": days})
        return
    out().print(made, soft_wrap=True, markup=False, highlight=False)
    err().print(f"valid for {days:g} days; to revoke it, add {right.jti} to tokens.denied", highlight=False)


@farm.command()
@verb
def page(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
) -> None:
    """Print the address of the farm's page, with the token it needs: open it in a browser.

    The token is in the part of the address that browsers keep to themselves. Whoever gets the address can do what the
    token allows.

    \b
    Examples:
      agentenv farm page
      agentenv farm page --url https://farm:8700 --token file:read.token
    """
    from agentenv.slots.farm_access import farm_access, page_url

    access = farm_access(url, bearer)
    out().print(page_url(access.urls[0], access.token), soft_wrap=True, markup=False, highlight=False)


@farm.command()
@verb
def runs(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs that hold or wait for slots, as far as the token covers them."""
    run_to_end(_runs(url, bearer, as_json))


async def _runs(url: str | None, bearer: str | None, as_json: bool) -> None:
    from rich.table import Table

    from agentenv.slots.farm_access import farm_access
    from agentenv.slots.farm_client import FarmClient

    access = farm_access(url, bearer)
    async with FarmClient(access.urls, access.token) as client:
        listed = await client.runs()
    if as_json:
        print_json(listed.model_dump())
        return
    table = Table("run", "holds", "fair share", "waits for", "longest wait", "weight", "guaranteed", "cap")
    for run in listed.runs:
        wait = "" if run.oldest_wait_s is None else f"{run.oldest_wait_s:.0f} s"
        share = run.share
        table.add_row(
            escape(run.run), str(sum(run.held.values())), f"{run.fair_share:.1f}", str(run.waiting), wait,
            f"{share.weight:g}", str(share.guaranteed), "" if share.cap is None else str(share.cap),
        )  # fmt: skip
    out().print(table)


def _file(config: Path | None) -> SettingsFile | FarmSettings:
    from agentenv.api.farm_server.settings import SettingsFile

    return SettingsFile(config) if config is not None else _settings(None)


def _settings(config: Path | None) -> FarmSettings:
    """Without a file: a farm of this machine and user, with its key in the state directory."""
    from agentenv.api.farm_server.settings import FarmSettings
    from agentenv.config import state_dir

    return FarmSettings.from_file(config) if config is not None else FarmSettings().below(state_dir())


async def _serve(config: Path | None, listening: Listening, url: str, as_json: bool) -> None:
    from agentenv.api.farm_server.service import farm_service

    async with farm_service(_file(config), listening, url=url) as service:
        await service.opening
        _announce(service, as_json)
        await service.run()


def _announce(service: Service, as_json: bool) -> None:
    from agentenv.slots.farm_access import page_url

    farm = service.farm
    if as_json:
        print_json_line({"event": "ready", "url": service.url, "farm": farm.name, "generation": farm.generation})
        return
    err().print(f"[green]listening[/] on {service.url} · farm {farm.name} · Ctrl-C ends the service, not the leases")
    # A log would keep the token.
    address = page_url(service.url, service.page_token()) if err().is_terminal else "agentenv farm page"
    err().print(f"its page: {address}", soft_wrap=True, markup=False, highlight=False)
    err().print("a token for a run: agentenv farm token --run NAME > NAME.token", highlight=False)
