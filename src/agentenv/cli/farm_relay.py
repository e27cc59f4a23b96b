"""``agentenv farm relay``: a way to the containers for clients that cannot reach them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import FarmTokenOption, FarmUrlOption, JsonOption
from agentenv.cli.output import InterruptedBySignalError, announce, debugging, err, run_to_end, verb
from agentenv.errors import ConfigError, FarmUnreachableError

if TYPE_CHECKING:
    import ssl


@verb
def relay(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8701,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM): speak TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
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
        err().print(f"ended by {ended}; clients go on through another relay")


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
    from agentenv.api.farm_server.relay import serve_relay
    from agentenv.api.farm_server.relay_directory import FarmContainers
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
