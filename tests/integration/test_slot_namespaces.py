"""The user namespace of root's plain slots: made by slotlaunch with the right to, joined by bwrap (decision 0056)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sandbox.supervisor.isolation import UNUSED_ID
from agentenv.sandbox.supervisor.launch import trial

UID, UNUSED = "61234", "61235"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's slots make their own")


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def launched(*command: str, user: Sequence[str] = ("-n", UID, UID, UNUSED)) -> subprocess.CompletedProcess[str]:
    return run([str(ensure_built().launch), *user, "--", *command])


def in_bwrap(*command: str) -> subprocess.CompletedProcess[str]:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    argv = trial(bwrap, command, Path("/nowhere"))
    assert argv is not None
    return run(argv)


def test_a_namespace_is_held_and_no_capability_is() -> None:
    done = launched("/bin/sh", "-c", "readlink /proc/self/ns/user /proc/self/fd/5; grep Cap /proc/self/status")
    own, held, *capabilities = done.stdout.splitlines()
    assert own == str(Path("/proc/self/ns/user").readlink())
    assert held.startswith("user:")
    assert held != own
    assert [line.split()[1] for line in capabilities[:3]] == ["0" * 16] * 3, "inheritable, permitted, effective"


def test_without_it_the_descriptor_is_closed() -> None:
    done = launched("/bin/sh", "-c", "ls /proc/self/fd", user=("-u", UID, UID))
    assert set(done.stdout.split()) <= {"0", "1", "2", "3"}


def test_the_slot_is_itself_in_it_and_0_is_an_id_that_nobody_has() -> None:
    done = in_bwrap("sh", "-c", "id -u; cat /proc/self/uid_map /proc/self/gid_map; cat /proc/self/setgroups")
    user, *maps, groups = done.stdout.splitlines()
    assert (user, groups) == ("65534", "deny")
    ids = [["65534", "65534", "1"], ["0", str(UNUSED_ID), "1"]]
    assert [line.split() for line in maps] == [*ids, *ids]


def test_what_runs_in_it_has_no_capability_and_gets_none_back() -> None:
    done = in_bwrap("grep", "^Cap\\|^NoNewPrivs", "/proc/self/status")
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0" * 16, "1"}
    assert in_bwrap("setpriv", "--reuid", "0", "true").returncode != 0


def test_no_namespace_can_be_made_below_it() -> None:
    """By the count, also where no filter of system calls refuses it."""
    done = in_bwrap("unshare", "--user", "true")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    raised = in_bwrap("sh", "-c", "echo 5 > /proc/sys/user/max_user_namespaces")
    assert raised.returncode != 0


def test_the_count_of_the_machine_is_as_before() -> None:
    file = Path("/proc/sys/user/max_user_namespaces")
    before = file.read_text()
    assert in_bwrap("true").returncode == 0
    assert file.read_text() == before


def test_whatever_fails_is_told() -> None:
    done = launched("/bin/true", user=("-n", "no", UID, UNUSED))
    assert (done.returncode, done.stderr.strip()) == (127, "slotlaunch: number no: Invalid argument")
