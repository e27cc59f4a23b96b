"""Image slots as a cluster has them: the keeper is a system job, its store a volume of the containers' job, which
Docker starts with the job's five capabilities and its filter; the farm asks the keeper, and places slots. The image is
Debian's base."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv import AsyncFarm, AsyncSandbox, shipped
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.dev.agent import Ports
from agentenv.errors import ConfigError, ImageUnavailableError
from agentenv.farm_client.pool import FarmPool
from agentenv.image_placement.keepers import Keepers, keeper_at
from agentenv.sdk.roots import ImageRoot
from agentenv.slots.backends.nomad.job import hcl
from agentenv.wire.images import NodeImages
from agentenv.wire.spec import MIB, SlotLimits
from tests.debian_images import base_in_cache
from tests.farm_service import served
from tests.image_sources import member, oci_layout, tar_of
from tests.nomad.cluster import Cluster
from tests.nomad.containers import healthy
from tests.nomad.farm import docker_name, nomad_farm
from tests.waiting import START_S, eventually, wait_for

AGENTENV = Path(sys.executable).with_name("agentenv")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SMALL = {"workspace_bytes": 32 * MIB, "tmp_bytes": 32 * MIB, "shm_bytes": 16 * MIB}
CONTAINERS = ContainerSettings(slots_per_container=3, limits=SlotLimits(memory_bytes=512 * MIB, **SMALL))
POOL = PoolSettings(min_containers=1, max_containers=1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Nodes:
    """The farm, and where its images come from."""

    farm: AsyncFarm
    base: str
    """A reference to Debian's base."""
    directory: Path
    """Images in it may be named."""

    def box(self, image: str = "") -> AsyncSandbox:
        return self.farm.sandbox(ImageRoot(image or self.base, cpus=1, memory_mib=512, storage_mib=256))

    async def where(self) -> list[NodeImages]:
        return list((await self.farm._pool._client.image_map()).nodes)  # type: ignore[union-attr]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "tree"])
async def nodes(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Nodes]:
    """As this kernel can do it; and as before Linux 6.12, where containers unpack the images beside the store."""
    directory = tmp_path_factory.mktemp("images")
    base = base_in_cache(directory / "cache") / "image"
    (tarball,) = base.glob("base-*.tar")
    oci_layout(directory / "debian", tarball.read_bytes(), how="", config={"Env": [f"PATH={PATH}"]})
    token, keepers = secrets.token_hex(32), cluster.job_id("images")
    port = Ports.free().http
    containers = CONTAINERS.model_copy(update={"image_format": request.param})
    variables = {"image_volume": json.dumps("agentenv-images"), "unpack_images": json.dumps(request.param == "tree")}
    backend = nomad_farm(cluster.address, containers, variables=variables)
    try:
        asked = Keepers(token, keeper_at(port))
        async with (
            served(backend, POOL, containers=containers, keepers=asked) as opened,
            AsyncFarm("farm", farm=opened.access(), start_timeout_s=START_S) as farm,
        ):
            # As on a new node: the container may be there first.
            _submit_keepers(cluster, keepers, token, port, directory)
            url = f"http://127.0.0.1:{port}"
            await asyncio.to_thread(wait_for, lambda: healthy(url), START_S, lambda: cluster.tell(keepers))
            yield Nodes(farm, f"oci:{directory}/debian:t", directory)
    finally:
        cluster.purge(keepers)


def _submit_keepers(cluster: Cluster, job_id: str, token: str, port: int, readable: Path) -> None:
    """The shipped job, over the clients' volume of the store."""
    path = f"nomad/jobs/{job_id}"
    cluster.nomad.put(f"/v1/var/{path}", {"Path": path, "Items": {"token": token}})
    given = {
        "job_id": job_id, "driver": "raw_exec", "command": str(AGENTENV), "store": str(cluster.client.place.store),
        "port": port, "cpu_mhz": 500, "memory_mib": 512,
        "args": ["--allow-path", str(readable), "--patience", "1", "--registry", "127.0.0.1:9"],
    }  # fmt: skip
    text = shipped.path("nomad/images.nomad.hcl").read_text()
    job = cluster.nomad.parse_job(text, {name: hcl(value) for name, value in given.items()})
    cluster.nomad.put("/v1/jobs", {"Job": job})


async def _sh(box: AsyncSandbox, script: str) -> str:
    done = await box.run(script, timeout_s=120)
    assert done.exit_code == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


