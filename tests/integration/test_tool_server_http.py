"""The tool server behind its socket: the client through cuts, restarts and refusals; the command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from agentenv.api.tool_server.app import served
from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.inprocess import InProcessTools
from agentenv.errors import (
    AcquireTimeoutError,
    CallLostError,
    ConfigError,
    ConnectionLostError,
    InfraError,
    PoolClosedError,
    ProtocolError,
)
from agentenv.executor.toolserver_client import ToolServerClient
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import MAX_REQUEST_BYTES, CallScope
from tests.faults.proxy import Proxy
from tests.integration.web_of_tests import Web, answering
from tests.unit.api.tool_server_box import Counted
from tests.waiting import DEADLINE_S, until

TOKEN = "a-token-for-these-tests"
SCOPE = CallScope(trajectory="t-0", group="g", item="i")


@asynccontextmanager
async def serving(server: ToolServer, port: int = 0) -> AsyncIterator[str]:
    async with server, served(server, TOKEN, port=port) as url:
        yield url


def client(url: str, **fields: Any) -> ToolServerClient:
    return ToolServerClient(url, TOKEN, **{"reconnect_deadline_s": DEADLINE_S, **fields})


def http(url: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """A client that is not ours, as curl would be."""
    return httpx.AsyncClient(base_url=url, headers=headers, trust_env=False)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def asked(tools: ToolServerClient | InProcessTools, word: str = "w", timeout_s: float = 20.0) -> CallResult:
    return await tools.call(SCOPE, "ask", {"word": word}, timeout_s)


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "127.0.0.1/health?a="])
@pytest.mark.parametrize("url_of", ["this Starlette", "an older one"])
async def test_no_host_header_does_without_the_token(
    counted: Counted, host: str, url_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette before 1.10 makes a request's URL out of its Host header, and so the URL's path."""
    if url_of == "an older one":
        made = property(lambda request: URL(f"http://{request.headers['host']}{request.scope['path']}"))
        monkeypatch.setattr(Request, "url", made)
    asked = {"id": "c-1", "scope": SCOPE.model_dump(), "tool": "ask", "arguments": {"word": "w"}, "timeout_s": 5}
    async with serving(ToolServer([counted.tool()])) as url, http(url, {"Host": host}) as caller:
        assert (await caller.get("/v1/tools")).status_code in (400, 401)
        assert (await caller.post("/v1/calls", json=asked)).status_code in (400, 401)
        assert (await caller.get("/health", headers={"Host": "x"})).status_code == 200
    assert counted.runs == []


async def test_there_and_back(counted: Counted) -> None:
    async with serving(ToolServer([counted.tool()])) as url, client(url) as tools:
        assert [tool.name for tool in tools.tools] == ["ask"]
        (spec,) = tools.specs
        assert (spec.kind, spec.default_timeout_s) == ("external", 30.0)
        result = await asked(tools)
        wrong = await tools.call(SCOPE, "ask", {"words": 1}, 5.0)
        unknown = await tools.call(SCOPE, "asks", {}, 5.0)
    assert result.content == {"said": "w", "run": 1}
    assert (wrong.fault, unknown.fault) == ("model", "model")
    assert "did you mean 'word'?" in wrong.message


async def test_both_ways_are_the_same(counted: Counted) -> None:
    async with ToolServer([counted.tool(per_trajectory=1)]) as server:
        here = InProcessTools(server)
        assert (await asked(here)).fault == "none"
        assert (await asked(here)).fault == "policy"
        await here.ended("t-0")
        assert (await asked(here)).fault == "none"
    with pytest.raises(PoolClosedError):
        await asked(here)


async def test_a_long_call_is_asked_about_until_it_ends(counted: Counted) -> None:
    counted.gate.clear()
    async with serving(ToolServer([counted.tool()])) as url, client(url, wait_s=0.05) as tools:
        calling = asyncio.create_task(asked(tools))
        await until(lambda: counted.runs)
        await asyncio.sleep(0.3)
        counted.gate.set()
        assert (await calling).fault == "none"
    assert counted.runs == ["w"]


@pytest.mark.parametrize("when", ["before", "running", "answered"])
async def test_a_cut_connection_is_asked_about_again_and_nothing_runs_twice(counted: Counted, when: str) -> None:
    counted.gate.clear()
    async with serving(ToolServer([counted.tool()])) as url, Proxy(port_of(url)) as proxy:
        async with client(f"http://127.0.0.1:{proxy.port}") as tools:
            if when == "before":
                proxy.cut_after("up", 50)  # in the middle of the request
            calling = asyncio.create_task(asked(tools))
            await until(lambda: counted.runs)
            if when == "running":
                proxy.cut()
            if when == "answered":
                proxy.cut_after("down", 20)  # in the middle of the answer
            counted.gate.set()
            result = await calling
        assert proxy.cuts == 1
    assert (result.fault, counted.runs) == ("none", ["w"])


