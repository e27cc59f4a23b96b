"""Which format images have on which machine: a row of the table in docs/images.md each."""

from __future__ import annotations

import pytest

from agentenv.sandbox.supervisor.id_ranges import ids_of_trees
from agentenv.sandbox.supervisor.image_formats import FEW_IDS, Format, Probes, decide, without_probes
from agentenv.sandbox.supervisor.isolation import Identity
from agentenv.sandbox.supervisor.user_namespace import IDS_OF_TREES, NOBODY, LeanIds
from agentenv.store import unpacked
from agentenv.wire.roots import RootSpec, unfit
from agentenv.wire.spec import ImageFormat, SlotLimits

ALL_IDS = "         0          0 4294967295\n"
PRIVILEGES = "Name:\tpython\nNoNewPrivs:\t0\n"
LINUX = "Linux version 6.12.0 (debian) #1 SMP PREEMPT_DYNAMIC Debian"
NO_EROFS = "create erofs: Block device required"
NO_MAPPED = "mount overlay on root: Invalid argument"
NO_ATTRIBUTES = "Operation not supported"
NO_TREES = "unpacked images need the store's trees, which are read-only here"


def probes(erofs: str = "", tree: str = "", shifted: str = "", memory: str = "") -> Probes:
    return Probes(formats={"erofs": erofs, "tree": tree, "shifted": shifted}, memory=memory)


@pytest.mark.parametrize(
    ("host", "found", "chosen", "writable", "said"),
    [
        ("6.12 and newer", probes(), "erofs", ("memory", "disk"), []),
        ("6.6 to 6.11", probes(NO_EROFS), "tree", ("memory", "disk"), ["unpacked"]),
        ("no store on a disk", probes("create erofs: Invalid argument"), "tree", ("memory", "disk"), ["unpacked"]),
        ("5.19 to 6.5", probes(NO_EROFS, memory=NO_ATTRIBUTES), "tree", ("disk",), ["unpacked", "to the disk only"]),
        (
            "5.11 to 5.18",
            probes(NO_EROFS, NO_MAPPED, memory=NO_ATTRIBUTES),
            "shifted",
            ("disk",),
            ["unpacked", "same user ids", "to the disk only"],
        ),
    ],
)
def test_a_host_that_can(host: str, found: Probes, chosen: Format, writable: tuple[str, ...], said: list[str]) -> None:
    support = decide(found)
    assert (support.format, support.writable, support.refused) == (chosen, writable, ""), host
    assert len(support.weaker) == len(said)
    assert all(word in sentence for word, sentence in zip(said, support.weaker, strict=True))


@pytest.mark.parametrize(
    ("host", "found", "said"),
    [
        ("before 5.11", Probes(basics="mount overlay on root: Operation not permitted"), "not permitted"),
        ("a store that is read-only, before 6.12", probes(NO_EROFS, NO_TREES, NO_TREES), "which are read-only here"),
    ],
)
def test_a_host_that_cannot_says_why(host: str, found: Probes, said: str) -> None:
    support = decide(found)
    assert support.format is None, host
    assert said in support.refused
    assert support.writable == ()


@pytest.mark.parametrize(
    ("host", "one_id", "uid_map", "version", "said"),
    [
        ("an ordinary user", "user a has none", "1000 1000 1\n", LINUX, "this container has one: user a has none"),
        ("a user namespace of one id", "", "0 1000 1\n", LINUX, "map 65536 ids"),
        (
            "gVisor",
            "",
            ALL_IDS,
            "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n",
            "gVisor cannot mount images",
        ),
    ],
)
def test_a_host_that_need_not_be_tried_says_why(host: str, one_id: str, uid_map: str, version: str, said: str) -> None:
    assert said in without_probes(one_id, ids_of_trees(uid_map, uid_map), version, PRIVILEGES), host


def test_without_new_privileges_no_program_of_an_image_could_become_root() -> None:
    assert "no-new-privileges" in without_probes(
        "", ids_of_trees(ALL_IDS, ALL_IDS), LINUX, PRIVILEGES.replace("0", "1")
    )


