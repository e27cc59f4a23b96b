"""Requests with images under random sequences of events: a ledger, its nodes and their keepers, against the rules of
placement."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentenv.errors import AgentEnvError, BadImageError, ImageUnavailableError
from agentenv.slots.commands import Command, EndLease, Expire, Fail, Fetch, Grant, HandOver, Reclaim, Retire
from agentenv.slots.ledger import Ledger
from agentenv.slots.waiters import Aside, Waiter
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState

COPIES = 2
SLOTS = 2
NODES = ("a", "b", "c")
IMAGES = tuple(f"sha256:{digit * 64}" for digit in "123")
UNAVAILABLE, BAD = ImageUnavailableError("no answer"), BadImageError("broken")


class FarmMachine(RuleBasedStateMachine):
    """Plays manager, containers and keepers; keeps its own account of which node has which image."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(copies_per_image=COPIES)
        self.now = 0.0
        self.made = 0
        self.containers: dict[str, str] = {}
        """Node of each."""
        self.stored: dict[str, set[str]] = {node: set() for node in NODES}
        self.fetching: set[tuple[str, str]] = set()
        self.failing: dict[str, set[str]] = {}
        """Nodes where a fetch of an image failed since it was fetched or given up last."""
        self.waiting: dict[int, SlotRequest] = {}
        self.asking: dict[int, Grant] = {}
        self.granted: dict[int, Grant] = {}
        self.held: dict[int, Grant] = {}
        self.dirty: list[tuple[str, int]] = []
        self.start("a")

    def perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Grant():
                    self.check_grant(command)
                    self.asking[command.lease] = command
                case HandOver(ticket, lease):
                    self.waiting.pop(ticket, None)
                    self.held[lease] = self.granted.pop(lease)
                case Fetch(node, image):
                    assert (node, image) not in self.fetching, "fetched twice at once"
                    assert image not in self.stored[node], "fetched though it is there"
                    assert node in self.containers.values(), "fetched to a node without a container"
                    self.fetching.add((node, image))
                case Fail(ticket, error):
                    image = self.waiting.pop(ticket).image
                    nodes = set(self.containers.values())
                    assert not any(image in self.stored[node] for node in nodes)
                    assert error is BAD or nodes <= self.failing[image], "refused while a node was left to try"
                case Reclaim(container, slot, lease):
                    self.asking.pop(lease or -1, None)
                    self.granted.pop(lease or -1, None)
                    self.dirty.append((container, slot))
                case EndLease(lease):
                    del self.held[lease]
                case Expire() | Retire():
                    raise AssertionError(command)
        for image in IMAGES:  # who is refused or served begins anew
            if not any(request.image == image for request in self.waiting.values()):
                self.failing.pop(image, None)

    def check_grant(self, grant: Grant) -> None:
        image = "" if grant.root is None else grant.root.image
        assert not image or image in self.stored[self.containers[grant.container]], "a slot without its image"
        served = next(waiter for waiter in self.ledger.waiters() if grant.lease in waiter.leases)
        for other in self.ledger.waiters():
            if other.missing and not other.served and _key(other) == _key(served):
                assert served.ticket <= other.ticket or served.served, "not in order of arrival"

    # -- events --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.containers) < 5)
    @rule(node=st.sampled_from(NODES))
    def start(self, node: str) -> None:
        self.made += 1
        name = f"{node}{self.made}"
        if node not in self.containers.values():
            self.stored[node] = set()
        self.containers[name] = node
        self.perform(self.ledger.started(name, self.made, node))
        self.perform(self.ledger.inventory(name, [SlotState.free] * SLOTS, self.now))

    @rule(image=st.sampled_from(("", *IMAGES)), size=st.sampled_from((1, 1, 1, 2)), run=st.sampled_from("xy"))
    def ask(self, image: str, size: int, run: str) -> None:
        root = RootSpec(image) if image else None
        request = SlotRequest(tuple(f"t{n}" for n in range(size)), Tags(run=run), root=root)
        self.waiting[self.ledger._next + 1] = request  # before it is granted or refused
        ticket, commands = self.ledger.enqueue(request, self.now, 1e9)
        assert self.waiting[ticket] is request
        self.perform(commands)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.perform(self.ledger.withdraw(ticket, self.now))

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), error=st.sampled_from((None, None, None, UNAVAILABLE, UNAVAILABLE, BAD)))
    def fetch_ends(self, data: st.DataObject, error: AgentEnvError | None) -> None:
        node, image = data.draw(st.sampled_from(sorted(self.fetching)))
        self.fetching.discard((node, image))
        if error is None:
            self.stored[node].add(image)
            self.perform(self.ledger.fetched(node, image, self.now))
        else:
            self.failing.setdefault(image, set()).add(node)
            self.perform(self.ledger.fetch_failed(node, image, error, self.now))

    @rule(node=st.sampled_from(NODES), images=st.sets(st.sampled_from(IMAGES)))
    def report(self, node: str, images: set[str]) -> None:
        """Somebody else fetched images there, or removed them."""
        if node in self.containers.values():
            self.stored[node] = set(images)
            self.fetching -= {(node, image) for image in images}
            self.perform(self.ledger.images(node, images, self.now))

    @rule(images=st.lists(st.sampled_from(IMAGES), unique=True))
    def prefetch(self, images: list[str]) -> None:
        self.perform(self.ledger.prefetch(images, self.now))
        for image in images:
            assert sum((node, image) in self.fetching for node in NODES) <= COPIES

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), yes=st.booleans())
    def answer(self, data: st.DataObject, yes: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.asking)))
        if yes:
            self.granted[lease] = self.asking.pop(lease)
            self.perform(self.ledger.confirm(lease, self.now))
        else:
            self.perform(self.ledger.refuse(lease, self.now))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[lease]
        self.perform(self.ledger.release(lease, self.now))

    @precondition(lambda self: self.dirty)
    @rule()
    def reset(self) -> None:
        self.perform(self.ledger.freed(*self.dirty.pop(0), self.now))

    @precondition(lambda self: self.containers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.containers)))
        node = self.containers.pop(name)
        self.dirty = [where for where in self.dirty if where[0] != name]
        if node not in self.containers.values():
            self.fetching = {one for one in self.fetching if one[0] != node}
            for nodes in self.failing.values():
                nodes.discard(node)
        for leases in (self.asking, self.granted):
            for lease in [lease for lease, grant in leases.items() if grant.container == name]:
                del leases[lease]
        self.perform(self.ledger.lose(name, "lost", self.now))

    # -- what must be true at every moment -----------------------------------------------------

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert {waiter.ticket for waiter in self.ledger.waiters()} == set(self.waiting)

    @invariant()
    def few_nodes_fetch_the_same(self) -> None:
        for image in IMAGES:
            assert sum((node, image) in self.fetching for node in NODES) <= COPIES

    @invariant()
    def nobody_waits_behind_somebody_who_is_aside(self) -> None:
        """Whoever is in the line and not aside is served while there are slots, in order."""
        free = sum(container.free for container in self.ledger.containers())
        in_line = [one for one in self.ledger.waiters() if one.missing and one.ticket not in self.aside]
        if in_line:
            first = min(in_line, key=lambda waiter: (not waiter.served, waiter.ticket))
            assert free < len(first.missing)

    @invariant()
    def who_is_aside_has_a_reason(self) -> None:
        missing = [waiter for waiter in self.ledger.waiters() if waiter.missing]
        for waiter in missing:
            behind = any(_key(one) == _key(waiter) and one.ticket < waiter.ticket for one in missing)
            if waiter.ticket in self.aside and not behind:
                image = waiter.request.image
                have = [one for one in self.ledger.containers() if image in self.stored[one.node] and one.free]
                assert sum(one.free for one in have) < len(waiter.missing), "it could be served"
                lacking = {one.node for one in self.ledger.containers() if one.free} - {one.node for one in have}
                under_way = any((node, image) in self.fetching for node in NODES)
                assert under_way or lacking <= self.failing.get(image, set()), "nobody fetches it"

    @property
    def aside(self) -> Aside:
        return self.ledger._waiters.aside

    def teardown(self) -> None:
        """When fetches succeed and slots come back, everybody is served: nobody starves."""
        if not self.containers:
            self.start("a")
        for _ in range(400):
            if not self.waiting:
                return
            self.now += 30
            for node, image in sorted(self.fetching):
                self.fetching.discard((node, image))
                self.stored[node].add(image)
                self.perform(self.ledger.fetched(node, image, self.now))
            for lease in sorted(self.asking):
                if lease in self.asking:
                    self.granted[lease] = self.asking.pop(lease)
                    self.perform(self.ledger.confirm(lease, self.now))
            for lease in sorted(self.held):
                del self.held[lease]
                self.perform(self.ledger.release(lease, self.now))
            while self.dirty:
                self.reset()
            self.perform(self.ledger.tick(self.now))
        raise AssertionError(f"somebody starves: {self.waiting}, {self.ledger}")


def _key(waiter: Waiter) -> tuple[str, str]:
    return waiter.request.image, waiter.request.tags.run


FarmMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPlacementRandom = FarmMachine.TestCase
