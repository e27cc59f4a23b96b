"""The operators' verbs where nothing runs: what decides, what is shown, what is said when there is no farm."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from agentenv.cli.app import app
from agentenv.cli.output import count_of, mib, short
from agentenv.cli.progress import Arrival
from agentenv.cli.status import shown
from agentenv.containers.handle import ContainerHandle
from agentenv.durations import duration
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.farm.log import lines_of, logging_to
from agentenv.farm.metrics import of_farm
from agentenv.farm.view import Census, ContainerView, FarmView, Place, PoolView, as_json, choose
from agentenv.metrics.scrape import parse
from agentenv.slots.backends.base import ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.histogram import Buckets
from agentenv.wire.leases import SlotReport
from agentenv.wire.server import ServerInfo
from agentenv.wire.states import SlotState
from agentenv.wire.watch import CALL_BOUNDS_S
from tests.waiting import DEADLINE_S

TOKEN = "secret-token-of-a-container"


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("AGENTENV_BACKEND", raising=False)
    monkeypatch.delenv("NOMAD_ADDR", raising=False)
    return tmp_path


WIDE = "1000"
"""Columns of a terminal on which no line is broken, however long the path in it."""


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": WIDE, **env})


# -- which farm is meant


@pytest.mark.parametrize("verb", ["status", "slots", "down", "gc", "logs", "exec", "shell"])
def test_a_job_means_nothing_without_nomad(verb: str) -> None:
    rest = ["--", "true"] if verb == "exec" else []
    result = run(verb, "--job", "x", *rest)
    assert result.exit_code == 2
    assert "--backend nomad" in result.stderr


def test_the_verbs_own_backend_beats_the_one_before_it_and_that_the_environment() -> None:
    def chosen(*arguments: str, **env: str) -> str:
        told = json.loads(run(*arguments, "--json", **env).stdout)
        backend: str = told["backend"]
        return backend

    assert chosen("status") == "local"
    assert chosen("status", AGENTENV_BACKEND="fake") == "fake"
    assert chosen("--backend", "local", "status", AGENTENV_BACKEND="fake") == "local"
    assert chosen("--backend", "local", "status", "--backend", "fake") == "fake"


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    result = run("status", "--backend", "cloud")
    assert result.exit_code == 2
    assert "nomad" in result.stderr


# -- no farm, no cluster


def test_no_farm_is_said_with_how_to_have_one() -> None:
    result = run("status")
    assert result.exit_code == 1
    assert "no farm is running" in result.stdout
    assert "agentenv up" in result.stdout


def test_slots_of_no_farm_is_an_error_with_a_next_step() -> None:
    result = run("slots", "--backend", "fake")
    assert result.exit_code == 125
    assert "agentenv up --backend fake" in result.stderr


def test_down_where_nothing_runs_is_done() -> None:
    assert run("down").exit_code == 0


def test_logs_of_no_farm_is_an_error_with_a_next_step() -> None:
    result = run("logs")
    assert result.exit_code == 2
    assert "agentenv up" in result.stderr


def test_logs_of_a_container_by_its_number_after_its_end_and_of_none(state: Path) -> None:
    (state / "farm-local.log").write_text("local-0-2b9e: serving 9\nlocal-10-77aa: serving\n")
    assert run("logs", "0").stdout == "local-0-2b9e: serving 9\n"
    assert run("logs", "local-1").stdout == "local-10-77aa: serving\n"
    for unknown in ("9", "zz"):
        result = run("logs", unknown)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "agentenv status" in result.stderr


def test_logs_print_what_a_terminal_would_obey_as_its_code(state: Path) -> None:
    (state / "farm-local.log").write_text("local-0-2b9e: \x1b]0;mine\x07\tö\x9b2J\x7f\n")
    assert run("logs").stdout == "local-0-2b9e: \\x1b]0;mine\\x07\tö\\x9b2J\\x7f\n"


@pytest.mark.parametrize("verb", [("status",), ("slots",), ("down",), ("gc",), ("up",), ("exec", "--", "true")])
def test_a_silent_nomad_is_named_with_how_to_start_one(verb: tuple[str, ...]) -> None:
    result = run("--backend", "nomad", *verb, NOMAD_ADDR="http://127.0.0.1:9")
    assert result.exit_code == 125, result.output
    assert "127.0.0.1:9" in result.stderr
    assert "make nomad-dev" in result.stderr


def test_as_json_that_is_one_document() -> None:
    result = run("status", "-b", "nomad", "--json", NOMAD_ADDR="http://127.0.0.1:9")
    told = json.loads(result.stdout)
    assert told["error"] == "sandbox_unavailable"
    assert "make nomad-dev" in told["next_step"]


def test_nomads_farm_has_no_containers_of_ones_own() -> None:
    result = run("exec", "--backend", "nomad", "--own", "true")
    assert result.exit_code == 2
    assert "agentenv up --backend nomad --network" in result.stderr


def test_up_refuses_what_its_backend_cannot() -> None:
    assert "--backend nomad" in run("up", "--image", "x").stderr
    assert "--metrics-port" in run("up", "--backend", "nomad", "--metrics-port", "0").stderr
    assert "--backend nomad" in run("up", "--var", "a=1").stderr


def test_up_hands_the_job_files_variables_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    async def bring_up(settings: object, count: int, timeout_s: float, named: dict[str, object]) -> dict[str, object]:
        given.update(named)
        return {}

    monkeypatch.setattr("agentenv.cli.nomad_up.bring_up", bring_up)
    result = run("up", "--backend", "nomad", "--var", 'runtime="runsc"', "--var", 'a={ b = "c" }', "--json")
    assert result.exit_code == 0, result.stderr
    assert given == {
        "job_id": None, "image": None, "memory_mib": None, "variables": {"runtime": '"runsc"', "a": '{ b = "c" }'},
        "memory_oversubscription": False,
    }  # fmt: skip
    for wrong in ("runtime", "=1", "runtime="):
        assert "NAME=HCL" in run("up", "--backend", "nomad", "--var", wrong).stderr


# -- what is shown


def place(number: int, state: str = "running", detail: str = "", *, reachable: bool = True) -> Place:
    handle = ContainerHandle(f"c-{number}", number, "http://127.0.0.1:1", TOKEN, 2) if reachable else None
    return Place(f"c-{number}", number, state, "node-a", detail, handle, age_s=125.0)


TIMES = (
    "# TYPE agentenv_sandbox_call_seconds histogram\n"
    + "".join(f'agentenv_sandbox_call_seconds_bucket{{le="{bound:g}"}} 5\n' for bound in CALL_BOUNDS_S)
    + 'agentenv_sandbox_call_seconds_bucket{le="+Inf"} 12\n'
    + "agentenv_sandbox_call_seconds_sum 2000.5\nagentenv_sandbox_call_seconds_count 12\n"
)


def answering(number: int, *states: SlotState) -> ContainerView:
    info = ServerInfo(container=f"c-{number}", boot="b", version="1", slots=2, isolation="full")
    slots = tuple(SlotReport(slot=index, state=state, epoch=0) for index, state in enumerate(states))
    samples = parse(f"agentenv_sandbox_calls_total 12\nagentenv_sandbox_calls_running 3\n{TIMES}")
    return ContainerView(place(number), info, slots, samples)


def farm(*containers: ContainerView, goal: int | None = None, **census: object) -> FarmView:
    given = {"backend": "nomad", "where": "Nomad job j", "exists": True, **census}
    wanted = len(containers) if goal is None else goal
    places = tuple(container.place for container in containers)
    return FarmView(Census(goal=wanted, places=places, **given), containers)  # type: ignore[arg-type]


def text(sight: FarmView) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown(sight))
    return console.export_text()


def test_a_whole_farm_is_well() -> None:
    sight = farm(answering(0, SlotState.free, SlotState.leased))
    assert sight.well
    said = text(sight)
    assert "healthy" in said
    assert "1 free, 1 leased" in said
    assert "12, 3 running" in said
    assert "2 min" in said


@pytest.mark.parametrize(
    "sight",
    [
        farm(answering(0), goal=2),
        farm(ContainerView(place(0), problem="no answer")),
        farm(answering(0), waiting_for=("Nomad cannot place a container: memory exhausted on 3 nodes",)),
        farm(answering(0, SlotState.quarantined)),
        farm(exists=False),
    ],
    ids=["missing", "silent", "unplaced", "quarantined", "none"],
)
def test_less_than_a_whole_farm_is_not_well(sight: FarmView) -> None:
    assert not sight.well
    assert as_json(sight)["well"] is False


def test_what_nomad_waits_for_and_what_failed_is_shown() -> None:
    sight = farm(
        answering(0, SlotState.free),
        ContainerView(place(1, "pending", "Driver: pulling", reachable=False), problem="Driver: pulling"),
        waiting_for=("memory exhausted on 3 nodes",),
        faults=("container c-7 failed: killed for memory",),
    )
    said = text(sight)
    for expected in ("memory exhausted on 3 nodes", "killed for memory", "Driver: pulling", "1 of 2 ready"):
        assert expected in said


def test_a_farms_metrics_are_those_of_its_containers_and_how_many_there_should_be() -> None:
    whole = farm(
        answering(0, SlotState.free, SlotState.leased), ContainerView(place(1), problem="it is silent"), goal=4
    )
    found = {reading.metric.name: reading for reading in of_farm(whole)}
    containers = found["agentenv_pool_containers"].values
    assert {state: count for (state,), count in containers.items()} == {
        "ready": 1, "suspect": 1, "starting": 2, "draining": 0
    }  # fmt: skip
    assert found["agentenv_pool_containers_goal"].values == {(): 4}
    assert found["agentenv_pool_slots"].values[("leased",)] == 1
    assert found["agentenv_sandbox_calls_total"].values == {("c-0",): 12}
    assert found["agentenv_sandbox_calls_total"].metric.labels == ("container",)
    (times,) = found["agentenv_sandbox_call_seconds"].values.values()
    assert isinstance(times, Buckets)
    assert (times.counts[0], times.counts[-1], times.total) == (5, 7, 2000.5)


def test_markup_in_what_others_say_is_text() -> None:
    sight = farm(ContainerView(place(0), problem="[bold]not markup[/]"), faults=("[red]",))
    assert "[bold]not markup[/]" in text(sight)


def test_the_queue_is_that_of_every_pool() -> None:
    samples = parse('agentenv_pool_waiting 7\nagentenv_pool_faults_total{code="container_lost"} 2\n')
    pools = (PoolView("http://a/metrics", 42, samples), PoolView("http://b/metrics", None, parse(""), "no answer"))
    sight = FarmView(farm(answering(0)).census, (answering(0),), pools)
    said = text(sight)
    assert "42 http://a/metrics" in said
    assert "2 container_lost" in said
    assert "no answer" in said
    assert as_json(sight)["queue"][0]["waiting"] == 7


def test_no_token_is_in_what_is_shown() -> None:
    sight = farm(answering(0, SlotState.free))
    assert TOKEN not in json.dumps(as_json(sight))
    assert TOKEN not in text(sight)
    assert TOKEN not in repr(sight)


# -- figures


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"), (0, "0.0 s"), (-0.1, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (60, "1 min"), (3599, "59 min"),
        (3600, "1 h"), (7500, "2 h 5 min"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_counts_and_sizes() -> None:
    assert (count_of(None), count_of(3.0), mib(None), mib(41 * 2**20)) == ("–", "3", "–", "41 MiB")
    assert short("7f3c0a52-18f9-985f-473a-000000000000") == "7f3c0a52"
    assert short("local-0-abcd") == "local-0-abcd"


def test_a_beginning_names_one_or_none_and_never_one_of_several() -> None:
    named = [("abc", 1), ("abd", 2), ("x", 3)]
    assert choose(named, "abc") == 1
    assert choose(named, "x") == 3
    assert choose(named, "y") is None
    with pytest.raises(ConfigError, match="abc or abd"):
        choose(named, "ab")


# -- waiting for containers


HANDLE = ContainerHandle("c", 0, "http://127.0.0.1:1", TOKEN, 2)


async def test_arrival_is_when_all_have_come() -> None:
    with Arrival(2, "containers") as arrival:
        waiting = asyncio.create_task(arrival.complete(10))
        arrival.handle(ContainerStarted(HANDLE))
        arrival.handle(StartFailed("out of memory"))
        arrival.handle(ContainerGone("c", "died"))
        for number in range(2):
            assert not waiting.done()
            arrival.handle(ContainerStarted(ContainerHandle(f"d-{number}", number, "", TOKEN, 2)))
        await waiting


async def test_what_can_never_come_is_not_waited_for() -> None:
    with Arrival(1, "containers") as arrival:
        arrival.handle(StartFailed("no such image", next_step="build it", permanent=True))
        with pytest.raises(SandboxUnavailableError, match="no such image") as raised:
            await arrival.complete(60)
    assert raised.value.next_step == "build it"


async def test_what_does_not_come_in_time_says_the_last_reason() -> None:
    with Arrival(1, "containers") as arrival:
        arrival.handle(StartFailed("memory exhausted on 3 nodes", next_step="add nodes"))
        with pytest.raises(SandboxUnavailableError, match=r"0 of 1 containers .* memory exhausted") as raised:
            await arrival.complete(0.05)
    assert raised.value.next_step == "add nodes"


# -- the log


async def test_the_log_is_private_filtered_and_followed(state: Path) -> None:
    import logging

    path = state / "farm.log"
    logger = logging.getLogger("agentenv.test")
    with logging_to(path):
        for number in range(5):
            logger.info("c-%d: line %d", number % 2, number)
        logger.debug("too fine")
        assert path.stat().st_mode & 0o777 == 0o600
        seen = [line async for _, line in lines_of(path, containing="c-0", tail=2, follow=False)]
        assert [line.split("INFO ")[1] for line in seen] == ["c-0: line 2", "c-0: line 4"]
        following = lines_of(path, containing="c-1", tail=1, follow=True)
        assert (await anext(following))[1].endswith("c-1: line 3")
        logger.info("c-0: other")
        logger.info("c-1: new")
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(following))[1].endswith("c-1: new")
        path.rename(state / "farm.log.1")
        path.write_text("c-1: in the next file\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await anext(following) == (path, "c-1: in the next file")
        await following.aclose()  # type: ignore[attr-defined]
    logger.info("after")
    assert "after" not in path.read_text()


async def test_logs_of_containers_are_followed_beside_it_and_when_they_are_cut(state: Path) -> None:
    farm, first, second = (state / name for name in ("farm.log", "first", "second"))
    farm.write_text("c-1: farm\nc-2: farm\n")
    first.write_text("one\ntwo\n")
    following = lines_of(farm, more=lambda: [first, second], containing="c-1", tail=1, follow=True)
    assert [await anext(following) for _ in range(2)] == [(farm, "c-1: farm"), (first, "two")]
    second.write_text("a new container\n")
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(following) == (second, "a new container")
        first.write_text("two\n")  # as the launcher cuts it
        last = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)  # it looks again before this goes on, however long that is
        await asyncio.sleep(0.5)
        with first.open("a") as file:
            file.write("three\n")
        assert await last == (first, "three")
    await following.aclose()  # type: ignore[attr-defined]
