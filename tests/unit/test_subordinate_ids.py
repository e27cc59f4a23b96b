"""Subordinate ids of an ordinary user: which he has, how they are mapped, what is said where he has none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agentenv import subordinate_ids
from agentenv.subordinate_ids import PROGRAMS, WANTED, Maps, Range, Refusal, extents, first_free, lacking, ranges_of
from tests.ordinary_user import FIRST, UID, as_ordinary_user

SUBUID = """\
ann:100000:65536
bob:165536:30000

1000:300000:65536
bob:not:a number
bob:0:0
bob:400000:70000
bob:399999:2
bobby:500000:65536
"""
MAPS = Maps(extents(1000, [Range(100_000, WANTED)]), extents(1000, [Range(100_000, WANTED)]))
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user with ids of the test's")


@pytest.mark.parametrize(
    ("owners", "found"),
    [
        ({"ann", "7"}, [Range(100_000, 65_536)]),
        ({"bob", "1000"}, [Range(165_536, 30_000), Range(300_000, 65_536), Range(400_000, 70_000)]),
        ({"nobody"}, []),
    ],
)
def test_ranges_are_found_by_name_and_by_uid(owners: set[str], found: list[Range]) -> None:
    """What overlaps an earlier range is left out: the kernel refuses to map an id twice."""
    assert ranges_of(SUBUID, owners) == found


def test_0_is_the_user_and_the_others_follow_the_largest_range_first() -> None:
    assert extents(1000, []) == ((0, 1000, 1),)
    assert extents(1000, [Range(100_000, 1_000_000)]) == ((0, 1000, 1), (1, 100_000, WANTED))
    some = extents(1000, [Range(165_536, 30_000), Range(900_000, 5), Range(400_000, 40_000)])
    assert some == ((0, 1000, 1), (1, 400_000, 40_000), (40_001, 165_536, WANTED - 40_000))


def test_what_is_lacking_is_told_with_the_cure() -> None:
    assert lacking(MAPS, "bob", PROGRAMS, 470_000) is None
    few = Maps(extents(1000, [Range(100_000, 1000)]), MAPS.gids)
    assert lacking(few, "bob", PROGRAMS, 470_000) == Refusal(
        "user bob has no 65536 ids in /etc/subuid",
        ("usermod --add-subuids 470000-535535 --add-subgids 470000-535535 bob",),
    )
    assert str(lacking(MAPS, "bob", ("newuidmap",), 0)) == "there is no newgidmap (as root: apt-get install uidmap)"
    nothing = lacking(Maps(extents(7, []), extents(7, [])), "7", (), 0)
    assert nothing is not None
    assert nothing.problem.startswith("user 7 has no 65536 ids in /etc/subuid and /etc/subgid; there is no newuidmap")
    assert len(nothing.cures) == 2


def test_a_cure_names_ids_that_nobody_has() -> None:
    assert first_free([]) == 100_000
    assert first_free([SUBUID, "ann:1:5"]) == 565_536


@only_root
def test_a_user_with_ids_is_root_of_a_namespace() -> None:
    shown = "id -u; id -g; cat /proc/self/uid_map /proc/self/gid_map; touch f && chown 1000:2000 f && rm f && echo done"
    command = [sys.executable, "-m", subordinate_ids.__name__, "sh", "-c", f"cd $(mktemp -d) && {shown} && rmdir $PWD"]
    done = as_ordinary_user(command, subordinate=True)
    maps = [0, UID, 1, 1, FIRST, WANTED] * 2
    assert (done.stdout.split(), done.stderr) == ([*map(str, [0, 0, *maps]), "done"], "")


@only_root
def test_a_user_without_ids_is_told_so() -> None:
    done = as_ordinary_user([sys.executable, "-m", subordinate_ids.__name__, "true"])
    assert done.returncode == 125
    assert f"user {UID} has no 65536 ids in /etc/subuid and /etc/subgid" in done.stderr
    assert "usermod --add-subuids" in done.stderr


@only_root
def test_what_the_programs_refuse_is_told() -> None:
    """Ids that are in our copy of the files, and not in theirs."""
    script = (
        "from agentenv.subordinate_ids import *\nfrom agentenv import subordinate_ids as s\n"
        "given = extents(s.os.getuid(), [Range(7, WANTED)])\ns.own_maps = lambda: Maps(given, given)\n"
        "print(s.refusal_when_tried())"
    )
    done = as_ordinary_user([sys.executable, "-c", script], subordinate=True)
    assert "newuidmap: uid range [1-65537) -> [7-65543) not allowed" in done.stdout, done.stderr


@only_root
def test_a_machine_without_user_namespaces_is_told() -> None:
    """In a namespace that allows no other, as the sysctl does for a machine."""
    inside = "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --reuid 0 " + sys.executable + " -c "
    script = (
        "from agentenv import subordinate_ids as s\n"
        "try: s.enter(s.own_maps())\nexcept OSError as error: print(error.strerror)"
    )
    command = [sys.executable, "-m", subordinate_ids.__name__, "sh", "-c", f"{inside} '{script}'"]
    done = as_ordinary_user(command, subordinate=True)
    assert done.stdout.startswith("this machine refuses user namespaces: No space left on device (see sysctl"), done


def test_own_maps_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uid", "gid"):
        (tmp_path / name).write_text("bob:200000:5\n")
    monkeypatch.setattr(subordinate_ids, "user_name", lambda: "bob")
    maps = subordinate_ids.own_maps((tmp_path / "uid", tmp_path / "missing"))
    assert (maps.uids[1:], maps.gids[1:]) == (((1, 200_000, 5),), ())