PACKAGE = r"""
set -e
mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin
printf '%s\n' "Package: $0" 'Version: 1' 'Architecture: all' 'Maintainer: a' 'Description: x' > /tmp/p/DEBIAN/control
printf '#!/bin/sh\nuseradd -r user-%s\n' "$0" > /tmp/p/DEBIAN/postinst
printf '#!/bin/sh\necho from the package\n' > "/tmp/p/usr/bin/$0"
chmod 755 /tmp/p/DEBIAN/postinst "/tmp/p/usr/bin/$0"
dpkg-deb --root-owner-group -b /tmp/p "/tmp/$0.deb"
rm -r /tmp/p
"""


async def test_root_installs_packages_and_makes_users(nodes: Nodes) -> None:
    async with nodes.box() as box:
        assert await _sh(box, "id -u; . /etc/os-release; echo $ID") == "0\ndebian\n"
        for name, install in [("one", "dpkg -i /tmp/one.deb"), ("two", "apt-get install -y -q /tmp/two.deb")]:
            made = await box.exec(["bash", "-c", PACKAGE, name])
            assert made.exit_code == 0, made.stderr
            await _sh(box, f"DEBIAN_FRONTEND=noninteractive {install}; dpkg -s {name} | grep -q 'ok installed'")
            assert await _sh(box, f"{name}; id -un user-{name}") == f"from the package\nuser-{name}\n"
        await _sh(box, "useradd -m agent; cp /usr/bin/id /usr/bin/suid; chmod 4755 /usr/bin/suid")
        assert "euid=0(root)" in (await box.exec(["suid"], user="agent")).stdout
        assert (await box.exec(["cat", "/etc/shadow"], user="agent")).exit_code != 0
        assert await _sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"


async def test_files_are_kept_restored_and_forked(nodes: Nodes) -> None:
    async with nodes.box() as box:
        await _sh(box, "echo one > /srv/f; rm -r /usr/share/doc; chown 1000:5 /srv/f")
        checkpoint = await box.checkpoint()
        await _sh(box, "echo two > /srv/f; mkdir /usr/share/doc")
        forks = await box.fork(2)
        for number, fork in enumerate(forks):
            assert (
                await _sh(fork, f"cat /srv/f; echo {number} > /srv/f; ls -d /usr/share/doc") == "two\n/usr/share/doc\n"
            )
        assert [await _sh(fork, "cat /srv/f") for fork in forks] == ["0\n", "1\n"]
        await box.restore(checkpoint)
        assert await _sh(box, "cat /srv/f; stat -c %u:%g /srv/f; ls -d /usr/share/doc || true") == "one\n1000:5\n"
        await asyncio.gather(*(fork.close() for fork in forks))


async def test_an_image_is_on_the_node_whose_container_has_its_slots(nodes: Nodes) -> None:
    oci_layout(
        nodes.directory / "other",
        tar_of(member("etc/issue", b"other", mode=0o644)),
        how="",
        config={"Env": [f"PATH={PATH}"]},
    )
    pool = nodes.farm._pool
    assert isinstance(pool, FarmPool)
    other = f"oci:{nodes.directory}/other:t"
    pool.images.prefetch([other])
    digest = (await pool.images.resolve(other)).digest

    async def there() -> bool:
        (node,) = await nodes.where()
        return digest in node.stored

    await eventually(there)
    async with nodes.box(other) as first, nodes.box() as second:  # an image without any program, beside Debian
        assert await first.read_file("/etc/issue") == "other"
        assert "Debian" in await second.read_file("/etc/issue")
        assert first._usable().lease.container.id == second._usable().lease.container.id


async def test_what_cannot_be_fetched_is_told(nodes: Nodes) -> None:
    for reference, kind, said in [
        (f"oci:{nodes.directory}/none", ConfigError, "does not exist"),
        ("127.0.0.1:9/team/app:1", ImageUnavailableError, "connection refused"),
        ("127.0.0.1:10/team/app:1", ConfigError, "is not on this machine's allow list"),
        ("dockerfile:.", ConfigError, "the nodes of this farm fetch their images"),
    ]:
        with pytest.raises(kind, match=said):
            await nodes.box(reference).open()


async def test_docker_gives_the_container_no_more_than_plain_slots_need(cluster: Cluster, nodes: Nodes) -> None:
    async with nodes.box() as box:
        container = cluster.docker.containers.get(docker_name(box._usable().lease.container.id))
    made = container.attrs["HostConfig"]
    assert sorted(made["CapAdd"]) == ["CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN"]
    assert (made["CapDrop"], made["Privileged"], made["ReadonlyRootfs"]) == (["ALL"], False, True)
    assert made["UsernsMode"] == "host", "of an engine with userns-remap; on others it is the only one"
    assert any(option.startswith("seccomp=") for option in made["SecurityOpt"])
    (store,) = [mount for mount in container.attrs["Mounts"] if mount["Destination"] == "/store"]
    assert (store["Source"], store["RW"]) == (str(cluster.client.place.store), False)
