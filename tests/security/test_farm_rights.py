"""Who may do what at the farm service: every route and every kind of token, in one table."""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp
import jwt
import pytest
import pytest_asyncio
from starlette.routing import Route

from agentenv.api.farm_server.access import ROUTES, Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.settings import OpenPages
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.sandbox.server.access import bearer_of
from agentenv.sandbox.server.leases import Lease
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.leases import LeaseRequest
from agentenv.wire.passes import make_pass
from agentenv.wire.server import ErrorReply
from tests.farm_service import KEY, KEYS, TOKEN_S, Served, served, token
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN: Final = "team/exp7"
"""The run that every request in the table is about."""
ASK: Final = "an-ask-of-the-table"
SENDERS: Final = ("nobody", "read", "run", "team", "admin", "other", "other-admin", "operator")
TABLE: Final = """
                                                nobody read run team admin other other-admin operator
GET /health                                        200  200 200  200   200   200         200      200
GET /ready                                         200  200 200  200   200   200         200      200
GET /openapi.json                                  401  200 200  200   200   200         200      200
GET /v1/farm                                       401  200 200  200   200   200         200      200
POST /v1/asks                                      401  403 200  200   200   403         403      200
GET /v1/asks/{request_id}                          401  403 200  200   200   403         403      200
DELETE /v1/asks/{request_id}                       401  403 200  200   200   403         403      200
GET /v1/news                                       401  403 200  200   200   403         403      200
GET /v1/leases                                     401  200 200  200   200   200         200      200
POST /v1/leases/release                            401  403 200  200   200   200         200      200
DELETE /v1/leases                                  401  403 200  200   200   200         200      200
DELETE /v1/paused                                  401  403 200  200   200   200         200      200
GET /v1/paused                                     401  403 200  200   200   200         200      200
DELETE /v1/leases/{container}/{slot}/{epoch}       401  403 200  200   200   200         200      200
GET /v1/runs                                       401  200 200  200   200   200         200      200
DELETE /v1/runs/{run:path}                         401  403 403  403   200   403         403      200
GET /v1/containers                                 401  200 200  200   200   200         200      200
POST /v1/containers/{container}/drain              401  403 403  403   403   403         403      404
POST /v1/images                                    401  403 200  200   200   200         200      200
POST /v1/images/commit                             401  403 400  400   400   403         403      400
GET /v1/images                                     401  200 200  200   200   200         200      200
POST /v1/tokens                                    401  403 403  403   200   403         403      200
DELETE /v1/tokens/{jti}                            401  403 403  403   403   403         403      200
GET /                                              200  200 200  200   200   200         200      200
GET /page.js                                       200  200 200  200   200   200         200      200
GET /page.css                                      200  200 200  200   200   200         200      200
GET /metrics                                       401  200 200  200   200   200         200      200
GET /v1/sight                                      401  200 200  200   200   200         200      200
GET /v1/sight/changes                              401  200 200  200   200   200         200      200
GET /v1/leases/{container}/{slot}/{epoch}/tail     401  403 404  404   404   404         404      404
POST /execute                                      401  403 200  200   200   403         403      200
POST /release                                      401  403 200  200   200   403         403      200
POST /artifacts/read                               401  403 404  404   404   403         403      404
POST /artifacts/list                               401  403 404  404   404   403         403      404
POST /artifacts/archive                            401  403 404  404   404   403         403      404
GET /status                                        401  200 200  200   200   200         200      200
"""
"""Where somebody else's token gets a 200, it finds nothing: see the test below the table's."""
REQUESTS: Final[Mapping[str, tuple[str, Any]]] = {
    "POST /v1/asks": ("/v1/asks", {"run": RUN, "asks": [{"request_id": ASK, "trajectories": ["t"]}]}),
    "GET /v1/asks/{request_id}": (f"/v1/asks/{ASK}?run={RUN}", None),
    "DELETE /v1/asks/{request_id}": (f"/v1/asks/{ASK}?run={RUN}", None),
    "GET /v1/news": (f"/v1/news?client=c&run={RUN}", None),
    "POST /v1/leases/release": ("/v1/leases/release", {"leases": ["nowhere/0/1"]}),
    "DELETE /v1/leases": (f"/v1/leases?run={RUN}", None),
    "DELETE /v1/paused": (f"/v1/paused?run={RUN}&trajectory=t", None),
    "DELETE /v1/leases/{container}/{slot}/{epoch}": ("/v1/leases/nowhere/0/1", None),
    "DELETE /v1/runs/{run:path}": (f"/v1/runs/{RUN}", None),
    "POST /v1/containers/{container}/drain": ("/v1/containers/nowhere/drain", None),
    "POST /v1/images": ("/v1/images", {"references": [], "images": []}),
    "POST /v1/images/commit": (
        "/v1/images/commit",
        {"container": "nowhere", "checkpoint": "0" * 32, "image": f"sha256:{'0' * 64}", "run": RUN},
    ),
    "POST /v1/tokens": ("/v1/tokens", {"run": RUN, "expires_s": 60}),
    "DELETE /v1/tokens/{jti}": ("/v1/tokens/nobodys", None),
    "GET /v1/leases/{container}/{slot}/{epoch}/tail": ("/v1/leases/nowhere/0/1/tail", None),
    "POST /execute": (
        "/execute",
        {"run": RUN, "trajectory_id": "t", "tool": {"name": "bash", "arguments": {"command": "true"}}},
    ),
    "POST /release": ("/release", {"run": RUN, "trajectory_id": "t"}),
    **{
        f"POST /artifacts/{verb}": (f"/artifacts/{verb}", {"run": RUN, "trajectory_id": "nobody", "path": "file"})
        for verb in ("read", "list", "archive")
    },
}
"""Paths and bodies of the others are as in the table."""