async def test_large_arguments_travel(counted: Counted) -> None:
    async with serving(ToolServer([counted.tool()])) as url, client(url) as tools:
        assert (await asked(tools, "x" * 2_000_000)).truncated  # more than a result may have
        refused = await asked(tools, "x" * MAX_REQUEST_BYTES)
        assert (refused.fault, "larger than" in refused.message) == ("model", True)
    assert [len(word) for word in counted.runs] == [2_000_000]


async def test_a_call_does_not_wait_for_nagle(counted: Counted) -> None:
    """A delayed acknowledgement is 40 ms, every time: one quick call proves that there is none."""
    async with serving(ToolServer([counted.tool()])) as url, client(url) as tools, asyncio.timeout(60):
        took_s = 1.0
        while took_s >= 0.035:
            began_s = time.perf_counter()
            await asked(tools)
            took_s = time.perf_counter() - began_s


async def test_many_calls_through_many_cuts(counted: Counted) -> None:
    async with (
        serving(ToolServer([counted.tool()])) as url,
        Proxy(port_of(url)) as proxy,
        client(f"http://127.0.0.1:{proxy.port}", wait_s=0.2) as tools,
    ):
        calling = [asyncio.create_task(asked(tools, str(n))) for n in range(60)]
        for _ in range(10):
            await asyncio.sleep(0.01)
            proxy.cut()
        results = await asyncio.gather(*calling)
    assert sorted(counted.runs, key=int) == [str(n) for n in range(60)]
    assert {result.fault for result in results} == {"none"}


async def test_a_server_that_stays_away_is_typed(counted: Counted) -> None:
    async with (
        serving(ToolServer([counted.tool()])) as url,
        Proxy(port_of(url)) as proxy,
        client(f"http://127.0.0.1:{proxy.port}", reconnect_deadline_s=0.5) as tools,
    ):
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(ConnectionLostError, match=r"unreachable for 0\.5 s"):
            await asked(tools)
    with pytest.raises(ConnectionLostError, match="check that it is running"):
        async with client(url, reconnect_deadline_s=0.3):
            pass
    with pytest.raises(PoolClosedError):
        await asked(tools)


async def test_a_restarted_server_loses_what_may_have_run_and_takes_what_is_new(counted: Counted) -> None:
    counted.gate.clear()
    async with serving(ToolServer([counted.tool(), counted.tool(name="page", stateful=True, repeatable=True)])) as url:
        port = port_of(url)
        tools = await client(url).__aenter__()
        lost = asyncio.create_task(asked(tools, "lost"))
        await until(lambda: counted.runs)
        counted.gate.set()
        await tools.call(SCOPE, "page", {}, 5.0)
        counted.gate.clear()
        lost = asyncio.create_task(asked(tools, "lost"))
        await until(lambda: len(counted.runs) == 3)
    counted.gate.set()
    again = Counted()
    tools_again = [again.tool(), again.tool(name="page", stateful=True, repeatable=True)]
    try:
        async with serving(ToolServer(tools_again), port):
            with pytest.raises(CallLostError):
                await lost
            assert (await asked(tools, "new")).fault == "none"
            with pytest.raises(CallLostError, match="is lost"):
                await tools.call(SCOPE, "page", {}, 5.0)
            await tools.ended("t-0")
            assert (await tools.call(SCOPE, "page", {}, 5.0)).fault == "none"
    finally:
        await tools.__aexit__(None, None, None)
    assert again.runs == ["new", "hello"]


async def test_our_failures_are_raised_as_what_they_are() -> None:
    def act(word: str) -> Any:
        raise AcquireTimeoutError("all are taken") if word == "busy" else RuntimeError("a bug")

    async with serving(ToolServer([Counted(act).tool()])) as url, client(url) as tools:
        with pytest.raises(AcquireTimeoutError, match="all are taken"):
            await asked(tools, "busy")
        with pytest.raises(InfraError, match="the tool ask failed"):
            await asked(tools, "other")


async def test_cancelling_and_ending_reach_the_server(counted: Counted) -> None:
    counted.gate.clear()
    async with serving(ToolServer([counted.tool()])) as url, client(url) as tools:
        calling = asyncio.create_task(asked(tools))
        await until(lambda: counted.runs)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: counted.cancelled == 1)
        other = asyncio.create_task(asked(tools))
        await until(lambda: len(counted.runs) == 2)
        await tools.ended("t-0")
        with pytest.raises(CallLostError, match="was ended"):
            await other


