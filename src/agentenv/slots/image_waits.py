"""Requests that need an image: where their slots are, and whether they step aside for a fetch. Pure.

The rules it keeps for any order of events:

- nobody waits behind a request that waits for its image;
- of one image, run and kind, requests are served in order of arrival;
- a request whose image is on every node with free slots waits as every other does;
- a fetch that fails is tried on another node; when none is left, everybody who waits for the image is told why.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentenv.errors import AgentEnvError
from agentenv.slots.commands import Fetch
from agentenv.slots.placement import Placement
from agentenv.slots.records import ContainerRecord
from agentenv.slots.waiters import Waiter, Waiters


class ImageWaits:
    """Those of a ledger's waiters that need an image. The ledger serves the line after each call."""

    def __init__(self, waiters: Waiters, placement: Placement) -> None:
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
        """A container has a free slot: whoever may use it, now or after a fetch, comes back to the line."""
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
