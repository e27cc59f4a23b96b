"""Agent programs in slots of an ordinary user: in user isolation, and with images where he has subordinate ids."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image_sources import member, oci_layout
from tests.ordinary_user import as_ordinary_user, delegated_cgroups, give, own_directory
from tests.small_root import PASSWD, PROGRAMS, PYTHON, RUNTIME, files, programs

PLAYED = """
import asyncio, json, sys
from pathlib import Path
from tests.integration.test_agent_programs import played
slots = {"tool_pool_mode": "local", "isolation": "user", "max_containers": 1, "slots_per_container": 1}
one, group = asyncio.run(played(Path(sys.argv[1]), sys.argv[2], agent_max_steps=20, **slots))
print(json.dumps([one.error, one.score, one.finish_reason, len(group["tokens"])]))
"""
CHECKED = """
import asyncio, json, sys
from agentenv import AsyncSandbox
from agentenv.agents.check import checked
from tests.unit.agents.test_check import small
async def check():
    async with AsyncSandbox(image=sys.argv[1], memory_mib=256) as box:
        return (await checked(small("rewriting"), "chat", box)).faults
print(json.dumps(asyncio.run(check())))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with own_directory() as directory:
        yield directory


def env_of(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "TMPDIR": str(home),
        "AGENTENV_CACHE_DIR": str(home / "cache"),
        "AGENTENV_STATE_DIR": str(home / "state"),
    }


@pytest.mark.parametrize(("behaviour", "sequences"), [("rewriting", 1), ("forking", 3)])
def test_every_token_is_exact_in_user_isolation(home: Path, behaviour: str, sequences: int) -> None:
    done = as_ordinary_user([sys.executable, "-c", PLAYED, str(home), behaviour], env=env_of(home))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["", 1.0, "stop", sequences]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user with ids of the test's")
def test_a_program_runs_in_his_slot_with_an_image(home: Path) -> None:
    links = [
        member(f"usr/bin/{name}", type=tarfile.SYMTYPE, linkname=target)
        for name, target in (("sh", "bash"), ("python3", PYTHON.name))
    ]
    passwd = member("etc/passwd", PASSWD.encode(), mode=0o644)
    oci_layout(home / "layout", programs(*PROGRAMS, "sed"), files(passwd, *links), tag="t", config=RUNTIME)
    give(*home.rglob("*"))
    with delegated_cgroups() as cgroups:
        command = [sys.executable, "-c", CHECKED, f"oci:{home}/layout:t"]
        done = as_ordinary_user(command, subordinate=True, cgroups=cgroups, env=env_of(home))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
