"""The table of a slot's states, and the slot that follows it, under random sequences of events."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import AgentEnvError, LeaseLostError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.server import call_queue
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_states import (
    MOVES,
    REPORTED,
    USABLE,
    Event,
    Move,
    Refusal,
    State,
    decide,
)
from agentenv.sandbox.slot_loss import LossReason
from agentenv.wire.calls import Call
from agentenv.wire.leases import LeaseRequest
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState


class Account:
    """What is true of a slot, fact by fact, without a table."""

    def __init__(self) -> None:
        self.made = self.leased = self.agent_gone = self.dirty = False
        self.work = ""
        """What the supervisor does to the slot of this lease, or of the last."""
        self.resets = 0

    @property
    def reported(self) -> SlotState:
        if self.dirty:
            return SlotState.quarantined
        if self.leased:
            return SlotState.leased
        return SlotState.free if self.made and not self.work else SlotState.resetting

    def refusal(self, event: Event) -> Refusal | None:
        """What this event gets instead of happening."""
        abandoned = bool(self.work) and not self.leased
        match event:
            case Event.grant | Event.grant_root:
                return None if self.reported is SlotState.free else Refusal.not_free
            case Event.use | Event.freeze | Event.reroot | Event.connect:
                return None if self.leased and not self.work else Refusal.busy
            case Event.seal:
                return None if self.leased and self.work in ("", Event.seal) else Refusal.busy
            case Event.give_back:
                matters = self.leased
            case Event.agent_ended:
                matters = self.leased and not self.work and not self.agent_gone
            case Event.unusable | Event.lost:
                matters = self.made and not abandoned
            case Event.kept:
                matters = bool(self.work)
            case Event.replaced | Event.refused:
                matters = abandoned or self.work == Event.reroot
            case Event.not_frozen:
                matters = abandoned or self.work == Event.freeze
            case Event.made | Event.taken_over:
                matters = not self.dirty
            case Event.failed:
                matters = True
        return None if matters else Refusal.late

    def happens(self, event: Event) -> None:
        match event:
            case Event.grant:
                self.leased = True
            case Event.grant_root:
                self.leased, self.work = True, Event.reroot
            case Event.seal | Event.freeze | Event.reroot:
                self.work = event
                self.agent_gone = False
            case Event.agent_ended:
                self.agent_gone = True
            case Event.give_back:
                self.leased = self.agent_gone = False
                if not self.work:
                    self.dirt()
            case Event.kept | Event.replaced | Event.not_frozen:
                self.work = ""
                if not self.leased:
                    self.dirt()
            case Event.unusable | Event.lost | Event.refused:
                self.made = self.leased = self.agent_gone = False
                self.work = ""
                self.resets += event is Event.unusable
            case Event.made | Event.taken_over:
                self.made, self.leased = True, event is Event.taken_over
                self.agent_gone, self.work = False, ""
            case Event.failed:
                self.dirty, self.work = True, ""
                self.made = self.leased = self.agent_gone = False
            case Event.use | Event.connect:
                pass

    def dirt(self) -> None:
        """Nobody has the slot, and the supervisor does not know it."""
        self.made = False
        self.resets += 1


@given(st.lists(st.sampled_from(Event), max_size=40))
@settings(max_examples=600, deadline=None)
def test_the_table_says_what_follows_from_the_facts(events: list[Event]) -> None:
    account, state, resets = Account(), State.resetting, 0
    for event in events:
        move = decide(state, event)
        refusal = account.refusal(event)
        if isinstance(move, Refusal):
            assert move is refusal, f"{event} in {state}"
            continue
        assert refusal is None, f"{event} in {state}"
        account.happens(event)
        state, resets = move.to, resets + move.request_reset
        assert (REPORTED[state], resets) == (account.reported, account.resets)
        assert (state in USABLE) == (account.leased and not account.work)
        assert (state is State.agent_gone) == account.agent_gone


def test_every_state_has_a_row_and_can_be_reached() -> None:
    assert set(MOVES) == set(REPORTED) == set(State)
    reached, new = set[State](), {State.resetting}
    while new:
        reached |= new
        new = {to for state in new for to in MOVES[state].values()} - reached
    assert reached == set(State)


def test_what_could_not_be_proved_clean_is_never_used_again() -> None:
    for event in Event:
        move = decide(State.quarantined, event)
        assert isinstance(move, Refusal) or move == Move(State.quarantined)


class Supervisor:
    """A slot's supervisor that answers when :meth:`answer` is called. What it is asked for while it is busy it ignores,
    as the real one does, but for the reset."""

    def __init__(self) -> None:
        self.slot: Slot
        self.epoch = 1
        self.work = "reset"
        self.reset_after = False
        self.remembered: dict[str, Any] = {}

    def _ask(self, work: str) -> None:
        if not self.work:
            self.work = work

    def seal(self, *_: object) -> None:
        self._ask("seal")

    def freeze(self, *_: object) -> None:
        self._ask("freeze")

    def reroot(self, *_: object) -> None:
        self._ask("reroot")

    def reset(self, *_: object) -> None:
        if not self.work:
            self._turn()
        elif self.work != "reset":
            self.reset_after = True

    def remember(self, _slot: int, _epoch: int, lease: dict[str, Any]) -> None:
        self.remembered = lease

    def _turn(self) -> None:
        self.work = "reset"
        self.epoch += 1

    def lose(self) -> None:
        """The slot has ended by itself."""
        if not self.work:
            self.slot.lost(LossReason.ended, "it ended")
            self._turn()

    def answer(self, *, well: bool = True) -> None:
        """Its work is done, or (not ``well``) cannot be."""
        work, self.work = self.work, ""
        if self.reset_after:
            self.reset_after = False
            self._turn()
        elif work == "reroot" and not well:
            self.slot.refused(self.epoch, "image_unavailable", "no such image")
            self._turn()
        elif work == "freeze" and not well:
            self.slot.not_frozen(self.epoch, "no room", ended=False)
        elif work == "seal" and not well:
            self.slot.lost(LossReason.not_renewed, "sealing it failed")
            self._turn()
        elif work:
            kept = work in ("seal", "freeze")
            self.slot.ready(SlotReady(0, self.epoch, None, kept=kept, limits=LimitFiles()), {"": MagicMock()})


class Play:
    """One slot, its supervisor and its holder."""

    def __init__(self, *, calls: bool = True) -> None:
        """``calls``: a stand-in takes the place of the slot's."""
        self.supervisor = Supervisor()
        context = MagicMock(supervisor=self.supervisor, reply_memory=9, index={})
        context.poller.loop = asyncio.get_running_loop()
        self.slot = self.supervisor.slot = Slot(0, cast("ServerContext", context))
        self.calls = MagicMock(any_ran=True)
        self.calls.take_above.return_value = ""
        if calls:
            self.slot.calls = self.calls
        self.asked: list[asyncio.Task[Any]] = []
        self.leases = 0

    def lease(self, root: RootSpec | None = None) -> None:
        self.leases += 1
        request = LeaseRequest(
            slot=0, trajectory="t", ttl_s=60, request_id=f"{self.leases:016}", root=root.to_dict() if root else None
        )
        free = self.slot.reported is SlotState.free
        try:
            self.slot.grant(request)
        except AgentEnvError:
            assert not free
        else:
            assert free, "a slot was leased that was not free"

    def do(self, action: str) -> None:
        """One thing happens."""
        match action:
            case "lease":
                self.lease()
            case "lease with a root":
                self.lease(RootSpec("sha256:" + "0" * 64))
            case "answer" | "fail":
                self.supervisor.answer(well=action == "answer")
            case "die":
                self.supervisor.lose()
            case "agent ends":
                if self.slot.state in USABLE or self.slot.state is State.free:
                    self.slot._agent_lost(LossReason.ended, "its agent ended")
                    self.supervisor.lose()
            case "agent is silent":
                if self.slot.state in USABLE or self.slot.state is State.free:
                    self.slot._agent_lost(LossReason.silent, "a killed call did not end")
            case "expire":
                if self.slot.lease is not None:
                    self.slot._expired()
            case _ if self.slot.lease is not None:
                key = self.slot.lease.key
                asks: dict[str, Any] = {
                    "seal": lambda: self.slot.seal(key),
                    "checkpoint": lambda: self.slot.checkpoint(key),
                    "restore": lambda: self.slot.restore(key, "c" * 32),
                    "release": lambda: self.slot.release(key),
                }
                self.asked.append(asyncio.create_task(asks[action]()))

    def check(self) -> None:
        """What must be true at every moment."""
        slot, supervisor = self.slot, self.supervisor
        assert (slot.lease is not None) == (slot.reported is SlotState.leased)
        if slot.state in USABLE or slot.state is State.free:
            assert not supervisor.work, "a slot is used of which the supervisor makes something else"
            assert slot.epoch == supervisor.epoch
        elif slot.state is not State.quarantined:
            assert supervisor.work, f"{slot} waits for nothing"


