"""Record and replay: one web for a whole group, and none at all for later runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.api.tool_server.cassette import Cassette, Recording, file_name, key_of
from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun, external_tool, tool
from agentenv.errors import InfraError, InvalidArgumentsError, PolicyRefusalError, ToolCallError
from tests.unit.api.tool_server_box import Counted, ask, lines, member, taping
from tests.waiting import until


def tape(directory: Path, item: str = "item") -> Path:
    return directory / file_name(item)


async def test_rollouts_of_a_group_see_the_same_and_ask_once(tmp_path: Path) -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool(concurrent=8)], taping(tmp_path)) as server:
        asking = [asyncio.create_task(ask(server, scope=member(n), word="w")) for n in range(6)]
        await until(lambda: counted.runs)
        await asyncio.sleep(0.05)
        assert counted.runs == ["w"]
        counted.gate.set()
        results = await asyncio.gather(*asking)
        assert {json.dumps(result.content) for result in results} == {'{"said": "w", "run": 1}'}
        await ask(server, scope=member(0), word="other")
        await ask(server, scope=member(0, item="another item"), word="w")
    assert counted.runs == ["w", "other", "w"]
    assert [line["arguments"] for line in lines(tape(tmp_path))] == [{"word": "w"}, {"word": "other"}]


async def test_a_later_run_needs_nothing_and_other_words_are_refused(tmp_path: Path) -> None:
    async with ToolServer([Counted().tool()], taping(tmp_path)) as server:
        recorded = await ask(server, word="w")
    counted = Counted()
    unavailable = counted.tool(unavailable="no network here")
    async with ToolServer([unavailable], taping(tmp_path, "replay")) as server:
        assert server.describe().tools[0].unavailable == ""
        replayed = await ask(server, scope=member(7, group="later"), word="w")
        refused = await ask(server, word="new")
    assert replayed.content == recorded.content
    assert (refused.fault, refused.error) == ("policy", "refused")
    assert "was not" in refused.message
    assert counted.runs == []


async def test_recording_goes_on_where_a_cassette_ends(tmp_path: Path) -> None:
    for word, runs in (("a", ["a"]), ("a", []), ("b", ["b"])):
        counted = Counted()
        async with ToolServer([counted.tool()], taping(tmp_path)) as server:
            await ask(server, word="a")
            await ask(server, word=word)
        assert counted.runs == runs


async def test_defaults_and_order_of_arguments_make_no_difference(tmp_path: Path) -> None:
    async def look(a: int = 1, b: int = 2) -> int:
        """Look."""
        return a + b

    async with ToolServer([external_tool(look)], taping(tmp_path)) as server:
        given: list[dict[str, Any]] = [{}, {"a": 1}, {"b": 2, "a": 1}, {"a": 1, "b": 2}]
        for arguments in given:
            assert (await ask(server, "look", **arguments)).content == 3
    assert len(lines(tape(tmp_path))) == 1


@pytest.mark.parametrize(
    ("error", "kept", "runs"),
    [
        (ToolFailure("404", keep=True), 1, 1),
        (ToolFailure("timed out"), 0, 2),
        (RuntimeError("ours"), 0, 2),
    ],
)
async def test_only_what_the_world_settled_is_kept(tmp_path: Path, error: Exception, kept: int, runs: int) -> None:
    def act(_: str) -> Any:
        raise error

    counted = Counted(act)
    async with ToolServer([counted.tool()], taping(tmp_path)) as server:
        first, second = await ask(server, scope=member(0)), await ask(server, scope=member(1))
    assert (first.fault, first.exit_code, first.stderr) == (second.fault, second.exit_code, second.stderr)
    assert len(counted.runs) == runs
    assert (len(lines(tape(tmp_path))) if tape(tmp_path).exists() else 0) == kept


@pytest.mark.parametrize(
    "error",
    [PolicyRefusalError("not on the list", next_step="stay"), InvalidArgumentsError("no URL"), ToolCallError("wrong")],
)
async def test_a_refusal_is_replayed_as_it_was_and_asked_again_while_recording(
    tmp_path: Path, error: Exception
) -> None:
    def act(_: str) -> Any:
        raise error

    counted = Counted(act)
    async with ToolServer([counted.tool()], taping(tmp_path)) as server:
        recorded = [await ask(server, scope=member(n)) for n in range(2)]
    assert len(counted.runs) == 2
    assert len(lines(tape(tmp_path))) == 1
    later = Counted()
    async with ToolServer([later.tool()], taping(tmp_path, "replay")) as server:
        replayed = await ask(server, scope=member(0, group="later"))
    assert later.runs == []
    for result in recorded:
        assert (result.fault, result.error, result.message) == (replayed.fault, replayed.error, replayed.message)
    assert replayed.message == str(error)
    async with ToolServer([later.tool()], taping(tmp_path)) as server:  # allowed by now
        assert (await ask(server)).fault == "none"
    async with ToolServer([Counted().tool()], taping(tmp_path, "replay")) as server:
        assert (await ask(server)).content == {"said": "hello", "run": 1}


async def test_the_next_one_asks_when_the_first_is_cancelled_or_fails(tmp_path: Path) -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool()], taping(tmp_path)) as server:
        first = asyncio.create_task(ask(server, scope=member(0)))
        await until(lambda: counted.runs)
        second = asyncio.create_task(ask(server, scope=member(1)))
        await asyncio.sleep(0.02)
        await server.ended("g-0")
        assert (await first).cancelled
        await until(lambda: len(counted.runs) == 2)
        counted.gate.set()
        assert (await second).fault == "none"


async def test_tools_that_are_not_recorded_always_run(tmp_path: Path) -> None:
    counted = Counted()
    async with ToolServer([counted.tool(recorded=False)], taping(tmp_path, "replay")) as server:
        await ask(server)
        await ask(server)
    assert len(counted.runs) == 2
    assert list(tmp_path.iterdir()) == []


async def test_no_secret_is_in_a_cassette_and_it_replays_with_another(tmp_path: Path) -> None:
    @tool(secrets=("key",))
    async def look(what: str, *, run: ToolRun) -> dict[str, str]:
        """Look."""
        return {"told": run.secrets["key"], "what": what}

    for mode, secret in (("record", "the-first-key"), ("replay", "the-second-key")):
        async with ToolServer([look], taping(tmp_path, mode), secrets=Secrets({"key": secret})) as server:
            result = await ask(server, "look", what=f"with {secret}")
        assert result.content == {"told": "[secret:key]", "what": "with [secret:key]"}
    assert "the-first-key" not in tape(tmp_path).read_text()


# -- stateful tools ------------------------------------------------------------------------------------


class Pages:
    """A browser of a kind: goes somewhere, and says where each trajectory is."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}
        self.log: list[str] = []

    async def go(self, where: str, *, run: ToolRun) -> str:
        """Go."""
        self.log.append(f"{run.scope.trajectory} go {where}")
        if where == "nowhere":
            raise ToolFailure("no such place")
        self.at[run.scope.trajectory] = where
        return f"at {where}"

    async def look(self, *, run: ToolRun) -> str:
        """Look."""
        self.log.append(f"{run.scope.trajectory} look")
        return f"you see {self.at.get(run.scope.trajectory, 'nothing')}"

    def tools(self) -> list[ExternalTool]:
        return [external_tool(function, stateful=True) for function in (self.go, self.look)]


