"""Containers that are virtual machines, on a real cluster: emulated where the processor runs no guests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from agentenv import shipped
from agentenv.image import make_machine
from agentenv.image.machine import NAME
from agentenv.sandbox.machine.qemu import PROGRAM, ROOT
from agentenv.wire.spec import MIB
from tests.nomad.cluster import Cluster
from tests.nomad.containers import run_in_slot, server_info
from tests.waiting import wait_for

BOOT_S = 400.0
"""Emulated, on a loaded machine."""
BOOTS = 3
"""An emulated kernel has once stopped in the middle of its start. A farm replaces what does not start; so do we."""
SPEC = {
    "slots": 2,
    "checkpoint_bytes": 0,
    "limits": {"memory_bytes": 128 * MIB, "workspace_bytes": 32 * MIB, "tmp_bytes": 16 * MIB, "shm_bytes": 16 * MIB},
}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a machine's files."""
    directory = tmp_path_factory.mktemp("machine")
    assert make_machine(directory, cluster.image, client=cluster.docker)
    assert not make_machine(directory, cluster.image, client=cluster.docker), "made again, of the same"
    yield directory
    cluster.docker.images.remove(NAME)


def machines(image: Path) -> list[int]:
    """The processes of QEMU that run this image."""
    root = str(image / ROOT)

    def runs_it(process: Path) -> bool:
        try:
            name = (process / "cmdline").read_bytes().partition(b"\0")[0]
            return name == PROGRAM.encode() and root in [str(fd.readlink()) for fd in (process / "fd").iterdir()]
        except OSError:
            return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if runs_it(process)]


def started(cluster: Cluster, job_id: str, image: Path) -> tuple[str, int]:
    """The job's token, and the machine's process. Emulation is all computing: it goes before the tests that run beside
    this one, or it boots for as long as they take."""
    place = {"python": sys.executable, "pythonpath": str(shipped.PACKAGE.parent), "image": str(image)}
    token = cluster.run(job_id, SPEC, driver="vm", time_factor=10, **place)
    [machine] = wait_for(lambda: machines(image), 120.0, lambda: cluster.tell(job_id))
    with suppress(PermissionError, ProcessLookupError):
        for thread in Path(f"/proc/{machine}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), -15)
    return token, machine


def serving(cluster: Cluster, job_id: str, image: Path) -> tuple[str, str, str]:
    """A machine's token, allocation and address."""
    for boots in range(1, BOOTS + 1):
        token, _ = started(cluster, job_id, image)
        try:
            [(allocation, url)] = cluster.serving(job_id, deadline_s=BOOT_S).items()
        except AssertionError:
            if boots == BOOTS:
                raise
            cluster.purge(job_id)
        else:
            return token, allocation, url
    raise AssertionError("the last one returns or raises")


def test_a_container_is_a_machine(cluster: Cluster, job_id: str, image: Path) -> None:
    token, allocation, url = serving(cluster, job_id, image)

    info = server_info(url, token, BOOT_S)
    assert (info.container, info.isolation, info.weaker, info.slots) == (allocation, "full", (), 2)
    assert [proof for proof in info.proofs if not proof.holds] == []
    assert len(info.proofs) >= 15
    run = partial(run_in_slot, url, token, timeout_s=BOOT_S)
    assert run("uname -r").stdout != f"{os.uname().release}\n"
    assert run("head -c 200000 /dev/zero | wc -c", slot=1).stdout == "200000\n"
    killed = run("head -c 150M /dev/zero | tail -c 150M | wc -c; echo ${PIPESTATUS[1]}")
    assert killed.stdout == "0\n137\n", killed

    [machine] = machines(image)
    assert Path(f"/proc/{machine}").stat().st_uid >= 20_000, "QEMU is not root's"
    assert run("ulimit -Hn").stdout == "4096\n", "the slots' own limit"

    cluster.purge(job_id)
    wait_for(lambda: not machines(image), 120.0)


def test_what_kills_its_process_kills_the_machine(cluster: Cluster, job_id: str, image: Path) -> None:
    _, machine = started(cluster, job_id, image)
    parent = int(Path(f"/proc/{machine}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, 9)

    wait_for(lambda: machine not in machines(image), 60.0)
