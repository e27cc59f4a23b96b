"""What a trainer may rely on in every group, and what it may rely on besides when the model is the script. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentenv.agent.parsers import ParsedCall, parser_named
from agentenv.testing import Call, Reply, Turn
from agentenv.testing.generate import logprob_of
from examples.train_with_farm.policy import reply, right_answers

IGNORED: Final = -100
"""The mask of what the policy did not write."""
NO_LOGPROB: Final = 1.0
"""The logprob of what the policy did not write (a managed server's convention)."""
_END: Final = "<|end|>"
_NAME: Final = re.compile(r"(?P<item>.+)-(?P<draw>[0-9a-f]{8})-(?P<member>\d+)(-try\d+)?")
_MODEL_WRITES: Final = parser_named("hermes")

Group = Mapping[str, Any]
"""A group as ``/batch`` of run-api gives it."""


class WrongGroupError(Exception):
    """A group that must not be trained on."""


class Tokenizer(Protocol):
    """The part of a tokenizer that is used."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """The text of these tokens."""


@dataclass(frozen=True)
class Member:
    """One member's sequence, with what its name says."""

    item: str
    group: str
    member: int
    tokens: Sequence[int]
    masks: Sequence[int]
    logprobs: Sequence[float]
    score: float

    def turns(self) -> list[tuple[int, int]]:
        """Where the policy's turns begin and end."""
        inside = [mask != IGNORED for mask in self.masks]
        edges = [at for at, (before, now) in enumerate(zip([False, *inside], [*inside, False], strict=True))
                 if before != now]  # fmt: skip
        return list(zip(edges[::2], edges[1::2], strict=True))


class Checker:
    """Checks groups, one after the other, and counts them.

    ``tokenizer`` is for the groups of the scripted model, which are compared with the script token by token; None: any
    model's.
    """

    def __init__(self, group_size: int, tokenizer: Tokenizer | None = None) -> None:
        self._size = group_size
        self._tokenizer = tokenizer
        self._right = right_answers()
        self._seen: set[str] = set()
        self.groups: Counter[int] = Counter()
        """By the id that run-api gave their environment: an environment that started again has a new one."""
        self.sequences = self.trained_tokens = 0
        self.score_sum = 0.0

    def add(self, group: Group) -> None:
        """Check a group and count it. Raises: WrongGroupError, saying what is wrong."""
        sequences = checked(group, self._size)
        name = sequences[0].group
        _demand(name not in self._seen, f"group {name} came twice")
        if self._tokenizer is not None:
            for sequence in sequences:
                check_scripted(sequence, self._tokenizer, self._right)
        self._seen.add(name)
        self.groups[group["env_id"]] += 1
        self.sequences += len(sequences)
        self.trained_tokens += sum(end - begin for sequence in sequences for begin, end in sequence.turns())
        self.score_sum += sum(sequence.score for sequence in sequences)


def checked(group: Group, size: int) -> list[Member]:
    """The sequences of a group of any model. Raises: WrongGroupError."""
    lengths = {
        name: len(group[name] or ()) for name in ("tokens", "masks", "inference_logprobs", "scores", "overrides")
    }
    _demand(set(lengths.values()) == {size}, f"a group of {size} has {lengths}")
    said = (group["group_overrides"] or {}).get("group_size")
    _demand(said == size, f"a group of {size} says it has {said}")
    rows = zip(
        group["overrides"], group["tokens"], group["masks"], group["inference_logprobs"], group["scores"], strict=True
    )
    sequences = [_sequence(*row) for row in rows]
    names = {sequence.group for sequence in sequences}
    members = sorted(sequence.member for sequence in sequences)
    _demand(len(names) == 1, f"sequences of several groups in one: {sorted(names)}")
    _demand(members == list(range(size)), f"group {sequences[0].group} has the members {members}")
    for sequence in sequences:
        _check_numbers(sequence)
    return sequences


def _sequence(
    override: Mapping[str, Any], tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float], score: float
) -> Member:
    name = override["trajectory"]
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise WrongGroupError(f"{name!r} is not the name of a trajectory")
    _demand(override["sequences"] == 1, f"{name} has {override['sequences']} sequences, and its context was never cut")
    group = f"{parts['item']}-{parts['draw']}"
    return Member(parts["item"], group, int(parts["member"]), tokens, masks, logprobs, score)


def _check_numbers(sequence: Member) -> None:
    where = f"{sequence.group}-{sequence.member}"
    lengths = (len(sequence.tokens), len(sequence.masks), len(sequence.logprobs))
    _demand(len(set(lengths)) == 1, f"{where}: {lengths} tokens, masks and logprobs")
    rows = zip(sequence.tokens, sequence.masks, sequence.logprobs, strict=True)
    for place, (token, mask, logprob) in enumerate(rows):
        at = f"{where}, token {place}"
        _demand(mask in (IGNORED, token), f"{at}: the mask is {mask}, the token {token}")
        if mask == IGNORED:
            _demand(logprob == NO_LOGPROB, f"{at} is not the policy's and has the logprob {logprob}")
        else:
            _demand(math.isfinite(logprob) and logprob <= 0, f"{at}: the logprob is {logprob}")
    turns = sequence.turns()
    _demand(bool(turns) and turns[0][0] > 0, f"{where}: there is no prompt, or no turn of the policy")
    _demand(0 <= sequence.score <= 1, f"{where}: the score is {sequence.score}")


def check_scripted(sequence: Member, tokenizer: Tokenizer, right: Mapping[str, int]) -> None:
    """The policy's turns are those of the script, with their logprobs, and the score is what the answer deserves.

    Raises: WrongGroupError.
    """
    where = f"{sequence.group}-{sequence.member}"
    said = Reply()
    for step, (begin, end) in enumerate(sequence.turns()):
        before = tokenizer.decode(sequence.tokens[:begin], skip_special_tokens=False)
        said = reply(Turn("", sequence.member, step, [{"role": "user", "content": before}]))
        text = tokenizer.decode(sequence.tokens[begin:end], skip_special_tokens=False)
        _demand(text == _written(said), f"{where}, turn {step}: it says {text!r}, the script {_written(said)!r}")
        sampled = [logprob_of(token, place) for place, token in enumerate(sequence.tokens[begin:end])]
        _demand(list(sequence.logprobs[begin:end]) == sampled, f"{where}, turn {step}: other logprobs than sampled")
    _demand(not said.calls, f"{where} was scored before its answer")
    answered, deserved = said.text, str(right[sequence.item])
    score = float(answered == deserved)
    _demand(sequence.score == score, f"{where}: {answered!r} scored {sequence.score}, right is {deserved!r}")
    _demand(score == float(sequence.member % 4 < 2), f"{where}: {answered!r} is not what this member finds out")


def _written(said: Reply) -> str:
    calls = [ParsedCall(call.name, _arguments(call)) for call in said.calls]
    return "\n".join(filter(None, (said.text, _MODEL_WRITES.written(calls) if calls else ""))) + _END


def _arguments(call: Call) -> dict[str, Any]:
    assert isinstance(call.arguments, Mapping)
    return dict(call.arguments)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongGroupError(otherwise)
