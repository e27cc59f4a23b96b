"""What a token promises, and what its holder tries: a table for each promise. A row is an attempt."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.open_ask import OpenAsk
from agentenv.api.farm_server.revocations import Revocations
from agentenv.api.farm_server.service import USER_TOKEN_S, Listening, farm_service
from agentenv.api.farm_server.settings import AskLimits, FarmSettings, PlainSettings
from agentenv.api.farm_server.tokens import DeniedFile, Right
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.deadlines import scaled
from agentenv.errors import ForbiddenError, LeaseReclaimedError, UnauthorizedError
from agentenv.farm_client.access import farm_access
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.wire.farm import Grant, TokenRequest
from tests.farm_service import KEYS, TOKEN_S, Served, served, token
from tests.plain_http import PlainHttp, plain_http
from tests.waiting import START_S, eventually, until

RUN: Final = "team/exp7"


@dataclass(frozen=True)
class Site:
    """A farm of one container, and how it is asked."""

    farm: Served
    access: Access
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, bearer: str, body: Any = None) -> tuple[int, Any]:
        """Status and body."""
        headers = {"Authorization": f"Bearer {bearer}"}
        async with self.http.request(method, self.farm.url + path, headers=headers, json=body) as answer:
            if answer.content_type == "application/json":
                return answer.status, await answer.json()
            return answer.status, await answer.text()

    def opened(self, name: str) -> OpenAsk:
        """An ask of RUN."""
        found = self.farm.farm.queue.find(name, RUN)
        assert found is not None
        return found

    async def renewed(self, *grants: Grant) -> list[bool]:
        """Whether leases of one container are renewed by their holders' pass."""
        headers = {"Authorization": f"Bearer {grants[0].token}"}
        body = {"keys": [grant.key.model_dump() for grant in grants], "ttl_s": 86_400}
        async with self.http.post(f"{grants[0].base_url}/v1/leases/renew", headers=headers, json=body) as answer:
            renewed = (await answer.json())["renewed"]
        return [grant.key.slot in renewed for grant in grants]

    async def wants(self, bearer: str, *groups: int, run: str = "", wait_s: float = 20.0) -> list[str]:
        """Ask for groups of so many slots, and wait until one is granted or refused; the names of the asks."""
        asks = {secrets.token_hex(8): [f"t{number}" for number in range(slots)] for slots in groups}
        wanted = [{"request_id": name, "trajectories": trajectories} for name, trajectories in asks.items()]
        status, reply = await self.ask("POST", "/v1/asks", bearer, {"run": run, "asks": wanted, "wait_s": wait_s})
        assert status == 200, reply
        return [*asks]


@asynccontextmanager
async def site(slots: int = 8, limits: AskLimits | None = None) -> AsyncIterator[Site]:
    backend = FakeBackend(ContainerSettings(slots_per_container=slots))
    access = Access(KEYS, limits=limits)
    async with (
        served(backend, PoolSettings(min_containers=1, max_containers=1), access=access) as farm,
        aiohttp.ClientSession() as http,
    ):
        yield Site(farm, access, http)


# -- a token shows what it covers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bearer", "seen"),
    [
        (token(RUN, "read"), {RUN}),
        (token("team/*", "read"), {RUN}),
        (token("exp8", "run"), {"exp8"}),
        (token("others/*", "admin"), set[str]()),
        (token("*", "read"), {RUN, "exp8"}),
    ],
    ids=["its run", "its team", "another run", "another team", "every run"],
)
async def test_metrics_name_the_runs_that_a_token_covers(bearer: str, seen: set[str]) -> None:
    async with site() as farm:
        for run in (RUN, "exp8"):
            await farm.wants(token(run), 1, 1)
        status, text = await farm.ask("GET", "/metrics", bearer)
        assert status == 200
        assert {run for run in (RUN, "exp8") if f'run="{run}"' in text} == seen
        assert "agentenv_pool_slots" in text, "what is not about runs is for all"


# -- no token outlives the one it was made by ---------------------------------------------------------


def made_by(maker: str, **wanted: Any) -> Right:
    """What a token allows that this one has made."""
    access = Access(KEYS)
    asked = TokenRequest.model_validate({"run": RUN, "expires_s": 60, **wanted})
    return KEYS.verify(access.mint(asked, KEYS.verify(maker)).token)