def expected() -> dict[str, dict[str, int]]:
    """Status by route and sender."""
    _, *lines = TABLE.strip().splitlines()
    cells = [line.rsplit(maxsplit=len(SENDERS)) for line in lines]
    return {route: dict(zip(SENDERS, map(int, statuses), strict=True)) for route, *statuses in cells}


def forged(given: str, **changes: Any) -> str:
    """A token with other claims, signed by the farm's key (or, of ``key``, by another)."""
    key = changes.pop("key", KEY)
    claims = {**jwt.decode(given, options={"verify_signature": False}), **changes}
    return jwt.encode(claims, key, algorithm="HS256", headers={"kid": jwt.get_unverified_header(given)["kid"]})


DENIED: Final = token("*", "admin")
NOBODIES: Final = {
    "none": None,
    "empty": "",
    "garbage": "garbage",
    "expired": forged(token("*", "admin"), exp=1),
    "of another key": forged(token("*", "admin"), key="another key, as long as it has to be"),
    "denied": DENIED,
}
TOKENS: Final = {
    "read": token(RUN, "read"),
    "run": token(RUN, "run"),
    "team": token("team/*", "run"),
    "admin": token(RUN, "admin"),
    "other": token("team/exp8", "run"),
    "other-admin": token("others/*", "admin"),
    "operator": token("*", "admin"),
}


