"""Which failures are retried: each row of the table in docs/environments.md is a case here."""

from __future__ import annotations

import asyncio
import errno
import itertools
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv import errors
from agentenv.agent.culprit import DOUBTFUL, worth_another
from agentenv.agent.models.openai import ServedModel, request_completion
from agentenv.agent.protocols import Completion, ContextOverflow
from agentenv.agent.rollout import MOST_RECLAIMS, Rollout
from agentenv.agent.settings import AgentSettings
from agentenv.agent.single_run import run_single
from agentenv.agent.token_sequences import TokenSequence, sequence_of
from agentenv.agent.transcript import Transcript
from agentenv.containers import transfer
from agentenv.errors import (
    AcquireTimeoutError,
    AgentEnvError,
    CallLostError,
    ConfigError,
    ConnectionLostError,
    ContainerLostError,
    DoubtfulTurnError,
    InfraError,
    LeaseLostError,
    LeaseReclaimedError,
    ModelServerError,
    ProtocolError,
    SlotDestroyedError,
    StaleLeaseError,
    TaskError,
)
from agentenv.sandbox.slot_loss import WAYS
from agentenv.sdk import slot_tools
from agentenv.wire.calls import CallResult
from agentenv.wire.roots import RootSpec
from tests.unit.agent.agent_stubs import (
    StubHooks,
    StubModel,
    StubSession,
    StubSessions,
    calling,
    echo,
    farm,
    ok,
    saying,
)
from tests.unit.sandbox.server import failed_seals

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
HEADING = "### Could the model have caused it?"
DESTROYED = SlotDestroyedError("its agent was killed by what ran in it")
CALL = calling(("bash", '{"command": "x"}'))


@dataclass
class Case:
    """One rollout whose first attempts go wrong. ``raised`` is None where nothing is."""

    raised: type[AgentEnvError] | None
    outcome: str
    sessions: Callable[[], StubSessions] = StubSessions
    hooks: type[StubHooks] = StubHooks
    model: Callable[[], Any] = lambda: StubModel(CALL, saying("done"))
    sealed: bool = False
    together: int | None = None


# -- slots that go wrong ---------------------------------------------------------------------------


def failing(error: Exception) -> Callable[[], StubSessions]:
    """The model's call meets this."""

    def behave(_: str, __: str, arguments: Any) -> CallResult:
        if arguments.get("command") == "x":
            raise error
        return ok()

    return lambda: StubSessions(behave)


def answering(**fields: Any) -> Callable[[], StubSessions]:
    """The model's call is answered so."""
    return lambda: StubSessions(lambda *_: CallResult(id="c", **fields))


class Refusing(StubSessions):
    def __init__(self) -> None:
        super().__init__()
        self.refuse = lambda _: AcquireTimeoutError("none is free")


def sealing(error: Exception) -> Callable[[], StubSessions]:
    class Sealed(StubSession):
        async def seal(self) -> None:
            raise error

    return lambda: Opening(Sealed, echo)


def sealed_for_real(seal: Callable[[], Awaitable[None]]) -> Callable[[], StubSessions]:
    """The slot is sealed as in a container, and that fails."""

    class Sealed(StubSession):
        async def seal(self) -> None:
            await seal()

    return lambda: Opening(Sealed, echo)


class Opening(StubSessions):
    """Opens sessions of another class; ``after`` is raised when one is given back."""

    def __init__(self, kind: type[StubSession], behaviour: Any, after: Exception | None = None) -> None:
        super().__init__(behaviour)
        self.kind, self.after = kind, after

    def open(
        self,
        trajectory: str,
        *,
        acquire_timeout_s: float | None = None,
        root: RootSpec | None = None,
        container: str = "",
    ) -> AbstractAsyncContextManager[StubSession]:
        @asynccontextmanager
        async def session() -> Any:
            self.leased += 1
            try:
                yield self.kind(trajectory, self.behaviour)
            finally:
                self.leased -= 1
                if self.after is not None:
                    raise self.after

        return session()