ACTIONS = (
    *("lease", "answer") * 3,
    *("lease with a root", "seal", "checkpoint", "restore", "release"),
    *("fail", "die", "agent ends", "agent is silent", "expire"),
)


@given(st.lists(st.sampled_from(ACTIONS), max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_slot_never_waits_for_what_nobody_does(actions: list[str]) -> None:
    async def play() -> None:
        one = Play()
        for action in actions:
            one.do(action)
            for _ in range(4):
                await asyncio.sleep(0)
            one.check()
        while one.supervisor.work:
            one.supervisor.answer()
        one.check()
        async with asyncio.timeout(10):
            for done in await asyncio.gather(*one.asked, return_exceptions=True):
                assert not isinstance(done, BaseException) or isinstance(done, AgentEnvError), repr(done)
        one.slot.close()

    asyncio.run(play())


async def _leased() -> Play:
    one = Play()
    one.do("answer")
    one.do("lease")
    return one


async def test_what_is_done_while_something_else_is_has_to_be_asked_for_again() -> None:
    one = await _leased()
    one.do("checkpoint")
    await asyncio.sleep(0)
    assert one.slot.lease is not None
    with pytest.raises(SandboxUnavailableError, match="is being recreated"):
        await one.slot.seal(one.slot.lease.key)
    with pytest.raises(SandboxUnavailableError, match="is being recreated"):
        one.slot.io(one.slot.lease.key)
    one.supervisor.answer()
    await one.asked[0]
    one.do("seal")
    one.do("seal")  # joins
    await asyncio.sleep(0)
    one.supervisor.answer()
    await asyncio.gather(*one.asked)
    assert one.slot.lease.sealed
    assert one.calls.open.call_args.kwargs["sealed"]
    one.slot.close()


async def test_a_restarted_server_knows_whether_the_slot_is_sealed() -> None:
    one = await _leased()
    known = []
    for action in ("seal", "checkpoint", "restore", "checkpoint", "seal"):
        one.do(action)
        await asyncio.sleep(0)
        one.supervisor.answer()
        assert one.supervisor.remembered["sealed"] == one.calls.open.call_args.kwargs["sealed"]
        known.append(one.supervisor.remembered["sealed"])
    await asyncio.gather(*one.asked)
    assert known == [True, True, False, False, True]
    one.slot.close()


async def test_a_slot_that_was_made_anew_meanwhile_is_another_leases() -> None:
    one = await _leased()
    one.do("seal")
    await asyncio.sleep(0)
    one.supervisor.epoch += 1  # as after a reset of which this server has heard nothing
    one.supervisor.answer()
    assert (one.slot.state, one.slot.lease) == (State.free, None)
    one.do("lease")
    one.do("seal")
    one.slot._move(Event.seal)  # before the first has looked: it must not wait for another's seal
    await asyncio.wait(one.asked[:1], timeout=30)
    with pytest.raises(LeaseLostError, match="the slot was reset"):
        await one.asked[0]
    assert one.slot.state is State.sealing
    one.supervisor.work = "seal"
    one.supervisor.answer()
    await one.asked[1]
    one.slot.close()


async def test_calls_begin_in_a_slot_as_soon_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = MagicMock()
    monkeypatch.setattr(call_queue, "Runner", lambda *_, **__: runner)
    one = Play(calls=False)
    one.do("answer")
    one.do("lease")
    assert one.slot.lease is not None
    key = one.slot.lease.key
    one.do("checkpoint")
    await asyncio.sleep(0)
    call = Call(id="c" * 8, lease=key, tool="bash", arguments={"command": "x"}, timeout_s=5.0, boot="b" * 16)
    one.slot.calls.submit(call, one.slot.admit(key), MagicMock(), 10)
    runner.begin.assert_not_called()
    one.supervisor.answer()
    runner.begin.assert_called_once()
    await one.asked[0]
    one.slot.close()


async def test_a_slot_released_during_a_checkpoint_that_is_not_made_is_reset() -> None:
    one = await _leased()
    one.do("checkpoint")
    await asyncio.sleep(0)
    one.do("release")
    await asyncio.sleep(0)
    one.do("fail")
    await asyncio.sleep(0)
    assert (one.slot.state, one.supervisor.work) == (State.resetting, "reset")
    assert not one.asked[1].done(), "the slot is not free yet"
    one.do("answer")
    assert await one.asked[1] is SlotState.free
    one.slot.close()


async def test_a_seal_after_the_agents_end_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor may seal a slot whose end it has not seen yet: then it will not report that any more."""
    monkeypatch.setattr("agentenv.sandbox.server.slot._EXPLAIN_S", 0.01)
    one = await _leased()
    one.slot._agent_lost(LossReason.ended, "its agent ended")
    one.do("seal")
    await asyncio.sleep(0)
    one.supervisor.answer()
    await one.asked[0]
    await asyncio.sleep(0.05)
    assert one.slot.state is State.running
    one.slot.close()


async def test_an_end_that_nobody_explains_ends_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.sandbox.server.slot._EXPLAIN_S", 0.01)
    one = await _leased()
    assert one.slot.lease is not None
    key = one.slot.lease.key
    one.slot._agent_lost(LossReason.ended, "its agent ended")
    async with asyncio.timeout(10):
        lost = await one.slot.wait_why_lost(key)
    assert lost is not None
    assert "did not say why" in str(lost)
    assert (one.slot.state, one.supervisor.work) == (State.resetting, "reset")
    one.slot.close()
