"""Tools over plain HTTP: trajectories whose slots the farm holds itself."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.audit import FarmAudit
from agentenv.api.farm_server.request_gate import MAX_REQUEST_BYTES
from agentenv.api.farm_server.settings import AskLimits, PlainSettings
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import LeaseLostError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.farm import Scope
from agentenv.wire.leases import Tags
from tests.farm_service import KEYS, Served, served, token
from tests.plain_http import PlainHttp, plain_http
from tests.waiting import START_S, eventually, until

TAKES_A_WHILE = PlainSettings(acquire_timeout_s=START_S)
UNTIL_GO = "until [ -e go ]; do sleep 0.02; done; echo gone"


@dataclass(frozen=True)
class Shared:
    """A farm, and programs that use it."""

    farm: Served
    backend: FakeBackend
    stack: AsyncExitStack

    async def client(self, run: str = "tests", scope: Scope = "run") -> PlainHttp:
        return await self.stack.enter_async_context(plain_http(self.farm.url, token(run, scope)))


@asynccontextmanager
async def shared(slots: int = 4, plain: PlainSettings = TAKES_A_WHILE, **options: Any) -> AsyncIterator[Shared]:
    backend = FakeBackend(ContainerSettings(slots_per_container=slots))
    async with (
        AsyncExitStack() as stack,
        served(backend, PoolSettings(max_containers=1, reset_timeout_s=START_S), plain=plain, **options) as farm,
    ):
        await until(lambda: sum(farm.farm.load().slots.values()) == slots)  # the container has told of them
        yield Shared(farm, backend, stack)


async def test_calls_of_a_trajectory_go_to_one_slot_and_a_failing_command_is_data() -> None:
    async with shared() as farm:
        http = await farm.client()
        first = await http.bash("t1", "echo hello | tee file", timeout_s=30)
        assert (first.body["success"], first.body["output"], first.body["error"]) == (True, "hello\n", "")
        second = await http.tool("t1", "bash", {"command": "cat file; echo bad >&2; exit 3"})
        assert (second.status, second.body["success"], second.body["error"]) == (200, False, "exit code 3")
        assert second.body["output"] == "hello\nbad\n"
        found = second.body["metadata"]
        assert (found["exit_code"], found["fault"], found["stdout"], found["stderr"]) == (3, "none", "hello\n", "bad\n")
        assert second.body["lease"] == first.body["lease"]
        late = await http.bash("t1", "sleep 60", timeout_s=0.1)
        assert late.body["error"].startswith("timed out after")
        wrong = await http.post("/execute", trajectory_id="t1", tool={"name": "bsh", "uniq_id": "u-1"})
        assert (wrong.status, wrong.body["success"], wrong.body["uniq_id"]) == (200, False, "u-1")
        assert (wrong.body["metadata"]["fault"], wrong.body["metadata"]["error"]) == ("model", "unknown_tool")
        (lease,) = farm.farm.farm.queue.leases(lambda _: True)
        assert lease.tags == Tags(
            run="tests", environment="plain", kind="train", item=lease.tags.item, tokens=lease.tags.tokens
        )


async def test_paths_are_changed_and_looked_at_by_the_tool_for_code() -> None:
    async with shared() as farm:
        http = await farm.client()
        assert (await http.tool("t1", "paths", {"action": "mkdir", "path": "made"})).body["success"]
        again = (await http.tool("t1", "paths", {"action": "mkdir", "path": "made"})).body
        assert (again["success"], again["metadata"]["exit_code"]) == (False, errno.EEXIST)
        renamed = await http.tool("t1", "paths", {"action": "rename", "path": "made", "target": "other"})
        assert renamed.body["success"]
        seen = (await http.tool("t1", "paths", {"action": "stat", "path": "other"})).body["metadata"]["content"]
        assert (seen["entry"]["path"], seen["entry"]["kind"]) == ("other", "directory")


async def test_two_trajectories_run_in_parallel() -> None:
    async with shared() as farm:
        http = await farm.client()
        where = (await http.bash("t1", "pwd")).output.strip()
        running = asyncio.create_task(http.bash("t1", UNTIL_GO, timeout_s=START_S))
        other = await http.bash("t2", f"pwd; touch {where}/go", kind="eval")  # slots of this backend are not isolated
        assert other.output.strip() != where
        assert (await running).output == "gone\n"
        status = (await http.get("/status")).body
        assert status["runs"][0]["held"] == {"train": 1, "eval": 1}


async def test_a_full_farm_is_waited_for_and_the_wait_ends_by_a_release() -> None:
    async with shared(slots=1) as farm:
        http = await farm.client()
        await http.bash("t1", "echo left > file")
        waiting = asyncio.create_task(http.bash("t2", "ls"))

        async def seen() -> bool:
            return await http.held() == {"t1": "held", "t2": "waiting"}

        await eventually(seen)
        assert (await http.get("/status")).body["queue_size"] == 1
        assert await http.release("t1", reset_workspace=True)
        assert (await waiting).output == ""
        assert await http.release("t1") is False


async def test_a_wait_that_is_too_long_is_refused_for_now_and_keeps_its_place() -> None:
    async with shared(slots=1, plain=PlainSettings(acquire_timeout_s=0.2)) as farm:
        http = await farm.client()
        await http.bash("t1", "true")
        refused = await http.bash("t2", "true")
        assert refused.refusal == (503, "acquire_timeout")
        assert refused.headers["Retry-After"] == "1"
        assert "the run holds 1 of 1 slots" in refused.body["message"]
        await http.release("t1")

        async def had() -> bool:
            return (await http.bash("t2", "true")).status == 200

        await eventually(had)
        assert await http.release("t2")


async def granted_between_calls(farm: Shared) -> PlainHttp:
    """A client whose trajectory t2 got its slot after the call that waited for it."""
    http = await farm.client()
    await http.bash("t1", "true")
    assert (await http.bash("t2", "true")).refusal == (503, "acquire_timeout")
    await http.release("t1")

    async def granted() -> bool:
        return await http.held() == {"t2": "held"}

    await eventually(granted)
    return http


async def test_a_slot_that_is_granted_between_two_calls_is_the_next_ones() -> None:
    async with shared(slots=1, plain=PlainSettings(acquire_timeout_s=0.2)) as farm:
        http = await granted_between_calls(farm)
        (lease,) = farm.farm.farm.queue.leases(lambda _: True)
        assert (await http.bash("t2", "true")).body["lease"] == lease.name


async def test_a_slot_that_ends_before_anything_was_called_in_it_is_not_the_trajectorys_loss() -> None:
    async with shared(slots=1, plain=PlainSettings(acquire_timeout_s=0.2)) as farm:
        http = await granted_between_calls(farm)
        queue = farm.farm.farm.queue
        (lease,) = queue.leases(lambda _: True)
        queue.end(lease.id, LeaseLostError("it was not renewed"))

        async def another() -> bool:
            called = await http.bash("t2", "true")
            assert called.status == 200 or called.refusal == (503, "acquire_timeout")
            return called.status == 200 and called.body["lease"] != lease.name

        await eventually(another)
        (plain,) = farm.farm.farm.plain._runs.values()
        assert plain.executor.statistics().sessions_now == 1


async def test_a_release_ends_a_wait() -> None:
    async with shared(slots=1) as farm:
        http = await farm.client()
        await http.bash("t1", "true")
        waiting = asyncio.create_task(http.bash("t2", "true"))

        async def seen() -> bool:
            return "t2" in await http.held()

        await eventually(seen)
        assert await http.release("t2")
        assert (await waiting).refusal == (502, "lease_lost")
        assert farm.farm.farm.load().waiting == 0


async def test_an_idle_trajectory_is_released_and_says_so_once_it_calls() -> None:
    async with shared(slots=1, plain=PlainSettings(idle_s=5)) as farm:
        http = await farm.client()
        await http.bash("t1", "echo mine > file")

        async def lost() -> bool:
            return await http.held() == {"t1": "lost"}

        await eventually(lost)
        refused = await http.bash("t1", "cat file")
        assert refused.refusal == (502, "stale_lease")
        assert "made no call for 5 s" in refused.body["message"]
        assert (await http.bash("t2", "ls")).output == ""
        await http.release("t1")
        await http.release("t2")
        assert (await http.bash("t1", "ls")).output == "", "it begins anew"


async def test_another_runs_token_does_not_reach_a_trajectory_of_the_same_name() -> None:
    async with shared() as farm:
        mine, other = await farm.client("mine"), await farm.client("team/other")
        await mine.bash("t1", "echo secret > file")
        assert (await other.post("/artifacts/list", trajectory_id="t1")).status == 404
        assert (await other.bash("t1", "ls")).output == ""
        assert [one["run"] for one in (await other.get("/status")).body["trajectories"]] == ["team/other"]
        assert await other.release("t1")
        assert (await mine.bash("t1", "cat file")).output == "secret\n"
        assert (await other.bash("t1", "ls", run="mine")).refusal == (403, "forbidden")
        assert (await other.post("/release", trajectory_id="t1", run="mine")).refusal == (403, "forbidden")
        looking = await farm.client("mine", "read")
        assert (await looking.bash("t1", "ls")).refusal == (403, "forbidden")
        assert (await looking.get("/status")).body["total_requests"] == 2


async def test_a_token_of_several_runs_names_its_run() -> None:
    async with shared() as farm:
        http = await farm.client("team/*")
        assert (await http.bash("t1", "true")).refusal == (403, "forbidden")
        assert (await http.bash("t1", "true", run="team/a")).status == 200
        assert (await http.bash("t1", "true", run="team/b")).status == 200
        status = (await http.get("/status?run=team/b")).body
        assert [one["run"] for one in status["trajectories"]] == ["team/b"]
        assert [one["run"] for one in status["runs"]] == ["team/b"]
        nobody = await farm.stack.enter_async_context(plain_http(farm.farm.url, "nonsense"))
        assert (await nobody.bash("t1", "true")).refusal == (401, "unauthorized")


async def test_a_call_with_an_id_runs_once_also_when_its_connection_was_cut() -> None:
    async with shared() as farm:
        http = await farm.client()
        where = (await http.bash("t1", "pwd")).output.strip()
        again: dict[str, Any] = {"command": f"echo ran >> log; {UNTIL_GO}", "call_id": "c-1", "timeout_s": START_S}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await http.bash("t1", **again)
        joined = [asyncio.create_task(http.bash("t1", **again)) for _ in range(2)]
        await http.bash("t2", f"until [ -e {where}/log ]; do sleep 0.02; done; touch {where}/go")
        assert [(await one).output for one in joined] == ["gone\n"] * 2
        await asyncio.gather(*(http.tool("t1", "list_files", {}) for _ in range(80)))
        assert (await http.bash("t1", **again)).output == "gone\n", "remembered, whatever else was called"
        assert (await http.bash("t1", "cat log")).output == "ran\n"
        assert (await http.bash("t1", "cat log", call_id="c-1")).output == "gone\n", "the id counts"
        await http.release("t1")
        assert (await http.bash("t1", "echo new", call_id="c-1")).output == "new\n"


async def test_a_large_result_is_not_kept_but_the_call_still_runs_once() -> None:
    async with shared() as farm:
        http = await farm.client()
        large = "echo ran >> log; head -c 400000 /dev/zero | tr '\\0' x"
        assert len((await http.bash("t1", large, call_id="c-1")).output) == 400_000

        async def forgotten() -> bool:
            again = await http.bash("t1", large, call_id="c-1")
            return again.status != 200 and again.refusal == (502, "call_lost")

        await eventually(forgotten)
        assert (await http.bash("t1", "cat log")).output == "ran\n"


async def test_an_id_of_a_call_that_runs_is_not_another_calls() -> None:
    async with shared() as farm:
        http = await farm.client()
        where = (await http.bash("t1", "pwd")).output.strip()
        running = asyncio.create_task(http.bash("t1", f"touch began; {UNTIL_GO}", call_id="c-1", timeout_s=START_S))
        await http.bash("t2", f"until [ -e {where}/began ]; do sleep 0.02; done")
        assert (await http.bash("t1", "echo other", call_id="c-1")).refusal == (409, "protocol")
        await http.bash("t2", f"touch {where}/go")
        assert (await running).output == "gone\n"


async def test_a_trajectory_that_loses_its_container_is_refused_until_it_is_released() -> None:
    async with shared() as farm:
        http = await farm.client()
        lease = (await http.bash("t1", "true")).body["lease"]
        running = asyncio.create_task(http.bash("t1", "sleep 600", timeout_s=1000))

        async def runs() -> bool:
            return bool((await http.get("/status")).body["trajectories"][0]["running_calls"])

        await eventually(runs)
        farm.backend.kill(lease.partition("/")[0])
        assert (await running).refusal == (502, "container_lost")
        assert (await http.bash("t1", "true")).refusal == (502, "container_lost")
        assert (await http.get("/status")).body["total_errors"] == 1
        await http.release("t1")
        again = await http.bash("t1", "true")
        assert again.status == 200
        assert again.body["lease"] != lease
        assert (await http.bash("t1", "true", lease=lease)).refusal == (502, "stale_lease")
        assert (await http.bash("t1", "true", lease=again.body["lease"])).status == 200
        assert (await http.bash("never", "true", lease=lease)).refusal == (502, "stale_lease")
        assert "never" not in await http.held()


async def test_artifacts() -> None:
    async with shared() as farm:
        http = await farm.client()
        content = "grüße\n".encode()
        await http.bash("t1", "mkdir -p a/b; printf 'grüße\\n' > a/b/c; printf '\\377\\0' > a/raw")
        text = (await http.post("/artifacts/read", trajectory_id="t1", path="a/b/c", include_sha256=True)).body
        assert (text["success"], text["content"], text["bytes"], text["truncated"]) == (True, "grüße\n", 8, False)
        assert text["sha256"] == hashlib.sha256(content).hexdigest()
        part = (await http.post("/artifacts/read", trajectory_id="t1", path="a/b/c", max_bytes=3)).body
        assert (part["content"], part["bytes"], part["file_size"], part["truncated"]) == ("gr", 2, 8, True)
        raw = await http.post("/artifacts/read", trajectory_id="t1", path="a/raw", encoding="base64", max_bytes=None)
        assert base64.b64decode(raw.body["content"]) == b"\xff\0"
        assert (await http.post("/artifacts/read", trajectory_id="t1", path="a/raw")).body["lossy"] is True
        missing = await http.post("/artifacts/read", trajectory_id="t1", path="none")
        assert (missing.status, missing.body["success"]) == (200, False)
        assert missing.body["error"] == "none: No such file or directory"
        listed = (await http.post("/artifacts/list", trajectory_id="t1", path="a")).body
        assert [(one["path"], one["is_dir"]) for one in listed["entries"]] == [("b", True), ("raw", False)]
        deep = (await http.post("/artifacts/list", trajectory_id="t1", recursive=True, max_entries=3)).body
        assert ([one["path"] for one in deep["entries"]], deep["truncated"]) == (["a", "a/b", "a/b/c"], True)
        assert (await http.post("/artifacts/list", trajectory_id="t2")).refusal == (404, "protocol")


async def test_an_archive() -> None:
    async with shared() as farm:
        http = await farm.client()
        await http.bash("t1", "mkdir a; echo one > a/1; head -c 5000 /dev/urandom > a/2")
        packed = (await http.post("/artifacts/archive", trajectory_id="t1", path="a")).body
        data = base64.b64decode(packed["content"])
        assert (packed["bytes"], packed["entry_count"], packed["format"]) == (len(data), 2, "tar.gz")
        assert packed["sha256"] == hashlib.sha256(data).hexdigest()
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
            assert {name: len(file.read()) for name, file in files.items() if file} == {"1": 4, "2": 5000}
        for bound, said in ({"max_bytes": 100}, "bytes, at most 100"), ({"max_entries": 1}, "2 files, at most 1"):
            large = (await http.post("/artifacts/archive", trajectory_id="t1", path="a", **bound)).body
            assert (large["success"], large["content"]) == (False, "")
            assert said in large["error"]
        none = (await http.post("/artifacts/archive", trajectory_id="t1", path="none")).body
        assert (none["success"], none["error"]) == (False, "none: No such file or directory")


async def test_too_much_at_once_is_refused_for_a_while() -> None:
    async with shared(plain=PlainSettings(calls_at_once=1)) as farm:
        http, other = await farm.client(), await farm.client("other")
        where = (await http.bash("t1", "pwd")).output.strip()
        running = asyncio.create_task(http.bash("t1", f"touch began; {UNTIL_GO}", timeout_s=START_S))
        await other.bash("t1", f"until [ -e {where}/began ]; do sleep 0.02; done")
        refused = await http.bash("t2", "true")
        assert refused.refusal == (429, "too_many_requests")
        assert refused.headers["Retry-After"] == "1"
        await other.bash("t1", f"touch {where}/go")
        assert (await running).output == "gone\n"
        assert (await http.bash("t2", "true")).status == 200


async def test_new_trajectories_are_limited_by_rate_as_asks_are_and_calls_are_not() -> None:
    async with shared(access=Access(KEYS, limits=AskLimits(asks_per_s=0.01, burst=1))) as farm:
        http = await farm.client()
        assert (await http.bash("t1", "true")).status == 200
        refused = await http.bash("t2", "true")
        assert refused.refusal == (429, "too_many_requests")
        assert int(refused.headers["Retry-After"]) > 1
        assert (await http.bash("t1", "true")).status == 200
        assert await http.held() == {"t1": "held"}


async def test_the_audit_tells_who_leased_and_released(tmp_path: Path) -> None:
    audit = FarmAudit(tmp_path / "audit.jsonl")
    async with shared(audit=audit) as farm:
        http = await farm.client()
        lease = (await http.bash("t1", "true", kind="eval")).body["lease"]
        await (await farm.client()).release("t1")
    audit.close()
    granted, ended = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert (granted["event"], granted["run"], granted["leases"]) == ("ask_granted", "tests", {"t1": lease})
    assert (granted["tags"]["environment"], granted["tags"]["kind"]) == ("plain", "eval")
    assert (ended["event"], ended["lease"], ended["why"]) == ("lease_ended", lease, "released")
    assert granted["by"] != ended["by"], "each is the id of its token"


async def test_what_is_too_large_or_malformed_is_refused_before_it_is_read() -> None:
    async with shared() as farm:
        http = await farm.client()
        large = io.BytesIO(b" " * (MAX_REQUEST_BYTES + 1))
        async with http.session.post(http.url + "/execute", data=large) as response:
            assert response.status == 413

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(MAX_REQUEST_BYTES // 65536 + 1):
                yield b" " * 65536

        async with http.session.post(http.url + "/execute", data=pieces()) as response:
            assert response.status == 413
        for body in ({}, {"trajectory_id": "t\n", "tool": {"name": "bash"}}, {"trajectory_id": "t", "tool": {}}):
            assert (await http.post("/execute", **body)).refusal == (400, "protocol")
        assert (await http.bash("t1", "true", timeout_s=0)).refusal == (400, "protocol")
        assert await http.held() == {}


async def test_a_standby_refers_to_the_farm_that_leads() -> None:
    async with shared() as farm:
        http = await farm.client()
        farm.farm.farm.leads, farm.farm.farm.leader_url = False, "http://leader:8700"
        referred = await http.bash("t1", "true")
        assert (referred.status, referred.headers["Location"]) == (307, "http://leader:8700/execute")
        farm.farm.farm.leads = True


async def test_a_farm_that_ends_answers_and_leaves_the_leases() -> None:
    async with shared() as farm:
        http = await farm.client()
        await http.bash("t1", "true")
        running = asyncio.create_task(http.bash("t1", "sleep 600", timeout_s=1000))

        async def runs() -> bool:
            return bool((await http.get("/status")).body["trajectories"][0]["running_calls"])

        await eventually(runs)
        farm.farm.farm.leave()
        assert (await running).refusal == (503, "closed")
        assert [lease.trajectory for lease in farm.farm.farm.queue.leases(lambda _: True)] == ["t1"]


async def test_the_document_describes_the_routes() -> None:
    async with shared() as farm:
        http = await farm.client()
        document = (await http.get("/openapi.json")).body
        for path in ("/execute", "/release", "/artifacts/read", "/artifacts/list", "/artifacts/archive"):
            operation = document["paths"][path]["post"]
            for content in (operation["requestBody"], operation["responses"]["200"]):
                named = content["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert document["components"]["schemas"][named]["description"]
        refusals = document["paths"]["/execute"]["post"]["responses"]
        assert {"401", "403", "409", "429", "502", "503", "504"} <= refusals.keys()


async def test_a_connection_that_was_cut_leaves_nothing_behind() -> None:
    async with shared(slots=1) as farm:
        http = await farm.client()
        await http.bash("t1", "true")
        waiting = asyncio.create_task(http.bash("t2", "true"))

        async def seen() -> bool:
            return "t2" in await http.held()

        await eventually(seen)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await http.release("t2")
        assert farm.farm.farm.load().waiting == 0
        assert await http.release("t1")
