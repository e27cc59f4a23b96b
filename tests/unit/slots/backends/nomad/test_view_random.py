"""Any order of facts, lists, answers and losses of them: what the pool hears stays true."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentenv.slots.backends.base import ContainerDraining, ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.nomad.facts import Allocation, Node, Snapshot
from agentenv.slots.backends.nomad.view import AwaitEmpty, Command, FleetView, ForgetAllocation, Handshake, ReportEvent
from tests.unit.slots.backends.nomad.nomad_samples import handle

NODES = ("n1", "n2")
WAYS = {
    "pending": [("running", "running", "run"), ("failed", "dead", "run"), ("pending", "pending", "stop")],
    "running": [
        ("failed", "dead", "run"),
        ("running", "running", "stop"),
        ("lost", "running", "stop"),
        ("unknown", "running", "run"),
        ("complete", "dead", "stop"),
    ],
    "unknown": [("running", "running", "run"), ("lost", "running", "stop")],
    "lost": [("complete", "dead", "stop")],
}


class Cluster(RuleBasedStateMachine):
    """Nomad as it is, a channel that reorders, repeats and loses its events, and the view under test."""

    def __init__(self) -> None:
        super().__init__()
        self.view = FleetView(start_timeout_s=60)
        self.now = 0.0
        self.index = 1
        self.truth: dict[str, Allocation] = {}
        self.nodes = {name: Node(name, 1) for name in NODES}
        self.said: list[Allocation | Node] = []
        self.deaf = False
        self.shaking: set[str] = set()
        self.handshaken: list[str] = []
        self.emptied: list[str] = []
        self.heard: dict[str, list[str]] = {}

    # -- Nomad -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.truth) < 3)
    @rule(node=st.sampled_from(NODES), running=st.booleans())
    def place(self, node: str, running: bool) -> None:
        self.index += 1
        fact = Allocation(f"a{self.index}", 0, node, self.index)
        self._say(fact)
        if running:
            self._change(fact, client="running", task_state="running")

    @rule(pick=st.integers(0), way=st.integers(0))
    def move(self, pick: int, way: int) -> None:
        movable = [one for one in self.truth.values() if one.client in WAYS]
        if movable:
            one = movable[pick % len(movable)]
            ways = WAYS[one.client]
            client, task, desired = ways[way % len(ways)]
            desired = "stop" if one.desired == "stop" else desired
            self._change(one, client=client, task_state=task, desired=desired)

    @rule(pick=st.integers(0))
    def restart(self, pick: int) -> None:
        running = [one for one in self.truth.values() if one.client == "running" and one.desired == "run"]
        if running:
            one = running[pick % len(running)]
            self._change(one, task_state="pending", restarts=one.restarts + 1)
            self._change(self.truth[one.id], task_state="running")

    @rule(pick=st.integers(0))
    def collect_garbage(self, pick: int) -> None:
        ended = [one for one in self.truth.values() if one.client in ("failed", "complete")]
        if ended:
            self.index += 1
            del self.truth[ended[pick % len(ended)].id]

    @rule(node=st.sampled_from(NODES))
    def drain_or_not(self, node: str) -> None:
        self.index += 1
        self.nodes[node] = Node(node, self.index, draining=not self.nodes[node].draining)
        self.said.append(self.nodes[node])

    def _change(self, one: Allocation, **changes: object) -> None:
        self.index += 1
        self._say(replace(one, modify_index=self.index, **changes))  # type: ignore[arg-type]

    def _say(self, fact: Allocation) -> None:
        self.truth[fact.id] = fact
        self.said.append(fact)
        if not self.deaf:
            self._perform(self.view.update(fact, self.now))

    @rule(deaf=st.booleans())
    def cut_or_mend_the_line(self, deaf: bool) -> None:
        self.deaf = deaf

    # -- what reaches the view -------------------------------------------------------------------

    @precondition(lambda self: self.said)
    @rule(back=st.integers(1, 8))
    def hear_late_or_again(self, back: int) -> None:
        self._perform(self.view.update(self.said[-min(back, len(self.said))], self.now))

    @rule()
    def look(self) -> None:
        snapshot = Snapshot(self.index, tuple(self.truth.values()), tuple(self.nodes.values()))
        self._perform(self.view.update(snapshot, self.now))
        serving = {name for name, words in self.heard.items() if words == ["started"]}
        truly = {one.container for one in self.truth.values() if one.client in ("running", "unknown")}
        assert serving <= truly, "a list shows every end"

    @precondition(lambda self: self.handshaken)
    @rule(back=st.integers(1, 4), well=st.sampled_from((True, True, False)))
    def answer(self, back: int, well: bool) -> None:
        """A handshake's outcome; the view may have lost interest in it, or heard it before."""
        name = self.handshaken[-min(back, len(self.handshaken))]
        wanted = name in self.shaking
        self.shaking.discard(name)
        commands = self.view.handshake_done(name, handle(name) if well else StartFailed("no"), self.now)
        assert wanted or not commands
        self._perform(commands)

    @precondition(lambda self: self.emptied)
    @rule(back=st.integers(1, 4), silent=st.booleans())
    def empty(self, back: int, silent: bool) -> None:
        name = self.emptied[-min(back, len(self.emptied))]
        self._perform(self.view.emptied(name, self.now, silent=silent))

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._perform(self.view.tick(self.now))

    # -- what must hold --------------------------------------------------------------------------

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Handshake(container, allocation):
                    assert allocation.client == "running"
                    assert container not in self.heard, "no handshake with one that is gone, or known"
                    assert container not in self.shaking
                    self.shaking.add(container)
                    self.handshaken.append(container)
                case ForgetAllocation(container):
                    self.shaking.discard(container)
                case AwaitEmpty(container):
                    assert self.heard[container] == ["started", "draining"]
                    self.emptied.append(container)
                case ReportEvent(ContainerStarted(started)):
                    assert started.id not in self.heard, "started once, and never again once gone"
                    self.heard[started.id] = ["started"]
                case ReportEvent(ContainerDraining(container)):
                    assert self.heard[container] == ["started"]
                    self.heard[container].append("draining")
                case ReportEvent(ContainerGone(container)):
                    assert self.heard[container] in (["started"], ["started", "draining"])
                    self.heard[container].append("gone")

    @invariant()
    def the_view_agrees_with_what_it_reported(self) -> None:
        alive = {name for name, words in self.heard.items() if words[-1] != "gone"}
        stages = self.view.stages()
        assert {name for name, stage in stages.items() if stage in ("serving", "draining")} == alive
        assert self.view.serving == sum(words == ["started"] for words in self.heard.values())

    def teardown(self) -> None:
        """When all has ended and a last list was made, everything that was started is gone."""
        self.truth.clear()
        self.index += 1
        self.look()
        assert all(words[-1] == "gone" for words in self.heard.values())
        assert self.view.stages() == {}


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestClusterRandom = Cluster.TestCase
