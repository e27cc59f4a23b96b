"""The part of a supervisor that gives slots their networks, driven by lines of JSON: started by the tests in a network
namespace that stands for a container's.

    {"slot": 0, "policy": {...}}   ->  {"env": {...}}  or  {"error": "..."}
    {"slot": 0}                    ->  its counts
    {"kill": 0}                    ->  the pid of the slot's proxy, which was killed
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import AgentEnvError
from agentenv.sandbox.supervisor import child, mounts, syscalls
from agentenv.sandbox.supervisor.isolation import FULL, Identity
from agentenv.sandbox.supervisor.network import SlotNamespaces
from agentenv.sandbox.supervisor.proxy_process import ProxySetup, ProxyTemplate, default_argv
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_network import NetworkServices, SlotNetwork
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.spec import SandboxSpec

CONTROL, _FIRST_SLOT = 3, 4


async def main(directory: Path, allow_network: bool, pids: list[int]) -> None:
    child.reserve_low_descriptors()
    loop = asyncio.get_running_loop()
    reaper = Reaper(loop)
    spec = SandboxSpec(container="t", token_file="t", data_dir="d", slots=len(pids), allow_network=allow_network,
                       closed_networks=("11.22.33.4/32",))  # fmt: skip
    private, jail = directory / "private", directory / "jail"
    private.mkdir()
    jail.mkdir()
    mounts.mount_tmpfs(private, size_bytes=4096, mode=0o755, uid=0)
    setup = ProxySetup(default_argv(), Identity(FULL, 0, 0), private, spec.slots, spec.closed_networks)
    proxies = ProxyTemplate(setup, reaper)
    services = NetworkServices(spec, reaper, proxies)
    slots = []
    for slot, pid in enumerate(pids):
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        namespaces = SlotNamespaces(slot, network, syscalls.owning_user_namespace(network), jail)
        lost = lambda status, slot=slot: print(json.dumps({"lost": slot, "status": status}), flush=True)  # noqa: E731
        slots.append(SlotNetwork(services, namespaces, lost))
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await perform(json.loads(line), slots)), flush=True)
    finally:
        for each in slots:
            await each.aclose()
        await proxies.aclose()
        reaper.close()


async def perform(asked: dict[str, Any], slots: list[SlotNetwork]) -> dict[str, Any]:
    slot = asked["kill"] if "kill" in asked else asked["slot"]
    proxy = slots[slot].proxy
    if "kill" in asked:
        pid = proxy.pid if proxy is not None else None
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return {"pid": pid}
    try:
        if "policy" not in asked:
            assert proxy is not None
            return {**dataclasses.asdict(await proxy.count()), "pid": proxy.pid}
        await slots[slot].apply(NetworkPolicy.parse(asked["policy"]))
    except AgentEnvError as error:
        return {"error": str(error)}
    return {"env": dict(slots[slot].env)}


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "allow_network", [int(pid) for pid in sys.argv[3:]]))
