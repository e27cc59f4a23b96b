"""One trajectory, from lease to score, retried on a new slot after an infrastructure failure.

:meth:`Rollout.run` never raises for a rollout's failure: it returns a transcript that records whose fault it was,
with ``score=None`` (except for a slot the policy destroyed, which the environment scores). Only cancellation
propagates, after the slot was released. What is retried: :mod:`agentenv.agent.culprit`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from agentenv.agent.culprit import before_the_model, unexpected, worth_another
from agentenv.agent.failure_log import FailureLog
from agentenv.agent.hook_slot_gate import HookSlotGate
from agentenv.agent.hooks import (
    Hooks,
    call_hook,
    call_hook_on_slot,
    checked_score,
    expected,
    finite,
    genuinely_cancelled,
)
from agentenv.agent.jsonable import clean_text, jsonable
from agentenv.agent.loop import AgentLoop
from agentenv.agent.preparation import Preparation, Preparations, fork_patience_s
from agentenv.agent.prepared import Key, PreparedState
from agentenv.agent.program import AgentProgram, ProgramRunner
from agentenv.agent.protocols import Handle, Model, Session, SessionOpener, ToolDefinition, opened
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline, totals
from agentenv.agent.tmux_recordings import last_recordings
from agentenv.agent.token_sequences import TokenSequence, sequences_of
from agentenv.agent.transcript import FinishReason, PhaseName, SequenceSummary, Transcript
from agentenv.backoff import pause_s
from agentenv.errors import (
    AcquireTimeoutError,
    AgentEnvError,
    CheckpointError,
    InfraError,
    LeaseReclaimedError,
    SlotDestroyedError,
    TaskError,
)
from agentenv.wire.roots import RootSpec

MAX_RETRY_DELAY_S = 30.0
MOST_RECLAIMS = 20
"""How often a rollout starts again because a farm took its slot back. That costs none of its attempts; but a run that
is reclaimed this often has no place on the farm."""


@dataclass(frozen=True)
class RolloutServices:
    """Services shared by all rollouts of an environment.

    ``slot_gate`` bounds how many rollouts hold or request a slot at once. A trajectory waits there without a
    deadline, so that ``acquire_timeout_s`` measures only the pool's health, not how long other rollouts take.
    """

    sessions: SessionOpener
    tools: tuple[ToolDefinition, ...]
    model_for: Callable[[str], Model]
    handle_for: Callable[[Session], Handle]
    slot_gate: HookSlotGate
    acquire_timeout_s: float | None = 30.0
    """None: as long as the pool finds right."""
    infra_retries: int = 2
    infra_retry_delay_s: float = 0.0
    """Pause, without a slot, before the second attempt; doubled before each further one, up to 30 s."""
    verification: Literal["live", "sealed"] = "live"
    failures: FailureLog = field(default_factory=FailureLog)
    root_of: Callable[[Any], Awaitable[RootSpec]] | None = None
    """Makes what ``task_image`` returned the root of a slot; the image is fetched if it is not there."""
    preparations: Preparations | None = None
    """Prepares once for all rollouts with the same key; None: every rollout prepares its own slot."""
    agent: AgentSettings = field(default_factory=AgentSettings)
    """For what the settings of a hook leave open."""
    turn_headers: Callable[[str, int], dict[str, str]] | None = None
    """HTTP headers of the request to the model for a turn (0 first) of an attempt, which is named as its slot is."""
    programs: ProgramRunner | None = None
    """Runs the agent programs of ``agent_program``."""
    continues: bool = False
    """Whether ``continue_task`` is called when the model has ended its turns."""


@dataclass
class Attempt:
    """State of one attempt; kept outside so that it can be read after a failure."""

    trajectory: str
    timeline: Timeline = field(default_factory=Timeline)
    agent: AgentResult = field(default_factory=lambda: AgentResult(messages=[]))
    workspace_meta: dict[str, Any] = field(default_factory=dict)
    verification: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    acted: bool = False
    """Whether the model has been queried."""
    failure: BaseException | None = None
    """The failure that ended the work on the slot, whatever the release of the slot raised in addition."""
    prepared: bool = False
    """Whether ``prepare`` has run in the slot, or in the one that it was forked from."""
    sequences: list[TokenSequence] = field(default_factory=list)
    last_recordings: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def working(self) -> Iterator[None]:
        """What fails in the block ended the work on the slot."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            self.failure = self.failure or error
            raise


