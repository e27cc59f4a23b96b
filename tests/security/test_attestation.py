"""A slot that is not what it must be is refused: each check of its attestation, by a slotroot that makes it wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agentenv.sandbox.slotagent import build
from tests.few_ids import FIRST as FIRST_OF_FEW
from tests.security.conftest import sh
from tests.security.image_slots import ImageSlots, container, make_images
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]
STARTED_WITH: Final = """\
import dataclasses, sys
from pathlib import Path
from agentenv.sandbox.supervisor import launch
program, built = Path(sys.argv.pop(1)), launch.ensure_built
launch.ensure_built = lambda cache: dataclasses.replace(built(cache), root=program)
sys.exit(launch.main(sys.argv[1:]))
"""
WRONG: Final[dict[str, tuple[str, str, str, str]]] = {
    "joins no user namespace": (
        "root/main.c",
        "join_user_namespace(arguments[1], USER_NAMESPACE);",
        "",
        "uid_map is 0 0",
    ),
    "is another user": (
        "root/main.c",
        "    restrict_to(wanted->capabilities, &guard);\n",
        '    restrict_to(wanted->capabilities, &guard);\n    become("1", "1");\n',
        "Uid is",
    ),
    "keeps a capability": (
        "root/main.c",
        "restrict_to(wanted->capabilities,",
        "restrict_to(wanted->capabilities | 1UL << 21,",
        "CapBnd is",
    ),
    "loses a capability": (
        "root/main.c",
        "restrict_to(wanted->capabilities,",
        "restrict_to(wanted->capabilities & ~1UL,",
        "CapEff is",
    ),
    "has no filter": ("root/main.c", "if (!guard_slot(getpid(), guard))", "if (!guard)", "Seccomp is 0, not 2"),
    "cannot gain privileges": (
        "root/main.c",
        "    bring_up_loopback();\n    const",
        "    bring_up_loopback();\n    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);\n    const",
        "NoNewPrivs is 1, not 0",
    ),
    "has the container's cgroup namespace": (
        "root/main.c",
        " | CLONE_NEWCGROUP",
        "",
        "its cgroup namespace is the container's",
    ),
    "joins no cgroup": ("steps/steps.c", 'put("join", arguments[1], "0");', "", "it is not in the slot's cgroup"),
    "has the oom score of the container": (
        "steps/steps.c",
        'put("raise", "/proc/self/oom_score_adj", arguments[1]);',
        "",
        "its oom_score_adj is",
    ),
    "may write to /proc": ("root/tree.c", "(root->nested ? 0 : ATTR_RDONLY)", "0", "/proc is not ro"),
    "may write to /sys": (
        "root/tree.c",
        '"sysfs", none, NO_EXEC_OR_DEVICES | ATTR_RDONLY',
        '"sysfs", none, NO_EXEC_OR_DEVICES',
        "/sys is not ro",
    ),
    "sees the machine's keys": ("root/tree.c", '"/proc/keys", ', "", "nothing is mounted at /proc/keys"),
    "may set something of the machine": (
        "root/tree.c",
        '"/proc/pressure", "/proc/sys",',
        '"/proc/pressure",',
        "nothing is mounted at /proc/sys",
    ),
    "keeps the machine's root": ("root/tree.c", 'umount2(".", MNT_DETACH) < 0 || ', "", "is mounted"),
    "has more shared memory": ("root/tree.c", '"size", root->shm_bytes', '"size", "1g"', "/dev/shm is not size="),
    "has more terminals": ("root/tree.c", '"max", root->terminals', '"max", "4096"', "/dev/pts is not max="),
    "has another device": ("root/tree.c", "copy_mount(path, 0)", 'copy_mount("/dev/null", 0)', "shows /null"),
    "has no queues of its own": (
        "root/tree.c",
        '    mount_at(from->queues, "/dev/mqueue");\n',
        "",
        "nothing is mounted at /dev/mqueue",
    ),
    "has executable devices": (
        "root/tree.c",
        "devices, ATTR_NOSUID | ATTR_NOEXEC",
        "devices, ATTR_NOSUID",
        "/dev is not noexec",
    ),
    "mounts something more": (
        "root/tree.c",
        '    make_mount_point("/run/agentenv");\n',
        '    make_mount_point("/run/agentenv");\n    mount("none", "/tmp", "tmpfs", 0, NULL);\n',
        "tmpfs is mounted at /tmp",
    ),
}
"""What it does: the file, what is replaced in it, by what, and what is said of the slot."""


def compiled(directory: Path, file: str, old: str, new: str) -> Path:
    """A slotroot with this change."""
    sources = directory / "sources"
    shutil.copytree(Path(build.__file__).parent, sources, ignore=shutil.ignore_patterns("bin", "*.py", "__pycache__"))
    text = (sources / file).read_text()
    assert text.count(old) == 1, f"{old!r} in {file}"
    (sources / file).write_text(text.replace(old, new))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_HERE", sources)
        patch.setattr(build, "_WARNINGS", ("-std=gnu17",))
        build._compile("slotroot", directory / "slotroot", build._RELEASE)
    return directory / "slotroot"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slotroot of the container, which tests replace."""
    place = tmp_path_factory.mktemp("program") / "slotroot"
    shutil.copy(build.ensure_built().root, place)
    return place


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slots(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, program: Path
) -> AsyncIterator[ImageSlots]:
    async def command(_name: str, spec: Path, *, detached: bool) -> list[str]:
        assert not detached
        return [sys.executable, "-c", STARTED_WITH, str(program), str(spec), "--lifeline"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.slots.backends.local_process.container_command", command)
        async with container(make_images(tmp_path_factory.mktemp("images")), request, slots=2) as made:
            yield made


def log_of(slots: ImageSlots) -> str:
    assert slots.backend is not None
    return " ".join(process.files.last_words() for process in slots.backend._running.values())


async def test_the_right_one_is_not_refused(slots: ImageSlots) -> None:
    assert await sh(await slots.open(), "echo works") == "works\n"
    assert "not what it must be" not in log_of(slots)
    await slots.release_all()


OF_IDS: Final = ("joins no user namespace", "is another user")
"""What differs where the container has few ids."""
KINDS: Final = [*(("local", what) for what in WRONG), *(("lean", what) for what in OF_IDS)]


@pytest.mark.parametrize(("slots", "what"), KINDS, indirect=["slots"], scope="module")
async def test_one_that_makes_it_wrong_is_refused(slots: ImageSlots, program: Path, tmp_path: Path, what: str) -> None:
    file, old, new, said = WRONG[what]
    if slots.kind == "lean":
        said = said.replace("0 0", f"0 {FIRST_OF_FEW}")
    kept = tmp_path / "right"
    shutil.copy(program, kept)
    compiled(tmp_path, file, old, new).replace(program)
    opening = asyncio.create_task(slots.open())
    try:
        await until(
            lambda: "not what it must be: " in log_of(slots) and said in log_of(slots), explain=lambda: log_of(slots)
        )
        assert not opening.done()
    finally:
        kept.replace(program)
        opening.cancel()
        await asyncio.wait([opening])
        await slots.release_all()
