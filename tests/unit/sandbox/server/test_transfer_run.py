"""A run whose input or output is streamed, and the slot that is lost meanwhile."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest

from agentenv.errors import LeaseLostError
from agentenv.sandbox.server.transfer_run import TransferRun
from agentenv.sandbox.slot_paths import USUAL_PATHS
from tests.waiting import loop_turns


async def test_a_lost_slot_is_neither_the_end_of_the_output_nor_an_exit_code() -> None:
    run = TransferRun(MagicMock(paths=USUAL_PATHS))
    run.start(["true"], {}, feeds=False)
    steps = [asyncio.create_task(run.read()), asyncio.create_task(run.ended())]
    await loop_turns(3)
    assert not any(step.done() for step in steps)
    run.on_lost()
    for step in steps:
        with pytest.raises(LeaseLostError, match="lost while it was sent"):
            await step
    run.close()
