"""Who waits for slots: requests in line, requests whose turn it is, and their deadlines. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agentenv.slots.aside import Aside, Key
from agentenv.slots.line import Ask, Line, caps_of
from agentenv.wire.leases import SlotRequest


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


Room = Callable[[str], int]
"""How many slots of a container could be leased now; of all, for the empty name."""


class Waiters:
    """The waiters of one ledger. Whose turn it is, its line decides; a waiter that a container refused is served before
    everybody in line, because it has had its turn.

    A waiter that only one container can serve is in the line while that has room for it; otherwise it steps aside, so
    that nobody waits behind it, and comes back to its old place. Who waits for its image does so too
    (:mod:`agentenv.slots.aside`)."""

    def __init__(self, line: Line) -> None:
        self.line = line
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
        self._in_line: set[int] = set()
        """Tickets of those of them that are in the line now."""

    def __len__(self) -> int:
        """How many wait for a free slot: not those whose slots are being requested."""
        return len(self.line) + len(self._short) + len(self._particular) - len(self._in_line) + len(self.aside)

    def all(self) -> Iterable[Waiter]:
        """Every waiter without an answer."""
        return self._by_ticket.values()

    @property
    def slots_wanted(self) -> int:
        """Slots they could use now, of whatever container: another would not help those that need a particular one."""
        short = (self._by_ticket[ticket] for ticket in self._short)
        particular = sum(len(self._particular[ticket].leases) for ticket in self._in_line)
        aside = sum(len(self._by_ticket[ticket].missing) for ticket in self.aside)
        short_of = sum(len(one.missing) for one in short if not one.request.container)
        return self.line.slots_wanted - particular + short_of + aside

    def get(self, ticket: int) -> Waiter | None:
        """The waiter with this ticket, if it still waits."""
        return self._by_ticket.get(ticket)

    def add(self, waiter: Waiter) -> None:
        """At the end of the line, for its run; or aside, until its container has room."""
        waiter.leases = [None] * len(waiter.request.trajectories)
        self._by_ticket[waiter.ticket] = waiter
        if image := waiter.request.image:
            self.images[image] += 1
        if waiter.request.container:
            self._particular[waiter.ticket] = waiter
        elif image and self.aside.behind(image, _key(waiter)):
            self.aside.add(image, _key(waiter), waiter.ticket, len(waiter.leases))
        else:
            self.line.push(_ask(waiter))
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
        ask = self.line.pick(free)
        if ask is None:
            return None
        waiter = self._by_ticket[ask.ticket]
        waiter.served = True
        self._particular.pop(ask.ticket, None)
        self._in_line.discard(ask.ticket)
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
                self.line.push(_ask(waiter))

    def _step_aside(self, room: Room) -> None:
        for ticket, waiter in self._particular.items():
            fits = room(waiter.request.container) >= len(waiter.leases)
            if fits and ticket not in self._in_line:
                self._in_line.add(ticket)
                self.line.push(_ask(waiter))
            elif not fits and ticket in self._in_line:
                self._in_line.remove(ticket)
                self.line.withdraw(ticket, aside=True)

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
            self.line.withdraw(ticket)
            self._particular.pop(ticket, None)
            self._in_line.discard(ticket)
        elif missing := waiter.missing:
            if not aside:
                del self._short[bisect_left(self._short, ticket)]
            self._gave(waiter, len(missing))
        return waiter

    def _gave(self, waiter: Waiter, slots: int) -> None:
        tags = waiter.request.tags
        self.line.gave(tags.run, tags.kind, slots, caps_of(tags))

    def position(self, waiter: Waiter) -> int:
        """1: next in the queue; 0: its slots are being requested."""
        if waiter.ticket in self.aside:
            return self.aside.position(waiter.ticket) + 1
        if not waiter.served:
            return len(self._short) + max(1, self.line.position(waiter.ticket))
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


def _key(waiter: Waiter) -> Key:
    tags = waiter.request.tags
    return waiter.served, tags.run, tags.kind


def _ask(waiter: Waiter) -> Ask:
    tags = waiter.request.tags
    return Ask(waiter.ticket, len(waiter.leases), tags.run, tags.kind, caps_of(tags))
