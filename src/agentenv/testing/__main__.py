"""``python -m agentenv.testing SCRIPT.json``: a scripted policy as a process; prints its base_url on stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from agentenv.testing.generate import TokenSpeaker
from agentenv.testing.script import load_script
from agentenv.testing.scripted_policy import MODEL, ScriptedPolicy


async def _serve(arguments: argparse.Namespace) -> None:
    script = load_script(arguments.script)
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
    """``python -m agentenv.testing SCRIPT.json``: serve a script until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("script")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--tokenizer", help="also serve token ids (/generate), with the tokenizer in this directory")
    parser.add_argument("--parser", default="hermes", help="with --tokenizer: format in which calls are written")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
