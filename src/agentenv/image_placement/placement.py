"""Which containers a request with an image may have, and where an image is fetched next. Pure: no I/O, no clock.

Slots are taken where the image is stored, lowest container first. Where it is not, or where all slots are taken, the
image is fetched to another node: the one that comes first by the rendezvous hash of the image over the nodes with free
slots, so that an image comes back to nodes that had it, and images spread evenly over nodes. An image is fetched to at
most ``copies_per_image`` nodes at once, and prefetched until as many have it; more get it only when it is wanted and
all that have it are full.

A node is known by the containers on it. Containers of no named node see the store of whoever asks for their slots:
there, every image is stored.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from agentenv.errors import AgentEnvError, InfraError

DEFAULT_COPIES: Final = 2
RETRY_S: Final = 60.0
"""How long a node where a fetch failed is passed over for that image."""

_index = attrgetter("index")


class Container(Protocol):
    """A container, as far as placement looks at it: the lowest is taken first."""

    node: str
    index: int

    @property
    def free(self) -> int:
        """Slots that can be leased now."""
        ...


C = TypeVar("C", bound=Container)


@dataclass
class _Node(Generic[C]):
    containers: list[C] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    fetching: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        return sum(container.free for container in self.containers)


@dataclass(frozen=True)
class _Failure:
    at: float
    error: AgentEnvError


class Placement(Generic[C]):
    """The nodes of a farm, and the images that they have. See the module."""

    def __init__(self, copies_per_image: int = DEFAULT_COPIES) -> None:
        """Raises ValueError for less than one copy."""
        if copies_per_image < 1:
            raise ValueError(f"copies_per_image must be 1 or more, not {copies_per_image}")
        self._copies = copies_per_image
        self._nodes: dict[str, _Node[C]] = {}
        self._failures: dict[str, dict[str, _Failure]] = {}
        """By image and node: fetches that failed."""

    # -- what is known ------------------------------------------------------------------------

    def joined(self, container: C) -> None:
        """A container runs on its node."""
        self._nodes.setdefault(container.node, _Node()).containers.append(container)

    def left(self, container: C) -> bool:
        """It is gone. Returns whether its node is gone with it, because it has no other container."""
        node = self._nodes[container.node]
        node.containers.remove(container)
        if node.containers:
            return False
        del self._nodes[container.node]
        for failures in self._failures.values():
            failures.pop(container.node, None)
        return True

    def report(self, name: str, images: Iterable[str]) -> set[str]:
        """A node has these images, and no others. Returns those that are news."""
        node = self._nodes.get(name)
        if node is None:
            return set()
        before, node.stored = node.stored, set(images)
        node.fetching -= node.stored
        return node.stored - before

    def fetched(self, name: str, image: str) -> None:
        """A fetch has succeeded."""
        if (node := self._nodes.get(name)) is not None:
            node.fetching.discard(image)
            node.stored.add(image)
        self._failures.get(image, {}).pop(name, None)

    def failed(self, name: str, image: str, error: AgentEnvError, now: float) -> None:
        """A fetch has failed, or an image that was stored there cannot be used."""
        if (node := self._nodes.get(name)) is not None:
            node.fetching.discard(image)
            node.stored.discard(image)
            self._failures.setdefault(image, {})[name] = _Failure(now, error)

    # -- decisions ----------------------------------------------------------------------------

    def containers_for(self, image: str, slots: int) -> list[C]:
        """Containers whose free slots such a request may have, lowest first, one entry for each of the slots; fewer
        if there are not as many."""
        able = [
            container
            for name, node in self._nodes.items()
            if not name or image in node.stored
            for container in node.containers
            if container.free
        ]
        if slots == 1:
            return [min(able, key=_index)] if able else []
        chosen: list[C] = []
        for container in heapq.nsmallest(slots, able, key=_index):
            chosen += [container] * min(container.free, slots - len(chosen))
        return chosen

    def useful(self, container: C, image: str, wanted: int, now: float) -> bool:
        """Whether a free slot of the container may serve one of ``wanted`` such requests, now or after a fetch."""
        if not container.node or image in self._nodes[container.node].stored:
            return True
        return not self._enough_under_way(image, wanted) and self._may_try(container.node, image, now)

    def next_fetch(self, image: str, wanted: int, now: float) -> str | None:
        """The node that is to fetch an image for ``wanted`` slots, which counts as fetching from now on.

        None if none is to, because enough are at it, or no node with a free slot is left to try.
        """
        if self._enough_under_way(image, wanted):
            return None
        return self._begin(image, now, [name for name, node in self._nodes.items() if node.free])

    def ahead(self, image: str, now: float, copies: int | None = None) -> str | None:
        """As :meth:`next_fetch`, before a slot is free for it, until so many nodes have the image (None:
        ``copies_per_image``)."""
        have = sum(image in node.stored for node in self._nodes.values())
        if "" in self._nodes or have + self._under_way(image) >= (copies or self._copies):
            return None
        return self._begin(image, now, list(self._nodes))

    def fetching(self, image: str) -> bool:
        """Whether a node is fetching an image."""
        return self._under_way(image) > 0

    def hopeless(self, image: str, now: float) -> AgentEnvError | None:
        """Why no node will have an image: fetches failed on every one, or for a reason that is the same everywhere;
        None while there is hope."""
        failures = self._failures.get(image)
        if not failures or self.fetching(image) or any(self._has(name, image) for name in self._nodes):
            return None
        last = max(failures.values(), key=lambda failure: failure.at)
        if isinstance(last.error, InfraError) and any(self._may_try(name, image, now) for name in self._nodes):
            return None
        return last.error

    def forget_failures(self, image: str) -> None:
        """Whoever asks for it next begins anew."""
        self._failures.pop(image, None)

    # -- views --------------------------------------------------------------------------------

    def nodes(self) -> Iterator[tuple[str, frozenset[str], frozenset[str]]]:
        """Every named node, with the images that it has and those that it is fetching."""
        for name, node in sorted(self._nodes.items()):
            if name:
                yield name, frozenset(node.stored), frozenset(node.fetching)

    def _has(self, name: str, image: str) -> bool:
        return not name or image in self._nodes[name].stored

    def _under_way(self, image: str) -> int:
        return sum(image in node.fetching for node in self._nodes.values())

    def _enough_under_way(self, image: str, wanted: int) -> bool:
        """Whether the nodes that are fetching it are as many as may be, or have free slots for all who want it."""
        at_it = [node for node in self._nodes.values() if image in node.fetching]
        return len(at_it) >= self._copies or sum(node.free for node in at_it) >= wanted

    def _may_try(self, name: str, image: str, now: float) -> bool:
        node = self._nodes[name]
        failure = self._failures.get(image, {}).get(name)
        if not name or image in node.stored or image in node.fetching:
            return False
        return failure is None or now - failure.at >= RETRY_S

    def _begin(self, image: str, now: float, names: Iterable[str]) -> str | None:
        able = [name for name in names if self._may_try(name, image, now)]
        if not able:
            return None
        chosen = max(able, key=lambda name: rendezvous(image, name))
        self._nodes[chosen].fetching.add(image)
        return chosen

    def __repr__(self) -> str:
        return f"<Placement {len(self._nodes)} nodes>"


def rendezvous(image: str, node: str) -> bytes:
    """The weight of a node for an image: the highest has it first (highest random weight hashing, Thaler and
    Ravishankar 1996). When nodes come or go, only the images move that these win or held."""
    return hashlib.blake2b(f"{image}\0{node}".encode(), digest_size=8).digest()
