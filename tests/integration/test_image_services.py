"""Debian's own packages in an image slot: installed by apt, services that run, users, and programs with privileges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentenv import AsyncSandbox
from agentenv.config import cache_dir
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.store.addition import Runtime
from agentenv.tasks.base_image import make_base
from agentenv.wire.spec import MIB, SlotLimits
from tests.debian_images import base_in_cache
from tests.debian_packages import packages_above
from tests.few_ids import few_ids

PACKAGES = (
    *("postgresql", "redis-server", "nginx-light", "openssh-server", "openssh-client", "cron", "sudo"),
    *("iputils-ping", "libcap2-bin", "procps", "curl"),
)
INSTALL = (
    f"DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-download --no-install-recommends {' '.join(PACKAGES)}"
)
NAME = "debian-packages:test"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["all ids", "few ids"])
async def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncSandbox]:
    """A slot in which the packages are installed, in a container of this machine's root and of a user namespace's."""
    place = tmp_path_factory.mktemp("services")
    kept = cache_dir() / "image"
    cache = base_in_cache(place / "cache")
    few = few_ids() if request.param == "few ids" else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, few:
        patch.setenv("AGENTENV_CACHE_DIR", str(cache))
        patch.setenv("AGENTENV_STATE_DIR", str(place / "state"))
        store = Store.open(store_directory())
        base = make_base(store)
        image = store.add(base, [packages_above(base.layers[0], PACKAGES, kept)], Runtime.of(base))
        store.name(NAME, image)
        limits = SlotLimits(memory_bytes=4096 * MIB)
        async with AsyncSandbox(image=NAME, memory_mib=4096, storage_mib=2048, limits=limits) as opened:
            done = await opened.run(INSTALL, timeout_s=900)
            assert done.exit_code == 0, (done.stdout + done.stderr)[-4000:]
            yield opened


AS_ROOT = [
    "apt-get check",
    "dpkg --verify",
    # users
    "useradd -m -s /bin/bash agent && usermod -aG sudo agent && su agent -c 'id -un' | grep -qx agent",
    "echo 'agent ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/agent && su agent -c 'sudo -n id -u' | grep -qx 0",
    "su agent -c 'sudo -n -u postgres id -un' | grep -qx postgres",
    "cp /usr/bin/id /usr/local/bin/myid && chmod u+s /usr/local/bin/myid && su agent -c myid | grep -q 'euid=0'",
    "setcap cap_net_bind_service+ep /usr/local/bin/myid && getcap /usr/local/bin/myid | grep -q bind_service",
    "su agent -c 'ping -c 1 -W 2 127.0.0.1'",
    # services
    "service postgresql start && su postgres -c 'createdb shop' && su postgres -c 'psql shop -Atc \"select 6 * 7\"'"
    " | grep -qx 42",
    "service redis-server start && for _ in $(seq 600); do redis-cli set a b && break; sleep 0.1; done"
    " && redis-cli get a | grep -qx b",
    "nginx && curl -sf http://127.0.0.1/ | grep -qi nginx",
    "ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id && cp /root/.ssh/id.pub /root/.ssh/authorized_keys"
    " && service ssh start"
    " && ssh -i /root/.ssh/id -o StrictHostKeyChecking=no -o ConnectionAttempts=60 root@127.0.0.1 'echo $((6 * 7))'"
    " | grep -qx 42",
    "service cron start && pgrep -x cron && echo '@reboot true' | crontab - && crontab -l",
    # what the lower layer has is moved, replaced, deleted
    "mv /usr/share/perl5 /usr/share/moved && mv /usr/share/moved /usr/share/perl5 && perl -MFile::Temp -e 1",
    'rm -rf /usr/share/doc && mkdir /usr/share/doc && [ -z "$(ls -A /usr/share/doc)" ]',
    "nginx -s stop; apt-get remove -y -q --no-download nginx && [ ! -e /usr/sbin/nginx ] && apt-get check",
]


@pytest.mark.parametrize("command", AS_ROOT)
async def test_it_works_as_on_a_machine(box: AsyncSandbox, command: str) -> None:
    done = await box.run(command, timeout_s=120)
    assert done.exit_code == 0, (done.stdout + done.stderr)[-2000:]


async def test_services_are_started_again_above_a_checkpoint(box: AsyncSandbox) -> None:
    """Files are what a checkpoint keeps: a database's too, as after a power cut."""
    start = "service postgresql restart >&2 && su postgres -c 'psql -Atc \"select count(*) from kept\"'"
    made = await box.run(
        "service postgresql restart >&2 && su postgres -c 'psql -c \"create table kept as select 1\"'", timeout_s=120
    )
    assert made.exit_code == 0, made.stderr
    checkpoint = await box.checkpoint()
    try:
        for _ in range(2):
            again = await box.run(start, timeout_s=120)
            assert (again.exit_code, again.stdout) == (0, "1\n"), again.stderr
            await box.run("su postgres -c 'psql -c \"drop table kept\"'")
            await box.restore(checkpoint)
    finally:
        await box.drop(checkpoint)
