"""The model of this example: a script that speaks tokens as SGLang and vLLM do, with exact ids and logprobs.

    python -m examples.train_with_farm.policy

It plays both environments, members 0 and 1 of a group right, 2 and 3 wrong. No GPU, no key, no weights.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agentenv.agent.jsonable import item_id
from agentenv.cli.output import InterruptedBySignalError, err, run_to_end
from agentenv.errors import AgentEnvError
from agentenv.testing import Call, Reply, ScriptedPolicy, TokenSpeaker, Turn, build_tokenizer

PORT: Final = 9004
TOKENIZER: Final = Path("out/train_with_farm/tokenizer")
MEMBERS: Final = 4
"""Ways to play a task; member k of a group plays the k-th of them, and a fifth the first again."""
_OUTPUT: Final = re.compile(r"stdout:\n(\d+)")

_WORDS: Final = (("wc -w < text.txt",), ("ls -l", "wc -w < text.txt"), (), ("wc -w < text.txt",))
_TERMINAL: Final = (
    (". project/settings.sh", "answer"),
    ("ls project", ". project/settings.sh", "answer"),
    (),
    (". project/settings.sh", "answer"),
)


def reply(turn: Turn) -> Reply:
    """What the member says now: its next command, or its answer from the last number it was shown."""
    conversation = turn.last_output
    planned = (_WORDS if "text.txt" in conversation else _TERMINAL)[turn.member % MEMBERS]
    if turn.step < len(planned):
        return Reply(calls=(Call("terminal", {"command": planned[turn.step]}),))
    shown = _OUTPUT.findall(conversation)
    return Reply(answer(turn.member, int(shown[-1])) if shown else "1")


def answer(member: int, right: int) -> str:
    """The answer of a member who was shown the right one: member 2 guesses without looking, 3 is off by one."""
    match member % MEMBERS:
        case 2:
            return "1"
        case 3:
            return str(right + 1)
        case _:
            return str(right)


def right_answers() -> Mapping[str, int]:
    """The answer to every item of the two environments, by the id that its trajectories are named after."""
    words: dict[str, Any] = {item_id({"words": number}): number for number in range(10, 1000, 7)}
    pairs = itertools.product(range(12, 90), range(103, 990, 7))
    products = {item_id({"factor": factor, "number": number}): factor * number for factor, number in pairs}
    return MappingProxyType({**words, **products})


async def serve(port: int, tokenizer: Path) -> None:
    """Write the tokenizer, and answer until cancelled."""
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(str(build_tokenizer(tokenizer)))
    speaker = TokenSpeaker(loaded, "hermes", remember=False)
    async with ScriptedPolicy({"*": [reply] * MEMBERS}, port=port, speaker=speaker) as policy:
        err().print(f"a scripted model is at {policy.base_url}, its tokenizer in {tokenizer}", soft_wrap=True)
        await asyncio.Event().wait()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_with_farm.policy", description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help="port on 127.0.0.1 (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="where to write it (%(default)s)")
    arguments = parser.parse_args()
    try:
        run_to_end(serve(arguments.port, arguments.tokenizer))
    except AgentEnvError as error:
        sys.exit(f"{error}")
    except InterruptedBySignalError as ended:
        sys.exit(128 + ended.number)


if __name__ == "__main__":
    main()
