"""The supervisor's end of the slots' proxies, with processes that break the contract in its stead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.proxy.packets import Answer, Counts, encode_answer, parse_request
from agentenv.sandbox.supervisor import proxy_process
from agentenv.sandbox.supervisor.isolation import USER, Identity
from agentenv.sandbox.supervisor.proxy_process import ProxySetup, ProxyTemplate, SlotProxy
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.wire.network import NetworkPolicy
from tests.waiting import DEADLINE_S, loop_turns, until

NONE = NetworkPolicy()
SETUP = ProxySetup(["proxy"], Identity(USER, 1000, 1000), Path("/nowhere"), 2, ("attached",))
Serve = Callable[[socket.socket], None]


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    made = Reaper(asyncio.get_running_loop())
    yield made
    made.close()


def standing_in(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """``serve`` is the whole life of each process that is forked in place of a proxy, after it said which it is."""

    def become(_: ProxySetup, control: socket.socket) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            while (received := socket.recv_fds(control, 64, 1))[0]:
                if os.fork() == 0:
                    own = socket.socket(fileno=received[1][0])
                    control.close()
                    socket.send_fds(own, [encode_answer(Answer(0))], [os.pidfd_open(os.getpid())])
                    serve(own)
                    return
                os.close(received[1][0])
        finally:
            os._exit(0)

    monkeypatch.setattr(proxy_process, "_become_proxy", become)


def answering(control: socket.socket, answer: Callable[[int], Answer] = Answer) -> None:
    while packet := control.recv(65536):
        control.send(encode_answer(answer(parse_request(packet).serial)))


def hanging(control: socket.socket) -> None:
    """It answers one request."""
    control.send(encode_answer(Answer(parse_request(control.recv(65536)).serial)))
    while control.recv(65536):
        pass


def gone(pid: int) -> bool:
    """Whether no process of this id runs; it may be a zombie for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("Z", "X")
    except OSError:
        return True


class World:
    """Proxies of slots, and what ends them."""

    def __init__(self, reaper: Reaper) -> None:
        self.template = ProxyTemplate(SETUP, reaper)
        self._made: list[SlotProxy] = []

    def proxy(self, slot: int = 0) -> SlotProxy:
        made = SlotProxy(self.template, slot, socket.create_server(("127.0.0.1", 0)), NONE)
        self._made.append(made)
        return made

    async def aclose(self) -> None:
        for each in self._made:
            await each.aclose()
        await self.template.aclose()


@pytest.fixture
async def world(reaper: Reaper, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(proxy_process, "ANSWER_DEADLINE_S", DEADLINE_S)
    made = World(reaper)
    yield made
    await made.aclose()


def test_the_command_names_what_the_proxies_must_know() -> None:
    assert SETUP.command() == ["proxy", "--control-fd", "3", "--slots", "2", "--closed=attached"]


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (lambda _: None, "it ended|reset by peer|Broken pipe"),
        (lambda control: control.recv(65536) and control.send(b"{}"), "no answer"),
        (lambda control: answering(control, lambda serial: Answer(serial + 1)), "before it was sent"),
        (lambda control: answering(control, lambda serial: Answer(serial, error="no room")), "no room"),
        (lambda control: control.recv(65536) and control.recv(65536), "TimeoutError"),
    ],
)
async def test_a_process_that_breaks_the_contract_is_ended_and_the_slot_gets_no_network(
    monkeypatch: pytest.MonkeyPatch, world: World, serve: Serve, said: str
) -> None:
    if "Timeout" in said:
        monkeypatch.setattr(proxy_process, "ANSWER_DEADLINE_S", 1.0)
    standing_in(monkeypatch, serve)
    proxy = world.proxy()
    with pytest.raises(SandboxUnavailableError, match=f"proxy of slot 0 does not run: .*({said})"):
        await proxy.start()
    assert proxy.pid is None


async def test_one_that_hangs_is_replaced_and_no_other_slots_notices(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    standing_in(monkeypatch, answering)
    other = world.proxy(1)
    await other.start()
    untouched = other.pid
    await world.template.aclose()
    standing_in(monkeypatch, hanging)
    hung = world.proxy()
    await hung.start()
    before = hung.pid
    assert before is not None
    monkeypatch.setattr(proxy_process, "ANSWER_DEADLINE_S", 5.0)
    changing = asyncio.create_task(hung.change(NetworkPolicy("public")))
    await loop_turns(1)  # it waits for its answer
    monkeypatch.setattr(proxy_process, "ANSWER_DEADLINE_S", DEADLINE_S)
    await other.change(NetworkPolicy("public"))
    assert not changing.done()
    await changing
    assert gone(before)
    assert hung.pid not in (None, before)
    assert other.pid == untouched


async def test_a_caller_that_is_cancelled_leaves_no_answer_to_the_next(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    gate_read, gate_write = os.pipe()

    def late(control: socket.socket) -> None:
        answering(control, lambda serial: Answer(serial, Counts(connections=serial)) if serial != 2 else held(serial))

    def held(serial: int) -> Answer:
        os.read(gate_read, 1)
        return Answer(serial)

    standing_in(monkeypatch, late)
    proxy = world.proxy()
    try:
        await proxy.start()
        pid = proxy.pid
        asked = asyncio.create_task(proxy.count())
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        os.write(gate_write, b"x")
        assert (await proxy.count()).connections == 3
        assert proxy.pid == pid
    finally:
        os.close(gate_read)
        os.close(gate_write)


async def test_one_that_ends_by_itself_is_replaced_unasked_and_ends_with_its_slot(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    standing_in(monkeypatch, answering)
    proxy = world.proxy()
    await proxy.start()
    before = proxy.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: proxy.pid not in (None, before))
    await proxy.count()
    after = proxy.pid
    assert after is not None
    await proxy.aclose()
    await proxy.aclose()
    assert gone(after)


async def test_proxies_outlive_their_template_and_another_is_started_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    standing_in(monkeypatch, answering)
    one, two = world.proxy(), world.proxy(1)
    await one.start()
    before = one.pid
    await world.template.aclose()
    await one.change(NetworkPolicy("public"))
    assert one.pid == before
    await two.start()


async def test_one_that_cannot_be_started_again_lets_those_who_ask_fail_and_comes_back_when_it_can(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    standing_in(monkeypatch, answering)
    proxy = world.proxy()
    await proxy.start()
    await world.template.aclose()
    standing_in(monkeypatch, lambda _: None)
    assert proxy.pid is not None
    os.kill(proxy.pid, signal.SIGKILL)
    with pytest.raises(SandboxUnavailableError, match="does not run"):
        await proxy.change(NetworkPolicy("public"))
    standing_in(monkeypatch, lambda control: answering(control, lambda serial: Answer(serial, Counts(open=1))))
    await world.template.aclose()
    await until(lambda: proxy.pid is not None)
    assert (await proxy.count()).open == 1