def recording(error: Exception) -> Callable[[], StubSessions]:
    def behave(_: str, __: str, arguments: Any) -> CallResult:
        if arguments.get("action") == "capture":
            raise error
        return ok(content={"recording": "{}\n", "session": {"session": "s"}})

    return lambda: StubSessions(behave)


def given_back_badly(behaviour: Any = echo) -> Callable[[], StubSessions]:
    return lambda: Opening(StubSession, behaviour, ContainerLostError("lost while it was given back"))


def destroying(*_: Any) -> CallResult:
    raise DESTROYED


# -- models that go wrong --------------------------------------------------------------------------


def saying_first(*replies: Any) -> Callable[[], Any]:
    return lambda: StubModel(*replies)


class Cancelling(StubModel):
    async def complete(self, *_: Any, **__: Any) -> Completion:
        raise asyncio.CancelledError


class Misreading(StubModel):
    """As a parser or a template would that meets text it was not made for."""

    async def complete(self, *_: Any, **__: Any) -> Completion:
        raise IndexError("string index out of range")


class Unopened(StubModel):
    async def __aenter__(self) -> Unopened:
        raise KeyError("no such server")

    async def __aexit__(self, *_: object) -> None:
        return None


class Refused(Exception):
    def __init__(self, status_code: int, text: str = "no") -> None:
        super().__init__(text)
        self.status_code = status_code


def message(content: str = "", finish_reason: str = "stop", calls: Any = None, tokens: int | None = None) -> Any:
    told = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    choice = SimpleNamespace(message=SimpleNamespace(model_dump=lambda **_: told), finish_reason=finish_reason)
    usage = None if tokens is None else SimpleNamespace(model_dump=lambda **_: {"completion_tokens": tokens})
    return SimpleNamespace(choices=[choice], usage=usage)


CALLED = message("", "tool_calls", CALL.message["tool_calls"])


def served(*replies: Any, **constant: Any) -> Callable[[], ServedModel]:
    """A served model whose server does this, turn after turn; ``None`` is a turn that never ends."""

    def make() -> ServedModel:
        left = list(replies)

        async def chat(**_: Any) -> Any:
            reply = left.pop(0)
            if reply is None:
                await asyncio.Event().wait()
            if isinstance(reply, Exception):
                raise reply
            return reply

        return ServedModel(chat, timeout_s=0.05 if None in replies else 30, constant=constant)

    return make


class Misfit(StubModel):
    """A managed server whose masks are not its tokens."""

    async def complete(self, *_: Any, **__: Any) -> Completion:
        node = SimpleNamespace(tokens=[7], masked_tokens=[8], logprobs=[-0.5], metadata=None)
        sequence_of(node)
        raise AssertionError("unreachable")


# -- hooks that go wrong ---------------------------------------------------------------------------


def preparing(error: Exception) -> type[StubHooks]:
    class Preparing(StubHooks):
        def setup_trajectory_workspace(self, *_: Any, **__: Any) -> Any:
            raise error

    return Preparing


class Testing(StubHooks):
    """Runs what the policy made; raises as the slot does."""

    async def verify_and_score_trajectory(self, *_: Any, exec_tool: Any = None, **__: Any) -> Any:
        result = await exec_tool.terminal("test")
        return float(result.exit_code == 0), {}


class Swallowing(StubHooks):
    async def verify_and_score_trajectory(self, *_: Any, exec_tool: Any = None, **__: Any) -> Any:
        try:
            await exec_tool.terminal("test")
        except Exception:
            return 1.0, {}
        raise AssertionError("it was to fail")


class Reading(StubHooks):
    def verify_and_score_trajectory(self, *_: Any, **__: Any) -> Any:
        raise IsADirectoryError(errno.EISDIR, "is a directory", "report.txt")