class Rollout:
    """Runs trajectories of one item, which share ``retries_together``: how many attempts they may repeat together
    after the model has acted (None: no limit). Otherwise a policy that found a way to cause infrastructure failures
    would get every attempt in every member."""

    def __init__(
        self, farm: RolloutServices, hooks: Hooks, item: Any, item_id: str, *, retries_together: int | None = None
    ) -> None:
        self._farm = farm
        self._hooks = hooks
        self._item = item
        self._item_id = item_id
        self._retries_left = retries_together

    async def run(self, trajectory: str) -> Transcript:
        """One member of a group: at most ``1 + infra_retries`` attempts, each on a new slot. Attempts that end because
        a farm takes the slot back are not counted."""
        earlier: list[str] = []
        reclaims = 0
        while True:
            number = len(earlier) + 1
            attempt = Attempt(trajectory if number == 1 else f"{trajectory}-try{number}")
            error = await self._attempt(attempt)
            if isinstance(error, SlotDestroyedError):
                return self._transcript(attempt, trajectory, await self._destroyed(attempt, error), earlier)
            if error is None:
                return self._transcript(attempt, trajectory, None, earlier)
            if isinstance(error, LeaseReclaimedError):
                reclaims += 1
                again = reclaims <= MOST_RECLAIMS
            else:
                again = self._another(error, attempt, number - reclaims)
            if error.fault != "task":
                self._log_attempt(error, trajectory, number, again=again)
            if not again:
                return self._transcript(attempt, trajectory, error, earlier)
            earlier.append(_text_of(error))
            await asyncio.sleep(pause_s(self._farm.infra_retry_delay_s, MAX_RETRY_DELAY_S, number - reclaims))

    def _log_attempt(self, error: AgentEnvError, trajectory: str, number: int, *, again: bool) -> None:
        then = "a new attempt follows" if again else "not scored"
        text = f"attempt {number} failed, {then}: {_text_of(error)}"
        self._farm.failures.add(f"{then}: {_text_of(error)}", f"{trajectory}: {text}")

    def _another(self, error: AgentEnvError, attempt: Attempt, number: int) -> bool:
        """Whether to make another attempt; counts it for the group."""
        if number > self._farm.infra_retries or not worth_another(error, acted=attempt.acted):
            return False
        if attempt.acted and self._retries_left is not None:
            self._retries_left -= 1
            return self._retries_left >= 0
        return True

    async def _attempt(self, attempt: Attempt) -> AgentEnvError | None:
        """Return the attempt's failure, or None when it was scored."""
        try:
            await self._perform(attempt)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and genuinely_cancelled():
                raise
            if attempt.failure is None and attempt.score is not None:
                text = f"{attempt.trajectory}: the slot could not be released; the score counts: {_text_of(error)}"
                self._farm.failures.add(f"the slot could not be released: {_text_of(error)}", text)
                return None
            return self._failure(attempt, attempt.failure or error)
        return None

    def _failure(self, attempt: Attempt, error: BaseException) -> AgentEnvError:
        if not isinstance(error, AgentEnvError):
            self._farm.failures.unexpected(error, trajectory=attempt.trajectory)
            return unexpected(error)
        if isinstance(error, SlotDestroyedError) and not attempt.acted:
            return before_the_model(error)
        if error.fault == "task":
            self._farm.failures.hook_failed(error, item=self._item_id, trajectory=attempt.trajectory)
        return error

    async def _destroyed(self, attempt: Attempt, error: SlotDestroyedError) -> AgentEnvError:
        """Scored by the environment's hook: there is no slot left to verify on."""
        self._farm.failures.add(_text_of(error), f"{attempt.trajectory}: {_text_of(error)}")
        try:
            returned = await call_hook(
                "score_destroyed_slot",
                self._hooks.score_destroyed_slot,
                self._item,
                attempt.agent,
                trajectory_id=attempt.trajectory,
                workspace_meta=attempt.workspace_meta,
            )
            attempt.score = None if returned is None else finite("score_destroyed_slot", returned)
        except AgentEnvError as failure:
            self._farm.failures.hook_failed(failure, item=self._item_id, trajectory=attempt.trajectory)
            text = f"score_destroyed_slot: {_text_of(failure)}"
            return failure if isinstance(failure, TaskError) else TaskError(text)
        return error

    async def _perform(self, attempt: Attempt) -> None:
        hooks, item = self._hooks, self._item
        task = expected("build_task", await call_hook("build_task", hooks.build_task, item), str)
        settings = await call_hook("build_agent_config", hooks.build_agent_config, item)
        settings = expected("build_agent_config", settings, AgentSettings).completed(self._farm.agent)
        root = await self._root()
        async with AsyncExitStack() as stack:
            session = await self._slot(attempt, root, stack)
            with attempt.working():
                await self._set_up(attempt, session)
                await self._act(attempt, session, settings, task)
                attempt.last_recordings = await last_recordings(session, attempt.agent.steps)
                await self._verify(attempt, session)

    async def _act(self, attempt: Attempt, session: Session, settings: AgentSettings, task: str) -> None:
        program = await call_hook("agent_program", self._hooks.agent_program, self._item)
        if program is not None:
            await self._play(expected("agent_program", program, AgentProgram), attempt, session, settings, task)
            return
        async with opened(self._farm.model_for(attempt.trajectory)) as model:
            headers = self._farm.turn_headers
            of_turn = None if headers is None else partial(headers, attempt.trajectory)
            loop = AgentLoop(model, session, self._farm.tools, settings, attempt.timeline, of_turn)
            attempt.agent = loop.result
            attempt.acted = True
            try:
                await loop.run(loop.opening(task))
                while (more := await self._continued(attempt, session)) is not None:
                    await loop.go_on(*more)
            finally:
                # also for a rollout that ends half way, because it may be scored
                attempt.sequences = sequences_of(model)

    async def _play(
        self, program: AgentProgram, attempt: Attempt, session: Session, settings: AgentSettings, task: str
    ) -> None:
        """An agent program in the place of the loop."""
        assert self._farm.programs is not None
        handle, headers = self._farm.handle_for(session), self._farm.turn_headers
        of_turn = None if headers is None else partial(headers, attempt.trajectory)
        model_for = partial(self._farm.model_for, attempt.trajectory)
        run = self._farm.programs(program, handle, model_for, settings, attempt.timeline, of_turn)
        attempt.agent = run.result
        attempt.acted = True
        try:
            try:
                await run.run(task)
            except SlotDestroyedError:  # which is scored, too
                await self._choose_trained(run.result)
                raise
            await self._choose_trained(run.result)
        finally:
            attempt.sequences = run.sequences()
            await handle.cleanup()

    async def _choose_trained(self, result: AgentResult) -> None:
        """Ask the environment which conversations of a program are trained on."""
        assert result.program is not None
        for conversation in result.program.conversations:
            trains = await call_hook("trains_conversation", self._hooks.trains_conversation, conversation)
            conversation.trained = expected("trains_conversation", trains, bool)

    async def _continued(self, attempt: Attempt, session: Session) -> tuple[str, AgentSettings | None] | None:
        """A further task of the same conversation; None: the rollout has come to its end."""
        if not self._farm.continues:
            return None
        handle = self._farm.handle_for(session)
        with attempt.timeline.phase("verify", "between tasks"):
            returned = await call_hook_on_slot(
                handle,
                "continue_task",
                self._hooks.continue_task,
                self._item,
                trajectory_id=attempt.trajectory,
                exec_tool=handle,
                agent_result=attempt.agent,
                workspace_meta=attempt.workspace_meta,
            )
        if returned is None or isinstance(returned, str):
            return None if returned is None else (returned, None)
        text, settings = expected("continue_task", returned, tuple)
        settings = expected("continue_task", settings, AgentSettings).completed(self._farm.agent)
        return expected("continue_task", text, str), settings

    async def _root(self) -> RootSpec | None:
        """What the slot is made from; an image is fetched before the slot is requested."""
        image = await call_hook("task_image", self._hooks.task_image, self._item)
        if image is None:
            return None
        assert self._farm.root_of is not None
        return await self._farm.root_of(image)

    async def _slot(self, attempt: Attempt, root: RootSpec | None, stack: AsyncExitStack) -> Session:
        """A leased slot, within ``stack``. With preparations it is prepared, unless that cannot be shared."""
        preparations, key = self._farm.preparations, await self._key(root)
        if preparations is None or key is None:
            return await stack.enter_async_context(self._session(attempt, root))
        full: list[PreparedState] = []
        while True:
            with attempt.timeline.phase("prepare", "waiting"):
                begun = await preparations.begin(key, full)
            if begun is None:
                return await stack.enter_async_context(self._session(attempt, root))
            if isinstance(begun, Preparation):
                with begun:
                    session = await stack.enter_async_context(self._session(attempt, root))
                    if (state := preparations.here(key, session, root)) is None:
                        await self._prepare_for_all(attempt, session, begun)
                    else:  # its container was full a moment ago
                        stack.enter_context(preparations.standing_on(state))
                        await self._restore(attempt, session, state, preparations)
                        begun.found()
                return session
            if (session_there := await self._fork(attempt, begun, preparations, stack)) is not None:
                return session_there
            full.append(begun)

    async def _key(self, root: RootSpec | None) -> Key | None:
        if self._farm.preparations is None:
            return None
        name = await call_hook("prepare_key", self._hooks.prepare_key, self._item)
        if name is None:
            return None
        return expected("prepare_key", name, str), json.dumps(root.to_dict(), sort_keys=True) if root else ""

    async def _prepare_for_all(self, attempt: Attempt, session: Session, preparation: Preparation) -> None:
        timeline = attempt.timeline
        with attempt.working(), timeline.phase("prepare", "for all"):
            began_s = timeline.now()
            await self._prepare(attempt, session)
            await preparation.keep(session, deepcopy(attempt.workspace_meta), timeline.now() - began_s)

    async def _restore(
        self, attempt: Attempt, session: Session, state: PreparedState, preparations: Preparations
    ) -> None:
        with attempt.working(), attempt.timeline.phase("prepare", "restore"):
            try:
                await session.restore(state.checkpoint)
            except InfraError:  # a new attempt is not to meet it again
                preparations.lost(state)
                raise
        self._has_begun(attempt, state, preparations)

    def _has_begun(self, attempt: Attempt, state: PreparedState, preparations: Preparations) -> None:
        preparations.reused()
        attempt.workspace_meta, attempt.prepared = deepcopy(dict(state.meta)), True

    async def _fork(
        self, attempt: Attempt, state: PreparedState, preparations: Preparations, stack: AsyncExitStack
    ) -> Session | None:
        """A slot that begins from the state; None if its container has none in time, or the state is lost."""
        patience_s = fork_patience_s(state, self._farm.acquire_timeout_s)
        async with AsyncExitStack() as trial:
            trial.enter_context(preparations.standing_on(state))
            opened_there = self._session(attempt, state.checkpoint.root, state.checkpoint.container, patience_s)
            try:
                session = await trial.enter_async_context(opened_there)
            except AcquireTimeoutError:
                return None
            except CheckpointError:
                preparations.lost(state)
                return None
            except InfraError:  # a new attempt is not to meet it again
                preparations.lost(state)
                raise
            stack.push_async_exit(trial.pop_all())
        self._has_begun(attempt, state, preparations)
        return session

    @asynccontextmanager
    async def _session(
        self, attempt: Attempt, root: RootSpec | None, container: str = "", patience_s: float | None = None
    ) -> AsyncIterator[Session]:
        """A leased slot; waiting for it and releasing it are separate phases. With ``container`` it is one of that."""
        timeline = attempt.timeline
        kind: PhaseName = "slot_wait"
        patience_s = patience_s or self._farm.acquire_timeout_s
        began_s = timeline.now()
        try:
            async with (
                self._farm.slot_gate.enter(),
                self._farm.sessions.open(
                    attempt.trajectory, acquire_timeout_s=patience_s, root=root, container=container
                ) as session,
            ):
                timeline.record("slot_wait", began_s)
                try:
                    yield session
                finally:
                    kind, began_s = "release", timeline.now()
        finally:
            timeline.record(kind, began_s)

    async def _prepare(self, attempt: Attempt, session: Session) -> None:
        await self._call_on_slot(attempt, session, "prepare", self._hooks.prepare)
        attempt.prepared = True

    async def _set_up(self, attempt: Attempt, session: Session) -> None:
        with attempt.timeline.phase("prepare"):
            if not attempt.prepared:
                await self._prepare(attempt, session)
            hook = self._hooks.setup_trajectory_workspace
            await self._call_on_slot(
                attempt, session, "setup_trajectory_workspace", hook, trajectory_id=attempt.trajectory
            )

    async def _call_on_slot(
        self, attempt: Attempt, session: Session, name: str, hook: Callable[..., Any], **more: Any
    ) -> None:
        """A hook that prepares; what it returns is added to the rollout's ``workspace_meta``."""
        handle = self._farm.handle_for(session)
        meta = await call_hook_on_slot(handle, name, hook, self._item, exec_tool=handle, **more)
        attempt.workspace_meta |= expected(name, {} if meta is None else meta, dict)

    async def _verify(self, attempt: Attempt, session: Session) -> None:
        with attempt.timeline.phase("verify"):
            if self._farm.verification == "sealed":
                await session.seal()
            handle = self._farm.handle_for(session)
            returned = await call_hook_on_slot(
                handle,
                "verify_and_score_trajectory",
                self._hooks.verify_and_score_trajectory,
                self._item,
                attempt.agent.final_response,
                trajectory_id=attempt.trajectory,
                exec_tool=handle,
                agent_result=attempt.agent,
                workspace_meta=attempt.workspace_meta,
            )
        attempt.score, attempt.verification = checked_score("verify_and_score_trajectory", returned)

    def _transcript(
        self, attempt: Attempt, trajectory: str, error: AgentEnvError | None, earlier: list[str]
    ) -> Transcript:
        agent, timeline = attempt.agent, attempt.timeline
        return Transcript(
            trajectory=trajectory,
            item_id=self._item_id,
            attempt=len(earlier) + 1,
            began_unix_s=timeline.began_unix_s,
            messages=agent.messages,
            steps=agent.steps,
            tools=agent.tools,
            phases=timeline.phases,
            final_response=agent.final_response,
            finish_reason=_finish_reason(error, agent),
            score=attempt.score if error is None or isinstance(error, SlotDestroyedError) else None,
            fault=error.fault if error else "none",
            error=_text_of(error) if error else "",
            doubtful=isinstance(error, InfraError) and not worth_another(error, acted=attempt.acted),
            earlier_attempts=earlier,
            workspace_meta=jsonable(attempt.workspace_meta),
            verification=jsonable(attempt.verification),
            model_faults=agent.model_faults,
            program=agent.program,
            shortenings=agent.shortenings,
            last_recordings=attempt.last_recordings,
            sequences=[
                SequenceSummary(first_step=one.first_step, tokens=len(one.tokens), trained=one.trained)
                for one in attempt.sequences
            ],
            token_sequences=attempt.sequences,
            totals=totals(timeline.phases, agent.steps, timeline.now()),
        )


def _text_of(error: BaseException) -> str:
    return clean_text(f"{type(error).__name__}: {error}")


def _finish_reason(error: AgentEnvError | None, agent: AgentResult) -> FinishReason:
    if error is None:
        return agent.finish_reason
    return "slot_destroyed" if isinstance(error, SlotDestroyedError) else "fault"
