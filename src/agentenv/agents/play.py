"""Runs an agent program in a slot, in the place of the agent loop: its requests to a model end here."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentenv.agent.jsonable import clean_text
from agentenv.agent.program import LAST_MESSAGE, STDOUT, AgentProgram
from agentenv.agent.protocols import Model
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.agent.token_sequences import TokenSequence
from agentenv.agent.transcript import ConversationRecord, FinishReason, ProgramRecord, text_of
from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.programs import StreamedProgram
from agentenv.deadlines import scaled
from agentenv.errors import (
    ConnectionLostError,
    InvalidArgumentsError,
    LeaseLostError,
    PolicyRefusalError,
    ServingEndedError,
    TaskError,
)
from agentenv.gateway.conversations import Conversation, Conversations, main_of
from agentenv.gateway.server import MODEL, Gateway
from agentenv.gateway.turns import ProgramTurns
from agentenv.sdk.serving import Served
from agentenv.sdk.slot_tools import SlotTools
from agentenv.sessions.head_tail import HeadTail

KEY: Final = "unused"
"""The API key of every program: who comes through a slot's port is that slot's."""
GOODBYE_S: Final = scaled(2.0)
"""For a program to end by itself when its rollout is over, so that its own records are written."""
MOST_DROPPED_KEPT: Final = 100
MOST_ANSWER_CHARS: Final = 1024 * 1024
_OPEN_S: Final = scaled(30.0)
_CONTEXT_TOKENS: Final = 128 * 1024
_TURN_TOKENS: Final = 8 * 1024
"""What a program that has to name its model's limits is given when the environment has none."""


@dataclass(frozen=True)
class ProgramSettings:
    """Settings of agent programs. ``timeout_s``: after which a program is killed and verified as it is (None: the
    agent's ``max_s``); ``reasoning``: programs are shown the model's; ``output_bytes``: kept of stdout and of stderr,
    the first and the last; ``max_conversations``: of one rollout, with sub-agents, titles and what follows a
    compaction; ``train``: which of them are trained on, all or only those that were offered tools."""

    timeout_s: float | None = None
    reasoning: bool = False
    output_bytes: int = 64 * 1024
    max_conversations: int = 16
    train: Literal["all", "main"] = "all"

    def trains(self, conversation: ConversationRecord) -> bool:
        """Whether a conversation is trained on."""
        return self.train == "all" or bool(conversation.tools)