@pytest.mark.parametrize("early_s", [0.0, 0.0001, 0.5, 1.0, 10.0])
def test_a_token_does_not_outlive_its_maker_however_late_it_is_made(
    early_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = token(RUN, "admin")
    ends = KEYS.verify(maker).ends_unix_s
    now = ends - 60
    monkeypatch.setattr("agentenv.api.farm_server.access.time.time", lambda: now)
    last = maker
    for _ in range(5):
        asked = TokenRequest(run=RUN, scope="admin", expires_s=60 - early_s)
        last = Access(KEYS).mint(asked, KEYS.verify(last)).token
        assert KEYS.verify(last).ends_unix_s <= ends


def test_a_token_ends_with_any_of_its_makers() -> None:
    maker = token("team/*", "admin")
    child = made_by(maker, scope="admin")
    assert child.made_by == KEYS.verify(maker).tokens
    for denied in (child.jti, KEYS.verify(maker).jti):
        refused = child.revoked({denied})
        assert refused is not None
        assert denied in refused.message
    assert child.revoked({"somebody's"}) is None


def test_a_chain_of_tokens_ends() -> None:
    last = token(RUN, "admin")
    for ends_s in range(3500, 2800, -100):  # each before the one that it is made by
        last = Access(KEYS).mint(TokenRequest(run=RUN, scope="admin", expires_s=ends_s), KEYS.verify(last)).token
    with pytest.raises(ForbiddenError, match="each was made by the next"):
        Access(KEYS).mint(TokenRequest(run=RUN, scope="admin", expires_s=60), KEYS.verify(last))


async def test_tokens_are_made_at_a_limited_rate_whether_they_are_granted_or_refused() -> None:
    async with site(limits=AskLimits(asks_per_s=1, burst=60)) as farm:
        bearer = token("team/*", "admin")
        wanted = {"run": RUN, "expires_s": 60}
        statuses = [(await farm.ask("POST", "/v1/tokens", bearer, wanted | {"run": run}))[0] for run in (RUN, "*") * 3]
        assert statuses == [200, 403, 200, 429, 429, 429]


# -- a token's cap is the most that it holds ----------------------------------------------------------

CAP: Final = 3
CAPPED: Final = token("team/*", "admin", cap=CAP)
"""Of a team's admin; the others are made by it."""


def child(run: str = RUN, cap: int = CAP, maker: str = CAPPED) -> str:
    """A token that this one has made."""
    right = KEYS.verify(maker)
    asked = TokenRequest(run=run, scope="admin", cap=cap, expires_s=TOKEN_S - 60 * len(right.tokens))
    return Access(KEYS).mint(asked, right).token


ONE_CHILD: Final = child()
CAPS: Final[Mapping[str, tuple[tuple[str, str, int, int], ...]]] = {
    "one at a time": ((CAPPED, RUN, 1, 6),),
    "in groups": ((CAPPED, RUN, 2, 4),),
    "in several runs": ((CAPPED, "team/a", 1, 3), (CAPPED, "team/b", 1, 3)),
    "by a token that it made": ((ONE_CHILD, RUN, 1, 6),),
    "by many tokens that it made": tuple((child(f"team/{number}"), f"team/{number}", 1, 2) for number in range(5)),
    "by it and one that it made": ((CAPPED, RUN, 1, 2), (ONE_CHILD, RUN, 1, 2), (CAPPED, "team/a", 1, 2)),
    "by a token that that made": ((child(maker=ONE_CHILD), RUN, 1, 2), (CAPPED, "team/a", 1, 4)),
    "by one of a smaller cap, and another": ((child(cap=1), RUN, 1, 3), (child(cap=CAP), RUN, 1, 5)),
}
"""Attempts to hold more than the cap: token, run, slots of an ask, asks."""


@pytest.mark.parametrize("attempt", CAPS)
async def test_no_attempt_holds_more_than_the_cap(attempt: str) -> None:
    async with site() as farm:
        for bearer, run, slots, asks in CAPS[attempt]:
            await farm.wants(bearer, *[slots] * asks, run=run, wait_s=0)
        queue = farm.farm.farm.queue
        most = max(slots for _, _, slots, _ in CAPS[attempt])

        def held() -> int:
            return sum(1 for _ in queue.leases(lambda _: True))

        await until(lambda: held() > CAP - most)
        mine = await farm.wants(token("free"), 1, run="free")
        await until(lambda: queue.find(mine[0], "free").granted)  # type: ignore[union-attr]
        assert held() <= CAP + 1, "the other run's is not of the team"
        assert all(queue.place(one, queue.forecast()).why == "cap" for one in queue.waiting())


async def test_an_ask_over_the_cap_says_so_and_goes_on_when_slots_come_back() -> None:
    async with site() as farm:
        bearer = token(RUN, cap=2)
        first, *_, last = await farm.wants(bearer, 1, 1, 1)
        await until(lambda: len([*farm.farm.farm.queue.leases(lambda _: True)]) == 2)
        _, waiting = await farm.ask("GET", f"/v1/asks/{last}", bearer)
        place = waiting["place"]
        assert (place["why"], place["run_cap"], place["run_held"]) == ("cap", 2, 2)
        assert "holds 2 slots of at most 2" in place["detail"]
        assert farm.farm.farm.manager.ledger.load(0.0).waiting == 0, "nothing is started for it"
        other = await farm.wants(token(RUN), 1)
        status, granted = await farm.ask("GET", f"/v1/asks/{other[0]}", bearer)
        assert (status, granted["state"]) == (200, "granted"), "it holds up no other token of its run"
        await farm.ask("DELETE", f"/v1/asks/{first}", bearer)
        await farm.wants(bearer, 1, wait_s=0)
        await until(lambda: farm.opened(last).granted)
        _, granted = await farm.ask("GET", f"/v1/asks/{last}", bearer)
        assert granted["state"] == "granted"


async def test_a_group_larger_than_the_cap_of_a_maker_is_refused() -> None:
    async with site() as farm:
        (name,) = await farm.wants(ONE_CHILD, CAP + 1)
        _, refused = await farm.ask("GET", f"/v1/asks/{name}", ONE_CHILD)
        assert (refused["state"], refused["error"]["error"]) == ("refused", "quota")


async def test_a_farm_that_was_restarted_counts_what_its_tokens_hold(tmp_path: Path) -> None:
    settings = ContainerSettings(slots_per_container=8, require_sandbox=False)
    pool = PoolSettings(min_containers=1, max_containers=1)
    bearer = token(RUN, cap=2)
    backend = LocalBackend(settings, detached=True, state_dir=tmp_path)
    async with served(backend, pool) as farm, aiohttp.ClientSession() as http:
        await Site(farm, Access(KEYS), http).wants(bearer, 1, 1)
        await until(lambda: farm.farm.queue_policy.held(RUN) == 2 and farm.farm.load().waiting == 0, START_S)
        await until(lambda: len([*farm.farm.queue.leases(lambda _: True)]) == 2)
    again = LocalBackend(settings, detached=True, state_dir=tmp_path)
    async with served(again, pool) as farm, aiohttp.ClientSession() as http:
        await until(lambda: farm.farm.queue_policy.held(RUN) == 2, START_S)
        (name,) = await Site(farm, Access(KEYS), http).wants(bearer, 1, wait_s=0)
        opened = farm.farm.queue.find(name, RUN)
        assert opened is not None
        await until(lambda: farm.farm.queue.place(opened, farm.farm.queue.forecast()).why == "cap")
        await again.stop_all()


# -- a trajectory's lost slot is told, never replaced by an empty one ---------------------------------

IDLE_S: Final = 2.0


@dataclass(frozen=True)
class Lives:
    """A farm on this machine whose service may end and be followed by another."""

    directory: Path

    @asynccontextmanager
    async def life(self, idle_s: float = IDLE_S) -> AsyncIterator[tuple[Farm, PlainHttp]]:
        backend = LocalBackend(
            ContainerSettings(slots_per_container=2, require_sandbox=False), detached=True, state_dir=self.directory
        )
        pool = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
        plain = PlainSettings(idle_s=idle_s, acquire_timeout_s=START_S)
        async with served(backend, pool, plain=plain) as farm, plain_http(farm.url, token(RUN)) as http:
            yield farm.farm, http

    async def end(self) -> None:
        async with LocalBackend(
            ContainerSettings(slots_per_container=2, require_sandbox=False), detached=True, state_dir=self.directory
        ) as backend:
            await backend.stop_all()


@pytest_asyncio.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    yield Lives(tmp_path)
    await Lives(tmp_path).end()


async def is_free(farm: Farm) -> None:
    await until(lambda: farm.load().slots == {"free": 2}, START_S)


async def test_a_slot_that_ended_while_no_service_ran_is_told_by_the_next(lives: Lives) -> None:
    async with lives.life() as (_, http):
        first = await http.bash("t1", "echo work > f")
        assert first.status == 200
    async with lives.life() as (farm, http):
        await is_free(farm)
    async with lives.life(idle_s=600) as (farm, http):  # and by the one after it
        for _ in range(2):
            refused = await http.bash("t1", "cat f || echo EMPTY WORKSPACE")
            assert refused.refusal == (502, "stale_lease")
        assert (await http.bash("t2", "echo other")).output == "other\n"
        await http.release("t1")
        assert (await http.bash("t1", "ls")).output == "", "it begins anew"
        await http.release("t1")
        await is_free_but_for(farm, "t2")
    async with lives.life() as (_, http):
        assert (await http.bash("t1", "ls")).status == 200, "it was released: nothing is to be told"


async def is_free_but_for(farm: Farm, name: str) -> None:
    await until(lambda: [lease.trajectory for lease in farm.queue.leases(lambda _: True)] == [name])


async def test_a_slot_that_ends_in_a_life_that_has_not_called_it_is_told(lives: Lives) -> None:
    idle_s = scaled(15.0)  # longer than the second life takes to begin
    async with lives.life(idle_s) as (_, http):
        await http.bash("t1", "echo work > f")
    async with lives.life(idle_s) as (farm, http):
        assert [lease.trajectory for lease in farm.queue.leases(lambda _: True)] == ["t1"]
        await is_free(farm)
        assert (await http.bash("t1", "cat f")).refusal == (502, "stale_lease")


async def test_a_slot_that_was_taken_is_told_by_the_next_service(lives: Lives) -> None:
    async with lives.life(idle_s=600) as (farm, http):
        await http.bash("t1", "echo work > f")
        (lease,) = farm.queue.leases(lambda _: True)
        farm.queue.end(lease.id, LeaseReclaimedError("reclaimed"))
        await is_free(farm)
    async with lives.life(idle_s=600) as (_, http):
        assert (await http.bash("t1", "cat f")).refusal == (502, "lease_reclaimed")


async def test_a_call_of_a_new_life_is_sent_when_the_lease_lasts(lives: Lives) -> None:
    """However short each life is: what a call has done is there as long as the trajectory is not idle."""
    async with lives.life(idle_s=600) as (farm, http):
        await http.bash("t1", "echo 1 >> log")
        (link,) = farm.manager.links.values()
        (left_s,) = [slot.expires_in_s for slot in (await link.control.slots()).slots if slot.expires_in_s is not None]
        assert left_s > 500


# -- what a token had ends with it --------------------------------------------------------------------


def dying(life_s: float) -> str:
    """A token of RUN that a team's admin has made."""
    maker = KEYS.verify(token("team/*", "admin"))
    return KEYS.mint(RUN, "run", expires_s=life_s, maker=maker)


async def revoked(farm: Site, bearer: str, **params: str) -> dict[str, Any]:
    """Revoke it."""
    query = "&".join(f"{name}={value}" for name, value in params.items())
    path = f"/v1/tokens/{KEYS.verify(bearer).jti}?{query}"
    status, answer = await farm.ask("DELETE", path, token("*", "admin"))
    assert status == 200, answer
    return dict(answer)


async def maker_revoked(farm: Site, bearer: str, **params: str) -> dict[str, Any]:
    """Revoke the token that has made it."""
    path = f"/v1/tokens/{KEYS.verify(bearer).made_by[0].id}"
    status, answer = await farm.ask("DELETE", path, token("*", "admin"))
    assert status == 200, answer
    return dict(answer)


async def settings_changed(farm: Site, bearer: str, **params: str) -> dict[str, Any]:
    """As when ``tokens.denied`` changes."""
    Revocations(farm.access, farm.farm.farm).set_denied({KEYS.verify(bearer).jti})
    return {}


async def expired(farm: Site, bearer: str, **params: str) -> dict[str, Any]:
    """Its time passes."""
    ends = KEYS.verify(bearer).ends_unix_s
    await until(lambda: time.time() >= ends)
    return {}


ENDS: Final = {each.__name__: each for each in (revoked, maker_revoked, settings_changed, expired)}
STREAMS: Final = ("/v1/news?client=c", "/v1/sight/changes", "/v1/leases/{lease}/tail")


@pytest.mark.parametrize("end", ENDS)
async def test_nothing_of_a_token_goes_on_when_it_has_ended(end: str, tmp_path: Path) -> None:
    async with site(slots=2) as farm:
        bearer = dying(15.0 if end == "expired" else 600.0)
        names = await farm.wants(bearer, 1, 1, 1)
        queue = farm.farm.farm.queue
        await until(lambda: len([*queue.leases(lambda _: True)]) == 2)
        mine = [*queue.leases(lambda _: True)]
        headers = {"Authorization": f"Bearer {bearer}"}
        streams = [
            await farm.http.get(farm.farm.url + path.format(lease=mine[0].name), headers=headers) for path in STREAMS
        ]
        assert [stream.status for stream in streams] == [200] * 3
        waits = asyncio.create_task(
            farm.ask(
                "POST", "/v1/asks", bearer, {"wait_s": 25, "asks": [{"request_id": "r" * 16, "trajectories": ["w"]}]}
            )
        )
        await until(lambda: queue.find("r" * 16, RUN) is not None)
        await ENDS[end](farm, bearer)
        async with asyncio.timeout(START_S):
            for stream in streams:
                await stream.read()  # to its end
            assert (await waits)[0] == 401
        assert (await farm.ask("GET", "/v1/farm", bearer))[0] == 401
        assert not list(queue.waiting()), "nothing is granted any more"
        queue.end(mine[0].id, LeaseReclaimedError("its slot becomes free"))
        free = await farm.wants(token("free"), 1, run="free")
        assert queue.find(free[0], "free").granted  # type: ignore[union-attr]
        assert queue.find(names[2], RUN) is None


async def test_leases_of_a_revoked_token_are_not_renewed() -> None:
    async with site() as farm:
        bearer, other = dying(600.0), token(RUN)
        (name,), (kept,) = await farm.wants(bearer, 1), await farm.wants(other, 1)
        grants = [farm.farm.farm.queue.state_of(opened).leases[0] for opened in map(farm.opened, (name, kept))]
        assert await farm.renewed(*grants) == [True, True]
        answer = await revoked(farm, bearer)
        assert (answer["leases"], answer["ended"]) == (1, False)
        assert len([*farm.farm.farm.queue.leases(lambda _: True)]) == 2, "it lasts until it would be renewed"

        async def refused() -> bool:
            return await farm.renewed(*grants) == [False, True]

        await eventually(refused)
        await until(lambda: len([*farm.farm.farm.queue.leases(lambda _: True)]) == 1)


async def test_leases_of_a_revoked_token_end_at_once_when_that_is_wanted() -> None:
    async with site() as farm:
        bearer = dying(600.0)
        await farm.wants(bearer, 1, 1)
        await farm.wants(token(RUN), 1)
        await until(lambda: len([*farm.farm.farm.queue.leases(lambda _: True)]) == 3)
        answer = await revoked(farm, bearer, end_leases="true")
        assert (answer["leases"], answer["ended"]) == (2, True)
        assert len([*farm.farm.farm.queue.leases(lambda _: True)]) == 1


def test_a_revocation_is_known_to_the_next_service(tmp_path: Path) -> None:
    keys = (tmp_path / "farm.key",)
    farm = Farm(FakeBackend(ContainerSettings()))
    access = Access(KEYS)
    bearer = dying(600.0)
    assert Revocations(access, farm, DeniedFile(keys)).revoke(KEYS.verify(bearer).jti, "x", end_leases=False).kept
    again = Access(KEYS)
    Revocations(again, Farm(FakeBackend(ContainerSettings())), DeniedFile(keys))
    with pytest.raises(UnauthorizedError, match="revoked"):
        again.check_again(KEYS.verify(bearer))


# -- the service's own token --------------------------------------------------------------------------


async def test_the_token_of_this_machine_s_user_is_short_lived_renewed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    audit_log = tmp_path / "audit.jsonl"
    settings = FarmSettings(backend="fake", audit_log=audit_log).below(tmp_path)
    async with farm_service(settings, Listening(port=0), user_token_s=3.0) as service:
        await service.opening
        first = service.token
        access = farm_access()
        assert (access.token, service.keys.verify(first).ends_unix_s <= time.time() + 4.0) == (first, True)
        await until(lambda: service.token != first)
        assert access.renew is not None
        assert access.renew() == service.token
        assert service.keys.verify(service.token).scope == "admin"
        minted = [json.loads(line) for line in audit_log.read_text().splitlines()]
        assert service.keys.verify(service.token).jti in [line["jti"] for line in minted]
    assert 3600 <= USER_TOKEN_S <= 86_400


# -- a drained container is made up for ----------------------------------------------------------------


async def test_who_asks_beside_a_container_that_keeps_its_leases_gets_a_slot_of_another() -> None:
    backend = FakeBackend(ContainerSettings(slots_per_container=2))
    pool = PoolSettings(min_containers=1, max_containers=2)
    async with served(backend, pool) as farm, aiohttp.ClientSession() as http:
        asked = Site(farm, Access(KEYS), http)
        await asked.wants(token(RUN), 1)
        (lease,) = farm.farm.queue.leases(lambda _: True)
        farm.farm.drain(lease.container, "operator")
        (name,) = await asked.wants(token(RUN), 1, wait_s=0)
        await until(lambda: asked.opened(name).granted, START_S)
        (other,) = asked.opened(name).held.values()
        assert not other.lease.startswith(lease.container), "the lease of the drained one goes on"
        assert farm.farm.load().max_containers == 2 >= len(farm.farm.manager.links)
