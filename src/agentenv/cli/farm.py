"""``agentenv farm``: one farm of slots for many training runs."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.farm_admin import client_of, drain, leases, page, revoke, runs
from agentenv.cli.options import FarmTokenOption, FarmUrlOption, JsonOption, group
from agentenv.cli.output import (
    InterruptedBySignalError,
    announce,
    debugging,
    err,
    out,
    print_json,
    run_to_end,
    verb,
)
from agentenv.errors import ConfigError, FarmUnreachableError

if TYPE_CHECKING:  # their imports are in [farm]; they are imported when a verb runs
    import ssl

    from agentenv.api.farm_server.service import Listening, Service
    from agentenv.api.farm_server.settings import FarmSettings, SettingsFile
    from agentenv.farm.local import FarmNotice
    from agentenv.wire.farm import MintedToken, Scope

farm = group("A farm service: one farm of slots for many training runs.")
_DAY_S = 86_400

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file (TOML): containers, shares, keys (docs/farm.md)."),
]


@farm.command()
@verb
def serve(
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8700,
    url: Annotated[str, typer.Option(help="Public URL, if it differs from the listen address.")] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): speak TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM).")] = None,
    e2b: Annotated[bool, typer.Option("--e2b", help="Serve E2B's API, too (docs/e2b.md).")] = False,
    template: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=IMAGE", help="With --e2b: an image that sandboxes begin from. Repeatable."),
    ] = None,
    envd: Annotated[Path | None, typer.Option(help="With --e2b: E2B's envd, if e2b-build did not build it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the farm until Ctrl-C.

    Its containers and their leases stay when it ends, however it ends: the next one adopts them. Without a config the
    containers run on this machine.

    \b
    Examples:
      agentenv farm serve
      agentenv farm serve --config farm.toml --host 0.0.0.0
      agentenv farm serve --e2b --template base=debian:bookworm
      agentenv farm token --run exp7 > exp7.token
    """
    from agentenv.api.farm_server.service import Listening

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert, --tls-key", "only one is given", next_step="give both, or neither")
    if not debugging():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if not e2b and (template or envd):
        raise ConfigError("--template, --envd", "are for E2B's API", next_step="add --e2b")
    served = _E2B(_templates(template or ()), envd) if e2b else None
    try:
        run_to_end(_serve(config, Listening(host, port, tls_cert, tls_key), url, as_json, served))
    except InterruptedBySignalError as ended:
        stay = "unless `agentenv down` ends them, containers and leases stay for the next service"
        err().print(f"interrupted by {ended}; {stay}", soft_wrap=True)


