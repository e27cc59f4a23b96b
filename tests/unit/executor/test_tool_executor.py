"""Sessions and the executor over a small server that speaks the wire, with a stub pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from agentenv.config import ExecutorSettings
from agentenv.errors import (
    CallLostError,
    ConfigError,
    ContainerLostError,
    InfraError,
    InvalidArgumentsError,
    LeaseLostError,
    PoolClosedError,
    ProtocolError,
    StaleLeaseError,
)
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.spec import ToolSpec
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import Call, CallResult, Failure
from agentenv.wire.toolserver import CallScope
from tests.faults.stub_pool import StubPool
from tests.faults.wire_server import WireServer, echo
from tests.waiting import until

CATALOG = ToolCatalog.builtin()


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    async with WireServer() as running:
        yield running


@pytest.fixture
def pool(server: WireServer) -> StubPool:
    return StubPool(server.handle())


@pytest.fixture
async def executor(pool: StubPool) -> AsyncIterator[ToolExecutor]:
    async with ToolExecutor(pool, CATALOG, ExecutorSettings(reconnect_deadline_s=30)) as running:
        yield running


class Gate:
    """Calls whose command is in ``held`` wait until it is opened; all others echo."""

    def __init__(self, *held: str) -> None:
        self.held = held
        self.opened = asyncio.Event()

    async def __call__(self, call: Call) -> CallResult:
        if call.arguments.get("command") in self.held:
            await self.opened.wait()
        return await echo(call)


def answering(**fields: Any) -> Callable[[Call], Awaitable[CallResult]]:
    async def run(call: Call) -> CallResult:
        return CallResult(id=call.id, **fields)

    return run


async def test_a_call_there_and_back(executor: ToolExecutor, server: WireServer, pool: StubPool) -> None:
    async with executor.open("t") as session:
        result = await session.call("bash", {"command": "hällo \N{SNOWMAN} \x01"})
        assert (result.fault, result.exit_code, result.stdout) == ("none", 0, "hällo \N{SNOWMAN} \x01")
        assert repr(session) == "<ToolSession t open, 0 calls running>"
        timing = session.last_timing
        assert timing is not None
        assert timing.call_id == result.id
        assert 0 <= timing.batch_wait_s == session.last_batch_wait_s <= timing.total_s
    assert pool.leases[0].released == 1
    assert repr(session) == "<ToolSession t closed, 0 calls running>"


async def test_what_travels_is_the_wire_model(executor: ToolExecutor, server: WireServer, pool: StubPool) -> None:
    seen: list[Call] = []

    async def run(call: Call) -> CallResult:
        seen.append(call)
        return await echo(call)

    server.run = run
    arguments = {"command": 'a "quoted" \\ \n', "env": {"A": "é"}, "cwd": None}
    async with executor.open("t") as session:
        await session.call("bash", arguments, timeout_s=1.5)
    (call,) = seen
    assert (call.tool, call.arguments, call.timeout_s, call.boot) == ("bash", arguments, 1.5, server.boot)
    assert call.lease == pool.leases[0].key


async def test_the_models_mistakes_are_results_and_reach_nobody(executor: ToolExecutor, server: WireServer) -> None:
    async with executor.open("t") as session:
        unknown = await session.call("bsh", {})
        wrong = await session.call("bash", '{"comand": "ls"}')
        broken = await session.call("bash", "{")
    assert (unknown.fault, unknown.error) == ("model", "unknown_tool")
    assert "did you mean 'bash'?" in unknown.message
    assert (wrong.fault, wrong.error) == ("model", "invalid_arguments")
    assert "did you mean 'command'?" in wrong.message
    assert broken.error == "invalid_arguments"
    assert len({unknown.id, wrong.id, broken.id}) == 3
    assert server.batches == []
    assert executor.statistics().model_faults == 3


@pytest.mark.parametrize(("fault", "error"), [("model", "invalid_arguments"), ("policy", "refused"), ("task", "task")])
async def test_faults_that_are_not_ours_come_back_as_results(
    executor: ToolExecutor, server: WireServer, fault: str, error: str
) -> None:
    server.run = answering(fault=fault, error=error, message="no")
    async with executor.open("t") as session:
        result = await session.call("bash", {"command": "x"})
    assert (result.fault, result.error, result.message) == (fault, error, "no")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("stale_lease", StaleLeaseError),
        ("call_lost", CallLostError),
        ("container_lost", ContainerLostError),
        ("infra", InfraError),
        ("nobody_knows_this", ProtocolError),
        ("invalid_arguments", ProtocolError),
        (None, ProtocolError),
    ],
)
async def test_our_faults_are_raised_by_their_class(
    executor: ToolExecutor, server: WireServer, error: str | None, kind: type[InfraError]
) -> None:
    server.run = answering(fault="infra", error=error, message="why")
    async with executor.open("t") as session:
        with pytest.raises(InfraError, match="why") as caught:
            await session.call("bash", {"command": "x"})
    assert type(caught.value) is kind
    assert executor.statistics().infra_faults == 1


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), -float("inf"), 1e9, True, "5"])
async def test_impossible_timeouts_are_refused(executor: ToolExecutor, server: WireServer, timeout_s: Any) -> None:
    async with executor.open("t") as session:
        with pytest.raises(InvalidArgumentsError, match="timeout_s is"):
            await session.call("bash", {"command": "x"}, timeout_s=timeout_s)
    assert server.batches == []


async def test_timeouts_default_to_the_tools_and_then_to_the_executors(server: WireServer, pool: StubPool) -> None:
    limits: list[float | None] = []

    async def run(call: Call) -> CallResult:
        limits.append(call.timeout_s)
        return await echo(call)

    server.run = run
    quick = ToolSpec(name="quick", description="", arguments=CATALOG.spec("bash").arguments, default_timeout_s=3)
    settings = ExecutorSettings(default_timeout_s=7)
    async with ToolExecutor(pool, CATALOG.extended(quick), settings) as executor, executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        await session.call("quick", {"command": "x"})
        await session.call("quick", {"command": "x"}, timeout_s=1)
    assert limits == [7, 3, 1]


async def test_a_call_too_large_for_one_message_is_refused(executor: ToolExecutor, server: WireServer) -> None:
    async with executor.open("t") as session:
        result = await session.call("write_file", {"path": "x", "text": "y" * (2 * MAX_FILE_BYTES)})
        assert (result.fault, result.error) == ("model", "invalid_arguments")
        assert "send it in smaller parts" in result.message
        assert (await session.call("bash", {"command": "still here"})).stdout == "still here"
    assert len(server.runs) == 1


async def test_slow_calls_do_not_delay_others(executor: ToolExecutor, server: WireServer) -> None:
    gate = server.run = Gate("slow")
    async with executor.open("a") as slow, executor.open("b") as fast:
        waiting = asyncio.create_task(slow.call("bash", {"command": "slow"}))
        await until(lambda: server.runs)
        for index in range(50):
            assert (await fast.call("bash", {"command": str(index)})).stdout == str(index)
        assert not waiting.done()
        gate.opened.set()
        assert (await waiting).stdout == "slow"


async def test_calls_of_one_session_run_in_the_order_made(executor: ToolExecutor, server: WireServer) -> None:
    async with executor.open("t") as session:
        results = await asyncio.gather(*(session.call("bash", {"command": str(index)}) for index in range(500)))
    assert [result.stdout for result in results] == [str(index) for index in range(500)]
    assert server.runs == [result.id for result in results]
    assert len(server.batches) < 20, "calls made together travel together"


async def test_many_sessions_at_once(executor: ToolExecutor, server: WireServer) -> None:
    async def trajectory(index: int) -> None:
        async with executor.open(f"t{index}") as session:
            for turn in range(5):
                result = await session.call("bash", {"command": f"{index}:{turn}"})
                assert result.stdout == f"{index}:{turn}"

    await asyncio.gather(*(trajectory(index) for index in range(60)))
    counts = executor.statistics()
    assert (counts.sessions_now, counts.calls, counts.streams, counts.running_now) == (0, 300, 1, 0)
    assert len(server.runs) == len(set(server.runs)) == 300


async def test_cancelling_ends_the_call_in_the_container(executor: ToolExecutor, server: WireServer) -> None:
    server.run = Gate("slow")
    async with executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "slow"}))
        await until(lambda: server.runs)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: server.cancelled)
        assert server.cancelled == server.runs
        assert (await session.call("bash", {"command": "next"})).stdout == "next"
    assert executor.statistics().cancelled == 1


async def test_a_call_cancelled_before_it_left_is_never_sent(executor: ToolExecutor, server: WireServer) -> None:
    async with executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "never"}))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await session.call("bash", {"command": "next"})
    assert len(server.runs) == 1
    assert server.cancelled == []


async def test_results_that_arrived_are_forgotten(executor: ToolExecutor, server: WireServer) -> None:
    async with executor.open("t") as session:
        for _ in range(130):
            await session.call("bash", {"command": "x"})
        await until(lambda: len(server.forgotten) >= 128)
    assert set(server.forgotten) <= set(server.runs)


async def test_large_results_are_forgotten_at_once(executor: ToolExecutor, server: WireServer) -> None:
    server.run = answering(stdout="x" * 1_000_000)
    async with executor.open("t") as session:
        result = await session.call("bash", {"command": "x"})
        await until(lambda: server.forgotten)
    assert server.forgotten == [result.id]


async def test_a_lost_lease_ends_its_calls_at_once_and_no_others(
    executor: ToolExecutor, server: WireServer, pool: StubPool
) -> None:
    gate = server.run = Gate("slow")
    async with executor.open("a") as doomed, executor.open("b") as other:
        lost = [asyncio.create_task(doomed.call("bash", {"command": "slow"})) for _ in range(3)]
        kept = asyncio.create_task(other.call("bash", {"command": "slow"}))
        await until(lambda: len(server.batches) >= 1 and len(server.known) == 4)
        pool.leases[0].lose(LeaseLostError("expired", next_step="begin again"))
        errors = await asyncio.gather(*lost, return_exceptions=True)
        assert [type(error) for error in errors] == [LeaseLostError] * 3
        assert len({id(error) for error in errors}) == 3
        with pytest.raises(LeaseLostError, match="expired"):
            await doomed.call("bash", {"command": "x"})
        with pytest.raises(LeaseLostError):
            await doomed.seal()
        gate.opened.set()
        assert (await kept).stdout == "slow"


async def test_a_container_that_is_gone_takes_its_connection_along(
    executor: ToolExecutor, server: WireServer, pool: StubPool
) -> None:
    async with executor.open("a") as session:
        await session.call("bash", {"command": "x"})
        pool.leases[0].lose(ContainerLostError("the container died"))
        with pytest.raises(ContainerLostError):
            await session.call("bash", {"command": "x"})
        assert executor.statistics().containers_now == 1
    assert executor.statistics().containers_now == 0
    assert executor.statistics().streams == 1, "what a closed client counted is kept"


async def test_a_connection_is_kept_for_the_next_session(executor: ToolExecutor, server: WireServer) -> None:
    for name in "abc":
        async with executor.open(name) as session:
            await session.call("bash", {"command": "x"})
    assert server.streams == 1


async def test_an_idle_connection_is_closed(
    executor: ToolExecutor, server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.executor.tool_executor._IDLE_CLOSE_S", 0.01)
    async with executor.open("a") as session:
        await session.call("bash", {"command": "x"})
    await until(lambda: executor.statistics().containers_now == 0)
    async with executor.open("b") as session:
        assert (await session.call("bash", {"command": "x"})).stdout == "x"
    assert server.streams == 2


async def test_closing_a_session_ends_its_calls_and_is_repeatable(
    executor: ToolExecutor, server: WireServer, pool: StubPool
) -> None:
    server.run = Gate("slow")
    session = executor.open("t")
    async with session:
        waiting = asyncio.create_task(session.call("bash", {"command": "slow"}))
        await until(lambda: server.runs)
        await asyncio.gather(session.aclose(), session.aclose())
        with pytest.raises(PoolClosedError):
            await waiting
        with pytest.raises(PoolClosedError):
            await session.call("bash", {"command": "x"})
        await until(lambda: server.cancelled)
    assert pool.leases[0].released == 1
    with pytest.raises(PoolClosedError):
        await session.__aenter__()


async def test_closing_goes_on_when_its_caller_is_cancelled(executor: ToolExecutor, pool: StubPool) -> None:
    session = executor.open("t")
    await session.__aenter__()
    closing = asyncio.create_task(session.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: pool.leases[0].released)
    assert executor.statistics().sessions_now == 0


async def test_leaving_the_executor_closes_its_sessions(server: WireServer, pool: StubPool) -> None:
    server.run = Gate("slow")
    async with ToolExecutor(pool, CATALOG) as executor:
        session = await executor.open("t").__aenter__()
        waiting = asyncio.create_task(session.call("bash", {"command": "slow"}))
        await until(lambda: server.runs)
    with pytest.raises(PoolClosedError):
        await waiting
    assert pool.leases[0].released == 1
    assert repr(executor) == "<ToolExecutor 0 sessions on 0 containers>"
    with pytest.raises(PoolClosedError):
        await executor.open("u").__aenter__()


async def test_a_slot_that_comes_after_the_executor_closed_is_given_back(server: WireServer, pool: StubPool) -> None:
    pool.gate.clear()
    async with ToolExecutor(pool, CATALOG) as executor:
        entering = asyncio.create_task(executor.open("t").__aenter__())
        await asyncio.sleep(0)
    pool.gate.set()
    with pytest.raises(PoolClosedError):
        await entering
    assert pool.leases[0].released == 1


async def test_a_session_that_is_not_open_says_so(executor: ToolExecutor) -> None:
    session: ToolSession = executor.open("t")
    with pytest.raises(PoolClosedError, match="use it as 'async with'"):
        await session.call("bash", {"command": "x"})
    await session.aclose()


async def test_seal_is_the_leases(executor: ToolExecutor, pool: StubPool) -> None:
    async with executor.open("t") as session:
        await session.seal()
    assert pool.leases[0].sealed == 1


async def test_a_refused_batch_ends_its_calls_only(executor: ToolExecutor, server: WireServer) -> None:
    async def refuse_bad(socket: Any, batch: Any) -> bool:
        if not any(call.arguments.get("command") == "bad" for call in batch.calls):
            return True
        failure = Failure(error="sandbox_unavailable", message="draining", batch=batch.batch)
        await socket.send_str(failure.model_dump_json())
        return False

    server.on_batch = refuse_bad
    async with executor.open("a") as session:
        with pytest.raises(InfraError, match="draining"):
            await session.call("bash", {"command": "bad"})
        assert (await session.call("bash", {"command": "good"})).stdout == "good"
    assert server.streams == 1


async def test_another_protocol_version_is_a_typed_error_at_once(executor: ToolExecutor, server: WireServer) -> None:
    server.protocol = 99
    async with executor.open("t") as session:
        for _ in range(2):
            with pytest.raises(ProtocolError, match="speaks protocol 99"):
                await session.call("bash", {"command": "x"})


async def test_a_wrong_token_is_a_typed_error_at_once(executor: ToolExecutor, server: WireServer) -> None:
    server.token = "another"
    async with executor.open("t") as session:
        with pytest.raises(ProtocolError, match="wrong token"):
            await session.call("bash", {"command": "x"})


@pytest.mark.parametrize("text", ["not json", '{"type":"result"}', '{"type":"accepted","batch":77}', "{}"])
async def test_a_server_that_breaks_the_contract(executor: ToolExecutor, server: WireServer, text: str) -> None:
    async def babble(socket: Any, batch: Any) -> bool:
        await socket.send_str(text)
        return False

    server.on_batch = babble
    async with executor.open("t") as session:
        with pytest.raises(ProtocolError):
            await session.call("bash", {"command": "x"})
        server.on_batch = None
        assert (await session.call("bash", {"command": "fine again"})).stdout == "fine again"


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Mapping[str, Any], float]] = []
        self.closed: list[str] = []

    async def call(self, scope: CallScope, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        self.seen.append((scope.trajectory, tool, arguments, timeout_s))
        return CallResult(id="external", stdout="found")

    async def ended(self, trajectory: str) -> None:
        self.closed.append(trajectory)


class Query(BaseModel):
    query: str


async def test_external_tools_go_to_whoever_runs_them(server: WireServer, pool: StubPool) -> None:
    catalog = CATALOG.extended(ToolSpec(name="web_search", description="", arguments=Query, kind="external"))
    with pytest.raises(ConfigError, match="web_search"):
        ToolExecutor(pool, catalog)
    tools = Recorder()
    async with ToolExecutor(pool, catalog, external=tools) as executor, executor.open("t") as session:
        assert (await session.call("web_search", '{"query": "x"}', timeout_s=4)).stdout == "found"
        assert (await session.call("web_search", "{}")).fault == "model"
    assert tools.seen == [("t", "web_search", {"query": "x"}, 4.0)]
    assert tools.closed == ["t"]
    assert server.batches == []
