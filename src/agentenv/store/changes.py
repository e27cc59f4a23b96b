"""What a layer changes of the tree below it, as a directory of overlayfs expresses it.

An unpacked layer has what the layer added or replaced, with its parents; a whiteout for each name that it removed; and
is opaque where it replaced a directory. A file that the layer gave another name, or took one from, is whole in it with
all its names: links do not cross the layers of an overlay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agentenv.store.tree import Node


@dataclass(slots=True, eq=False)
class Change:
    """A file or directory in an unpacked layer."""

    node: Node
    children: dict[bytes, Change | None] = field(default_factory=dict)
    """Of a directory; None: a whiteout."""
    opaque: bool = False
    """Nothing of the lower layers' directory of this name is seen."""


@dataclass(frozen=True)
class Before:
    """A tree at one time, though its directories change later."""

    directories: dict[int, tuple[Node, tuple[Any, ...], dict[bytes, Node]]]
    """By the ids of the nodes, which are kept so that no other gets one."""
    names: Counter[int]
    """Of each file, the sum of its names' hashes: another set of names has another one (64 bits)."""


def seen(root: Node) -> Before:
    """The tree as it is now."""
    directories = {}
    names: Counter[int] = Counter()
    todo = [root]
    while todo:
        node = todo.pop()
        children = dict(node.children or {})
        directories[id(node)] = (node, _attributes(node), children)
        for name, child in children.items():
            if child.children is None:
                names[id(child)] += hash((id(node), name))
            else:
                todo.append(child)
    return Before(directories, names)


def changes(before: Before, root: Node) -> Change:
    """The tree's root, with what is not as it was ``before``."""
    now = seen(root).names
    top = Change(root)
    made: list[tuple[Change, Change | None, bytes]] = [(top, None, b"")]
    for change, _, _ in made:  # it grows
        node = change.node
        known = before.directories.get(id(node))
        were = known[2] if known is not None else {}
        children = node.children or {}
        change.children = {name: None for name in were if name not in children}
        for name, child in children.items():
            was = were.get(name)
            if child.children is not None:
                replaced = was is not None and was is not child and was.children is not None
                below = change.children[name] = Change(child, opaque=replaced)
                made.append((below, change, name))
            elif was is not child or before.names[id(child)] != now[id(child)]:
                change.children[name] = Change(child)
    for change, parent, name in reversed(made):
        known = before.directories.get(id(change.node))
        if parent is not None and known is not None and not change.children and known[1] == _attributes(change.node):
            del parent.children[name]
    return top


def _attributes(node: Node) -> tuple[Any, ...]:
    return node.mode, node.uid, node.gid, node.mtime_ns, node.xattrs
