"""``agentenv farm page | runs | leases | drain | revoke``: look at a farm service, and take away slots,
containers or tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import FarmTokenOption, FarmUrlOption, JsonOption
from agentenv.cli.output import err, escape, out, print_json, run_to_end, verb
from agentenv.errors import ForbiddenError

if TYPE_CHECKING:
    from agentenv.farm_client.client import FarmClient
    from agentenv.wire.farm import LeaseList

RunOption = Annotated[str, typer.Option("--run", help="Those of this run.")]
TagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="NAME:VALUE",
        help="Those with this tag: environment, kind (train, eval, interactive), group or item. May be repeated.",
    ),
]


@verb
def runs(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs that hold or wait for slots, as far as the token covers them."""
    run_to_end(_runs(url, bearer, as_json))


@verb
def leases(
    run: RunOption = "",
    tag: TagOption = None,
    end: Annotated[bool, typer.Option("--end", help="End the leases; their holders get a lease_lost error.")] = False,
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the leases that the token covers, or end those of a run or with a tag.

    A rollout that loses its slot starts again on another. To keep a run from getting slots, set `paused` or `cap` in
    the farm's settings.

    \b
    Examples:
      agentenv farm leases --run exp7
      agentenv farm leases --run exp7 --tag kind:eval --end
    """
    run_to_end(_leases(run, tag or [], end, url, bearer, as_json))


@verb
def drain(
    container: Annotated[str, typer.Argument(metavar="CONTAINER", help="Container id, from `agentenv farm leases`.")],
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give no new leases on a container, and replace it when its last one has ended. Needs an admin token for `*`.

    Nobody loses a slot. Its free slots are missing to the farm until then, when another container takes its place; it
    cannot be undone.

    \b
    Examples:
      agentenv farm drain local-0-5f0c1c9e
    """
    run_to_end(_drain(container, url, bearer, as_json))


@verb
def revoke(
    jti: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `agentenv farm token` printed it.")],
    end_leases: Annotated[
        bool, typer.Option("--end-leases", help="End the token's leases now, not at their next renewal.")
    ] = False,
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a token, and those that it made. Needs an admin token for `*`.

    Its streams end and what it asks for is withdrawn, at once; its leases are not renewed.

    \b
    Examples:
      agentenv farm revoke 5f0c1c9e8a7b6d54
      agentenv farm revoke 5f0c1c9e8a7b6d54 --end-leases
    """
    run_to_end(_revoke(jti, end_leases, url, bearer, as_json))


def client_of(url: str | None, bearer: str | None) -> FarmClient:
    """A client of the farm that the options name."""
    from agentenv.farm_client.access import farm_access
    from agentenv.farm_client.client import FarmClient

    access = farm_access(url, bearer)
    return FarmClient(access.urls, access.token)


async def _runs(url: str | None, bearer: str | None, as_json: bool) -> None:
    from rich.table import Table

    async with client_of(url, bearer) as client:
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


async def _leases(run: str, tags: list[str], end: bool, url: str | None, bearer: str | None, as_json: bool) -> None:
    async with client_of(url, bearer) as client:
        if not end:
            listed = await client.leases(run, tags)
            print_json(listed.model_dump()) if as_json else _print(listed)
            return
        ended = await client.end_leases(run, tags)
    if as_json:
        print_json(ended.model_dump())
    else:
        err().print(f"ended {ended.ended} leases")


def _print(listed: LeaseList) -> None:
    from rich.table import Table

    table = Table("lease", "run", "trajectory", "kind", "environment", "group", "item")
    for lease in listed.leases:
        tags = lease.tags
        row = (lease.lease, tags.run, lease.trajectory, tags.kind, tags.environment, tags.group, tags.item)
        table.add_row(*map(escape, row))
    out().print(table)


async def _drain(container: str, url: str | None, bearer: str | None, as_json: bool) -> None:
    async with client_of(url, bearer) as client:
        draining = await client.drain(container)
    if as_json:
        print_json(draining.model_dump())
        return
    until = f"when its {draining.leases} leases have ended" if draining.leases else "now"
    err().print(f"{container} gets no new leases and is replaced {until}", markup=False, highlight=False)


async def _revoke(jti: str, end_leases: bool, url: str | None, bearer: str | None, as_json: bool) -> None:
    async with client_of(url, bearer) as client:
        revoked = await client.revoke(jti, end_leases=end_leases)
    if as_json:
        print_json(revoked.model_dump())
        return
    leases = f"{revoked.leases} leases {'ended' if revoked.ended else 'are not renewed'}"
    err().print(f"revoked: {revoked.streams} streams ended, {revoked.asks} requests withdrawn, {leases}")
    if not revoked.kept:
        err().print(f"the farm cannot store this: add {jti} to tokens.denied in its settings", highlight=False)


@verb
def page(
    url: FarmUrlOption = None,
    bearer: FarmTokenOption = None,
) -> None:
    """Print the address of the farm's page, with the token it needs: open it in a browser.

    The token is in the part of the address that browsers keep to themselves. It is the one given; of an admin of every
    run, one that only allows to look, for ten hours. Whoever gets the address can do what it allows.

    \b
    Examples:
      agentenv farm page
      agentenv farm page --url https://farm:8700 --token file:read.token
    """
    out().print(run_to_end(_page_url(url, bearer)), soft_wrap=True, markup=False, highlight=False)


async def _page_url(url: str | None, bearer: str | None) -> str:
    from agentenv.farm_client.access import farm_access, page_url
    from agentenv.farm_client.client import FarmClient
    from agentenv.wire.farm import PAGE_TOKEN_S, TokenRequest

    access = farm_access(url, bearer)
    token = access.token
    async with FarmClient(access.urls, token) as client:
        with suppress(ForbiddenError):  # then it is shown as far as the token given allows
            token = (await client.mint(TokenRequest(run="*", scope="look", expires_s=PAGE_TOKEN_S))).token
        return page_url(client.url, token)
