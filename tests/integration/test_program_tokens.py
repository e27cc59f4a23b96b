"""What a policy samples is trained on as it was sampled, however it wrote it and in whatever form a program sends it
back. For each way of writing but the first, a gateway without memory, which renders and tokenises what comes back,
would train on other tokens. The tokenizer's merges are learned here by Hugging Face's library, so that a text has more
than one tokenization.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentenv.testing import Call, Reply, TokenSpeaker, build_tokenizer
from tests.integration.test_agent_programs import check_sampled, playing
from tests.integration.test_env_managed import records
from tests.small_agent import BASH
from tests.unit.env import env_stubs
from tests.unit.env.managed_stubs import managed

COMMAND = {"command": "ls -la /workspace; python3 -c 'print(1, 2)' # look"}
CANONICAL = Reply("I look at the files.", (Call("bash", COMMAND),))


def calling(text: str, written: str) -> Reply:
    """A call in the policy's own spelling."""
    return Reply(f"{text}<tool_call>\n{written}\n</tool_call>")


SPACED = json.dumps({"name": "bash", "arguments": COMMAND}, separators=(" ,", " : ")).replace("/", "\\/")
WAYS: dict[str, tuple[list[Reply], bool]] = {
    "canonical": ([CANONICAL], False),
    "its own JSON": ([calling("I look.\n", SPACED)], False),
    "its own tokens": ([CANONICAL], True),
    "reasoning": ([Reply("<think>\nLook first.\n</think>\n\nI look.", CANONICAL.calls)], False),
    "space before a call": ([calling("I look.  \n", json.dumps({"name": "bash", "arguments": COMMAND}))], False),
}


def learned(directory: Path, **_: Any) -> Path:
    """The tests' tokenizer, with merges."""
    texts = [Path(str(module.__file__)).read_text() for module in (json, random)]
    return build_tokenizer(directory, merges_from=texts, vocabulary_size=1500)


class Sloppy:
    """A tokenizer that cuts words where its model would not."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token = tokenizer.eos_token
        self.decode = tokenizer.decode

    def encode(self, text: str, **options: Any) -> list[int]:
        found = []
        for n, token in enumerate(self._tokenizer.encode(text, **options)):
            piece = self._tokenizer.decode([token])
            cut = len(piece) > 2 and piece.isalpha() and n % 3 == 0
            parts = (piece[:1], piece[1:]) if cut else ()
            found += [each for part in parts for each in self._tokenizer.encode(part, **options)] or [token]
        return found


class Voice(TokenSpeaker):
    """Speaks with a tokenizer of its own, and reads with the usual one."""

    def speak_with(self, tokenizer: Any) -> None:
        self._spoken = tokenizer

    def answer(self, reply: Reply, turn: Any, asked: Any) -> dict[str, Any]:
        read, self._tokenizer = self._tokenizer, self._spoken
        try:
            return super().answer(reply, turn, asked)
        finally:
            self._tokenizer = read


@pytest.mark.parametrize("behaviour", ["plain", "rewriting"])
@pytest.mark.parametrize("way", WAYS)
async def test_each_way_of_writing_is_one_exact_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, behaviour: str
) -> None:
    monkeypatch.setattr(env_stubs, "build_tokenizer", learned)
    monkeypatch.setattr("tests.unit.env.managed_stubs.build_tokenizer", learned)
    monkeypatch.setattr("tests.unit.env.managed_stubs.TokenSpeaker", Voice)
    replies, sloppy = WAYS[way]
    script = {"*": [[*replies, *replies, Reply("done")]]}
    async with managed(playing(behaviour), tmp_path, script, group_size=1) as (env, voice):
        usual: Any = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
        assert isinstance(voice, Voice)
        voice.speak_with(Sloppy(usual) if sloppy else usual)
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_sampled(voice, group) == 3
        assert len(group["tokens"]) == 1
        (one,) = records(tmp_path)[-1].trajectories
        assert [step.outcome for step in one.steps] == ["tool_calls", "tool_calls", "answer"]
        renderer = env._models._renderer
        assert renderer is not None
        again = usual.encode(renderer.whole(one.messages[:-1], [BASH], {}), add_special_tokens=False)
        exact = group["tokens"][0]
    assert (exact[: len(again)] == again) == (way == "canonical")
