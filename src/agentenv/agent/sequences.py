"""Conversations as token sequences for a trainer.

A managed server gives exact tokens, masks and logprobs: :func:`exact_group` passes them on. An OpenAI-style server
gives no token ids, so :func:`scored_group` computes tokens afterwards with the tokenizer's chat template: good for
reading, wrong for training. Every mask is -100, every sequence has ``trainable: False`` and requests a zero
advantage, and there are no logprobs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from agentenv.agent.jsonable import jsonable
from agentenv.agent.protocols import Message
from agentenv.agent.transcript import Transcript

logger = logging.getLogger(__name__)

IGNORED = -100
NOT_TRAINABLE = {"trainable": False, "set_advantage_to_zero": True}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Token ids of a conversation."""


def for_trainer(messages: Sequence[Message]) -> list[Message]:
    """Messages as trainers and their web pages read them: each has text content, valid as JSON."""
    return [{**jsonable(message), "content": jsonable(message.get("content") or "")} for message in messages]


def _for_template(message: Message) -> Message:
    """Templates expect a call's arguments as an object; on the wire they are text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.loads(function["arguments"])}})
    return {**message, "tool_calls": calls}


def placeholder_tokens(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids for reading only; a single 0 if the tokenizer has no usable chat template."""
    try:
        conversation = [_for_template(message) for message in messages]
        tokens = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    except Exception as error:  # templates are programs written by users and may raise anything
        logger.warning("the chat template failed (%s: %s); the tokens are a placeholder", type(error).__name__, error)
        return [0]
    return [int(token) for token in tokens] or [0]


def exact_group(transcripts: Sequence[Transcript], *, include_messages: bool = True) -> dict[str, Any]:
    """The scored members' own tokens, masks and logprobs as an atropos ``ScoredDataGroup``.

    All sequences of a member are included with the member's score, so ``group_overrides`` gives the number of
    sequences; ``overrides`` identifies the trajectory and sequence of each.
    """
    entries = [
        (member, number, sequence)
        for member in transcripts
        if member.score is not None
        for number, sequence in enumerate(member.token_sequences)
    ]
    group = {
        "tokens": [sequence.tokens for _, _, sequence in entries],
        "masks": [sequence.masks for _, _, sequence in entries],
        "inference_logprobs": [sequence.logprobs for _, _, sequence in entries],
        "scores": [member.score for member, _, _ in entries],
        "advantages": None,
        "ref_logprobs": None,
        "group_overrides": {"group_size": len(entries)},
        "overrides": [
            {"trajectory": member.trajectory, "sequence": number, "sequences": len(member.token_sequences)}
            for member, number, _ in entries
        ],
        "images": None,
    }
    if include_messages:
        group["messages"] = [for_trainer(member.messages) for member, _, _ in entries]
    return group


def scored_group(
    tokenizer: Tokenizer, transcripts: Sequence[Transcript], *, include_messages: bool = True
) -> dict[str, Any]:
    """The scored members as an atropos ``ScoredDataGroup``; ``group_overrides`` gives their number."""
    members = [transcript for transcript in transcripts if transcript.score is not None]
    messages = [for_trainer(member.messages) for member in members]
    tokens = [placeholder_tokens(tokenizer, conversation) for conversation in messages]
    group = {
        "tokens": tokens,
        "masks": [[IGNORED] * len(sequence) for sequence in tokens],
        "scores": [member.score for member in members],
        "advantages": None,
        "ref_logprobs": None,
        "group_overrides": {"group_size": len(members), "trainable": False},
        "overrides": [dict(NOT_TRAINABLE) for _ in members],
        "images": None,
    }
    if include_messages:
        group["messages"] = messages
    return group