@dataclasses.dataclass(frozen=True)
class Site:
    """The farm, and how it is asked."""

    farm: Served
    http: aiohttp.ClientSession

    async def ask(self, route: str, bearer: str | None, **changed: Any) -> tuple[int, Any]:
        """Status and body; of a stream, its first line."""
        method, template = route.split()
        path, body = REQUESTS.get(route, (template, None))
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        request = {"headers": headers, "json": body, "allow_redirects": False, **changed}
        async with self.http.request(method, self.farm.url + path, **request) as answer:
            if answer.content_type == "application/x-ndjson":
                return answer.status, await answer.content.readline()
            if answer.content_type != "application/json":
                return answer.status, await answer.text()
            return answer.status, await answer.json()

    async def lease(self, run: str) -> str:
        """A lease of that run."""
        asked = {"run": run, "wait_s": 25, "asks": [{"request_id": secrets.token_hex(8), "trajectories": ["t"]}]}
        _, reply = await self.ask("POST /v1/asks", TOKENS["operator"], json=asked)
        (grant,) = reply["asks"][0]["leases"]
        return str(grant["lease"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    backend = FakeBackend(ContainerSettings(slots_per_container=4))
    access = Access(KEYS, denied={KEYS.verify(DENIED).jti})
    settings = PoolSettings(min_containers=2, max_containers=2)
    async with served(backend, settings, access=access) as farm, aiohttp.ClientSession() as http:
        await until(lambda: len(farm.farm.manager.links) == 2)
        yield Site(farm, http)


async def test_every_route_has_a_line() -> None:
    app = farm_app(Farm(FakeBackend(ContainerSettings())), Access(KEYS))
    routes = {f"{method} {one.path}" for one in app.routes if isinstance(one, Route) for method in one.methods or ()}
    assert set(expected()) == set(ROUTES) == routes


@pytest.mark.parametrize("route", ROUTES)
async def test_each_token_may_do_what_the_table_says(site: Site, route: str) -> None:
    found = {}
    for sender, bearer in TOKENS.items():
        if "{request_id}" in route:
            await site.ask("POST /v1/asks", TOKENS["operator"])
        found[sender], body = await site.ask(route, bearer)
        if found[sender] != 200:
            assert ErrorReply.model_validate(body).message
    for name, wrong in NOBODIES.items():
        status, body = await site.ask(route, wrong)
        assert status == expected()[route]["nobody"], name
        if status != 200:
            assert ErrorReply.model_validate(body).error == "unauthorized"
    assert {"nobody": expected()[route]["nobody"], **found} == expected()[route]


@pytest.mark.parametrize("sender", ["other", "other-admin"])
async def test_leases_of_others_are_as_if_they_were_not_there(site: Site, sender: str) -> None:
    mine, bearer = await site.lease(RUN), TOKENS[sender]
    leases = site.farm.farm.queue.leases

    async def answer(route: str, path: str = "", body: Any = None) -> Any:
        method = route.split()[0]
        headers = {"Authorization": f"Bearer {bearer}"}
        async with site.http.request(method, site.farm.url + path, headers=headers, json=body) as reply:
            return await reply.json()

    assert await answer("GET", "/v1/leases") == {"leases": []}
    assert await answer("GET", f"/v1/leases?run={RUN}") == {"leases": []}
    assert await answer("GET", "/v1/runs") == {"runs": []}
    assert await answer("POST", "/v1/leases/release", {"leases": [mine]}) == {"states": {mine: None}}
    for path in (f"/v1/leases/{mine}", f"/v1/leases?run={RUN}", "/v1/leases?tag=kind:train"):
        assert await answer("DELETE", path) == {"ended": 0}
    assert any(f"{one.container}/{one.slot}/{one.epoch}" == mine for one in leases(lambda _: True)), "it lives"
    _, ended = await site.ask("DELETE /v1/runs/{run:path}", TOKENS["admin"])
    assert ended["ended"] >= 1


async def test_a_request_id_of_another_run_is_another_ask(site: Site) -> None:
    """Neither its state nor its grant can be had by its id alone."""
    name, other = "an-ask-of-one-run", "team/exp8"
    mine, theirs = ({"Authorization": f"Bearer {TOKENS[sender]}"} for sender in ("operator", "other"))
    asked = {"run": RUN, "asks": [{"request_id": name, "trajectories": ["t"]}]}
    async with site.http.post(f"{site.farm.url}/v1/asks", json=asked, headers=mine) as reply:
        assert reply.status == 200
    path = f"{site.farm.url}/v1/asks/{name}"
    async with site.http.get(path, params={"run": other}, headers=theirs) as reply:
        assert reply.status == 404
    async with site.http.delete(path, params={"run": other}, headers=theirs) as reply:
        assert await reply.json() == {"cancelled": False}
    async with site.http.get(path, params={"run": RUN}, headers=mine) as reply:
        assert reply.status == 200
    async with site.http.delete(path, params={"run": RUN}, headers=mine) as reply:
        assert await reply.json() == {"cancelled": True}


@pytest.mark.parametrize(
    ("minter", "wanted", "status"),
    [
        ({"run": "team/*", "scope": "admin"}, {"run": "team/exp7", "scope": "admin"}, 200),
        ({"run": "team/*", "scope": "admin"}, {"run": "team/*"}, 200),
        ({"run": "team/*", "scope": "admin"}, {"run": "team/sub/*"}, 200),
        ({"run": "team/*", "scope": "admin"}, {"run": "*"}, 403),
        ({"run": "team/*", "scope": "admin"}, {"run": "team"}, 403),
        ({"run": "team/*", "scope": "admin"}, {"run": "teams/*"}, 403),
        ({"run": "team/exp7", "scope": "admin"}, {"run": "team/*"}, 403),
        ({"run": "team/exp7", "scope": "admin"}, {"run": "team/exp7/*"}, 403),
        ({"run": "*", "scope": "admin", "cap": 8}, {"run": "team/exp7", "cap": 8}, 200),
        ({"run": "*", "scope": "admin", "cap": 8}, {"run": "team/exp7", "cap": 9}, 403),
        ({"run": "*", "scope": "admin", "cap": 8}, {"run": "team/exp7"}, 403),
        ({"run": "*", "scope": "admin"}, {"run": "team/exp7", "expires_s": 2 * TOKEN_S}, 403),
        ({"run": "*", "scope": "run"}, {"run": "team/exp7", "scope": "read"}, 403),
        ({"run": "*", "scope": "admin"}, {"run": "te am"}, 400),
        ({"run": "*", "scope": "admin"}, {"run": "team", "scope": "root"}, 400),
    ],
)
async def test_a_token_is_minted_by_no_lesser_one(
    site: Site, minter: dict[str, Any], wanted: dict[str, Any], status: int
) -> None:
    asked = {"expires_s": 60, **wanted}
    got, body = await site.ask("POST /v1/tokens", token(**minter), json=asked)
    assert got == status, body
    if status == 200:
        right = KEYS.verify(body["token"])
        assert (right.run, right.scope, right.cap) == (asked["run"], asked.get("scope", "run"), asked.get("cap"))
        assert right.jti == body["jti"]


async def test_a_drained_container_keeps_its_leases_gets_no_new_ones_and_is_replaced(site: Site) -> None:
    manager = site.farm.farm.manager
    container = (await site.lease(RUN)).split("/")[0]
    route, path = "POST /v1/containers/{container}/drain", f"/v1/containers/{container}/drain"
    headers = {"Authorization": f"Bearer {TOKENS['operator']}"}
    for _ in range(2):  # it may be repeated
        async with site.http.post(site.farm.url + path, headers=headers) as reply:
            assert (reply.status, await reply.json()) == (200, {"container": container, "leases": 1}), route
    assert container in manager.links
    assert (await site.lease(RUN)).split("/")[0] != container
    await site.ask("DELETE /v1/runs/{run:path}", TOKENS["operator"])
    await until(lambda: container not in manager.links and len(manager.links) == 2)


async def test_pages_that_the_settings_open_need_no_token() -> None:
    access = Access(KEYS, public=OpenPages(openapi=True))
    backend = FakeBackend(ContainerSettings(slots_per_container=1))
    async with served(backend, access=access) as farm, aiohttp.ClientSession() as http:
        opened = Site(farm, http)
        assert (await opened.ask("GET /openapi.json", None))[0] == 200
        assert (await opened.ask("GET /v1/farm", None))[0] == 401


async def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one of the right form gets as far as the comparison, and the comparison is hmac's."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare(one, other)

    control = "c" * 32
    lease = Lease.grant(LeaseRequest(slot=0, trajectory="t", ttl_s=60, request_id="r" * 16), 1, 0.0)
    wrong = lease.key.model_copy(update={"secret": "s" * len(lease.key.secret)})
    monkeypatch.setattr(hmac, "compare_digest", counted)
    attempts: tuple[tuple[Callable[[], object], int], ...] = (
        (lambda: KEYS.verify(token("a")[:-4] + "AAAA"), 1),
        (lambda: bearer_of(f"Bearer {control[:-1]}x", control), 1),
        (lambda: bearer_of(f"Bearer {make_pass('d' * 32, 'a')}", control), 2),
        (lambda: lease.admits(wrong), 1),
    )
    for attempt, comparisons in attempts:
        compared.clear()
        with suppress(AgentEnvError):
            assert not attempt()
        assert len(compared) == comparisons
        assert all(len(one) == len(other) for one, other in compared[-1:])
