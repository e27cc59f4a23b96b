"""A client's asks for slots of a farm service: posted, stated again after each reconnect, answered by the news.

Nothing is done here with the slots that are granted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from agentenv.background import TaskSet
from agentenv.backoff import Backoff
from agentenv.config import PoolSettings
from agentenv.errors import (
    AgentEnvError,
    FarmUnreachableError,
    LeaseLostError,
    ProtocolError,
    TooManyRequestsError,
    from_wire,
)
from agentenv.farm_client.client import FarmClient
from agentenv.slots.pool_errors import acquire_timeout_error
from agentenv.slots.statistics import Tally
from agentenv.wire import farm as wire
from agentenv.wire.leases import SlotRequest

logger = logging.getLogger(__name__)

_ASK_WAIT_S: Final = 0.25
"""How long the farm holds back the answer to an ask: most slots are granted by then, and the others come as news."""
_REQUESTS_AT_ONCE: Final = 16
_CHECK_S: Final = 0.25
_BATCH_BYTES = 1024 * 1024
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 0.5
"""A farm that was restarted is back within a second or two; waiting asks are stated again with the next connection."""


def retries() -> Backoff:
    """Pauses between attempts to reach a farm."""
    return Backoff(_RETRY_MIN_S, _RETRY_MAX_S)


@dataclass(eq=False)
class Wanted:
    """An ask without an answer. ``deadline``: at which it fails in any case; ``patience_s``: for how long, without a
    break, it may be that the farm cannot be reached or has no capacity."""

    ask: wire.Ask
    deadline: float | None
    patience_s: float
    since: float
    granted: asyncio.Future[tuple[wire.Grant, ...]]
    place: wire.Place | None = None
    hopeless_s: float = 0.0


class FarmAsks:
    """The asks of one client without an answer. ``lost`` is called for each lease that the farm says has ended, with
    the lease's name. ``tasks`` runs what takes time; its owner closes it."""

    def __init__(
        self,
        client: FarmClient,
        settings: PoolSettings,
        tally: Tally,
        tasks: TaskSet,
        clock: Callable[[], float],
        *,
        lost: Callable[[str, AgentEnvError], None],
    ) -> None:
        self._client = client
        self._settings = settings
        self._tally = tally
        self._tasks = tasks
        self._clock = clock
        self._lost = lost
        self._wanted: dict[str, Wanted] = {}
        self._dismissed: AgentEnvError | None = None
        self._outbox: list[Wanted] = []
        self._outgoing = asyncio.Event()
        self._sending = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._connected = False
        self._why_not = ""

    def start(self) -> None:
        """Post asks, follow the news, end waits that have become hopeless."""
        for work, name in ((self._send(), "asks"), (self._follow_news(), "news"), (self._check(), "upkeep")):
            self._tasks.start("farm", work, name)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._wanted)

    def place(self, trajectory: str) -> wire.Place | None:
        """Why a trajectory waits, as the farm last told; None if it does not, or that is unknown yet."""
        found = (wanted.place for wanted in self._wanted.values() if trajectory in wanted.ask.trajectories)
        return next(found, None)

    # -- asking ----------------------------------------------------------------------------------

    def want(
        self,
        request: SlotRequest,
        timeout_s: float | None,
        tags: wire.AskTags,
        image_reference: str = "",
    ) -> Wanted:
        """Ask for a slot for each trajectory, with these tags. Its future has the grants, or the error.
        ``image_reference``: of the root's image, if it is known."""
        ask = wire.Ask(
            request_id=request.request_id or secrets.token_hex(16),
            trajectories=request.trajectories,
            tags=tags,
            ttl_s=request.ttl_s or self._settings.lease_ttl_s,
            root=request.root,
            image_reference=image_reference,
            container=request.container,
            existing=request.existing,
        )
        now = self._clock()
        wanted = Wanted(
            ask,
            deadline=None if timeout_s is None else now + timeout_s,
            patience_s=self._settings.acquire_timeout_s,
            since=now,
            granted=asyncio.get_running_loop().create_future(),
        )
        self._begin(wanted)
        return wanted

    def _begin(self, wanted: Wanted) -> None:
        """Send it. Of two with one id (an ask for what the other is granted), the later one waits for the other's
        answer: theirs could not be told apart."""
        if wanted.granted.done():
            return
        before = self._wanted.get(wanted.ask.request_id)
        if before is not None and not before.granted.done():
            before.granted.add_done_callback(lambda _: self._begin(wanted))
        elif self._dismissed is not None:
            self._answer(wanted, self._dismissed)
        else:
            self._wanted[wanted.ask.request_id] = wanted
            self._outbox.append(wanted)
            self._outgoing.set()

    def forget(self, wanted: Wanted) -> None:
        """It was answered, or nobody waits for it any more."""
        if self._wanted.get(wanted.ask.request_id) is wanted:
            del self._wanted[wanted.ask.request_id]

    def withdraw(self, wanted: Wanted) -> None:
        """The farm withdraws the ask, or ends its leases if it was granted; unless they were there before."""
        if wanted.ask.existing:
            return
        self._tasks.start("farm", self._cancel(wanted.ask.request_id), "cancel")

    def dismiss(self, error: AgentEnvError) -> None:
        """Answer every ask with this error, and withdraw it."""
        self._dismissed = error
        for wanted in list(self._wanted.values()):
            self._answer(wanted, error)
            self.withdraw(wanted)

    def _answer(self, wanted: Wanted, error: AgentEnvError) -> None:
        if not wanted.granted.done():
            self._tally.faults[error.code] += 1
            wanted.granted.set_exception(error)

    async def _cancel(self, request_id: str) -> None:
        backoff, until = retries(), self._clock() + wire.ASK_TTL_S
        while self._clock() < until:  # later the farm has dropped it, and the TTL has ended its leases
            try:
                await self._client.cancel(request_id)
                return
            except (FarmUnreachableError, TooManyRequestsError):
                await asyncio.sleep(backoff.next_s())
            except AgentEnvError as error:
                logger.debug("ask %s is not withdrawn: %s", request_id, error)
                return

    # -- the farm --------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Post new asks, those of one moment together."""
        while True:
            await self._outgoing.wait()
            await asyncio.sleep(0)  # a group's members ask one after the other
            self._outgoing.clear()
            while self._outbox:
                open_ones = self._next_batch()
                if open_ones:
                    await self._sending.acquire()
                    task = self._tasks.start("farm", self._post(open_ones), "post")
                    task.add_done_callback(lambda _: self._sending.release())

    def _next_batch(self) -> list[Wanted]:
        """The asks for one request, those with large environments in smaller numbers: all of a request that is too
        large would be refused, for the sake of one."""
        batch: list[Wanted] = []
        size_bytes = 0
        while self._outbox and len(batch) < wire.MAX_ASKS:
            wanted = self._outbox[0]
            if not wanted.granted.done():
                size_bytes += len(wanted.ask.model_dump_json())
                if batch and size_bytes > _BATCH_BYTES:
                    break
                batch.append(wanted)
            del self._outbox[0]
        return batch

    async def _post(self, batch: list[Wanted]) -> None:
        try:
            reply = await self._client.ask([wanted.ask for wanted in batch], wait_s=_ASK_WAIT_S)
        except (FarmUnreachableError, TooManyRequestsError) as error:
            self._why_not = str(error)
            await asyncio.sleep(error.retry_after_s if isinstance(error, TooManyRequestsError) else _RETRY_MIN_S)
            if not self._connected:
                return  # they are asked again with the next hello
            self._outbox += [wanted for wanted in batch if not wanted.granted.done()]
            self._outgoing.set()
        except AgentEnvError as error:
            for wanted in batch:
                self._answer(wanted, error)
        else:
            for state in reply.asks:
                self._learn(state)

    async def _follow_news(self) -> None:
        backoff = retries()
        while True:
            try:
                async with aclosing(self._client.news()) as news:
                    async for line in news:
                        backoff.reset()
                        self._hear(line)
            except (FarmUnreachableError, TooManyRequestsError) as error:
                self._why_not = str(error)
            except AgentEnvError as error:  # the token has expired, say: whoever waits has to know
                self._why_not = str(error)
                for wanted in list(self._wanted.values()):
                    self._answer(wanted, error)
            self._connected = False
            await asyncio.sleep(backoff.next_s())

    def _hear(self, line: wire.NewsLine) -> None:
        match line:
            case wire.NewsHello():
                self._connected, self._why_not = True, ""
                self._outbox = list(self._wanted.values())
                self._outgoing.set()
            case wire.NewsAsk(ask=state):
                self._learn(state)
            case wire.NewsLost(lease=name, error=said):
                self._lost(name, from_wire(said.error, said.message, said.next_step))
            case wire.NewsLeaving():
                self._connected, self._why_not = False, "the farm is ending"

    def _learn(self, state: wire.AskState) -> None:
        wanted = self._wanted.get(state.request_id)
        if wanted is None or wanted.granted.done():
            return  # withdrawn meanwhile: the withdrawal ends the leases
        match state.state:
            case "granted" if len(state.leases) == len(wanted.ask.trajectories):
                wanted.granted.set_result(state.leases)
            case "granted":  # ended before they were taken
                self._answer(wanted, LeaseLostError("the slot was lost before it was used"))
            case "waiting":
                before, wanted.place = wanted.place, state.place
                if state.place is not None and state.place.why == "image":
                    _tell(wanted.ask, before, state.place)
            case "refused":
                said = state.error
                error = from_wire(said.error, said.message, said.next_step) if said else ProtocolError("no reason")
                self._answer(wanted, error)

    async def _check(self) -> None:
        """End waits that have become hopeless."""
        last = self._clock()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = self._clock()
            passed_s, last = min(now - last, 4 * _CHECK_S), now
            for wanted in list(self._wanted.values()):
                self._judge(wanted, now, passed_s)

    def _judge(self, wanted: Wanted, now: float, passed_s: float) -> None:
        no_capacity = wanted.place is not None and wanted.place.why == "no_capacity"
        hopeless = not self._connected or no_capacity
        wanted.hopeless_s = wanted.hopeless_s + passed_s if hopeless else 0.0
        late = wanted.deadline is not None and now >= wanted.deadline
        if wanted.granted.done() or not (late or wanted.hopeless_s >= wanted.patience_s):
            return
        waited_s = now - wanted.since
        if not self._connected:
            error: AgentEnvError = FarmUnreachableError(
                f"no slot within {waited_s:.1f} s: {self._why_not or 'the farm does not answer'}",
                next_step="is farm_url right, and is the farm running?",
            )
        else:
            error = acquire_timeout_error(waited_s, wanted.place)
        self._answer(wanted, error)
        self.withdraw(wanted)


def _tell(ask: wire.Ask, before: wire.Place | None, now: wire.Place) -> None:
    """Log why its image is not there, once for each reason."""
    if now.detail and (before is None or before.detail != now.detail):
        image = ask.image_reference or (ask.root.image if ask.root else "")
        logger.warning("%s waits for its image %s: %s", ", ".join(ask.trajectories), image, now.detail)