async def test_stateful_calls_are_keyed_by_what_came_before(tmp_path: Path) -> None:
    pages = Pages()
    async with ToolServer(pages.tools(), taping(tmp_path)) as server:
        for n in range(2):
            for where in ("a", "b"):
                await ask(server, "go", scope=member(n), where=where)
                assert (await ask(server, "look", scope=member(n))).content == f"you see {where}"
    assert pages.log == ["g-0 go a", "g-0 look", "g-0 go b", "g-0 look"]
    replaying = Pages()
    async with ToolServer(replaying.tools(), taping(tmp_path, "replay")) as server:
        await ask(server, "go", where="a")
        assert (await ask(server, "look")).content == "you see a"
        assert (await ask(server, "look")).fault == "policy"  # nobody looked twice
        assert (await ask(server, "go", scope=member(3), where="b")).fault == "policy"  # nobody began there
    assert replaying.log == []


async def test_leaving_what_was_recorded_first_makes_the_calls_that_were_skipped(tmp_path: Path) -> None:
    pages = Pages()
    async with ToolServer(pages.tools(), taping(tmp_path)) as server:
        await ask(server, "go", scope=member(0), where="a")
        await ask(server, "go", scope=member(1), where="a")  # from the cassette
        assert (await ask(server, "look", scope=member(1))).content == "you see a"
        assert (await ask(server, "look", scope=member(0))).content == "you see a"
    assert pages.log == ["g-0 go a", "g-1 go a", "g-1 look"]