def downloading(error: Exception) -> type[StubHooks]:
    class Downloading(StubHooks):
        async def verify_and_score_trajectory(self, *_: Any, exec_tool: Any = None, **__: Any) -> Any:
            async def fails(*_: Any, **__: Any) -> Any:
                raise error

            exec_tool._session.lease = object()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transfer, "download", fails)
                patch.setattr(slot_tools, "ToolSession", StubSession)  # it has a slot of its own
                try:
                    await exec_tool.download("big", "here")
                except OSError:
                    return 0.0, {}  # as the docs say of what a policy's files may cause
            raise AssertionError("it was to fail")

    return Downloading


class Judging(StubHooks):
    """Asks an agent, whose own commands destroy its slot."""

    async def verify_and_score_trajectory(self, *_: Any, **__: Any) -> Any:
        judged = await run_single(farm(failing(DESTROYED)(), calls), AgentSettings(), "was it right?")
        return float(judged.final_response == "yes"), {}


class Unsure(StubHooks):
    def score_destroyed_slot(self, *_: Any, **__: Any) -> Any:
        raise LookupError("no such item")


class Patient(StubHooks):
    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_idle_s=1e-9)


class Thinking(StubModel):
    async def complete(self, *_: Any, **__: Any) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


class Hurried(StubHooks):
    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_s=1e-9)


def under_test(error: Exception) -> Callable[[], StubSessions]:
    """The verifier's command meets this, the model's does not."""

    def behave(_: str, __: str, arguments: Any) -> CallResult:
        if arguments.get("command") == "test":
            raise error
        return ok()

    return lambda: StubSessions(behave)


AGAIN, NO_SCORE, BY_HOOK = "retried", "no score", "score_destroyed_slot"
LOST = ContainerLostError("gone")