@farm.command()
@verb
def e2b_build(
    source: Annotated[
        str | None, typer.Option(metavar="REPOSITORY", help="Where git fetches E2B's sources: a URL or a directory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build E2B's envd for `agentenv farm serve --e2b`, from E2B's own sources, with git and Go 1.26.

    It is not part of agentenv; its licence (Apache-2.0) lies beside it. It takes some minutes, once.

    \b
    Examples:
      agentenv farm e2b-build
      agentenv farm e2b-build --source /srv/mirrors/e2b-infra
    """
    from agentenv.e2b.build import SOURCE, build_envd

    def report(line: str) -> None:
        err().print(line, highlight=False, markup=False, soft_wrap=True)

    program = build_envd(report, source or SOURCE)
    if as_json:
        print_json({"envd": str(program)})
    else:
        out().print(str(program), soft_wrap=True, markup=False, highlight=False)


@farm.command()
@verb
def token(
    run: Annotated[str, typer.Option(help="The run: exp7, team/exp7, team/* (every run of the team), * (every run).")],
    scope: Annotated[
        str,
        typer.Option(
            help="read: see. look: what slots print, too. run: lease, too. admin: everything.",
            metavar="read|look|run|admin",
        ),
    ] = "run",
    cap: Annotated[int | None, typer.Option(min=1, help="Most slots at once by this token.")] = None,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="How long it is valid.")] = 30.0,
    config: ConfigOption = None,
    url: Annotated[str | None, typer.Option(help="Have it made by the farm at this address.")] = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token for a run; it is printed on stdout.

    On the machine that has the farm's key (`agentenv farm serve` creates it) it is made here. Elsewhere --url has the
    farm make it, by an admin's token: it then allows no more than that one.

    \b
    Examples:
      agentenv farm token --run exp7 > exp7.token
      agentenv farm token --run 'vision/*' --days 7 --config farm.toml
      agentenv farm token --run vision/exp7 --url https://farm:8700
    """
    scopes: dict[str, Scope] = {"read": "read", "look": "look", "run": "run", "admin": "admin"}
    if scope not in scopes:
        raise ConfigError("--scope", f"got {scope!r}", next_step=f"allowed: {', '.join(scopes)}")
    if url is None:
        made = _mint(config, run, scopes[scope], cap, days)
    elif config is not None:
        raise ConfigError("--config, --url", "both are given", next_step="give --url alone: the farm has the key")
    else:
        made = run_to_end(_ask_for(url, bearer, run, scopes[scope], cap, days))
    if as_json:
        print_json({**made.model_dump(exclude={"expires_s"}), "days": days})
        return
    out().print(made.token, soft_wrap=True, markup=False, highlight=False)
    err().print(f"valid for {days:g} days; to revoke it: agentenv farm revoke {made.jti}", highlight=False)


for each in (page, runs, leases, drain, revoke):
    farm.command()(each)


def _mint(config: Path | None, run: str, scope: Scope, cap: int | None, days: float) -> MintedToken:
    from agentenv.api.farm_server.audit import FarmAudit
    from agentenv.api.farm_server.tokens import TokenKeys
    from agentenv.wire.farm import MintedToken

    settings = _settings(config)
    keys = TokenKeys.read(settings.tokens.key_files)
    expires_s = days * _DAY_S
    made = keys.mint(run, scope, cap=cap, expires_s=expires_s)
    right = keys.verify(made)
    audit = FarmAudit(settings.audit_log)
    audit.token_minted("operator", run, right.jti, scope=scope, cap=cap, expires_s=expires_s)
    audit.close()
    return MintedToken(token=made, jti=right.jti, run=run, scope=scope, cap=cap, expires_s=expires_s)


async def _ask_for(url: str, bearer: str | None, run: str, scope: Scope, cap: int | None, days: float) -> MintedToken:
    from agentenv.wire.farm import TokenRequest

    try:
        request = TokenRequest(run=run, scope=scope, cap=cap, expires_s=days * _DAY_S)
    except ValueError as error:
        raise ConfigError("--run", f"got {run!r}", next_step="allowed: exp7, team/exp7, team/*, *") from error
    async with client_of(url, bearer) as client:
        return await client.mint(request)


def _file(config: Path | None) -> SettingsFile | FarmSettings:
    from agentenv.api.farm_server.settings import SettingsFile

    return SettingsFile(config) if config is not None else _settings(None)


def _settings(config: Path | None) -> FarmSettings:
    """Without a file: a farm of this machine and user, with its key in the state directory."""
    from agentenv.api.farm_server.settings import FarmSettings
    from agentenv.config import state_dir

    return FarmSettings.from_file(config) if config is not None else FarmSettings().below(state_dir())


@dataclass(frozen=True)
class _E2B:
    """What the command line says of E2B's API."""

    templates: Mapping[str, str]
    envd: Path | None


def _templates(given: Iterable[str]) -> dict[str, str]:
    """Images by name. Raises ConfigError."""
    pairs = [text.partition("=") for text in given]
    for name, equals, image in pairs:
        if not (name and image):
            raise ConfigError("--template", f"got {name + equals + image!r}", next_step="allowed: NAME=IMAGE")
    return {name: image for name, _, image in pairs}


async def _serve(config: Path | None, listening: Listening, url: str, as_json: bool, e2b: _E2B | None = None) -> None:
    from agentenv.api.farm_server.service import farm_service
    from agentenv.api.farm_server.settings import SettingsFile
    from agentenv.farm.local import Watched

    source = _file(config)
    if e2b is not None and not isinstance(source, SettingsFile):
        # E2B's sandboxes have the internet unless they ask for none.
        source = source.model_copy(update={"containers": source.containers.model_copy(update={"allow_network": True})})
    settings = source.settings if isinstance(source, SettingsFile) else source
    with _noticed(settings) as notice:
        around = (lambda backend: Watched(backend, notice)) if notice is not None else (lambda backend: backend)
        async with farm_service(source, listening, url=url, around=around) as service:
            await service.opening
            if notice is not None:
                service.user.tell(lambda token: notice.publish(url=service.url, token=token))
            async with AsyncExitStack() as stack:
                if e2b is not None:
                    address = await stack.enter_async_context(_e2b_served(service, listening, settings, e2b))
                    announce({"e2b": address}, f"[green]E2B's API[/] on {address}", as_json=as_json)
                _announce(service, config, as_json)
                await service.run()


def _e2b_served(
    service: Service, listening: Listening, settings: FarmSettings, given: _E2B
) -> AbstractAsyncContextManager[str]:
    from agentenv.config import cache_dir
    from agentenv.e2b.build import built
    from agentenv.e2b.service import Where, serve_e2b

    where = Where(listening.host, settings.e2b.port, service.url, cache_dir() / "e2b" / settings.name)
    templates = {**settings.e2b.templates, **given.templates}
    program = given.envd or settings.e2b.envd or built()
    return serve_e2b(where, program, templates, service.right_of, settings.containers.limits)


@contextmanager
def _noticed(settings: FarmSettings) -> Iterator[FarmNotice | None]:
    """Let the other verbs find a farm of this machine, if they do not find another already."""
    from agentenv.farm.local import noticed
    from agentenv.slots.backends.registry import Backend

    backend = Backend(settings.backend)
    with ExitStack() as stack:
        notice = None
        if backend is not Backend.nomad:
            with suppress(ConfigError):
                notice = stack.enter_context(noticed(backend, settings.pool.min_containers, farm=settings.name))
        yield notice


def _announce(service: Service, config: Path | None, as_json: bool) -> None:
    from agentenv.farm_client.access import page_url

    farm = service.farm
    line = f"[green]listening[/] on {service.url} · farm {farm.name} · Ctrl-C ends the service, not the leases"
    announce({"url": service.url, "farm": farm.name, "generation": farm.generation}, line, as_json=as_json)
    if as_json:
        return
    # A log would keep the token.
    address = page_url(service.url, service.page_token()) if err().is_terminal else "agentenv farm page"
    err().print(f"page: {address}", soft_wrap=True, markup=False, highlight=False)
    given = "" if config is None else f" --config {shlex.quote(str(config.absolute()))}"
    made = f"(umask 077; agentenv farm token{given} --run NAME > NAME.token)"
    err().print(f"a token for a run: {made}", soft_wrap=True, markup=False, highlight=False)


@farm.command()
@verb
def relay(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8701,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): speak TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pass calls on to the containers, for clients that cannot reach them, until Ctrl-C.

    It needs a token of scope `read`, only to learn where the containers are; what a client may do is decided by the
    container, with the client's own pass. Run as many as you like behind one address, and name that address in the
    farm's settings (`relay_url`): clients then choose by themselves whether they need it (`farm_route`).

    \b
    Examples:
      agentenv farm token --run '*' --scope read > relay.token
      agentenv farm relay --url https://farm:8700 --token file:relay.token --host 0.0.0.0
    """
    context = _tls(tls_cert, tls_key)
    if not debugging():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        run_to_end(_relay(url, bearer, host, port, context, as_json))
    except InterruptedBySignalError as ended:
        err().print(f"ended by {ended}; clients continue through another relay")


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    import ssl

    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert, --tls-key", "only one is given", next_step="give both, or neither")
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # an SSLError is one
        raise ConfigError("--tls-cert", f"{certificate} with {key} cannot be used: {error}") from error
    return context


async def _relay(
    url: str | None, bearer: str | None, host: str, port: int, tls: ssl.SSLContext | None, as_json: bool
) -> None:
    from agentenv.api.farm_server.relay import FarmContainers, serve_relay
    from agentenv.farm_client.access import farm_access
    from agentenv.farm_client.client import FarmClient

    access = farm_access(url, bearer)
    async with FarmClient(access.urls, access.token, renew=access.renew) as client:
        with suppress(FarmUnreachableError):  # farms restart; until then the relay is not ready
            await client.containers()  # a wrong token ends it here, with the reason
        async with (
            FarmContainers(client) as containers,
            serve_relay(containers, host=host, port=port, tls=tls, problem=lambda: containers.problem) as address,
        ):
            line = f"[green]listening[/] on {address} · relay to the containers of {client.url} · Ctrl-C ends it"
            announce({"url": address, "farm": client.url}, line, as_json=as_json)
            await asyncio.Event().wait()
