from __future__ import annotations

import json

from agentenv import shipped
from agentenv.sandbox.slotagent import call_list

PROFILE = json.loads(shipped.path("docker/seccomp.json").read_text())


def test_the_list_in_c_is_that_of_the_profile() -> None:
    cure = "run: python -m agentenv.sandbox.slotagent.call_list docker/seccomp.json"
    assert call_list.SOURCE.read_text() == call_list.source(PROFILE), cure


def test_slots_may_not_use_what_makes_them() -> None:
    listed, nested = call_list.names(PROFILE)
    mounts = {"fsconfig", "fsmount", "fsopen", "mount", "mount_setattr", "move_mount", "open_tree", "umount2"}
    assert not {*mounts, "pivot_root", "setns", "clone3", "keyctl", "bpf", "userfaultfd"}.intersection(listed)
    assert {"read", "clone", "unshare", "chroot", "mknodat", "ptrace", "arch_prctl"} <= {*listed}
    assert not {"fsopen", "open_tree", "move_mount"}.intersection(nested)


def test_what_the_profile_says_of_arguments_is_what_the_guard_knows() -> None:
    """guard.c has these rules by hand: another one here needs another one there."""
    judged = [
        (name, argument["value"], argument["op"])
        for rule in PROFILE["syscalls"]
        for name in rule["names"]
        for argument in rule.get("args", ())
    ]
    personalities = [("personality", value, "SCMP_CMP_EQ") for value in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)]
    assert judged == [("socket", 40, "SCMP_CMP_NE"), *personalities]
    assert {name for name, _, _ in judged} == call_list.JUDGED
