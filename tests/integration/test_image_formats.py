"""Slots of images in every format: the same files, users, checkpoints; what is chosen and weaker is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.containers.control import ContainerControl
from agentenv.errors import ConfigError, ImageUnavailableError
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor.user_namespace import FIRST_ID, FIRST_LEAN_ID, IDS, NOBODY, TREES
from agentenv.wire.leases import CheckpointSlot
from agentenv.wire.spec import ImageFormat
from tests.few_ids import few_ids
from tests.image_sources import member
from tests.security.image_slots import ImageSlots, container, make_images, usual_files
from tests.small_root import files
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own"),
]
FORMATS: tuple[ImageFormat, ...] = ("erofs", "tree", "shifted")
LEAN = "lean"
"""``shifted``, in a container that has few ids."""
FIRST = {"shifted": FIRST_ID + IDS * TREES, LEAN: FIRST_LEAN_ID}
"""Of the ids that all slots have."""
LIST = (
    "import os, stat, sys\n"
    "for top, names, files in os.walk('/'):\n"
    "    names[:] = [n for n in sorted(names) if top != '/' or n not in ('proc', 'sys', 'dev', 'run', 'tmp')]\n"
    "    for name in sorted([*names, *files]):\n"
    "        path = os.path.join(top, name)\n"
    "        s = os.lstat(path)\n"
    "        link = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ''\n"
    "        size = 0 if stat.S_ISDIR(s.st_mode) else s.st_size\n"
    "        if name not in ('hosts', 'hostname', 'resolv.conf') and top != '/':\n"
    "            print(path, oct(s.st_mode), s.st_uid, s.st_gid, size, s.st_mtime_ns, link)\n"
)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=(*FORMATS, LEAN))
async def slots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ImageSlots]:
    made = make_images(tmp_path_factory.mktemp("images"))
    lean = request.param == LEAN
    with few_ids() if lean else contextlib.nullcontext():
        async with container(made, slots=4, image_format="auto" if lean else request.param) as opened:
            yield opened


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The format, or LEAN."""
    named: str = request.node.callspec.params["slots"]
    return named


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def released(slots: ImageSlots) -> AsyncIterator[None]:
    yield
    await slots.release_all()


async def run(session: ToolSession, command: str, **more: object) -> str:
    result = await session.call("bash", {"command": command, **more})
    assert result.exit_code == 0, result
    return result.stdout.strip()


async def test_the_format_is_told(slots: ImageSlots, kind: str) -> None:
    session = await slots.open()
    async with ContainerControl(session.lease.container, guest=True) as control:
        info = await control.info()
    assert info.image_format == ("shifted" if kind == LEAN else kind)
    assert len(info.image_weaker) == {"erofs": 0, "tree": 1, "shifted": 2, LEAN: 3}[kind]
    outside = int((await run(session, "cat /proc/self/uid_map")).split()[1])
    assert outside == FIRST.get(kind, outside)
    assert kind in FIRST or outside not in FIRST.values()


async def shell(session: ToolSession, **more: object) -> str:
    names = {"/run/agentenv/bash": "the container's", "/usr/bin/bash": "its own"}
    tested = "; ".join(f'[ /proc/$$/exe -ef {path} ] && echo "{name}"' for path, name in names.items())
    return await run(session, f'{tested}; type -P bash; echo "$SHELL"', **more)


OWN, CONTAINERS = "its own\n/usr/bin/bash\n/bin/bash", "the container's\n/usr/bin/bash\n/bin/bash"


async def test_calls_are_run_by_the_containers_bash_where_the_image_has_the_same(slots: ImageSlots) -> None:
    content = Path("/usr/bin/bash").read_bytes()
    older = content.replace(b"@(#)Bash version 5", b"@(#)Bash version 4")
    assert older != content
    work = member("work", type=tarfile.DIRTYPE, mode=0o755)
    another = slots.images.over_programs(work, member("usr/bin/bash", older, mode=0o755))
    beside = slots.images.over_programs(work, member("usr/local/bin/bash", older, mode=0o755))
    session = await slots.open()
    assert await shell(session) == CONTAINERS
    assert await shell(await slots.open(another)) == OWN
    assert (await shell(await slots.open(beside))).startswith("/usr/local/bin/bash")
    assert await shell(await slots.open(env={"PATH": "/bin:/usr/bin"})) == OWN.replace("/usr/bin/bash", "/bin/bash")
    await slots.release_all()
    session = await slots.open()
    await run(session, "cp /usr/bin/bash /usr/bin/new && mv /usr/bin/new /usr/bin/bash")
    async with ContainerControl(session.lease.container) as control:
        checkpoint = (await control.act(session.lease.key, CheckpointSlot())).checkpoint
    assert await shell(session) == OWN
    assert await shell(await slots.open(checkpoint=checkpoint)) == OWN


async def test_a_user_beyond_the_ids_of_slots_is_told_so(slots: ImageSlots, kind: str) -> None:
    session = await slots.open()
    done = await session.call("bash", {"command": "id -u", "user": "2000"})
    if kind != LEAN:
        assert done.stdout == "2000\n"
        return
    assert done.exit_code != 0
    assert "the slot does not map all of its ids" in done.stderr
    told = "chown 2000 /work; setpriv --reuid 2000 true; chown 1999 /work && stat -c %u /work"
    asked = await session.call("bash", {"command": told})
    assert asked.stderr.count("Invalid argument") == 2
    assert asked.stdout == "1999\n"


LISTED: dict[str, str] = {}


