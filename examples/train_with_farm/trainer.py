"""A trainer without a model: it takes batches from atropos' run-api, as a trainer does, and checks every group.

    run-api --host 127.0.0.1 &
    python -m examples.train_with_farm.trainer --groups 40

It ends with status 1 at the first group that a real trainer must not be given.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from agentenv.cli.output import out
from agentenv.cli.progress import Bars
from examples.train_with_farm.checks import Checker, Group, WrongGroupError
from examples.train_with_farm.policy import TOKENIZER

GROUP_SIZE: Final = 4
GROUPS_IN_BATCH: Final = 4
_POLL_S: Final = 0.05
_FIRST_POLL_S: Final = 0.2


class TrainerApi:
    """atropos' run-api from a trainer's side."""

    def __init__(self, client: aiohttp.ClientSession, batch_size: int) -> None:
        self._client = client
        self._batch_size = batch_size

    async def register(self) -> None:
        """Wait for the API, register with it, and let environments begin. Raises: aiohttp.ClientResponseError."""
        registration = {
            "wandb_group": "", "wandb_project": "", "batch_size": self._batch_size, "max_token_len": 32_768,
            "checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 1_000_000,
        }  # fmt: skip
        while True:
            try:
                async with self._client.post("/register", json=registration) as reply:
                    reply.raise_for_status()
                await self._batch()
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(_FIRST_POLL_S)

    async def groups(self, check: Callable[[], object] = lambda: None) -> AsyncIterator[Group]:
        """Groups as they arrive, without end. ``check`` is called again and again."""
        while True:
            check()
            batch = await self._batch()
            for group in batch:
                yield group
            if not batch:
                await asyncio.sleep(_POLL_S)

    async def _batch(self) -> list[dict[str, Any]]:
        async with self._client.get("/batch") as reply:
            reply.raise_for_status()
            return (await reply.json())["batch"] or []


@asynccontextmanager
async def trainer_api(url: str, group_size: int = GROUP_SIZE) -> AsyncIterator[TrainerApi]:
    """A trainer that is registered with the run-api at ``url``."""
    async with aiohttp.ClientSession(url) as client:
        api = TrainerApi(client, GROUPS_IN_BATCH * group_size)
        await api.register()
        yield api


def checker(group_size: int, tokenizer: Path | None) -> Checker:
    """A checker for the groups of the scripted model, if its tokenizer is given; else for those of any model."""
    if tokenizer is None:
        return Checker(group_size)
    from tokenizers import Tokenizer

    return Checker(group_size, Tokenizer.from_file(str(tokenizer / "tokenizer.json")))


def summary(seen: Checker, took_s: float) -> str:
    """What was checked."""
    by_environment = ", ".join(f"{count} of environment {env_id}" for env_id, count in sorted(seen.groups.items()))
    return (
        f"groups    {seen.groups.total()}, every one right ({by_environment})\n"
        f"sequences {seen.sequences}, with {seen.trained_tokens} tokens to train on; "
        f"mean score {seen.score_sum / max(1, seen.sequences):.3f}\n"
        f"time      {took_s:.1f} s"
    )


@contextmanager
def progress(goal: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; call it after each group."""
    with Bars() as bars:
        bar = bars.add_task("groups", total=goal)
        yield lambda: bars.advance(bar)


async def train(arguments: argparse.Namespace) -> None:
    """Check as many groups as asked for. Raises: WrongGroupError at the first wrong one."""
    seen = checker(arguments.group_size, None if arguments.any_model else arguments.tokenizer)
    began = time.monotonic()
    async with trainer_api(arguments.url, arguments.group_size) as api:
        with progress(arguments.groups) as advance:
            async for group in api.groups():
                seen.add(group)
                advance()
                if seen.groups.total() >= arguments.groups:
                    break
    out().print(summary(seen, time.monotonic() - began))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_with_farm.trainer", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of run-api (%(default)s)")
    parser.add_argument("--groups", type=int, default=40, help="end after so many (%(default)s)")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="the environments' group_size (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="the scripted model's (%(default)s)")
    parser.add_argument("--any-model", action="store_true", help="the model is not the script: check less")
    arguments = parser.parse_args()
    path = arguments.tokenizer / "tokenizer.json"
    if not arguments.any_model and not path.exists():
        sys.exit(f"there is no {path} yet: examples.train_with_farm.policy writes it; start that first")
    try:
        asyncio.run(train(arguments))
    except WrongGroupError as error:
        sys.exit(f"wrong group: {error}")
    except (aiohttp.ClientError, OSError) as error:
        sys.exit(f"run-api failed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