CASES = {
    "no slot becomes free in time": Case(AcquireTimeoutError, AGAIN, Refusing),
    "the container is lost during preparation": Case(ContainerLostError, AGAIN, hooks=preparing(LOST)),
    "the slot is destroyed during preparation": Case(SlotDestroyedError, AGAIN, hooks=preparing(DESTROYED)),
    "an unexpected exception before the first turn": Case(InfraError, AGAIN, model=lambda: Unopened(saying("never"))),
    "the first prompt does not fit the model": Case(
        ConfigError, NO_SCORE, model=saying_first(ContextOverflow("4097 tokens, the limit is 4096"))
    ),
    "the first prompt leaves no room for an answer": Case(
        ConfigError, NO_SCORE, model=served(message("42", "length", tokens=1))
    ),
    "the container is lost while the model works": Case(ContainerLostError, AGAIN, failing(LOST)),
    "the container cannot be reached": Case(ConnectionLostError, AGAIN, failing(ConnectionLostError("silent"))),
    "a call's result is lost": Case(CallLostError, AGAIN, failing(CallLostError("restarted"))),
    "the model's commands destroy the slot": Case(
        SlotDestroyedError, BY_HOOK, answering(fault="policy", error="slot_destroyed", message="its agent was killed")
    ),
    "the lease ends although the container lives": Case(LeaseLostError, NO_SCORE, failing(LeaseLostError("lost"))),
    "the lease is found to be stale": Case(StaleLeaseError, NO_SCORE, failing(StaleLeaseError("ended"))),
    "an answer of the container is not understood": Case(ProtocolError, NO_SCORE, failing(ProtocolError("?"))),
    "the container finds arguments malformed that were checked before they were sent": Case(
        ProtocolError, NO_SCORE, answering(fault="infra", error="protocol", message="write_file: data: is not base64")
    ),
    "a limit above the slot is met: the container's memory, the machine's processes": Case(
        InfraError, NO_SCORE, answering(fault="infra", error="infra", message="the container ran out of memory")
    ),
    "a tool fails in an unexpected way": Case(
        InfraError, NO_SCORE, answering(fault="infra", error="infra", message="search failed: ValueError()")
    ),
    "an unexpected exception while the model works": Case(
        InfraError, NO_SCORE, model=lambda: Misreading(saying("never"))
    ),
    "no tool is called for terminal_lifetime": Case(
        LeaseLostError, NO_SCORE, hooks=Patient, model=lambda: Thinking(saying("never"))
    ),
    "an unexpected cancellation while the model works": Case(
        InfraError, NO_SCORE, model=lambda: Cancelling(saying("never"))
    ),
    "an unreadable call": Case(
        None,
        "continues",
        model=saying_first(Completion({"role": "assistant", "content": "<tool"}, problem="?"), saying("done")),
    ),
    "calls nested, named or numbered so that servers would refuse them": Case(
        None, "continues", model=saying_first(calling(("a b", '{"a":' * 900 + "1e999" + "}" * 900)), saying("done"))
    ),
    "the tool server cannot be reached": Case(
        ConnectionLostError, AGAIN, answering(fault="infra", error="connection_lost", message="nobody is there")
    ),
    "the model's server fails (5xx, 401, 404, 429, no connection)": Case(
        ModelServerError, AGAIN, model=served(CALLED, Refused(500))
    ),
    "the model's server aborts a message (abort, error)": Case(
        ModelServerError, AGAIN, model=served(message("half an ans", "abort"))
    ),
    "a turn with a token limit does not end in model_timeout_s": Case(
        ModelServerError, AGAIN, model=served(None, max_tokens=10)
    ),
    "a turn without a token limit does not end in model_timeout_s": Case(
        DoubtfulTurnError, NO_SCORE, model=served(None)
    ),
    "the model's server refuses a later turn (400, 403, 422), or answers it without a message": Case(
        DoubtfulTurnError, NO_SCORE, model=served(CALLED, Refused(422))
    ),
    "the tokens of a turn are inconsistent": Case(ModelServerError, AGAIN, model=lambda: Misfit(saying("never"))),
    "the managed server's text is not the conversation's": Case(
        DoubtfulTurnError, NO_SCORE, model=saying_first(DoubtfulTurnError("lost track"))
    ),
    "the chat template fails on what the conversation has become": Case(
        ConfigError, NO_SCORE, model=saying_first(CALL, ConfigError("tokenizer_name", "its chat template failed"))
    ),
    "a later turn does not fit the context (400, 413)": Case(
        None, "verified as it is", model=served(CALLED, Refused(413))
    ),
    "the time is over": Case(None, "verified as it is", hooks=Hurried),
    "the slot is destroyed while recordings are fetched": Case(
        SlotDestroyedError, BY_HOOK, recording(DESTROYED), model=saying_first(calling(("tmux", "{}")), saying("done"))
    ),
    "the container is lost while recordings are fetched": Case(
        ContainerLostError, AGAIN, recording(LOST), model=saying_first(calling(("tmux", "{}")), saying("done"))
    ),
    "what it left running does not die when the slot is sealed": Case(
        LeaseLostError, NO_SCORE, sealed_for_real(failed_seals.with_what_does_not_die), sealed=True
    ),
    "the slot is not recreated in time when it is sealed": Case(
        LeaseLostError, NO_SCORE, sealed_for_real(failed_seals.with_what_takes_its_time), sealed=True
    ),
    "what it left in the slot's memory keeps it from being sealed": Case(
        SlotDestroyedError, BY_HOOK, sealed_for_real(failed_seals.with_a_full_slot), sealed=True
    ),
    "the lease is lost when the slot is sealed": Case(
        LeaseLostError, NO_SCORE, sealing(LeaseLostError("lost while it was sealed")), sealed=True
    ),
    "the container is lost when the slot is sealed": Case(ContainerLostError, AGAIN, sealing(LOST), sealed=True),
    "what it left running destroys the slot under a live verifier": Case(
        SlotDestroyedError, BY_HOOK, under_test(DESTROYED), Testing
    ),
    "its program, run by a sealed verifier, destroys the slot": Case(
        SlotDestroyedError, BY_HOOK, under_test(DESTROYED), Testing, sealed=True
    ),
    "a verifier catches that its slot is destroyed, and returns a score": Case(
        SlotDestroyedError, BY_HOOK, under_test(DESTROYED), Swallowing
    ),
    "a verifier meets a lost container, but returns a score": Case(
        ContainerLostError, AGAIN, under_test(LOST), Swallowing
    ),
    "a verifier's command fails: the disk is full, no process can be started": Case(
        None, "the verifier's to judge", lambda: StubSessions(lambda *_: ok(exit_code=126)), Testing
    ),
    "a verifier raises, because of what was left in the files": Case(TaskError, NO_SCORE, hooks=Reading),
    "a verifier's download is cut": Case(ConnectionLostError, AGAIN, hooks=downloading(ConnectionLostError("cut"))),
    "a verifier's download is stopped or killed by what was left running: OSError": Case(
        None, "the verifier's to judge", hooks=downloading(OSError(errno.EIO, "was stopped"))
    ),
    "a verifier's download fills the disk of the trainer": Case(
        InfraError, NO_SCORE, hooks=downloading(OSError(errno.ENOSPC, "No space left on device"))
    ),
    "an agent that a hook runs destroys its own slot": Case(InfraError, NO_SCORE, hooks=Judging),
    "releasing the slot fails after the score": Case(None, "the score stands", given_back_badly()),
    "releasing the slot fails after the slot was destroyed": Case(
        SlotDestroyedError, BY_HOOK, given_back_badly(destroying)
    ),
    "score_destroyed_slot raises": Case(TaskError, NO_SCORE, failing(DESTROYED), Unsure),
    "the group has used up its new attempts": Case(ContainerLostError, NO_SCORE, failing(LOST), together=0),
}


