"""Two environments train on one farm while an environment, the farm, the relay and a container are killed in turn."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import aiohttp

from agentenv.report import read_records
from agentenv.wire.farm import LeaseList
from examples.train_with_farm.run import ENVIRONMENTS, Everything, train

GROUPS = 120


async def leases_of(everything: Everything, run: str) -> set[str]:
    """Names of the leases that a run holds."""
    headers = {"Authorization": f"Bearer {everything.token('*', 'read')}"}
    async with (
        aiohttp.ClientSession(everything.farm_url, headers=headers) as client,
        client.get("/v1/leases", params={"run": run}) as reply,
    ):
        reply.raise_for_status()
        return {lease.lease for lease in LeaseList.model_validate_json(await reply.read()).leases}


async def kill_environment(everything: Everything) -> None:
    """Kill it while it holds slots, and start it again. What it held expires, and the slots come back."""
    held: set[str] = set()

    async def holds() -> bool:
        held.update(await leases_of(everything, "terminal"))
        return bool(held)

    async def expired() -> bool:
        return not held & await leases_of(everything, "terminal")

    await everything.eventually(holds)
    await everything.restart("terminal")
    await everything.eventually(expired)


async def kill_container(everything: Everything, killed: list[str]) -> None:
    """Kill containers until a rollout has to begin again because of one: a slot may come back just before. The next is
    killed only after all that ran has ended: a group that loses its slots twice is not tried a third time."""

    async def told(files: list[Path]) -> bool:
        return any(b"ContainerLostError" in file.read_bytes() for file in files)

    async def leased() -> set[str]:
        return {lease for run in ENVIRONMENTS for lease in await leases_of(everything, run)}

    async def ended() -> bool:
        return not held & await leased()

    logs = [everything.parts[run].log for run in ENVIRONMENTS]
    records = [everything.directory / f"{run}.jsonl" for run in ENVIRONMENTS]
    while not await told(logs):
        killed.append(await everything.kill_container())
        held = await leased()
        await everything.eventually(ended)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(everything.eventually(partial(told, logs)), 15)
    await everything.eventually(partial(told, records))


async def test_all_groups_arrive_and_every_one_is_right(tmp_path: Path) -> None:
    killed: list[str] = []
    async with Everything(tmp_path) as everything:
        kills = {
            20: lambda: kill_environment(everything),
            45: lambda: everything.restart("farm"),
            65: lambda: everything.restart("relay"),
            85: lambda: kill_container(everything, killed),
        }
        seen = await train(everything, GROUPS, kills, environments=3)
        assert seen.groups.total() >= GROUPS
        assert seen.score_sum == seen.sequences / 2, "half of the members are right, whoever was killed"
        for run in ENVIRONMENTS:
            await everything.parts[run].end()

        async def at_rest() -> bool:
            load = (await everything.farm.info()).load
            return load.slots == {"free": 16} and load.waiting == 0

        await everything.eventually(at_rest)
        assert (await everything.farm.info()).generation == 2
        assert not {one.id for one in (await everything.farm.containers()).containers} & set(killed)
    assert left_of(tmp_path) == []
    records = [record for run in ENVIRONMENTS for record in read_records(tmp_path / f"{run}.jsonl")]
    assert {record.outcome for record in records} == {"complete"}
    rollouts = [rollout for record in records for rollout in record.trajectories]
    assert {rollout.fault for rollout in rollouts} == {"none"}
    again = [attempt for rollout in rollouts for attempt in rollout.earlier_attempts]
    assert any("ContainerLostError" in attempt for attempt in again), again


def left_of(directory: Path) -> list[str]:
    """Processes that were started for this directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue
            if str(directory).encode() in command + environment:
                found.append(command.replace(b"\0", b" ").decode())
    return found
