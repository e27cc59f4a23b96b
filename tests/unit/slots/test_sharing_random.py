"""The fair queue under random sequences of events, against its rules."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentenv.slots.queue_policy import Ask, Caps
from agentenv.slots.sharing import KIND_WEIGHTS, FairShare, Share
from agentenv.wire.leases import RunKind

RUNS = st.sampled_from(["a", "b", "c", "d"])
KINDS = st.sampled_from(sorted(KIND_WEIGHTS))
SLOTS = st.integers(1, 5)
SHARES = st.builds(
    Share,
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    guaranteed=st.integers(0, 6),
    cap=st.one_of(st.none(), st.integers(0, 12)),
    paused=st.sampled_from([False, False, False, True]),
)
CAPS: st.SearchStrategy[Caps] = st.sampled_from(
    [(), (), (("own", 4),), (("child", 3), ("parent", 7)), (("other child", 9), ("parent", 7))]
)
"""Tokens of whoever asks; runs share them."""
PLENTY = 10_000


class SharingMachine(RuleBasedStateMachine):
    """Plays the ledger; keeps its own simple account of who waits and holds."""

    def __init__(self) -> None:
        super().__init__()
        self.default, self.shares = Share(), dict[str, Share]()
        self.line = FairShare(self.default, self.shares)
        self.tickets = 0
        self.waiting: dict[int, Ask] = {}
        self.leases: list[Ask] = []
        """Groups in somebody's hands; those that were not picked have ticket 0."""
        self.served: set[int] = set()
        self.owed: Counter[str] = Counter()
        """What stood idle for groups that were withdrawn in their turn, and was not granted to others since."""

    # -- what the rules say --------------------------------------------------------------------

    def share(self, run: str) -> Share:
        return self.shares.get(run, self.default)

    def held(self, run: str, kind: RunKind | None = None) -> int:
        return sum(one.slots for one in self.leases if one.run == run and kind in (None, one.kind))

    def heads(self, run: str) -> list[Ask]:
        """The oldest asks of the kinds that hold least for their weight: one of them is the run's next. A token's asks
        are served in their order, so that small ones do not keep a large one waiting for ever."""
        oldest: dict[RunKind, Ask] = {}
        first: dict[tuple[RunKind, Caps], Ask] = {}
        for ticket in sorted(self.waiting):
            ask = self.waiting[ticket]
            if ask.run == run and first.setdefault((ask.kind, ask.caps), ask) is ask and self.allowed(ask):
                oldest.setdefault(ask.kind, ask)
        level = {kind: self.held(run, kind) / KIND_WEIGHTS[kind] for kind in oldest}
        return [ask for kind, ask in oldest.items() if level[kind] == min(level.values())]

    def held_by(self, token: str) -> int:
        return sum(one.slots for one in self.leases if token in dict(one.caps))

    def allowed(self, ask: Ask) -> bool:
        """Whether no token would be above its cap."""
        return all(self.held_by(token) + ask.slots <= cap for token, cap in ask.caps)

    def may_be_served(self, ask: Ask) -> bool:
        share = self.share(ask.run)
        return (
            self.allowed(ask)
            and not share.paused
            and (share.cap is None or self.held(ask.run) + ask.slots <= share.cap)
        )

    def place(self, ask: Ask) -> tuple[bool, float]:
        share, charged = self.share(ask.run), self.held(ask.run) + self.owed[ask.run]
        return charged + ask.slots > share.guaranteed, charged / share.weight

    def check_turn(self, picked: Ask | None, free: int) -> None:
        """Who was picked was in turn; if nobody was, the one in turn did not fit, or nobody may be served."""
        heads = {run: self.heads(run) for run in "abcd"}
        servable = {run: [ask for ask in asks if self.may_be_served(ask)] for run, asks in heads.items()}
        # Where kinds of a run are equal and their heads differ, either may stand for the run.
        certain = [asks for run, asks in servable.items() if asks and asks == heads[run]]
        if picked is None:
            assert not certain or any(ask.slots > free for asks in servable.values() for ask in asks)
            return
        assert picked.slots <= free
        assert picked in servable[picked.run], "not the next of its run, or over its cap"
        for asks in certain:
            assert self.place(picked) <= max(map(self.place, asks)), "somebody else was before it"

    # -- events --------------------------------------------------------------------------------

    @rule(run=RUNS, kind=KINDS, slots=SLOTS, caps=CAPS)
    def ask(self, run: str, kind: RunKind, slots: int, caps: Caps) -> None:
        self.tickets += 1
        self.waiting[self.tickets] = Ask(self.tickets, slots, run, kind, caps)
        self.line.push(self.waiting[self.tickets])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        ask = self.waiting.pop(ticket)
        if next(iter(self.line.upcoming(PLENTY)), None) == ticket:
            self.owed[ask.run] += ask.slots - 1
        self.line.withdraw(ticket)

    @rule(ticket=st.integers(0, 50))
    def withdraw_one_who_has_left(self, ticket: int) -> None:
        if ticket not in self.waiting:
            self.line.withdraw(ticket)

    @rule(free=st.integers(0, 8))
    def pick(self, free: int) -> None:
        picked = self.line.pick(free)
        self.check_turn(picked, free)
        if picked is not None:
            assert picked.ticket not in self.served, "served twice"
            assert picked == self.waiting.pop(picked.ticket)
            self.served.add(picked.ticket)
            self.leases.append(picked)
            for run in self.owed:
                if run != picked.run:
                    self.owed[run] = max(0, self.owed[run] - picked.slots)
            cap = self.share(picked.run).cap
            assert cap is None or self.held(picked.run) <= cap
            assert all(self.held_by(token) <= most for token, most in picked.caps)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), back=st.booleans())
    def end(self, data: st.DataObject, back: bool) -> None:
        """A group's slots are returned; if a container refused it, it is put back."""
        ask = data.draw(st.sampled_from(self.leases))
        self.leases.remove(ask)
        self.line.gave(ask.run, ask.kind, ask.slots, ask.caps)
        if back and ask.ticket:
            self.served.remove(ask.ticket)
            self.waiting[ask.ticket] = ask
            self.line.push(ask)

    @rule(run=RUNS, kind=KINDS, slots=SLOTS, caps=CAPS)
    def take(self, run: str, kind: RunKind, slots: int, caps: Caps) -> None:
        self.leases.append(Ask(0, slots, run, kind, caps))
        self.line.took(run, kind, slots, caps)

    @rule(default=SHARES, shares=st.dictionaries(RUNS, SHARES, max_size=3))
    def read_settings(self, default: Share, shares: dict[str, Share]) -> None:
        self.default, self.shares = default, shares
        self.line.set_shares(default, shares)

    @rule()
    def serve_all(self) -> None:
        """What was said about who is next comes true if nothing else happens."""
        expected, ahead = self.line.upcoming(PLENTY), 0
        for ticket, slots in expected.items():
            assert slots == ahead
            before = len(self.leases)
            self.pick(PLENTY)
            assert len(self.leases) == before + 1
            assert self.leases[-1].ticket == ticket
            ahead += self.leases[-1].slots
        assert self.line.pick(PLENTY) is None

    @rule(free=st.integers(0, 6))
    def reclaim(self, free: int) -> None:
        """Nobody is taken below a guarantee, and after it nothing more is reclaimed, unless a token with a cap got
        slots back: then asks may be served that were held back by it."""
        found = self.line.to_reclaim(free)
        freed = False
        for run, kind in found:
            lease = next(one for one in self.leases if (one.run, one.kind) == (run, kind))
            self.leases.remove(lease)
            freed = freed or bool(lease.caps)
            if lease.slots > 1:
                self.leases.append(Ask(0, lease.slots - 1, run, kind, lease.caps))
            self.line.gave(run, kind, 1, lease.caps)
        assert all(self.held(run) >= self.share(run).guaranteed for run, _ in found)
        assert freed or self.line.to_reclaim(free + len(found)) == []

    # -- what must be true at every moment -----------------------------------------------------

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert list(self.line) == sorted(self.waiting)
        assert len(self.line) == len(self.waiting)

    @invariant()
    def accounts_agree(self) -> None:
        views = self.line.runs()
        assert set(views) == {one.run for one in (*self.leases, *self.waiting.values())}
        for run, view in views.items():
            held: Counter[str] = Counter()
            for one in self.leases:
                if one.run == run:
                    held[one.kind] += one.slots
            asks = [ask for ask in self.waiting.values() if ask.run == run]
            assert (view.held, view.slots_held, self.line.held(run)) == (held, held.total(), held.total())
            assert (view.asks, view.slots_waiting) == (len(asks), sum(ask.slots for ask in asks))
            assert view.oldest == min((ask.ticket for ask in asks), default=None)
            assert view.share == self.share(run)

    @invariant()
    def slots_wanted_are_possible(self) -> None:
        possible = 0
        for run, view in self.line.runs().items():
            share = self.share(run)
            if any(self.may_be_served(ask) for ask in self.heads(run)):
                room = PLENTY if share.cap is None else share.cap - self.held(run)
                possible += min(room, view.slots_waiting)
        assert 0 <= self.line.slots_wanted <= possible
        for token in ("own", "child", "parent", "other child"):
            assert self.line.held_by(token) == self.held_by(token)
        if self.some_are_capped():
            return
        if all(self.share(run).cap is None and not self.share(run).paused for run in "abcd"):
            assert self.line.slots_wanted == possible == sum(ask.slots for ask in self.waiting.values())

    @invariant()
    def reasons_agree(self) -> None:
        upcoming = {self.waiting[ticket].run for ticket in self.line.upcoming(PLENTY)}
        for ticket, ask in self.waiting.items():
            expected = "paused" if self.share(ask.run).paused else "queue" if ask.run in upcoming else "cap"
            if expected != "paused" and not self.allowed(ask):
                expected = "cap"
            # One that may be served now may be held back by those that are served before it.
            assert self.line.why(ticket) == expected or (self.some_are_capped() and self.allowed(ask))
            of_its_kind = [one.ticket for one in self.waiting.values() if (one.run, one.kind) == (ask.run, ask.kind)]
            assert self.line.position(ticket) == sorted(of_its_kind).index(ticket) + 1

    def some_are_capped(self) -> bool:
        return any(ask.caps for ask in self.waiting.values())

    @invariant()
    def fair_shares_use_the_farm(self) -> None:
        views = self.line.runs()
        for total in (0, 7, 30):
            shares = self.line.fair_shares(total)
            usable = {}
            for run, view in views.items():
                assert 0 <= view.held_back <= view.slots_waiting
                wanted = view.slots_held + view.slots_waiting - view.held_back
                usable[run] = wanted if view.share.cap is None else min(wanted, view.share.cap)
                if view.share.paused:
                    usable[run] = view.slots_held
                assert -1e-9 <= shares[run] <= usable[run] + 1e-9
            assert abs(sum(shares.values()) - min(total, sum(usable.values()))) < 1e-6


SharingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSharingRandom = SharingMachine.TestCase
