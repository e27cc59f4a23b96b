"""Which conversation a request continues.

Programs do not send back what they were sent: they write arguments anew, strip white space, split an answer into items.
So messages are compared by meaning (:func:`agentenv.agent.assistant_messages.meaning`), and the longest beginning that
is known wins:

* It ends with the last answer of a conversation: the conversation goes on.
* It ends with an earlier answer (a sub-agent with the same beginning, a second try, an output that was changed):
  another conversation begins behind that answer. With a model that keeps tokens it begins with the same tokens, which
  are not trained there.
* No answer is in it (compaction, another system prompt, other tools, a title): another conversation begins.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from agentenv.agent.assistant_messages import LONG_HISTORY, Meanings, meaning
from agentenv.agent.protocols import Message, Model, ToolDefinition, opened
from agentenv.agent.token_sequences import TokenSequence, sequences_of
from agentenv.gateway.canonical import ModelRequest


class TooManyConversationsError(Exception):
    """No further conversation may begin."""


@runtime_checkable
class ForkableModel(Protocol):
    """A model that can go on behind an earlier answer of its own."""

    def fork(self, turn: int) -> Model:
        """Another model, to be entered, that goes on behind answer ``turn`` (0: the first)."""


@dataclass(eq=False)
class Conversation:
    """One line of turns, of one model. ``behind`` is the turn of the rollout after whose answer it began with the same
    messages; None: it began with messages of its own. ``messages`` end with its last answer, as its model has it, and
    ``turns`` are its own turns, numbered through the rollout."""

    index: int
    model: Model
    tools: list[str]
    behind: int | None = None
    messages: list[Message] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    end: _Answer | None = None
    """The last answer; None while there is none."""
    busy: bool = False
    """Whether a turn of it is being generated."""

    def sequences(self) -> list[TokenSequence]:
        """Its model's, each named by the turn of the rollout with whose prompt it begins."""
        before = 0 if self.end is None else self.end.of_model + 1 - len(self.turns)
        found = [one for one in sequences_of(self.model) if one.trained]
        return [replace(one, first_step=self.turns[max(0, one.first_step - before)]) for one in found]


@dataclass(frozen=True, eq=False)
class _Answer:
    """An answer that requests may continue: ``turn`` of the rollout, which is turn ``of_model`` of its model."""

    conversation: Conversation
    turn: int
    of_model: int
    messages: list[Message]


@dataclass(eq=False)
class Place:
    """Where a turn belongs. ``messages`` are the request's, with the answers in them as the model has them; ``after``
    is the answer that it continues, by its turn."""

    conversation: Conversation
    messages: list[Message]
    new: list[Message]
    """What the request adds to what it continues."""
    after: int | None
    _of_model: int
    _name: bytes
    _known: defaultdict[bytes, list[_Answer]]

    def answered(self, turn: int, kept: Message, shown: Message) -> None:
        """The turn has this answer, as the model and as the program has it."""
        one = self.conversation
        one.messages = [*self.messages, kept]
        one.turns.append(turn)
        one.end = _Answer(one, turn, self._of_model, one.messages)
        self._known[_digest(self._name, meaning(shown))].append(one.end)


class Conversations:
    """Those of one rollout, at most ``most``. ``model_for`` makes a model for each. A context manager, whose end is
    that of their models."""

    def __init__(self, model_for: Callable[[], Model], most: int) -> None:
        self.all: list[Conversation] = []
        self._model_for = model_for
        self._most = most
        self._known: defaultdict[bytes, list[_Answer]] = defaultdict(list)
        self._names = _Names()
        self._naming = asyncio.Lock()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def place_of(self, request: ModelRequest) -> AsyncIterator[Place]:
        """The place of a request's turn, which no other gets while the block runs. Raises: TooManyConversationsError,
        and what the model raises when it is opened."""
        names = await self._named(request)
        answers = next((found for name in reversed(names) if (found := self._known.get(name))), [])
        answer = next((one for one in answers if _goes_on(one)), answers[0] if answers else None)
        if answer is not None and _goes_on(answer):
            conversation, of_model = answer.conversation, answer.of_model + 1
            conversation.busy = True  # before anything else can run: equal requests may come at once
        else:
            conversation, of_model = await self._begun(request, answer)
        before = [] if answer is None else answer.messages
        new = list(request.messages[len(before) :])
        after = None if answer is None else answer.turn
        try:
            yield Place(conversation, [*before, *new], new, after, of_model, names[-1], self._known)
        finally:
            conversation.busy = False

    async def _named(self, request: ModelRequest) -> list[bytes]:
        """The names of its beginnings. A long history has them made in a thread: other rollouts go on meanwhile."""
        async with self._naming:
            if len(request.messages) > LONG_HISTORY:
                return await asyncio.to_thread(self._names.of, request)
            return self._names.of(request)

    async def _begun(self, request: ModelRequest, answer: _Answer | None) -> tuple[Conversation, int]:
        """Another conversation, and the number of its model's next turn."""
        if len(self.all) >= self._most:
            raise TooManyConversationsError(f"there are {self._most} conversations already")
        tools = [tool["function"]["name"] for tool in request.tools]
        of_model = 0
        if answer is None or not isinstance(answer.conversation.model, ForkableModel):
            model = self._model_for()
        else:
            model, of_model = answer.conversation.model.fork(answer.of_model), answer.of_model + 1
        behind = None if answer is None else answer.turn
        conversation = Conversation(len(self.all), model, tools, behind, busy=True)
        self.all.append(conversation)
        conversation.model = await self._stack.enter_async_context(opened(model))
        return conversation, of_model


def _goes_on(answer: _Answer) -> bool:
    """Whether nothing has continued it yet."""
    return answer.conversation.end is answer and not answer.conversation.busy


class _Names:
    """Names of the beginnings of requests: equal if the beginnings mean the same and have the same tools."""

    def __init__(self) -> None:
        self._meanings = Meanings()
        self._tools: tuple[list[ToolDefinition], bytes] = ([], _digest(b"", "[]"))

    def of(self, request: ModelRequest) -> list[bytes]:
        """Of every beginning, from none of its messages to all of them."""
        if request.tools != self._tools[0]:
            self._tools = request.tools, _digest(b"", json.dumps(request.tools, sort_keys=True))
        names = [self._tools[1]]
        for message in request.messages:
            names.append(_digest(names[-1], self._meanings.of(message)))
        return names


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def main_of(conversations: Sequence[Conversation]) -> Conversation | None:
    """The one that is taken for the rollout's: of those that were offered tools the one with the most turns, the first
    of them. Titles and summaries are asked for without tools."""
    answered = [one for one in conversations if one.turns]
    return max(answered, key=lambda one: (bool(one.tools), len(one.turns), -one.index), default=None)
