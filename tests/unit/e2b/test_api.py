"""The control plane and the proxy, over a stand-in for the farm and for envd."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2b_stand_in import Served, served
from tests.waiting import until


class Client:
    """Requests with a key."""

    def __init__(self, url: str, http: aiohttp.ClientSession, key: str = "key-of-a") -> None:
        self.url, self.http, self.key = url, http, key

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        sent = {"X-API-Key": self.key, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.http.request(method, self.url + path, json=body, headers=sent) as reply:
            text = await reply.text()
            return reply.status, (await reply.json()) if text else None

    async def create(self, **asked: Any) -> dict[str, Any]:
        status, told = await self.ask("POST", "/v2/sandboxes", {"templateID": "base", **asked})
        assert status == 201, told
        found: dict[str, Any] = told
        return found


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as opened:
        yield opened


@pytest.fixture
async def client(api: Served) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(api.url, http)


async def test_a_sandbox_from_beginning_to_end(api: Served, client: Client) -> None:
    told = await client.create(timeout=100, metadata={"a": "b"}, envVars={"X": "1"})
    sandbox = told["sandboxID"]
    assert (told["state"], told["templateID"], told["metadata"]) == ("running", "base", {"a": "b"})
    (init,) = api.farm.inits
    assert init["accessToken"] == told["envdAccessToken"]
    assert (init["defaultUser"], init["defaultWorkdir"]) == ("user", "/home/user")
    assert init["envVars"] == {
        "PATH": "/bin", "GREETING": "hi", "E2B_SANDBOX_ID": sandbox, "E2B_TEMPLATE_ID": "base", "X": "1"
    }  # fmt: skip
    assert await client.ask("GET", f"/sandboxes/{sandbox}") == (200, told)
    assert await client.ask("DELETE", f"/sandboxes/{sandbox}") == (204, None)
    status, said = await client.ask("GET", f"/sandboxes/{sandbox}")
    assert (status, said["message"]) == (404, f"sandbox {sandbox} not found")
    assert api.farm.open == []


async def test_envd_is_put_into_an_image_once(api: Served, client: Client) -> None:
    await asyncio.gather(*(client.create() for _ in range(3)))
    assert [line for line in api.farm.ran if line.startswith("upload")] == ["upload /usr/bin/envd"]
    (commit,) = api.farm.commits
    assert commit[0] == "debian:bookworm"
    assert {box.root.image for box in api.farm.open} == {f"sha256:{1:064x}"}


async def test_a_pause_keeps_files_and_says_that_it_ends_processes(api: Served, client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    assert await client.ask("POST", f"/sandboxes/{sandbox}/pause") == (204, None)
    assert api.farm.open == []
    _, told = await client.ask("GET", f"/sandboxes/{sandbox}")
    assert (told["state"], told["pauseMode"]) == ("paused", "filesystem")
    status, said = await client.ask("POST", f"/sandboxes/{sandbox}/pause")
    assert (status, said["message"]) == (409, f"sandbox {sandbox} is already paused")
    status, told = await client.ask("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 60})
    assert (status, told["state"]) == (201, "running")
    assert "pauseMode" not in told
    (box,) = api.farm.open
    assert box.root.image == f"sha256:{len(api.farm.commits):064x}"
    status, _ = await client.ask("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 60})
    assert status == 200


async def test_timeouts_end_or_pause(api: Served, client: Client) -> None:
    ends = (await client.create(timeout=0))["sandboxID"]
    pauses = (await client.create(timeout=0, autoPause=True))["sandboxID"]
    await until(lambda: api.farm.open == [])
    assert (await client.ask("GET", f"/sandboxes/{ends}"))[0] == 404
    _, told = await client.ask("GET", f"/sandboxes/{pauses}")
    assert (told["state"], told["lifecycle"]["onTimeout"]) == ("paused", "pause")


async def test_connecting_never_shortens_the_time(client: Client) -> None:
    told = await client.create(timeout=1000)
    _, connected = await client.ask("POST", f"/sandboxes/{told['sandboxID']}/connect", {"timeout": 10})
    assert connected["endAt"] == told["endAt"]
    await client.ask("POST", f"/sandboxes/{told['sandboxID']}/timeout", {"timeout": 10})
    _, shorter = await client.ask("GET", f"/sandboxes/{told['sandboxID']}")
    assert shorter["endAt"] < told["endAt"]
    status, said = await client.ask("POST", f"/sandboxes/{told['sandboxID']}/timeout", {"timeout": 1e9})
    assert (status, "allowed are 0 to 86400" in said["message"]) == (400, True)


async def test_lists_have_filters_and_pages(client: Client) -> None:
    made = [(await client.create(metadata={"n": str(n)}))["sandboxID"] for n in range(3)]
    await client.ask("POST", f"/sandboxes/{made[0]}/pause")

    async def ids(query: str) -> list[str]:
        _, found = await client.ask("GET", f"/v2/sandboxes?{query}")
        return [one["sandboxID"] for one in found]

    assert await ids("") == made[::-1]
    assert await ids("order=asc") == made
    assert await ids("state=paused") == made[:1]
    assert await ids("metadata=n%3D1") == made[1:2]
    assert await ids("template=other") == []
    assert await ids(f"startedAfter={int(time.time()) + 1000}") == []
    async with client.http.get(client.url + "/v2/sandboxes?limit=2", headers={"X-API-Key": client.key}) as reply:
        assert [one["sandboxID"] for one in await reply.json()] == made[:0:-1]
        following = reply.headers["x-next-token"]
    assert await ids(f"limit=2&nextToken={following}") == made[:1]
    status, said = await client.ask("GET", "/v2/sandboxes?limit=many")
    assert (status, said["message"]) == (400, "nextToken and limit have to be numbers")


async def test_keys_are_the_farms_tokens_and_see_their_own_run(api: Served, client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    other = Client(client.url, client.http, "key-of-b")
    assert await other.ask("GET", "/v2/sandboxes") == (200, [])
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/timeout")):
        assert (await other.ask(method, f"/sandboxes/{sandbox}{path}"))[0] == 404
    nobody = Client(client.url, client.http, "guessed")
    assert (await nobody.ask("POST", "/v2/sandboxes", {"templateID": "base"}))[0] == 401
    assert len(api.farm.open) == 1


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"templateID": "missing"}, 404, "template 'missing' not found"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, 501, "volumeMounts: this farm has no volumes"),
        ({"iam": {"tokens": {}}, "network": {"dnsServers": ["1.1.1.1"]}}, 501, "iam: this farm has no tokens"),
        (
            {"network": {"denyOut": ["1.1.1.1"], "allowOut": ["a.org"]}},
            501,
            "network.denyOut: slots have no exceptions",
        ),
        ({"network": {"denyOut": ["example.org"]}}, 400, "network.denied[0]: 'example.org' is a name"),
        ({"timeout": -1}, 400, "timeout: got -1"),
    ],
)
async def test_what_it_lacks_is_refused_by_name_before_a_slot_is_taken(
    api: Served, client: Client, asked: dict[str, Any], status: int, said: str
) -> None:
    found, answer = await client.ask("POST", "/v2/sandboxes", {"templateID": "base", **asked})
    assert (found, answer["code"]) == (status, status)
    assert answer["message"].startswith(said)
    assert api.farm.ran == []


@pytest.mark.parametrize("path", ["/volumes", "/volumes/x", "/secrets", "/sandboxes/x/logs"])
async def test_parts_of_the_api_that_it_lacks_are_refused_by_name(client: Client, path: str) -> None:
    status, said = await client.ask("GET", path)
    assert status == 501
    assert said["message"].startswith("this farm has no ")


async def test_networks_reach_the_slot(api: Served, client: Client) -> None:
    sandbox = (await client.create(allow_internet_access=False))["sandboxID"]
    (box,) = api.farm.open
    assert box.root.network == "none"
    allowed = {"denyOut": ["0.0.0.0/0"], "allowOut": ["example.org"]}
    assert await client.ask("PUT", f"/sandboxes/{sandbox}/network", allowed) == (204, None)
    assert box.network == ["example.org"]


async def test_metrics_are_the_slots_and_what_it_does_not_say_envds(client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    _, (measured,) = await client.ask("GET", f"/sandboxes/{sandbox}/metrics")
    assert (measured["memUsed"], measured["memTotal"], measured["timestampUnix"]) == (5, 50, 1_700_000_000)
    assert (measured["diskUsed"], measured["diskTotal"]) == (1, 2)
    assert await client.ask("GET", f"/sandboxes/{sandbox}/metrics?start=1&end=2") == (200, [])
    _, found = await client.ask("GET", f"/sandboxes/metrics?sandbox_ids={sandbox}")
    assert found["sandboxes"] == {sandbox: measured}


async def test_snapshots_and_forks_begin_with_its_files(api: Served, client: Client) -> None:
    sandbox = (await client.create(metadata={"a": "b"}))["sandboxID"]
    _, snapshot = await client.ask("POST", f"/sandboxes/{sandbox}/snapshots", {"name": "snap"})
    taken = f"sha256:{len(api.farm.commits):064x}"
    assert snapshot == {"snapshotID": "snap", "names": ["snap"]}
    assert (await client.ask("GET", f"/snapshots?sandboxID={sandbox}"))[1] == [snapshot]
    await client.create(templateID="snap")
    assert api.farm.open[-1].root.image == taken
    status, forks = await client.ask("POST", f"/sandboxes/{sandbox}/fork", {"count": 2, "timeout": 60})
    assert (status, [one["sandbox"]["metadata"] for one in forks]) == (201, 2 * [{"a": "b"}])
    assert len({one["sandbox"]["envdAccessToken"] for one in forks}) == 2
    assert len(api.farm.open) == 4


async def test_a_template_is_built_of_uploaded_files(api: Served, client: Client) -> None:
    status, told = await client.ask("POST", "/v3/templates", {"name": "mine:v1", "cpuCount": 1, "memoryMB": 512})
    assert (status, told["tags"]) == (202, ["v1"])
    build = f"/templates/mine/builds/{told['buildID']}"
    assert (await client.ask("GET", f"{build}/status"))[1]["status"] == "waiting"
    _, link = await client.ask("GET", "/templates/mine/files/abc123")
    assert link["present"] is False
    async with client.http.put(link["url"], data=b"a tar") as reply:
        assert reply.status == 200
    async with client.http.put(link["url"], data=b"again") as reply:
        assert reply.status == 404  # a link is good once
    assert (await client.ask("GET", "/templates/mine/files/abc123"))[1]["present"] is True
    steps = [{"type": "COPY", "args": ["a", "/a"], "filesHash": "abc123"}]
    asked = {"fromImage": "debian:trixie", "steps": steps, "startCmd": "serve"}
    assert await client.ask("POST", f"/v2{build}", asked) == (202, None)

    async def ended() -> dict[str, Any]:
        while (found := (await client.ask("GET", f"{build}/status"))[1])["status"] == "building":
            await asyncio.sleep(0.01)
        told: dict[str, Any] = found
        return told

    assert (await asyncio.wait_for(ended(), 30))["status"] == "ready"
    made = await client.create(templateID="mine:v1")
    assert (made["cpuCount"], made["memoryMB"]) == (1, 512)
    assert api.farm.open[-1].started == [["envd"], ["/bin/bash", "-l", "-c", "serve"]]
    assert (await client.ask("GET", "/templates/aliases/mine"))[1]["templateID"] == "mine"
    other = Client(client.url, client.http, "key-of-b")
    assert (await other.ask("GET", "/templates/aliases/mine"))[0] == 404
    assert (await other.ask("GET", f"{build}/status"))[0] == 404


@pytest.mark.parametrize("image", ["dockerfile:/etc", "oci:/etc", "docker-archive:/x", "docker-daemon:x"])
async def test_no_client_names_files_of_this_machine(client: Client, image: str) -> None:
    _, told = await client.ask("POST", "/v3/templates", {"name": "mine"})
    build = f"/templates/mine/builds/{told['buildID']}"
    await client.ask("POST", f"/v2{build}", {"fromImage": image})
    status = ""
    while status not in ("error", "ready"):
        _, found = await client.ask("GET", f"{build}/status")
        status = found["status"]
    assert (status, "is not an image of a registry" in found["reason"]["message"]) == ("error", True)


# -- what is in a sandbox -------------------------------------------------------------------------------


async def test_requests_go_to_the_sandbox_that_a_header_or_a_host_name_says(client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    status, said = await client.ask("POST", "/files?a=b%20c", {"x": 1}, E2b_Sandbox_Id=sandbox)
    assert (status, said["port"], said["path"], said["query"]) == (200, 49983, "/files", {"a": "b c"})
    _, said = await client.ask("GET", "/sandboxes", E2b_Sandbox_Id=sandbox, E2b_Sandbox_Port="8080")
    assert (said["port"], said["path"]) == (8080, "/sandboxes")
    _, said = await client.ask("GET", "/templates", Host=f"8081-{sandbox}.example.org")
    assert (said["port"], said["path"], said["headers"]["Host"]) == (8081, "/templates", f"8081-{sandbox}.example.org")
    status, said = await client.ask("GET", "/", E2b_Sandbox_Id="missing")
    assert (status, said["message"]) == (502, "The sandbox was not found")


@pytest.mark.parametrize("path", ["/init", "/init/", "/upgrade", "/freeze"])
async def test_what_is_for_the_farm_at_envd_is_refused(client: Client, path: str) -> None:
    sandbox = (await client.create())["sandboxID"]
    assert (await client.ask("POST", path, E2b_Sandbox_Id=sandbox))[0] == 403


async def test_a_signed_link_says_whose_it_is(client: Client) -> None:
    made = [await client.create() for _ in range(2)]
    text = f"/a:read:user:{made[1]['envdAccessToken']}"
    signature = "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"path": "/a", "username": "user", "signature": signature}
    async with client.http.get(f"{client.url}/files", params=query) as reply:
        assert (await reply.json())["query"] == query
    async with client.http.get(f"{client.url}/files", params={**query, "path": "/b"}) as reply:
        assert reply.status == 401


async def test_without_public_traffic_ports_need_the_sandboxs_token(client: Client) -> None:
    told = await client.create(network={"allowPublicTraffic": False})
    to = {"E2b_Sandbox_Id": told["sandboxID"], "E2b_Sandbox_Port": "80"}
    assert (await client.ask("GET", "/", **to))[0] == 403
    assert (await client.ask("GET", "/", E2b_Traffic_Access_Token=told["trafficAccessToken"], **to))[0] == 200


async def test_websockets_reach_servers_in_a_sandbox(client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    headers = {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "80"}
    async with client.http.ws_connect(f"{client.url}/ws", headers=headers, protocols=["chat"]) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "chat: hello"


async def test_a_sandbox_whose_slot_is_lost_is_gone(api: Served, client: Client) -> None:
    sandbox = (await client.create())["sandboxID"]
    api.farm.open[0].lost = True
    status, said = await client.ask("GET", "/", E2b_Sandbox_Id=sandbox, E2b_Sandbox_Port="80")
    assert (status, said["message"]) == (502, "The sandbox was not found")
    assert (await client.ask("GET", f"/sandboxes/{sandbox}"))[0] == 404


async def test_traffic_resumes_a_sandbox_that_wants_it(api: Served, client: Client) -> None:
    sandbox = (await client.create(autoPause=True, autoResume={"enabled": True}))["sandboxID"]
    await client.ask("POST", f"/sandboxes/{sandbox}/pause")
    assert (await client.ask("GET", "/x", E2b_Sandbox_Id=sandbox))[0] == 200
    assert len(api.farm.open) == 1