def tables() -> list[list[list[str]]]:
    """The cells of the tables below the heading, row by row."""
    _, _, section = PAGE.read_text().partition(HEADING)
    found: list[list[list[str]]] = []
    for before, line in itertools.pairwise(["", *re.split(r"\n#+ ", section)[0].splitlines()]):
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[2:] for table in found]


def rows() -> dict[str, tuple[str, str]]:
    """(raised, what becomes of the rollout) by what happens, as the page has it."""
    return {what: (raised, becomes) for what, raised, _, becomes in tables()[0]}


def test_the_page_has_every_way_to_lose_a_slot() -> None:
    assert tables()[1] == [[loss.value, f"`{kind.__name__}`"] for loss, kind in WAYS.items()]
    for kind in WAYS.values():
        assert not worth_another(kind("x"), acted=True), "whatever it was: the model may have had a hand in it"


def test_the_page_and_the_cases_are_the_same() -> None:
    said = {what: ("–" if one.raised is None else one.raised.__name__, one.outcome) for what, one in CASES.items()}
    assert rows() == said


async def rolled(case: Case) -> Transcript:
    sessions = case.sessions()
    shared = farm(sessions, lambda _: case.model(), infra_retries=1, verification="sealed" if case.sealed else "live")
    rollout = Rollout(shared, case.hooks(), "it", "item", retries_together=case.together)
    transcript = await rollout.run("t")
    assert sessions.leased == 0
    return transcript


@pytest.mark.parametrize("what", CASES)
async def test_what_becomes_of_a_rollout(what: str) -> None:
    case = CASES[what]
    transcript = await rolled(case)
    seen = (transcript.attempt, transcript.score, transcript.finish_reason == "slot_destroyed")
    if case.outcome == AGAIN:
        assert seen == (2, None, False)  # the second attempt meets the same
    elif case.outcome == NO_SCORE:
        assert seen == (1, None, False)
    elif case.outcome == BY_HOOK:
        assert seen == (1, 0.0, True)
        assert transcript.fault == "policy"
    elif case.outcome == "the verifier's to judge":
        assert seen == (1, 0.0, False)
    else:
        assert seen == (1, 1.0, False)
        assert transcript.fault == "none"
    if case.raised is None:
        assert transcript.error == ""
    elif what != "the slot is destroyed during preparation":  # which is ours, and so has another name
        assert transcript.error.startswith(f"{case.raised.__name__}: ")


