"""The same ``apt-get install`` in an image slot and in a plain chroot, from packages that are downloaded already."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from agentenv.containers.connection import open_session
from agentenv.containers.control import ContainerControl
from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.leases import CheckpointSlot
from agentenv.wire.network import NetworkPolicy
from benchmarks.image_farm import ImageFarm, base_tar
from benchmarks.workloads import timed_call

WANTED: Final = "postgresql redis-server nginx-light openssh-server cron sudo rsync git curl vim-tiny less"
INSTALL: Final = f"DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends {WANTED}"
NO_SERVICES: Final = "printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d"
"""Nothing is started by an installation: a chroot has nobody who would end it."""
PREPARE: Final = (
    f"{NO_SERVICES} && rm -f /etc/apt/apt.conf.d/docker-clean && apt-get update -q && {INSTALL} --download-only"
)
KEPT: Final = "tar -C / -cf /kept.tar usr/sbin/policy-rc.d var/lib/apt/lists var/cache/apt/archives"
TIMEOUT_S: Final = 900.0
CHROOT: Final = """
set -e
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -c "$2"
"""


@contextmanager
def chroot() -> Iterator[Path]:
    """A directory in memory with the base's files."""
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-") as directory:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3g", "tmpfs", directory], check=True)
        try:
            subprocess.run(["tar", "-C", directory, "-xf", str(base_tar())], check=True)
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


def chrooted_s(kept: Path) -> float:
    """How long the installation takes in a chroot that has these files too."""
    with chroot() as root:
        subprocess.run(["tar", "-C", str(root), "-xf", str(kept)], check=True)
        argv = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            CHROOT,
            "bash",
            str(root),
            INSTALL,
        ]
        began = time.perf_counter()
        subprocess.run(argv, check=True, capture_output=True, timeout=TIMEOUT_S)
        return time.perf_counter() - began


async def downloaded(session: ToolSession, kept: Path) -> tuple[str, int]:
    """Download the packages in this session's slot, and keep them as a checkpoint and as a tar. Returns the checkpoint,
    and how many packages there are."""
    await timed_call(session, PREPARE, TIMEOUT_S)
    listed = await session.call("bash", {"command": "ls /var/cache/apt/archives/*.deb | wc -l"})
    await timed_call(session, KEPT, TIMEOUT_S)
    await ToolContext(session).download("/kept.tar", kept)
    await timed_call(session, "rm /kept.tar")
    async with open_session() as http:
        made = await ContainerControl(session.lease.container, http).act(session.lease.key, CheckpointSlot())
    return made.checkpoint, int(listed.stdout)


async def in_slot_s(farm: ImageFarm, checkpoint: str) -> float:
    """How long the installation takes in a slot that begins with the checkpoint."""
    async with farm.executor.open("apt", root=replace(farm.root, checkpoint=checkpoint)) as session:
        return await timed_call(session, INSTALL, TIMEOUT_S)


def online(farm: ImageFarm) -> ImageFarm:
    """The same farm, with roots that reach the network."""
    return replace(farm, root=replace(farm.root, network=NetworkPolicy("public")))