async def test_an_image_of_layers_looks_the_same(slots: ImageSlots, kind: str) -> None:
    image = slots.images.make(
        slots.images.programs,
        files(
            *usual_files(),
            member("d", type=tarfile.DIRTYPE, mode=0o2751, uid=12, gid=34),
            member("d/gone", b"gone"),
            member("d/own", b"own", mode=0o4755, uid=1000, gid=1001),
            member("e", type=tarfile.DIRTYPE, mode=0o755),
            member("e/below", b"below"),
            member("link", type=tarfile.SYMTYPE, linkname="d/own"),
        ),
        files(
            member("d/.wh.gone"),
            member("e/.wh..wh..opq"),
            member("e", type=tarfile.DIRTYPE, mode=0o700, uid=7),
            member("e/above", b"above", uid=65_535),
            member("d/more", type=tarfile.LNKTYPE, linkname="d/own"),
            member("list.py", LIST.encode()),
        ),
    )
    session = await slots.open(image)
    listed = await run(session, "python3 /list.py")
    if kind == LEAN:
        assert f" {NOBODY} 0 5 " in listed
    seen_as = listed.replace(f" {NOBODY} 0 5 ", " 65535 0 5 ")  # what nobody there can own
    assert seen_as == LISTED.setdefault("", seen_as)
    assert "/d/gone" not in listed
    assert "/e/below" not in listed
    assert "/d/own 0o104755 1000 1001 3" in listed
    # What the image has can be changed, removed and replaced, for this slot alone.
    await run(session, "echo x >> /d/own && chown 5 /d/own && rm -r /e && mkdir /e && touch /e/new")
    assert await run(session, "cat /d/own; ls /e; stat -c %u /d/own") == "ownx\nnew\n5"
    other = await slots.open(image)
    assert await run(other, "python3 /list.py") == listed


async def test_programs_have_the_rights_that_the_image_gives_them(slots: ImageSlots) -> None:
    session = await slots.open(capabilities=("net_raw",))
    asked = {"user": "1000"}
    told = "import os; print(os.geteuid())"
    assert await run(session, f"/usr/bin/setuid -c '{told}'", **asked) == "0"
    raw = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('raw')"
    assert await run(session, f'/usr/bin/raw -c "{raw}"', **asked) == "raw"


async def test_checkpoints_and_forks(slots: ImageSlots) -> None:
    session = await slots.open()
    await run(session, "echo 1 > /work/a && rm /attacks.py && chown 1000:5 /work/a")
    async with ContainerControl(session.lease.container) as control:
        checkpoint = (await control.act(session.lease.key, CheckpointSlot())).checkpoint
    fork = await slots.open(checkpoint=checkpoint)
    for each in (session, fork):
        assert await run(each, "cat /work/a; stat -c %u:%g /work/a; ls /attacks.py 2>&1 | wc -l") == "1\n1000:5\n1"
        assert "No such file" in await run(each, "ls /attacks.py 2>&1 || true")


async def test_a_slot_on_the_disk(slots: ImageSlots, kind: str) -> None:
    if kind == LEAN:
        with pytest.raises(ConfigError, match="only the machine's root may mount a file system of a disk"):
            await slots.open(writable="disk")
        return
    session = await slots.open(writable="disk")
    assert await run(session, "rm /attacks.py && echo x > /work/x && cat /work/x") == "x"


async def test_mounts_name_no_path_of_the_machine(slots: ImageSlots) -> None:
    session = await slots.open()
    told = await run(session, "cat /proc/self/mountinfo")
    assert "upperdir=upper,workdir=work" in told
    assert [name for name in (str(slots.images.directory), "trees", "store") if name in told] == []


async def test_what_cannot_be_unpacked_is_refused_and_the_slots_go_on(slots: ImageSlots, kind: str) -> None:
    """More attributes than a file of ext4 has room for."""
    await slots.open()
    pax = {f"SCHILY.xattr.user.{number}": "v" * 60_000 for number in range(2)}
    image = slots.images.over_programs(*usual_files(), member("tagged", b"x", pax_headers=pax))
    if kind == "erofs":
        await slots.open(image)
        return
    with pytest.raises(ImageUnavailableError, match=r"could not be unpacked: .*(space|large|long)"):
        await slots.open(image)
    parts = list((slots.images.store / "trees").glob("*.part/*"))
    assert parts == []
    assert await run(await slots.open(), "echo on") == "on"
    assert unpackers(slots, image) == []


async def test_an_image_that_is_not_there_is_refused(slots: ImageSlots) -> None:
    with pytest.raises(ImageUnavailableError, match="is not in the store"):
        await slots.open(f"sha256:{'0' * 64}")


def unpackers(slots: ImageSlots, image: str) -> list[int]:
    """The processes of the container that unpack this image."""
    found = []
    for pid in slots.processes():
        with contextlib.suppress(OSError):
            if {b"agentenv.store.unpacked", image.encode()} <= set(
                Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            ):
                found.append(pid)
    return found


async def test_an_unpacking_that_is_killed_is_told_and_done_again(slots: ImageSlots, kind: str) -> None:
    if kind == "erofs":
        return  # nothing is unpacked
    await slots.open()

    def killed() -> bool:  # as soon as they are seen: on a loaded machine they are gone a moment later
        for pid in unpackers(slots, image):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return opening.done()

    for attempt in range(5):
        content = str(attempt).encode()
        image = slots.images.over_programs(*usual_files(), *(member(f"many/{n}", content) for n in range(10_000)))
        opening = asyncio.ensure_future(slots.open(image))
        await until(killed)
        if opening.exception() is not None:
            break
        await slots.release_all()  # it was unpacked before it could be killed
    with pytest.raises(ImageUnavailableError, match="could not be unpacked: killed by SIGKILL"):
        await opening
    assert await run(await slots.open(image), "ls /many | wc -l") == "10000"
    assert list((slots.images.store / "trees").glob("*.part")) == []