def test_every_fault_of_ours_has_been_thought_of() -> None:
    """A new class is retried unless it is named here: decide which it should be."""
    ours = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, InfraError)}
    again = {kind.__name__ for kind in ours if worth_another(kind("x"), acted=True)}
    assert again == {
        "SandboxUnavailableError", "SelfTestError", "StartTimeoutError", "MachineFullError", "JobOwnedError",
        "AcquireTimeoutError", "ContainerLostError", "ConnectionLostError", "CallLostError",
        "ModelServerError", "PoolClosedError", "LeaseReclaimedError", "FarmUnreachableError", "FencedError",
        "TooManyRequestsError", "ImageUnavailableError",
    }  # fmt: skip
    assert ours - DOUBTFUL == {kind for kind in ours if kind.__name__ in again}
    assert all(worth_another(kind("x"), acted=False) for kind in ours)


def calls(_: str) -> StubModel:
    return StubModel(CALL, saying("done"))


async def test_a_group_has_so_many_new_attempts_together() -> None:
    sessions = failing(LOST)()
    rollout = Rollout(farm(sessions, calls, infra_retries=2), StubHooks(), "it", "i", retries_together=3)
    transcripts = await asyncio.gather(*(rollout.run(f"t-{n}") for n in range(4)))
    assert sum(transcript.attempt - 1 for transcript in transcripts) == 3
    waiting = Refusing()
    patient = Rollout(farm(waiting, infra_retries=2), StubHooks(), "it", "i", retries_together=0)
    assert (await patient.run("t")).attempt == 3, "before the model has acted nothing is counted"


async def test_a_slot_that_the_farm_takes_back_costs_no_attempt() -> None:
    taken = failing(LeaseReclaimedError("taken back"))()
    rollout = Rollout(farm(taken, calls, infra_retries=0), StubHooks(), "it", "i", retries_together=0)
    transcript = await rollout.run("t")
    assert transcript.attempt == 1 + MOST_RECLAIMS
    assert transcript.score is None


async def test_a_destroyed_slot_is_scored_as_the_environment_says() -> None:
    class Lenient(StubHooks):
        given: Any = None

        async def score_destroyed_slot(self, item: Any, agent_result: Any, **more: Any) -> Any:
            self.given = (item, [step.index for step in agent_result.steps], more)
            return 0.25

    hooks = Lenient()
    transcript = await Rollout(farm(failing(DESTROYED)(), calls), hooks, "it", "i").run("t")
    assert (transcript.score, transcript.fault, transcript.finish_reason) == (0.25, "policy", "slot_destroyed")
    assert hooks.given == ("it", [0], {"trajectory_id": "t", "workspace_meta": {"prepared": True}})
    (call,) = transcript.steps[0].tool_calls
    assert call.result is not None
    assert (call.result.fault, call.result.error) == ("policy", "slot_destroyed")

    class Silent(StubHooks):
        def score_destroyed_slot(self, *_: Any, **__: Any) -> Any:
            return None

    transcript = await Rollout(farm(failing(DESTROYED)(), calls), Silent(), "it", "i").run("t")
    assert (transcript.score, transcript.fault, transcript.attempt) == (None, "policy", 1)


async def test_the_tokens_of_a_rollout_that_ends_half_way_are_kept() -> None:
    class Counting(StubModel):
        def sequences(self) -> list[TokenSequence]:
            return [TokenSequence([1, 2], [-100, 2], [1.0, -0.5])]

    transcript = await Rollout(farm(failing(DESTROYED)(), lambda _: Counting(CALL)), StubHooks(), "it", "i").run("t")
    assert [len(sequence.tokens) for sequence in transcript.token_sequences] == [2]


async def test_a_server_that_says_no_to_its_client_is_not_the_model_s_doing() -> None:
    async def chat(**_: Any) -> Any:
        raise Refused(404)

    with pytest.raises(ModelServerError) as caught:
        await request_completion(chat, 5, {}, turns=3)
    assert type(caught.value) is ModelServerError