def test_root_with_all_ids_has_to_be_tried() -> None:
    assert without_probes("", ids_of_trees(ALL_IDS, ALL_IDS), LINUX, PRIVILEGES) == ""
    assert without_probes("", ids_of_trees("0 0 1000\n1000 1000 4294966295\n", ALL_IDS), LINUX, PRIVILEGES) == ""


@pytest.mark.parametrize("wanted", ["erofs", "tree", "shifted"])
def test_a_format_that_is_named_is_taken_or_refused(wanted: ImageFormat) -> None:
    assert decide(probes(), wanted).format == wanted
    lacking = decide(probes(NO_EROFS, NO_MAPPED, NO_TREES), wanted)
    assert lacking.format is None
    assert lacking.refused.startswith(f"image_format = {wanted}, but")


def test_a_layer_in_memory_is_refused_where_only_the_disk_has_room_for_attributes() -> None:
    support = decide(probes(NO_EROFS, memory=NO_ATTRIBUTES))
    assert "to the disk only" in support.no_memory
    assert decide(probes()).no_memory == ""
    refused = {"writable=memory": support.no_memory}
    image = f"sha256:{'0' * 64}"
    error = unfit(RootSpec(image), SlotLimits(), refused)
    assert error is not None
    assert "to the disk only" in error.message
    assert unfit(RootSpec(image, writable="disk"), SlotLimits(), refused) is None


FEW = "0 100000 65536\n"


def test_a_container_with_few_ids_has_lean_slots_which_write_to_memory_only() -> None:
    ids = ids_of_trees(FEW, FEW)
    assert without_probes("", ids, LINUX, PRIVILEGES) == ""
    assert ids == LeanIds()
    support = decide(probes(FEW_IDS, FEW_IDS), ids=ids)
    assert (support.format, support.writable, support.ids) == ("shifted", ("memory",), ids)
    assert [
        word in sentence
        for word, sentence in zip(("unpacked", "same user ids", "0 to 1999 and 65534"), support.weaker, strict=True)
    ] == [True] * 3
    assert "--userns=host" in support.no_disk
    assert support.no_memory == ""


def test_a_container_with_few_ids_that_can_write_nowhere_is_refused() -> None:
    support = decide(probes(FEW_IDS, FEW_IDS, memory=NO_ATTRIBUTES), ids=LeanIds())
    assert support.format is None
    assert NO_ATTRIBUTES in support.refused
    assert "of a disk" in support.refused


@pytest.mark.parametrize("wanted", ["erofs", "tree"])
def test_a_container_with_few_ids_refuses_what_needs_all(wanted: ImageFormat) -> None:
    assert "few ids" in decide(probes(FEW_IDS, FEW_IDS), wanted, LeanIds()).refused


@pytest.mark.parametrize("maps", [("0 1000 1\n", FEW), (FEW, "0 100000 14000\n"), ("", "")])
def test_a_container_with_too_few_ids_of_either_kind_is_refused_with_the_cure(maps: tuple[str, str]) -> None:
    said = without_probes("", ids_of_trees(*maps), LINUX, PRIVILEGES)
    assert "12000 to 14000" in said
    assert "/etc/subuid" in said


def test_lean_ids_are_nobody_elses() -> None:
    """Neither the server's, nor the proxy's, nor a plain slot's in any block, nor one that all slots have elsewhere."""
    lean = LeanIds()
    taken = {lean.first + number for number in range(lean.count)}
    assert len(taken) == 2001
    others = [Identity("full", 0, 0, uid_block=block) for block in range(45)]
    assert not taken & {0, others[0].server_uid, others[0].proxy_uid}
    assert max(taken) < min(other.slot_uid(0) for other in others)
    assert lean.maps == "0 12000 2000\n65534 14000 1\n"


def test_what_was_not_tried_does_not_work() -> None:
    assert decide(Probes()).format is None


def test_what_unpacks_images_and_what_shows_them_agree_on_ids() -> None:
    lean = LeanIds()
    assert (IDS_OF_TREES.users, lean.users, NOBODY) == (unpacked.IDS, unpacked.LEAN_IDS, unpacked.NOBODY)
    assert str(unpacked.NOBODY) in lean.maps
