"""The supervisor's end of the slots' proxy, with processes that break the contract in its stead."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.proxy.packets import Answer, Counts, encode_answer, parse_request
from agentenv.sandbox.supervisor import proxy_process
from agentenv.sandbox.supervisor.isolation import USER, Identity
from agentenv.sandbox.supervisor.proxy_process import ProxyProcess, ProxySetup
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.wire.network import NetworkPolicy
from tests.waiting import until

NONE = NetworkPolicy()
SETUP = ProxySetup(["proxy"], Identity(USER, 1000, 1000), Path("/nowhere"), 2, ("attached",))
Serve = Callable[[socket.socket], None]


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    made = Reaper(asyncio.get_running_loop())
    yield made
    made.close()


def standing_in(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """``serve`` runs in the forked child instead of the proxy, and is its whole life."""

    def become(_: ProxySetup, control: socket.socket) -> None:
        try:
            serve(control)
        finally:
            os._exit(0)

    monkeypatch.setattr(proxy_process, "_become_proxy", become)


def answering(control: socket.socket, answer: Callable[[int], Answer] = Answer) -> None:
    while packet := control.recv(65536):
        control.send(encode_answer(answer(parse_request(packet).serial)))


def children() -> set[str]:
    """The ids of this process's children, zombies among them."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_the_command_names_what_the_proxy_must_know() -> None:
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
    monkeypatch: pytest.MonkeyPatch, reaper: Reaper, serve: Serve, said: str
) -> None:
    monkeypatch.setattr(proxy_process, "ANSWER_DEADLINE_S", 0.2 if "Timeout" in said else 60.0)
    standing_in(monkeypatch, serve)
    before = children()
    proxy = ProxyProcess(SETUP, reaper)
    with pytest.raises(SandboxUnavailableError, match=said):
        await proxy.add(0, listener(), NONE)
    assert proxy.pid is None
    await proxy.aclose()
    assert children() <= before  # this process may have others, that end when they like


async def test_a_caller_that_is_cancelled_leaves_no_answer_to_the_next(
    monkeypatch: pytest.MonkeyPatch, reaper: Reaper
) -> None:
    gate_read, gate_write = os.pipe()

    def late(control: socket.socket) -> None:
        answering(control, lambda serial: Answer(serial, Counts(connections=serial)) if serial != 3 else held(serial))

    def held(serial: int) -> Answer:
        os.read(gate_read, 1)
        return Answer(serial)

    standing_in(monkeypatch, late)
    proxy = ProxyProcess(SETUP, reaper)
    try:
        await proxy.add(0, listener(), NONE)  # two requests: of its start, and to see that it serves
        pid = proxy.pid
        asked = asyncio.create_task(proxy.count(0))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        os.write(gate_write, b"x")
        assert (await proxy.count(0)).connections == 4
        assert proxy.pid == pid
    finally:
        await proxy.aclose()
        os.close(gate_read)
        os.close(gate_write)


async def test_one_that_ends_by_itself_is_replaced_unasked_and_none_is_kept_for_no_slot(
    monkeypatch: pytest.MonkeyPatch, reaper: Reaper
) -> None:
    standing_in(monkeypatch, answering)
    proxy = ProxyProcess(SETUP, reaper)
    await proxy.add(0, listener(), NONE)
    before = proxy.pid
    assert before is not None
    os.kill(before, 9)
    await until(lambda: proxy.pid not in (None, before))
    await proxy.drop(0)
    await proxy.drop(0)
    after = proxy.pid
    assert after is not None
    os.kill(after, 9)
    await until(lambda: proxy.pid is None)
    await proxy.aclose()
    await proxy.aclose()


async def test_one_that_cannot_be_started_again_lets_those_who_ask_fail_and_comes_back_when_it_can(
    monkeypatch: pytest.MonkeyPatch, reaper: Reaper
) -> None:
    standing_in(monkeypatch, answering)
    proxy = ProxyProcess(SETUP, reaper)
    await proxy.start()
    await proxy.add(0, listener(), NONE)
    standing_in(monkeypatch, lambda _: None)
    assert proxy.pid is not None
    os.kill(proxy.pid, 9)
    with pytest.raises(SandboxUnavailableError, match="does not run"):
        await proxy.change(0, NetworkPolicy("public"))
    standing_in(monkeypatch, lambda control: answering(control, lambda serial: Answer(serial, Counts(open=1))))
    await until(lambda: proxy.pid is not None)
    assert (await proxy.count(0)).open == 1
    await proxy.aclose()
