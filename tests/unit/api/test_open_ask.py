"""What a farm service keeps of an ask."""

from __future__ import annotations

import asyncio
import gc

from agentenv.api.farm_server.open_ask import Once
from tests.waiting import DEADLINE_S


async def test_what_happens_once_wakes_all_who_wait() -> None:
    once = Once()
    waiting = [asyncio.create_task(once.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not once.is_set()
    assert not any(each.done() for each in waiting)
    once.set()
    once.set()
    await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_S)
    assert once.is_set()
    await asyncio.wait_for(once.wait(), DEADLINE_S)


async def test_one_who_gives_up_leaves_the_others_waiting() -> None:
    once = Once()
    patient, impatient = (asyncio.create_task(once.wait()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    assert not patient.done()
    once.set()
    await asyncio.wait_for(patient, DEADLINE_S)


async def test_there_is_an_event_only_while_somebody_waits() -> None:
    """It is eight times as large as the rest, and there are tens of thousands."""
    once = Once()
    assert not any(isinstance(each, asyncio.Event) for each in gc.get_referents(once))
    waiting = asyncio.create_task(once.wait())
    await asyncio.sleep(0)
    assert any(isinstance(each, asyncio.Event) for each in gc.get_referents(once))
    once.set()
    await waiting
    assert not any(isinstance(each, asyncio.Event) for each in gc.get_referents(once))
