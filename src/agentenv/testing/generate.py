"""The token interface of the scripted policy: ``/generate`` of vLLM (atropos' server) and of SGLang.

The policy's replies are written in a parser's format, turned into tokens by a tokenizer, and given invented
logprobs, always the same for the same token at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.agent.models.chat_template import ChatTokenizer
from agentenv.agent.parsers import ParsedCall, ToolCallParser, parser_named
from agentenv.testing.script import Failure, Reply, Turn

TURN_MARK = "<|start|>assistant"
"""Beginning of an assistant's turn in the small tokenizer's template."""


@dataclass(frozen=True)
class AskedFor:
    """A request: the server's protocol, the prompt's tokens, the longest answer."""

    protocol: Literal["vllm", "sglang"]
    prompt: list[int]
    max_tokens: int


def read_request(body: Any) -> AskedFor:
    """Parse a request. Raises: ValueError, KeyError, TypeError, AttributeError when it is invalid."""
    if "input_ids" in body:
        prompt, most = body["input_ids"], body["sampling_params"].get("max_new_tokens", 128)
        return AskedFor("sglang", _checked(prompt), int(most))
    if {"messages", "input_ids", "extra_body", "user"} & body.keys():
        raise ValueError("an argument that vLLM does not know")
    return AskedFor("vllm", _checked(body["prompt"]["prompt_token_ids"]), int(body.get("max_tokens", 16)))


def _checked(prompt: Any) -> list[int]:
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise TypeError("the prompt must be a list of token ids")
    return prompt


@dataclass(frozen=True)
class Said:
    """One answer: its request, the tokens and logprobs, their text."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    turn: Turn


class TokenSpeaker:
    """Turns a script's replies into tokens. ``said`` has every answer, for use in tests.

    ``parser``: format in which calls are written; ``turn_mark``: beginning of an assistant's turn in the
    tokenizer's template, used to count turns; ``context_tokens``: longer prompts are refused; ``remember=False``:
    ``said`` stays empty, for long runs whose requests name their trajectories.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        parser: str = "hermes",
        *,
        turn_mark: str = TURN_MARK,
        context_tokens: int = 1_000_000,
        remember: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser: ToolCallParser = parser_named(parser)
        self._turn_mark = turn_mark
        self._remember = remember
        self.context_tokens = context_tokens
        self.said: list[Said] = []

    def too_long(self, asked: AskedFor) -> Failure | None:
        """SGLang's message for a prompt longer than its context."""
        if len(asked.prompt) < self.context_tokens:
            return None
        length = f"The input ({len(asked.prompt)} tokens) is longer than the model's context length"
        return Failure(400, f"{length} ({self.context_tokens} tokens).")

    def parse_prompt(self, prompt: list[int]) -> tuple[str, int]:
        """Return (the prompt's text, the number of the policy's turns in it)."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, max(0, text.count(self._turn_mark) - 1)

    def member_of(self, prompt: list[int]) -> int | None:
        """The member whose conversation continues with this prompt, if it is known."""
        known = [said for said in self.said if prompt[: len(said.prompt)] == said.prompt]
        goes_on = [said for said in known if prompt[len(said.prompt) :][: len(said.tokens)] == said.tokens]
        return goes_on[-1].turn.member if goes_on else None

    def written(self, reply: Reply) -> str:
        """A reply as the policy writes it, without the end-of-turn mark."""
        calls = [_parsed(call.name, call.arguments) for call in reply.calls]
        return "\n".join(filter(None, (reply.text, self._parser.written(calls) if calls else "")))

    def answer(self, reply: Reply, turn: Turn, asked: AskedFor) -> dict[str, Any]:
        """The answer in the protocol of the request, cut to the requested length."""
        finish_reason = reply.finish_reason or "stop"
        text = self.written(reply) + (str(self._tokenizer.eos_token) if finish_reason == "stop" else "")
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False))
        if len(tokens) > asked.max_tokens:
            tokens, finish_reason = tokens[: asked.max_tokens], "length"
        logprobs = [logprob_of(token, place) for place, token in enumerate(tokens)]
        kept = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        said = Said(asked.prompt, tokens, logprobs, kept, finish_reason, turn)
        if self._remember:
            self.said.append(said)
        return _vllm(said) if asked.protocol == "vllm" else _sglang(said)


def logprob_of(token: int, place: int) -> float:
    """An invented logprob, different for neighbours."""
    return -(1 + (token * 31 + place * 17) % 997) / 128


def _parsed(name: str, arguments: Mapping[str, Any] | str) -> ParsedCall:
    return ParsedCall(name, arguments if isinstance(arguments, str) else dict(arguments))


def _vllm(said: Said) -> dict[str, Any]:
    pairs = zip(said.tokens, said.logprobs, strict=True)
    return {
        "text": [said.text],
        "logprobs": [[[{str(token): logprob}] for token, logprob in pairs]],
        "finish_reasons": [said.finish_reason],
    }


def _sglang(said: Said) -> dict[str, Any]:
    pairs = zip(said.tokens, said.logprobs, strict=True)
    return {
        "text": said.text,
        "meta_info": {
            "output_token_logprobs": [[logprob, token, None] for token, logprob in pairs],
            "finish_reason": {"type": said.finish_reason},
        },
    }
