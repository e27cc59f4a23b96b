"""Who waits for slots: requests in the queue, aside for their image, or whose turn it is, and their deadlines. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentenv.errors import AgentEnvError
from agentenv.image_placement.placement import Placement
from agentenv.slots.commands import Fetch
from agentenv.slots.queue_policy import Ask, QueuePolicy, caps_of
from agentenv.slots.records import ContainerRecord
from agentenv.wire.leases import RunKind, SlotRequest


@dataclass
class Waiter:
    """A request in the queue, or (``served``) one whose turn it is: ``leases`` has the lease of each trajectory, None
    where it has to be requested (again). ``confirmed``: how many of them the containers have granted."""

    ticket: int
    request: SlotRequest
    since: float
    deadline: float
    served: bool = False
    leases: list[int | None] = field(default_factory=list)
    confirmed: int = 0
    refused: int = 0
    """How often a node did not have its image after all."""

    @property
    def missing(self) -> list[int]:
        """Positions of the trajectories without a lease."""
        return [position for position, lease in enumerate(self.leases) if lease is None]

    @property
    def complete(self) -> bool:
        """Whether every lease was granted."""
        return self.confirmed == len(self.leases)


Key = tuple[bool, str, RunKind]
"""Whether it has been served a part of its group, the run and the kind."""


class Aside:
    """Tickets of requests that wait aside for their image while others go on, by image and by who is behind whom.

    Each keeps the place of its ticket, and returns to the queue as soon as there may be a slot for it. Of each image,
    run and kind only the oldest returns: those behind it are served after it in any case.
    """

    def __init__(self) -> None:
        self._by_image: dict[str, dict[Key, list[int]]] = {}
        self._places: dict[int, tuple[str, Key]] = {}
        self._slots: Counter[str] = Counter()
        self._of_run: Counter[str] = Counter()
        self._missing: dict[int, int] = {}

    def add(self, image: str, key: Key, ticket: int, slots: int) -> None:
        """A request steps aside, which waits for so many slots."""
        self._missing[ticket] = slots
        self._of_run[key[1]] += slots
        self._slots[image] += slots
        insort(self._by_image.setdefault(image, {}).setdefault(key, []), ticket)
        self._places[ticket] = (image, key)

    def remove(self, ticket: int) -> None:
        """It waits aside no longer. Raises KeyError if it does not."""
        image, key = self._places.pop(ticket)
        slots = self._missing.pop(ticket)
        self._slots[image] -= slots
        self._of_run[key[1]] -= slots
        if not self._of_run[key[1]]:
            del self._of_run[key[1]]
        keys = self._by_image[image]
        tickets = keys[key]
        del tickets[bisect_left(tickets, ticket)]
        if not tickets:
            del keys[key]
            if not keys:
                del self._by_image[image], self._slots[image]

    def behind(self, image: str, key: Key) -> bool:
        """Whether a newcomer would be behind somebody who is aside."""
        return key in self._by_image.get(image, ())

    def first(self, image: str) -> Sequence[int]:
        """The oldest of each run and kind that waits for an image; those that have a part of their group come first."""
        keys = self._by_image.get(image, {})
        return [keys[key][0] for key in sorted(keys, reverse=True)]

    def slots(self, image: str) -> int:
        """Slots that those who wait for an image miss."""
        return self._slots[image]

    def slots_of(self, run: str) -> int:
        """Slots that those of a run miss."""
        return self._of_run[run]

    def images(self) -> Sequence[str]:
        """Images that somebody waits for."""
        return list(self._by_image)

    def position(self, ticket: int) -> int:
        """How many are before it among those that it comes after in any case."""
        image, key = self._places[ticket]
        return bisect_left(self._by_image[image][key], ticket)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


Room = Callable[[str], int]
"""How many slots of a container could be leased now; of all, for the empty name."""


class Waiters:
    """The waiters of one ledger. Its queue policy decides whose turn it is; a waiter that a container refused is served
    before all others, because it has had its turn.

    A waiter that only one container can serve is in the queue while that has room for it; otherwise it steps aside, so
    that nobody waits behind it, and comes back to its old place. Who waits for its image does so too
    (:class:`Aside`)."""

    def __init__(self, queue_policy: QueuePolicy) -> None:
        self.queue_policy = queue_policy
        self._by_ticket: dict[int, Waiter] = {}
        self._short: list[int] = []
        """Tickets of waiters whose turn it is and that miss a lease, in order."""
        self._deadlines: list[tuple[float, int]] = []
        self.aside = Aside()
        self.images: Counter[str] = Counter()
        """How many wait for slots with each image."""
        self.gathering: int | None = None
        """The ticket of a waiter that takes slots for its group as they come, aside; there is at most one, or two would
        wait for each other's."""
        self._particular: dict[int, Waiter] = {}
        """Those that only one container can serve, and whose turn has not come."""
        self._queued: set[int] = set()
        """Tickets of those of them that are in the queue now."""

    def __len__(self) -> int:
        """How many wait for a free slot: not those whose slots are being requested."""
        return len(self.queue_policy) + len(self._short) + len(self._particular) - len(self._queued) + len(self.aside)

    def all(self) -> Iterable[Waiter]:
        """Every waiter without an answer."""
        return self._by_ticket.values()

    @property
    def slots_wanted(self) -> int:
        """Slots they could use now, of whatever container: another would not help those that need a particular one."""
        short = (self._by_ticket[ticket] for ticket in self._short)
        particular = sum(len(self._particular[ticket].leases) for ticket in self._queued)
        aside = sum(len(self._by_ticket[ticket].missing) for ticket in self.aside)
        short_of = sum(len(one.missing) for one in short if not one.request.container)
        return self.queue_policy.slots_wanted - particular + short_of + aside

    def get(self, ticket: int) -> Waiter | None:
        """The waiter with this ticket, if it still waits."""
        return self._by_ticket.get(ticket)

    def add(self, waiter: Waiter) -> None:
        """At the end of the queue, for its run; or aside, until its container has room."""
        waiter.leases = [None] * len(waiter.request.trajectories)
        self._by_ticket[waiter.ticket] = waiter
        if image := waiter.request.image:
            self.images[image] += 1
        if waiter.request.container:
            self._particular[waiter.ticket] = waiter
        elif image and self.aside.behind(image, _key(waiter)):
            self.aside.add(image, _key(waiter), waiter.ticket, len(waiter.leases))
        else:
            self.queue_policy.push(_ask(waiter))
        heapq.heappush(self._deadlines, (waiter.deadline, waiter.ticket))

    def next(self, room: Room) -> Waiter | None:
        """The waiter that gets slots now; None if nobody does."""
        self._step_aside(room)
        free = room("")
        if free <= 0:
            return None
        for ticket in self._short:
            waiter = self._by_ticket[ticket]
            if room(waiter.request.container) > 0:
                return waiter
        ask = self.queue_policy.pick(free)
        if ask is None:
            return None
        waiter = self._by_ticket[ask.ticket]
        waiter.served = True
        self._particular.pop(ask.ticket, None)
        self._queued.discard(ask.ticket)
        self._short.append(waiter.ticket)
        return waiter

    def step_aside(self, waiter: Waiter) -> None:
        """It is its turn, and it waits for its image. Slots are counted to its run only for a group that has some."""
        del self._short[bisect_left(self._short, waiter.ticket)]
        if waiter.served and len(waiter.missing) == len(waiter.leases):
            waiter.served = False
            self._gave(waiter, len(waiter.leases))
            if self.gathering == waiter.ticket:
                self.gathering = None
        self.aside.add(waiter.request.image, _key(waiter), waiter.ticket, len(waiter.missing))

    def recall(self, image: str) -> None:
        """There may be slots for those who wait for an image: the oldest of each run and kind come back."""
        for ticket in self.aside.first(image):
            waiter = self._by_ticket[ticket]
            self.aside.remove(ticket)
            if waiter.served:
                insort(self._short, ticket)
            else:
                self.queue_policy.push(_ask(waiter))

    def _step_aside(self, room: Room) -> None:
        for ticket, waiter in self._particular.items():
            fits = room(waiter.request.container) >= len(waiter.leases)
            if fits and ticket not in self._queued:
                self._queued.add(ticket)
                self.queue_policy.push(_ask(waiter))
            elif not fits and ticket in self._queued:
                self._queued.remove(ticket)
                self.queue_policy.withdraw(ticket, aside=True)

    @property
    def particular(self) -> Iterable[Waiter]:
        """Every waiter that only one container can serve, whether its turn has come or not."""
        short = (self._by_ticket[ticket] for ticket in self._short)
        return [*self._particular.values(), *(one for one in short if one.request.container)]

    def gatherers(self) -> list[Waiter]:
        """Those that have a part of their slots and could have the others anywhere, the first to be served first."""
        tickets = self._short if self.gathering is None else [*self._short, self.gathering]
        waiters = (self._by_ticket[ticket] for ticket in dict.fromkeys(tickets))
        return [one for one in waiters if not one.request.container and 0 < len(one.missing) < len(one.leases)]

    def lease_requested(self, waiter: Waiter, position: int, lease: int) -> None:
        """A lease is being requested for one of its trajectories."""
        waiter.leases[position] = lease
        if not waiter.missing:
            del self._short[bisect_left(self._short, waiter.ticket)]

    def lease_refused(self, waiter: Waiter, position: int) -> None:
        """That lease will not be had: another has to be requested."""
        if not waiter.missing:
            insort(self._short, waiter.ticket)
        waiter.leases[position] = None
        if waiter.ticket in self.aside:  # for one slot more now
            self.aside.remove(waiter.ticket)
            self.aside.add(waiter.request.image, _key(waiter), waiter.ticket, len(waiter.missing))

    def remove(self, ticket: int) -> Waiter | None:
        """It has its slots, or has left. Slots counted to its run that it has no lease of are given back; each of its
        leases counts until it ends."""
        waiter = self._by_ticket.pop(ticket, None)
        if waiter is None:
            return None
        if image := waiter.request.image:
            self.images[image] -= 1
            if not self.images[image]:
                del self.images[image]
        aside = ticket in self.aside
        if aside:
            self.aside.remove(ticket)
        if not waiter.served:
            self.queue_policy.withdraw(ticket)
            self._particular.pop(ticket, None)
            self._queued.discard(ticket)
        elif missing := waiter.missing:
            if not aside:
                del self._short[bisect_left(self._short, ticket)]
            self._gave(waiter, len(missing))
        return waiter

    def _gave(self, waiter: Waiter, slots: int) -> None:
        tags = waiter.request.tags
        self.queue_policy.gave(tags.run, tags.kind, slots, caps_of(tags))

    def position(self, waiter: Waiter) -> int:
        """1: next in the queue; 0: its slots are being requested."""
        if waiter.ticket in self.aside:
            return self.aside.position(waiter.ticket) + 1
        if not waiter.served:
            return len(self._short) + max(1, self.queue_policy.position(waiter.ticket))
        return bisect_left(self._short, waiter.ticket) + 1 if waiter.missing else 0

    def next_deadline(self) -> float | None:
        """The earliest deadline; None if nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._by_ticket:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now: float) -> Waiter | None:
        """A waiter whose deadline has passed, the earliest first."""
        deadline = self.next_deadline()
        return self._by_ticket[self._deadlines[0][1]] if deadline is not None and deadline <= now else None


class ImageWaits:
    """Those of a ledger's waiters that need an image: where their slots are, and whether they step aside for a fetch.
    The ledger serves the queue after each call.

    The rules it keeps for any order of events:

    - nobody waits behind a request that waits for its image;
    - of one image, run and kind, requests are served in order of arrival;
    - a request whose image is on every node with free slots waits as every other does;
    - a fetch that fails is tried on another node; when none is left, everybody who waits for the image is told why.
    """

    def __init__(self, waiters: Waiters, placement: Placement[ContainerRecord]) -> None:
        self._waiters = waiters
        self._placement = placement

    # -- decisions ----------------------------------------------------------------------------

    def came(self, waiter: Waiter, now: float) -> list[Fetch]:
        """A request has come: if no node has its image, one begins to fetch it before it is its turn."""
        image = waiter.request.image
        return self._fetch(image, self._placement.ahead(image, now, copies=1)) if image else []

    def choose(self, waiter: Waiter, now: float) -> tuple[list[ContainerRecord], list[Fetch]]:
        """It is its turn: the containers of its missing slots, one entry for each; or none, and it has stepped aside.

        A group that neither has enough slots where its image is nor can have it fetched takes those there are.
        """
        image, missing = waiter.request.image, len(waiter.missing)
        found = self._placement.containers_for(image, missing)
        if len(found) == missing:
            return found, []
        wanted = self._waiters.aside.slots(image) + missing
        fetches = self._fetch(image, self._placement.next_fetch(image, wanted, now))
        if found and not fetches and not self._placement.fetching(image) and self._may_gather(waiter):
            self._waiters.gathering = waiter.ticket
            return found, []
        self._waiters.step_aside(waiter)
        return [], fetches

    def served(self, waiter: Waiter) -> None:
        """It has been granted slots: if not all, it waits aside for the others; those behind it come next."""
        if waiter.missing:
            self._waiters.step_aside(waiter)
        else:
            self._waiters.recall(waiter.request.image)

    def left(self, waiter: Waiter) -> None:
        """It waits no longer, and those behind it, or behind its group, come next."""
        images = [waiter.request.image]
        if waiter.request.image not in self._waiters.images:
            self._placement.forget_failures(waiter.request.image)
        if self._waiters.gathering == waiter.ticket:
            self._waiters.gathering = None
            images = list(self._waiters.aside.images())
        for image in images:
            self._waiters.recall(image)

    def free(self, container: ContainerRecord, now: float) -> None:
        """A container has a free slot: whoever may use it, now or after a fetch, comes back to the queue."""
        for image in self._waiters.aside.images():
            if self._placement.useful(container, image, self._waiters.aside.slots(image), now):
                self._waiters.recall(image)

    def prefetch(self, images: Iterable[str], now: float) -> list[Fetch]:
        """Fetches of images that are wanted soon."""
        return [fetch for image in images for fetch in self._fetch(image, self._placement.ahead(image, now))]

    # -- events -------------------------------------------------------------------------------

    def joined(self, container: ContainerRecord) -> None:
        """A container runs."""
        self._placement.joined(container)

    def gone(self, container: ContainerRecord, now: float) -> dict[int, AgentEnvError]:
        """It is gone, perhaps with the last node that had, fetched or could fetch an image. Returns the tickets that
        are to be refused."""
        refused: dict[int, AgentEnvError] = {}
        if self._placement.left(container):
            for image in list(self._waiters.images):
                refused |= self._refused(image, now)
                self._waiters.recall(image)
        return refused

    def report(self, node: str, images: Iterable[str]) -> None:
        """A node has these images."""
        for image in self._placement.report(node, images):
            self._waiters.recall(image)

    def fetched(self, node: str, image: str) -> None:
        """A fetch has succeeded."""
        self._placement.fetched(node, image)
        self._waiters.recall(image)

    def failed(self, node: str, image: str, error: AgentEnvError, now: float) -> dict[int, AgentEnvError]:
        """A fetch has failed, or the image cannot be used there. Returns the tickets that are to be refused."""
        self._placement.failed(node, image, error, now)
        refused = self._refused(image, now)
        if image not in self._waiters.images:
            self._placement.forget_failures(image)
        self._waiters.recall(image)
        return refused

    def _refused(self, image: str, now: float) -> dict[int, AgentEnvError]:
        """Who waits for an image that no node will have. Whoever asks for it next begins anew."""
        why = self._placement.hopeless(image, now)
        if why is None:
            return {}
        self._placement.forget_failures(image)
        return {one.ticket: why for one in self._waiters.all() if one.missing and one.request.image == image}

    def _may_gather(self, waiter: Waiter) -> bool:
        return self._waiters.gathering in (None, waiter.ticket)

    def _fetch(self, image: str, node: str | None) -> list[Fetch]:
        return [] if node is None else [Fetch(node, image)]


def _key(waiter: Waiter) -> Key:
    tags = waiter.request.tags
    return waiter.served, tags.run, tags.kind


def _ask(waiter: Waiter) -> Ask:
    tags = waiter.request.tags
    return Ask(waiter.ticket, len(waiter.leases), tags.run, tags.kind, caps_of(tags))
