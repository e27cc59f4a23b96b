"""What an unpacked layer has of a tree."""

from __future__ import annotations

import tarfile

from agentenv.store.tree import Tree
from agentenv.store.unpacked import Change, changes, names_of, seen
from agentenv.tar_headers import entries
from tests.image_sources import member, tar_of

Shown = dict[str, "Shown | str | None"]
DIRECTORY = tarfile.DIRTYPE


def shown(change: Change) -> Shown:
    """Files by their content's size, whiteouts as None; a directory that is opaque has an entry for it."""
    found: Shown = {"opaque": ""} if change.opaque else {}
    for name, child in sorted(change.children.items()):
        if child is None:
            found[name.decode()] = None
        else:
            found[name.decode()] = str(child.node.size) if child.node.children is None else shown(child)
    return found


def layers(*tars: bytes) -> list[Shown]:
    tree = Tree()
    found = []
    for tar in tars:
        before = seen(tree.root)
        tree.apply(entries(tar))
        found.append(shown(changes(before, tree.root)))
    return found


BASE = tar_of(
    member("d", type=DIRECTORY, mode=0o755), member("d/a", b"a"), member("d/b", b"bb"),
    member("e", type=DIRECTORY, mode=0o755), member("e/f/x", b"xxx"), member("file", b""),
)  # fmt: skip


def test_the_first_layer_is_whole_and_an_empty_one_has_nothing() -> None:
    assert layers(BASE, tar_of()) == [{"d": {"a": "1", "b": "2"}, "e": {"f": {"x": "3"}}, "file": "0"}, {}]


def test_only_what_changed_with_its_parents() -> None:
    assert layers(BASE, tar_of(member("e/f/y", b"y"), member("d/.wh.a"), member("missing/z", b"z")))[1] == {
        "d": {"a": None},
        "e": {"f": {"y": "1"}},
        "missing": {"z": "1"},
    }


def test_a_directory_with_other_attributes_is_there_and_one_with_the_same_is_not() -> None:
    same, other = (member("d", type=DIRECTORY, mode=mode) for mode in (0o755, 0o700))
    assert layers(BASE, tar_of(same))[1] == {}
    assert layers(BASE, tar_of(other))[1] == {"d": {}}


def test_a_replaced_directory_is_opaque_and_one_in_place_of_a_file_need_not_be() -> None:
    replaced = tar_of(member(".wh.d"), member("d/new", b"n"), member(".wh.file"), member("file/x", b"x"))
    assert layers(BASE, replaced)[1] == {"d": {"opaque": "", "new": "1"}, "file": {"x": "1"}}
    assert layers(BASE, tar_of(member("d", b"now a file")))[1] == {"d": "10"}
    assert layers(BASE, tar_of(member("d/.wh..wh..opq"), member("d/b", b"b")))[1] == {"d": {"a": None, "b": "1"}}


def test_a_link_across_layers_takes_all_names_with_it() -> None:
    def link(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
        return member(name, type=tarfile.LNKTYPE, linkname=to)

    assert layers(BASE, tar_of(link("e/l", "d/b")))[1] == {"d": {"b": "2"}, "e": {"l": "2"}}
    moved = layers(tar_of(member("a", b"a"), link("b", "a")), tar_of(member(".wh.b"), link("c", "a")))
    assert moved[1] == {"a": "1", "b": None, "c": "1"}


def test_a_parent_that_is_a_link_leads_where_the_lower_layers_say() -> None:
    below = tar_of(member("d/a", b"a"), member("l", type=tarfile.SYMTYPE, linkname="d"))
    assert layers(below, tar_of(member("l/new", b"n")))[1] == {"d": {"new": "1"}}


def test_names_are_of_all_layers_below() -> None:
    first, second, third = "sha256:1", "sha256:2", "sha256:3"
    assert names_of([first, second])[0] == names_of([first, third])[0]
    assert names_of([first, second])[1] != names_of([second, first])[1]
    assert names_of([first, second, third])[:2] == names_of([first, second])
