"""Layers are applied as engines apply them; nothing leads out of the tree, and nothing grows without bound."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import BadImageError
from agentenv.store.tree import ACL_ACCESS, Node, Tree, TreeLimits
from agentenv.tar_headers import Entry, Kind


def entry(name: str, kind: Kind = Kind.FILE, *, link: str = "", mode: int = 0o644, size: int = 0, **more: Any) -> Entry:
    return Entry(name.encode(), kind, mode, more.pop("uid", 0), 0, 0, size=size, link=link.encode(), **more)


def directory(name: str, **more: Any) -> Entry:
    return entry(name, Kind.DIRECTORY, **more)


def symlink(name: str, target: str) -> Entry:
    return entry(name, Kind.SYMLINK, link=target)


def hard_link(name: str, target: str) -> Entry:
    return entry(name, Kind.HARD_LINK, link=target)


def walk(root: Node) -> Iterator[tuple[bytes, Node]]:
    """Every name below a directory and its node, parents before children, sorted; paths are relative."""
    stack = [(b"", root)]
    while stack:
        path, node = stack.pop()
        if path:
            yield path, node
        below = sorted((node.children or {}).items(), reverse=True)
        stack += [(path + b"/" + name if path else name, child) for name, child in below]


def applied(*layers: Sequence[Entry], limits: TreeLimits | None = None) -> dict[str, Node]:
    tree = Tree(limits)
    for layer in layers:
        tree.apply(layer)
    return {path.decode(): node for path, node in walk(tree.root)}


def names(*layers: Sequence[Entry]) -> list[str]:
    return list(applied(*layers))


def test_an_entry_becomes_a_node_of_its_layer() -> None:
    made = Entry(b"./a", Kind.FILE, 0o4750, 7, 8, 9, size=10, offset=512, xattrs={b"user.x": b"y"})
    node = applied([], [made])["a"]
    assert (node.mode, node.uid, node.gid, node.mtime_ns) == (stat.S_IFREG | 0o4750, 7, 8, 9)
    assert (node.size, node.layer, node.offset, node.xattrs) == (10, 1, 512, {b"user.x": b"y"})


@pytest.mark.parametrize("name", ["/a/b", "./a/b", "a//b/", "/./a/./b"])
def test_leading_and_doubled_slashes_mean_nothing(name: str) -> None:
    assert names([directory(name)]) == ["a", "a/b"]


def test_a_missing_parent_is_a_directory_of_root() -> None:
    parent = applied([entry("a/b", uid=5)])["a"]
    assert (parent.mode, parent.uid, parent.gid, parent.mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0, 0)


def test_an_existing_parent_stays_as_it_is() -> None:
    assert applied([directory("a", mode=0o700, uid=3)], [entry("a/b")])["a"].uid == 3


def test_the_root_has_attributes_too() -> None:
    tree = Tree()
    tree.apply([directory("./", mode=0o750, uid=4)])
    assert (tree.root.mode, tree.root.uid) == (stat.S_IFDIR | 0o750, 4)


def test_a_whiteout_removes_what_lower_layers_have() -> None:
    lower = [directory("d"), entry("d/a"), entry("d/b"), directory("e"), entry("e/x")]
    assert names(lower, [entry("d/.wh.a"), entry(".wh.e")]) == ["d", "d/b"]


@pytest.mark.parametrize("first", [True, False])
def test_a_whiteout_spares_its_own_layer(first: bool) -> None:
    new = [directory("d"), entry("d/new")]
    whiteout = [entry(".wh.d")]
    assert names([directory("d"), entry("d/old")], whiteout + new if first else new + whiteout) == ["d", "d/new"]


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_whiteout_reaches_nested_directories_but_not_its_own_layer(first: bool) -> None:
    lower = [directory("d"), directory("d/e"), entry("d/e/old"), entry("d/f")]
    new = [directory("d/e"), entry("d/e/new")]
    whiteout = [entry("d/.wh..wh..opq")]
    upper = whiteout + new if first else new + whiteout
    assert names(lower, upper) == ["d", "d/e", "d/e/new"]


def test_whiteouts_of_nothing_do_nothing() -> None:
    assert names([entry("a")], [entry(".wh.b"), entry("a/.wh.c")][:1]) == ["a"]


def test_an_opaque_root() -> None:
    assert names([entry("a"), directory("d")], [entry(".wh..wh..opq"), entry("b")]) == ["b"]


def test_files_of_aufs_are_left_out() -> None:
    assert names([directory(".wh..wh.plnk"), entry(".wh..wh.plnk/1.2"), entry(".wh..wh.aufs"), entry("a")]) == ["a"]


def test_a_file_replaces_a_directory_and_is_replaced_by_one() -> None:
    assert names([directory("a"), entry("a/b")], [entry("a")]) == ["a"]
    assert names([entry("a")], [directory("a"), entry("a/b")]) == ["a", "a/b"]


def test_a_directory_replaces_a_link_to_one() -> None:
    found = applied([directory("usr/bin"), symlink("bin", "usr/bin")], [directory("bin"), entry("bin/sh")])
    assert found["bin"].children is not None
    assert "usr/bin/sh" not in found


def test_a_directory_again_changes_its_attributes_and_keeps_its_content() -> None:
    found = applied([directory("a"), entry("a/b")], [directory("a", mode=0o700, xattrs={b"user.k": b"v"})])
    assert (found["a"].mode, found["a"].xattrs) == (stat.S_IFDIR | 0o700, {b"user.k": b"v"})
    assert "a/b" in found


def test_of_duplicates_the_last_counts() -> None:
    assert applied([entry("a", size=1), entry("a", size=2)])["a"].size == 2


def test_a_hard_link_is_the_same_node_also_of_a_lower_layer() -> None:
    found = applied([directory("d"), entry("d/a", size=3)], [hard_link("b", "/d/a"), hard_link("c", "b")])
    assert found["b"] is found["c"] is found["d/a"]


def test_a_hard_link_of_a_symbolic_link_is_the_link() -> None:
    found = applied([entry("a"), symlink("s", "a"), hard_link("h", "s")])
    assert found["h"] is found["s"]


@pytest.mark.parametrize(
    ("link", "target"),
    [("bin", "usr/bin"), ("bin", "/usr/bin"), ("bin", "../../../usr/bin"), ("a/bin", "../usr/./bin"), ("bin", "sbin")],
)
def test_parents_that_are_links_are_followed_inside_the_image(link: str, target: str) -> None:
    lower = [directory("usr/bin"), directory("a"), symlink("sbin", "/usr/bin"), symlink(link, target)]
    assert "usr/bin/tool" in names(lower, [entry(f"{link}/tool")])


def test_a_whiteout_below_a_link_hides_what_the_link_leads_to() -> None:
    lower = [directory("usr/bin"), entry("usr/bin/old"), symlink("bin", "usr/bin")]
    assert "usr/bin/old" not in names(lower, [entry("bin/.wh.old")])


def test_a_link_out_of_the_image_leads_to_its_root() -> None:
    found = names([symlink("out", "../../../../etc")], [entry("out/passwd")])
    assert found == ["etc", "etc/passwd", "out"]


def test_of_extended_attributes_only_those_stay_that_slots_may_see() -> None:
    acl = b"\x02\0\0\0" + b"\x01\0\x06\0\xff\xff\xff\xff"
    kept = {b"user.a": b"1", b"security.capability": b"\x01\0\0\x02", ACL_ACCESS: acl}
    forged = {b"trusted.overlay.opaque": b"y", b"user.overlay.redirect": b"/", b"security.selinux": b"x", b"odd": b""}
    assert applied([entry("a", xattrs={**kept, **forged})])["a"].xattrs == kept


LOOP = [symlink("a", "b"), symlink("b", "a")]
HOSTILE: dict[str, tuple[list[Entry], str]] = {
    "leads out": ([entry("../etc/passwd")], "'..'"),
    "leads out in between": ([entry("a/../../b")], "'..'"),
    "hard link that leads out": ([hard_link("a", "../../etc/shadow")], "'..'"),
    "hard link to nothing": ([hard_link("a", "b")], "does not exist"),
    "hard link to a directory": ([directory("d"), hard_link("a", "d")], "to a directory"),
    "hard link to the root": ([hard_link("a", "/")], "does not exist"),
    "hard link through a loop": ([*LOOP, hard_link("c", "a/x")], "links in a loop"),
    "no name": ([entry("")], "without a name"),
    "a file for the root": ([entry("./")], "entry of the root is not"),
    "a link for the root": ([symlink(".", "/etc")], "entry of the root is not"),
    "whiteout of the root": ([entry(".wh.")], "names nothing"),
    "whiteout of .": ([entry("d/.wh..")], "names nothing"),
    "whiteout of ..": ([directory("d"), entry("d/.wh...")], "names nothing"),
    "below a whiteout": ([entry(".wh.a/b")], "below a whiteout"),
    "below a file": ([entry("a"), entry("a/b")], "not a directory"),
    "below a device": ([entry("a", Kind.CHARACTER_DEVICE), entry("a/b/c")], "not a directory"),
    "below a loop": ([*LOOP, entry("a/x")], "links in a loop"),
    "below a link to itself": ([symlink("a", "a/b"), entry("a/x")], "links in a loop"),
    "name of 256 bytes": ([entry("n" * 256)], "too long"),
    "name of 256 bytes by a link": ([symlink("l", "n" * 256), entry("l/a")], "too long"),
    "path of 5000 bytes": ([entry("a/" * 2500)], "too long"),
    "malformed ACL": ([entry("a", xattrs={ACL_ACCESS: b"\x02\0\0\0123"})], "ACL"),
    "attribute with no name": ([entry("a", xattrs={b"user.": b""})], "attribute"),
    "attribute with a long name": ([entry("a", xattrs={b"user." + b"n" * 251: b""})], "attribute"),
    "attribute of 64 KiB": ([entry("a", xattrs={b"user.a": b"v" * 65536})], "65536 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers_are_refused_with_the_reason(name: str) -> None:
    layer, reason = HOSTILE[name]
    if "whiteout of ." in name:
        layer = [directory("d"), *layer]
    with pytest.raises(BadImageError, match=reason):
        applied([directory("d")], layer)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ([entry(f"f{n}") for n in range(51)], "50 entries"),
        ([entry("a/" * 60)], "50 entries"),
        ([entry(f"f{n}") for n in (1, 1)] * 30, "50 entries"),
        ([symlink("l", "."), *[entry(f"l/l/l/l/l/l/f{n}") for n in range(9)]], "50 entries"),
        ([entry("a", xattrs={b"user.a": b"v" * 700}), entry("b" * 250), entry("c" * 250)], "1000 bytes of names"),
        ([entry("a", xattrs={b"dropped": b"v" * 1000})], "1000 bytes of names"),
    ],
)
def test_what_an_image_may_cost_is_bounded(layer: list[Entry], reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        applied(layer, limits=TreeLimits(entries=50, metadata_bytes=1000))


# -- against a simple model: a dict of paths ------------------------------------------------------------------------

Path = tuple[str, ...]
Change = tuple[Path, str]
"""A path and what is done there: d(irectory), f(ile), w(hiteout), o(paque)."""
PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(tuple)
LAYERS = st.lists(st.lists(st.tuples(PATHS, st.sampled_from("ddffwo")), max_size=12), max_size=4)


def model(layers: list[list[Change]]) -> dict[Path, str]:
    """Paths and kinds. Raises BadImageError where something lies below a file."""
    there: dict[Path, str] = {}

    def remove_below(path: Path) -> None:
        for one in [one for one in there if one[: len(path)] == path and one != path]:
            del there[one]

    def make_parents(path: Path) -> None:
        for length in range(1, len(path)):
            if there.setdefault(path[:length], "d") != "d":
                raise BadImageError("below a file")

    for layer in layers:
        for path, kind in layer:
            if kind == "w":
                remove_below(path)
                there.pop(path, None)
            elif kind == "o" and there.get(path) == "d":
                remove_below(path)
        for path, kind in layer:
            make_parents((*path, "x") if kind == "o" else path)
            if kind in "df":
                if kind == "f":
                    remove_below(path)
                there[path] = kind
    return there


def written(change: Change) -> Entry:
    path, kind = change
    name = "/".join(path)
    if kind == "w":
        return entry("/".join((*path[:-1], f".wh.{path[-1]}")))
    return {"d": directory(name), "f": entry(name), "o": entry(f"{name}/.wh..wh..opq")}[kind]


@given(LAYERS)
def test_any_layers_make_the_tree_of_the_model(layers: list[list[Change]]) -> None:
    entries = [[written(change) for change in layer] for layer in layers]
    try:
        expected = model(layers)
    except BadImageError:
        with pytest.raises(BadImageError, match="not a directory"):
            applied(*entries)
        return
    kinds = {path: "d" if node.children is not None else "f" for path, node in applied(*entries).items()}
    assert kinds == {"/".join(path): kind for path, kind in sorted(expected.items())}
