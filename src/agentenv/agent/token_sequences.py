"""Tokens that a managed server keeps of a conversation: ids, masks for the policy's own tokens, logprobs.

Conventions of atropos: for the policy's own tokens ``masks`` is the token and ``logprobs`` the server's value; for
all others ``masks`` is -100 and ``logprobs`` 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentenv.errors import ModelServerError

IGNORED = -100
NO_LOGPROB = 1.0
ROUNDING = 1e-4
"""How far above zero a logprob may be through rounding."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to train on. All three lists have the same length. ``first_step`` is the model turn whose prompt
    begins the sequence."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    first_step: int = 0

    @property
    def trained(self) -> int:
        """Number of tokens that are the policy's."""
        return len(self.masks) - self.masks.count(IGNORED)  # counted with every turn


@runtime_checkable
class TokenModel(Protocol):
    """A model that keeps the tokens of its conversation."""

    def sequences(self) -> list[TokenSequence]:
        """All sequences, in the order they began."""


def sequences_of(model: object) -> list[TokenSequence]:
    """A model's sequences; empty for a model without tokens."""
    return model.sequences() if isinstance(model, TokenModel) else []


def sequence_of(node: Any, first_step: int = 0, known: TokenSequence | None = None) -> TokenSequence:
    """A managed server's node, checked token by token; it must continue where ``known`` ended.

    Raises: ModelServerError when its parts are inconsistent, when a logprob is missing (atropos pads with 1.0) or
    impossible, and for placeholders (atropos' dummy server): such a sequence would train the policy on noise.
    """
    if (getattr(node, "metadata", None) or {}).get("dummy_tokens"):
        raise ModelServerError(
            "the managed server gives placeholder tokens, which must never be trained on",
            next_step="use server_type vllm or sglang, or tool calls of an openai server",
        )
    tokens, masks, logprobs = list(node.tokens), list(node.masked_tokens), list(node.logprobs)
    if not len(tokens) == len(masks) == len(logprobs):
        raise ModelServerError(f"{len(tokens)} tokens, {len(masks)} masks and {len(logprobs)} logprobs differ")
    begins = len(known.tokens) if known else 0
    if known and (tokens[:begins], masks[:begins], logprobs[:begins]) != (known.tokens, known.masks, known.logprobs):
        raise ModelServerError("the managed server changed tokens of an earlier turn")
    for at in range(begins, len(tokens)):
        token, mask, logprob = tokens[at], masks[at], logprobs[at]
        if not _fits(token, mask, logprob):
            raise ModelServerError(f"token {at} is {token}, its mask {mask}, its logprob {logprob}: inconsistent")
    return TokenSequence(tokens, masks, logprobs, first_step)


def _fits(token: int, mask: int, logprob: float) -> bool:
    if mask == IGNORED:
        return logprob == NO_LOGPROB
    return mask == token and math.isfinite(logprob) and logprob <= ROUNDING