async def test_the_wrong_token_is_a_setting_and_a_stranger_no_tool_server(counted: Counted) -> None:
    async with serving(ToolServer([counted.tool()])) as url:
        with pytest.raises(ConfigError, match="tool_server_token"):
            async with ToolServerClient(url, "another-token-than-that"):
                pass
    async with Web() as stranger:
        stranger.pages["/v1/tools"] = answering({"tools": "none"})
        with pytest.raises(ProtocolError, match="is not a tool server"):
            async with client(stranger.url("")):
                pass
        stranger.pages["/v1/tools"] = answering({"boot": "b", "version": "9", "protocol": 99, "tools": []})
        with pytest.raises(ProtocolError, match="speaks protocol 99"):
            async with client(stranger.url("")):
                pass


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/v1/tools", None, 401, "token"),
        ("GET", "/docs", None, 401, "token"),
        ("GET", "/health", None, 200, '"ok"'),
    ],
)
async def test_without_a_token_only_health(
    counted: Counted, method: str, path: str, body: Any, status: int, said: str
) -> None:
    async with serving(ToolServer([counted.tool()])) as url, http(url) as caller:
        answer = await caller.request(method, path, content=body)
        assert (answer.status_code, said in answer.text) == (status, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/calls", b"", 400, "Invalid JSON"),
        ("/v1/calls", b"[]", 400, "the body"),
        ("/v1/calls", b'{"id": "x"}', 400, "scope"),
        ("/v1/calls", b"\xff\xfe", 400, "Invalid JSON"),
        ("/v1/calls", b"[" * 100_000, 400, "Invalid JSON"),
        ("/v1/calls", b" " * (MAX_REQUEST_BYTES + 1), 413, "larger than"),
        ("/v1/cancel", b"{}", 400, "trajectory"),
        ("/v1/trajectories/end", b'{"trajectory": ""}', 400, "trajectory"),
        ("/v1/nothing", b"{}", 404, "Not Found"),
        ("/v1/tools", b"{}", 405, "Method Not Allowed"),
    ],
)
async def test_bad_input_is_refused_readably_and_harmless(
    counted: Counted, path: str, body: bytes, status: int, said: str
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with serving(ToolServer([counted.tool()])) as url, http(url, headers) as caller:
        answer = await caller.post(path, content=body)
        assert (answer.status_code, said in answer.json()["message"]) == (status, True), answer.text
        async with client(url) as tools:
            assert (await asked(tools)).fault == "none"


async def test_a_port_in_use_is_a_setting(counted: Counted) -> None:
    async with serving(ToolServer([counted.tool()])) as url:
        with pytest.raises(ConfigError, match=r"port: cannot listen on 127\.0\.0\.1.*\(choose another port"):
            async with serving(ToolServer([]), port_of(url)):
                pass
    with pytest.raises(ConfigError, match=r"host: cannot listen on .*\(name an address of this machine"):
        async with served(ToolServer([]), TOKEN, host="203.0.113.77"):
            pass


# -- the command ---------------------------------------------------------------------------------------

TOOL = '''
from agentenv.api.tool_server.tool import ToolRun, tool


@tool(secrets=("vault",))
async def look(*, run: ToolRun) -> dict[str, str]:
    """Look."""
    return {"length": str(len(run.secrets["vault"])), "value": run.secrets["vault"]}
'''
CONFIG = 'modules = ["look.py"]\naudit_log = "audit.jsonl"\n[secrets]\nvault = { file = "vault" }\n'


def written(directory: Path) -> Path:
    (directory / "look.py").write_text(TOOL)
    (directory / "vault").write_text("the-value-in-the-vault\n")
    (directory / "tools.toml").write_text(CONFIG)
    return directory / "tools.toml"


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from agentenv.cli import main; main()", "tool-server", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True, env={**os.environ},
    )  # fmt: skip


async def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    process = await started(
        "--config", str(written(tmp_path)), "--token-file", str(token_file), "--port", "0", "--json"
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        assert ready["event"] == "ready"
        assert ready["tools"] == ["look"]  # the shipped ones have nothing to reach
        async with ToolServerClient(ready["url"], token_file.read_text().strip()) as tools:
            result = await tools.call(SCOPE, "look", {}, 10.0)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert result.content == {"length": "22", "value": "[secret:vault]"}
    assert process.returncode == 128 + signal.SIGTERM
    assert b"interrupted by SIGTERM" in errors
    assert "the-value" not in (tmp_path / "audit.jsonl").read_text()
    assert json.loads((tmp_path / "audit.jsonl").read_text())["tool"] == "look"


async def test_the_command_says_what_is_there_or_wrong(tmp_path: Path) -> None:
    checking = await started("--config", str(written(tmp_path)), "--check", "--json")
    wrong = await started("--config", str(tmp_path / "none.toml"))
    told, _ = await asyncio.wait_for(checking.communicate(), 60)
    _, errors = await asyncio.wait_for(wrong.communicate(), 60)
    listed = {tool["name"]: tool["unavailable"] for tool in json.loads(told)["tools"]}
    assert listed["look"] == ""
    assert "no search provider" in listed["web_search"]
    assert (checking.returncode, wrong.returncode) == (0, 2)
    assert b"none.toml cannot be read" in errors
