"""``python -m agentenv.testing SCRIPT.json``: a scripted policy as a process; prints its base_url on stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from agentenv.errors import AgentEnvError
from agentenv.testing.generate import TokenSpeaker
from agentenv.testing.script import load_script
from agentenv.testing.scripted_policy import MODEL, ScriptedPolicy
from agentenv.testing.tokenizer import build_tokenizer

_FORMAT = """\
script.json: players by task id ("*": all other tasks). A player is its list of
replies, one per model turn; after the last one it is silent. Member k of a
group is played by player k, if the environment has send_trajectory_id set.

  {"tasks": {
    "*": [
      [{"calls": [{"name": "bash", "arguments": {"command": "wc -w text.txt"}}]},
       {"text": "12"}],
      [{"text": "no idea"}],
      [{"status": 500}]
    ]
  }}

  text, calls  the assistant's message; "finish_reason" follows from them
               unless it is given
  status       an HTTP error in place of a message, with "message" and "code"
  task id      is read from [task:ID] in the first user message

On stdout it says {"base_url": ..., "model": "scripted"}, and serves until Ctrl-C.
"""


async def _serve(arguments: argparse.Namespace) -> None:
    script = load_script(arguments.script)
    if arguments.write_tokenizer is not None:
        await asyncio.to_thread(build_tokenizer, arguments.write_tokenizer)
    async with ScriptedPolicy(
        script, host=arguments.host, port=arguments.port, latency_s=arguments.latency_s, speaker=_speaker(arguments)
    ) as policy:
        print(json.dumps({"base_url": policy.base_url, "model": MODEL}), flush=True)  # noqa: T201
        await asyncio.Event().wait()


def _speaker(arguments: argparse.Namespace) -> TokenSpeaker | None:
    if arguments.tokenizer is None:
        return None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.tokenizer)
    return TokenSpeaker(tokenizer, arguments.parser)


def main() -> None:
    """Serve a script as an OpenAI-compatible model server, until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.testing",
        description=main.__doc__,
        epilog=_FORMAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="script.json", help="what the players do; its format is below")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (any free one)")
    parser.add_argument("--latency-s", type=float, default=0.0, metavar="SECONDS", help="pause before each answer")
    parser.add_argument("--write-tokenizer", metavar="DIR", help="write a small tokenizer for env.tokenizer_name first")
    parser.add_argument("--tokenizer", metavar="DIR", help="also serve token ids (/generate), with this tokenizer")
    parser.add_argument("--parser", default="hermes", help="with --tokenizer: how calls are written (%(default)s)")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except AgentEnvError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)


if __name__ == "__main__":
    main()