@pytest.mark.parametrize(
    ("now", "fault"),
    [({"text": "2"}, "none"), ({"element": "Delete"}, "infra"), ({"broken": "yes"}, "infra")],
)
async def test_a_skipped_call_that_ends_otherwise_when_it_is_made_is_our_failure(
    tmp_path: Path, now: dict[str, str], fault: str
) -> None:
    world = {"element": "Save", "text": "1"}

    async def press() -> dict[str, str]:
        """Press."""
        if "broken" in world:
            raise ToolFailure("gone", keep=True)
        return world

    async def look() -> str:
        """Look."""
        return "seen"

    tools = [external_tool(press, stateful=True, same=("element",)), external_tool(look, stateful=True)]
    async with ToolServer(tools, taping(tmp_path)) as server:
        await ask(server, "press", scope=member(0))
        world |= now
        recorded = await ask(server, "press", scope=member(1))
        assert recorded.content == {"element": "Save", "text": "1"}
        result = await ask(server, "look", scope=member(1))
    assert result.fault == fault
    assert ("delete the cassette" in result.message) == (fault == "infra")


async def test_after_a_failure_that_is_not_kept_nothing_recorded_is_mistaken_for_what_comes(tmp_path: Path) -> None:
    pages = Pages()
    async with ToolServer(pages.tools(), taping(tmp_path)) as server:
        await ask(server, "go", scope=member(0), where="nowhere")
        assert (await ask(server, "look", scope=member(0))).content == "you see nothing"
        await ask(server, "go", scope=member(1), where="a")
        await ask(server, "look", scope=member(1))
    keys = [line["key"] for line in lines(tape(tmp_path))]
    assert len(keys) == len(set(keys)) == 3


# -- files ---------------------------------------------------------------------------------------------


def recording(key: str, content: Any = None) -> Recording:
    return Recording(key=key, tool="ask", arguments={}, content=content)


def keeping(key: str, content: Any = None) -> Any:
    async def keep() -> Recording:
        return recording(key, content)

    return keep


async def test_half_a_line_left_by_a_crash_is_cut_off_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    await Cassette(path).answer("a", keeping("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "half')
    cassette = Cassette(path)
    assert len(cassette) == 1
    await cassette.answer("b", keeping("b", "x" * 100_000))
    assert [line["key"] for line in lines(path)] == ["a", "b"]
    path.write_bytes(b"{oops}\n" + whole)
    with pytest.raises(InfraError, match=r"c\.jsonl:1 is not a valid recording"):
        Cassette(path)


async def test_the_first_of_two_writers_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    one, other = Cassette(path), Cassette(path)
    await one.answer("a", keeping("a", 1))
    await other.answer("a", keeping("a", 2))
    found = Cassette(path).known("a")
    assert found is not None
    assert found.content == 1


async def test_a_cassette_that_cannot_be_written_is_our_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    counted = Counted()
    async with ToolServer([counted.tool()], taping(tmp_path / "file")) as server:
        result = await ask(server)
    assert (result.fault, result.error) == ("infra", "infra")


def test_file_names_are_readable_and_never_shared() -> None:
    names = ["a/b", "a_b", "", "../../etc/passwd", "a" * 500, "a" * 501, ".hidden", "ünï", "CON", "\ud800"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(files)
    assert all("/" not in name and not name.startswith(".") and len(name.encode()) < 200 for name in files)
    assert file_name("a/b").startswith("a_b-")


def test_keys_tell_apart_what_differs() -> None:
    keys = {key_of("t", {"a": 1}), key_of("t", {"a": "1"}), key_of("u", {"a": 1}), key_of("t", {"a": 1}, "x")}
    assert len(keys) == 4
    assert key_of("t", {"a": 1, "b": 2}) == key_of("t", {"b": 2, "a": 1})
