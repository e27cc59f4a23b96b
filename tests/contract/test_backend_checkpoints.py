"""Checkpoints of plain slots: every backend keeps a workspace as it is, and begins slots with it."""

from __future__ import annotations

import pytest

from agentenv.errors import CheckpointError, StaleLeaseError
from agentenv.wire.leases import ActionRequest, CheckpointSlot, DropCheckpoint, LeaseKey, RestoreSlot, SealSlot
from agentenv.wire.states import SlotState
from tests.contract.conftest import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")

TREE = """
mkdir -p a/deep/er empty && echo one > a/file && ln a/file a/deep/other && ln -s ../file a/deep/link
ln -s gone broken && mkfifo pipe && truncate -s 5M hole && printf end >> hole && echo x > 'name with
a line' && chmod 6751 a/file && chmod 500 empty && chmod 750 a && touch -d '2001-02-03 04:05:06.789012345' a/file a/deep
touch -h -d '1999-01-01' broken
"""
SEEN = (
    "find . ! -type d -printf '%P %y %m %n %s %T@ %l\\n' -o -printf '%P %y %m %T@\\n' | sort; "
    "find . -type f -exec sha256sum {} + | sort; [ a/file -ef a/deep/other ] && echo same"
)


async def _said(container: Client, key: LeaseKey, command: str) -> str:
    result = await container.run(key, command)
    assert result.exit_code == 0, result
    return result.stdout


async def _prepared(container: Client) -> tuple[LeaseKey, str]:
    """A slot with files of every kind, and what is to be seen of them."""
    key = await container.lease()
    await _said(container, key, TREE)
    return key, await _said(container, key, SEEN)


async def test_slots_begin_with_a_checkpoint_and_are_independent(container: Client) -> None:
    origin, was = await _prepared(container)
    checkpoint = (await container.control.act(origin, CheckpointSlot())).checkpoint
    assert await _said(container, origin, SEEN) == was, "the origin goes on with its files"
    forks = [await container.lease(slot, checkpoint=checkpoint) for slot in (1, 2)]
    assert [await _said(container, fork, SEEN) for fork in forks] == [was] * 2
    for number, key in enumerate((origin, *forks)):
        await _said(container, key, f"rm -r a/deep && echo {number} > a/file && echo {number} > own")
    assert [await _said(container, key, "cat a/file own") for key in (origin, *forks)] == ["0\n0\n", "1\n1\n", "2\n2\n"]


async def test_a_checkpoint_is_gone_back_to_and_no_process_is_kept(container: Client) -> None:
    key = await container.lease()
    await _said(container, key, TREE)
    await _said(container, key, "sleep 1000 > /dev/null 2>&1 & echo $! > pid")
    was = await _said(container, key, SEEN)
    checkpoint = (await container.control.act(key, CheckpointSlot())).checkpoint
    runs = "grep -q sleep /proc/$(cat pid)/cmdline && echo runs || echo gone"
    assert await _said(container, key, runs) == "gone\n"
    other = (await container.control.act(key, CheckpointSlot())).checkpoint
    assert other != checkpoint
    await _said(container, key, "rm -r a hole && echo new > new")
    await container.control.act(key, RestoreSlot(checkpoint=checkpoint))
    assert await _said(container, key, SEEN) == was
    assert (await container.control.slots()).slots[key.slot].state is SlotState.leased


async def test_a_fork_has_checkpoints_of_its_own(container: Client) -> None:
    key, _ = await _prepared(container)
    fork = await container.lease(1, checkpoint=(await container.control.act(key, CheckpointSlot())).checkpoint)
    await _said(container, fork, "echo second > second")
    again = await container.lease(2, checkpoint=(await container.control.act(fork, CheckpointSlot())).checkpoint)
    assert await _said(container, again, "cat second a/file") == "second\none\n"


async def test_what_was_dropped_begins_no_slot_and_is_kept_by_those_that_it_began(container: Client) -> None:
    key, was = await _prepared(container)
    checkpoint = (await container.control.act(key, CheckpointSlot())).checkpoint
    fork = await container.lease(1, checkpoint=checkpoint)
    await container.control.act(key, DropCheckpoint(checkpoint=checkpoint))
    await container.control.act(key, DropCheckpoint(checkpoint=checkpoint))
    with pytest.raises(CheckpointError):
        await container.lease(2, checkpoint=checkpoint)
    assert await _said(container, fork, SEEN) == was
    with pytest.raises(CheckpointError):
        await container.control.act(fork, RestoreSlot(checkpoint=checkpoint))
    with pytest.raises(CheckpointError):
        await container.control.act(fork, SealSlot())


async def test_a_request_makes_one_checkpoint(container: Client) -> None:
    key = await container.lease()
    request = ActionRequest(key=key, action=CheckpointSlot(), request_id="once")
    names = set()
    for _ in range(2):
        async with container.session.post(
            container.handle.base_url + "/v1/leases/act", data=request.model_dump_json()
        ) as reply:
            names.add((await reply.json())["checkpoint"])
    assert len(names) == 1


async def test_a_released_slot_has_nothing_of_the_checkpoint_it_began_with(container: Client) -> None:
    key, _ = await _prepared(container)
    checkpoint = (await container.control.act(key, CheckpointSlot())).checkpoint
    fork = await container.lease(1, checkpoint=checkpoint)
    await container.control.release(fork)
    assert await _said(container, await container.lease(1), "ls -A") == ""
    with pytest.raises(StaleLeaseError):
        await container.control.act(fork, CheckpointSlot())