class ProgramPlay:
    """One run of a program. ``result`` and :meth:`sequences` are up to date, also when :meth:`run` raises."""

    def __init__(
        self,
        program: AgentProgram,
        slot: SlotTools,
        model_for: Callable[[], Model],
        agent: AgentSettings,
        settings: ProgramSettings,
        timeline: Timeline,
        *,
        turn_headers: Callable[[int], dict[str, str]] | None = None,
    ) -> None:
        """``turn_headers``: as for the built-in loop."""
        self._program = program
        self._slot = slot
        self._agent = agent
        self._settings = settings
        self._timeline = timeline
        self._conversations = Conversations(model_for, settings.max_conversations)
        self._turns = ProgramTurns(
            self._conversations, agent, timeline, reasoning=settings.reasoning, turn_headers=turn_headers
        )
        self._record = ProgramRecord(name=program.title)
        self.result: AgentResult = self._turns.result
        self.result.program = self._record

    def sequences(self) -> list[TokenSequence]:
        """Those of the conversations that are trained on, in the order these began."""
        return [
            sequence
            for conversation, record in zip(self._answered(), self._record.conversations, strict=True)
            if record.trained
            for sequence in conversation.sequences()
        ]

    async def run(self, task: str) -> AgentResult:
        """Run it until it ends, or a limit is met.

        Raises: InfraError when the slot, the way to it or the model's server failed; SlotDestroyedError;
        TaskError when it ended without one turn; ConfigError when not even the first prompt fits the model.
        """
        began_s = self._timeline.now()
        try:
            async with self._conversations:
                try:
                    reason = await self._served(task)
                finally:
                    self._describe()
        finally:
            self._record.duration_s = self._timeline.now() - began_s
        self.result.finish_reason = reason
        return self.result

    async def _served(self, task: str) -> FinishReason:
        async with self._gateway() as served:
            program = self._program.filled(self._known(served, task))
            for path, content in {**program.plain_files, **program.files}.items():
                await self._written(path, content, program)
            ended = await self._ran(program, served)
            if self._turns.failure is not None:
                raise self._turns.failure
            if not self.result.steps:
                raise self._nothing_asked(ended)
            self.result.final_response = await self._answer(program)
            return ended

    @asynccontextmanager
    async def _gateway(self) -> AsyncIterator[Served]:
        async with AsyncExitStack() as stack:
            application = Gateway(self._turns).application()
            try:
                served = await stack.enter_async_context(self._slot.serve(application, timeout_s=_OPEN_S))
            except TimeoutError as error:
                raise ConnectionLostError(f"no port was opened in the slot within {_OPEN_S:g} s") from error
            yield served

    async def _ran(self, program: AgentProgram, served: Served) -> FinishReason:
        """How it ended. Raises what ended the slot, or the way to it."""
        limit_s = program.timeout_s or self._settings.timeout_s or self._agent.max_s
        stdout, stderr = (HeadTail(self._settings.output_bytes) for _ in range(2))
        try:
            started = await self._slot.start(
                program.argv, cwd=program.cwd, env=program.env, user=program.user, output="stream"
            )
        except InvalidArgumentsError as error:
            raise TaskError(f"{program.title} cannot be started: {error}") from error
        async with started:
            reading = [
                asyncio.create_task(_kept(stream, kept))
                for stream, kept in ((started.stdout, stdout), (started.stderr, stderr))
            ]
            try:
                await started.close_stdin()
                return await self._outcome(started, served, limit_s)
            finally:
                await asyncio.wait(reading, timeout=GOODBYE_S if started.exit_code is not None else 0)
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)
                self._keep_output(started.exit_code, stdout, stderr)

    async def _outcome(self, started: StreamedProgram, served: Served, limit_s: float | None) -> FinishReason:
        ending = asyncio.create_task(started.wait())
        over = asyncio.create_task(self._turns.over.wait())
        lost = asyncio.create_task(served.wait())
        idle = asyncio.create_task(self._idle())
        waiting: set[asyncio.Task[Any]] = {ending, over, lost, idle}
        try:
            await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not ending.done():
                await asyncio.wait({ending}, timeout=GOODBYE_S)
            if lost.done() and not isinstance(lost.result(), ServingEndedError):
                await asyncio.wait({ending}, timeout=GOODBYE_S)
                if ending.done():
                    ending.result()  # the program is told more: that the slot was destroyed by what ran in it
                raise lost.result()
            if ending.done():
                code = ending.result()  # raises, if the slot was lost
                if self._turns.reason is None and self._turns.out_of_room:
                    return "context_overflow"  # whatever its code: some end with 0 then
                return self._turns.reason or ("stop" if code == 0 else "program_failed")
            if self._turns.reason is not None:
                return self._turns.reason
            if idle.done():
                raise idle.result()
            # What listened was killed by a process of the slot: the program has nobody to talk to any more.
            return "program_failed" if lost.done() else "max_time"
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _idle(self) -> LeaseLostError:
        """Wait until no turn has ended for ``max_idle_s``; returns what ends the rollout then."""
        limit_s = math.inf if self._agent.max_idle_s is None else self._agent.max_idle_s
        left_s = limit_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            last_s = self.result.steps[-1].model_ended_s if self.result.steps else -math.inf
            left_s = last_s + limit_s - self._timeline.now()
        return LeaseLostError(f"the slot was released after {limit_s:g} s without a turn")

    def _known(self, served: Served, task: str) -> Mapping[str, str]:
        context = self._agent.context_tokens or _CONTEXT_TOKENS
        turn = self._agent.max_tokens or min(_TURN_TOKENS, context // 2)
        return {
            "url": f"{served.url}/v1",
            "root": served.url,
            "key": KEY,
            "model": MODEL,
            "task": task,
            "task_json": json.dumps(task),
            "context_tokens": str(context),
            "turn_tokens": str(turn),
        }

    async def _written(self, path: str, content: str | bytes, program: AgentProgram) -> None:
        try:
            await self._slot.write_file(path, content, user=program.user)
        except (OSError, InvalidArgumentsError, PolicyRefusalError) as error:
            raise TaskError(f"the file {path} of {program.title} cannot be written: {error}") from error

    async def _answer(self, program: AgentProgram) -> str:
        if program.answer == STDOUT:
            return self._record.stdout
        if program.answer == LAST_MESSAGE:
            main = main_of(self._conversations.all)
            return "" if main is None else text_of(main.messages[-1].get("content"))
        try:
            written = await self._slot.read_file(program.answer, errors="replace", user=program.user)
        except (OSError, PolicyRefusalError):
            return ""  # the program has written none, or nothing that can be read
        return clean_text(written[:MOST_ANSWER_CHARS])

    def _nothing_asked(self, reason: FinishReason) -> TaskError:
        record = self._record
        killed = {"max_time": "was killed at its time limit", "program_failed": "cut its own way to its model"}
        ended = f"ended with {record.exit_code}"
        if record.exit_code is None:
            ended = killed.get(reason, f"was killed ({reason})")
        said = (record.stderr.strip() or record.stdout.strip())[-800:]
        refused = f"; refused: {self._turns.refused[0]}" if self._turns.refused else ""
        return TaskError(
            f"{record.name} {ended} before its first turn{refused}: {said or 'it printed nothing'}",
            next_step="run it by hand in such a slot (agentenv agents check), and see what it needs",
        )

    def _keep_output(self, exit_code: int | None, stdout: HeadTail, stderr: HeadTail) -> None:
        record = self._record
        record.exit_code = exit_code
        text, record.stdout_dropped_bytes = stdout.text()
        record.stdout = clean_text(text)
        text, record.stderr_dropped_bytes = stderr.text()
        record.stderr = clean_text(text)

    def _answered(self) -> list[Conversation]:
        return [one for one in self._conversations.all if one.turns]

    def _describe(self) -> None:
        """Record the conversations that had an answer, and number them anew in the steps. Called once, at the end."""
        turns, record, answered = self._turns, self._record, self._answered()
        main = main_of(answered)
        numbers = {one.index: number for number, one in enumerate(answered)}
        for step in turns.result.steps:
            step.conversation = numbers.get(step.conversation, 0)
        record.refused, record.overruled = turns.refused, list(turns.overruled)[:MOST_DROPPED_KEPT]
        record.dropped = dict(turns.dropped.most_common(MOST_DROPPED_KEPT))
        record.main = 0 if main is None else answered.index(main)
        record.conversations = [
            ConversationRecord(
                behind=one.behind, tools=one.tools, messages=[] if one is main else [dict(m) for m in one.messages]
            )
            for one in answered
        ]
        for each in record.conversations:
            each.trained = self._settings.trains(each)
        if main is not None:
            self.result.messages = list(main.messages)
            self.result.tools = main.tools


async def _kept(stream: ByteStream, kept: HeadTail) -> None:
    """Read all of it, so that the program never waits for who reads."""
    while piece := await stream.read(64 * 1024):
        kept.feed(piece)
