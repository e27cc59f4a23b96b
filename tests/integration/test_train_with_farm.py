"""examples/train_with_farm: its checks find what is wrong, and the README's commands work as they stand."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentenv.farm_client.client import reachable
from agentenv.testing import build_tokenizer
from examples.hello.env import CountWords
from examples.train_with_farm.checks import Checker, WrongGroupError
from examples.train_with_farm.policy import MEMBERS, reply
from examples.train_with_farm.run import free_ports, tail
from examples.train_with_farm.trainer import checker
from tests.cli import Command
from tests.programs import program
from tests.unit.env.managed_stubs import managed
from tests.waiting import START_S, eventually, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("train") / "tokenizer")


@pytest.fixture(scope="module")
def right(tokenizer: Path) -> dict[str, Any]:
    """A group of the script's, as run-api gives it to the trainer."""

    async def played() -> dict[str, Any]:
        changed: dict[str, Any] = {"enabled_toolsets": ["terminal"], "group_size": MEMBERS}
        script = {"*": [reply] * MEMBERS}
        async with managed(CountWords, tokenizer.parent, script, server_type="sglang", **changed) as (env, _):
            made, _ = await env.collect_trajectories(await env.get_next_item())
        assert made is not None
        return {**made, "env_id": 0}

    return asyncio.run(played())


@pytest.fixture
def group(right: dict[str, Any]) -> dict[str, Any]:
    """A copy of it, to be spoiled."""
    return copy.deepcopy(right)


def checked(group: dict[str, Any], tokenizer: Path | None) -> Checker:
    made = checker(MEMBERS, tokenizer)
    made.add(group)
    return made


def test_a_right_group_is_right(group: dict[str, Any], tokenizer: Path) -> None:
    assert group["scores"] == [1.0, 1.0, 0.0, 0.0]
    seen = checked(group, tokenizer)
    assert (seen.groups[0], seen.sequences, seen.score_sum) == (1, 4, 2.0)
    with pytest.raises(WrongGroupError, match="came twice"):
        seen.add(group)


def short(group: dict[str, Any]) -> None:
    for name in ("tokens", "masks", "inference_logprobs", "scores", "overrides"):
        group[name].pop()


def policys(group: dict[str, Any], member: int = 0) -> int:
    """Where a member's last turn begins."""
    masks = group["masks"][member]
    return max(at for at in range(1, len(masks)) if masks[at] != -100 and masks[at - 1] == -100)


def silent(group: dict[str, Any]) -> None:
    length = len(group["tokens"][2])
    group["masks"][2], group["inference_logprobs"][2] = [-100] * length, [1.0] * length


def other_member(group: dict[str, Any]) -> None:
    group["overrides"][3] = dict(group["overrides"][2])


def shown_as_written(group: dict[str, Any]) -> None:
    group["masks"][0][5] = group["tokens"][0][5]


def other_token(group: dict[str, Any]) -> None:
    at = policys(group)
    group["tokens"][0][at] = group["masks"][0][at] = group["tokens"][0][at] + 1


def without_answer(group: dict[str, Any]) -> None:
    at = policys(group, member=3)
    for name in ("tokens", "masks", "inference_logprobs"):
        group[name][3] = group[name][3][:at]


def change(name: str, member: int, at: int | None, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(group: dict[str, Any]) -> None:
        place = policys(group, member) if at is None else at
        group[name][member][place] = value

    return apply


def score(member: int, value: float) -> Callable[[dict[str, Any]], None]:
    return lambda group: group["scores"].__setitem__(member, value)


FORM: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("a group of 4 has", short),
    ("says it has 3", lambda group: group["group_overrides"].update(group_size=3)),
    ("has the members", other_member),
    ("tokens, masks and logprobs", lambda group: group["inference_logprobs"][1].pop()),
    ("is not the policy's and has the logprob", change("inference_logprobs", 1, 5, -0.5)),
    ("the logprob is", change("inference_logprobs", 1, None, 1.0)),
    ("the logprob is", change("inference_logprobs", 1, None, float("nan"))),
    ("the mask is", change("masks", 1, None, 0)),
    ("no turn of the policy", silent),
    ("the score is", score(0, -1.0)),
    ("has 2 sequences", lambda group: group["overrides"][0].update(sequences=2)),
]
SCRIPTED: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("it says", other_token),
    ("other logprobs than sampled", change("inference_logprobs", 1, None, -0.5)),
    ("scored before its answer", without_answer),
    ("scored 0.0, right is", score(0, 0.0)),
    ("scored 1.0, right is", score(3, 1.0)),
]


@pytest.mark.parametrize(("said", "spoil"), FORM)
def test_a_wrong_group_of_any_model_is_found(
    group: dict[str, Any], said: str, spoil: Callable[[dict[str, Any]], None]
) -> None:
    checked(group, None)
    spoil(group)
    with pytest.raises(WrongGroupError, match=said):
        checked(group, None)


@pytest.mark.parametrize(("said", "spoil"), SCRIPTED)
def test_what_the_script_did_not_say_or_deserve_is_found(
    group: dict[str, Any], tokenizer: Path, said: str, spoil: Callable[[dict[str, Any]], None]
) -> None:
    spoil(group)
    checked(group, None)
    with pytest.raises(WrongGroupError, match=said):
        checked(group, tokenizer)


# -- the README's commands ----------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """Those of the section, in its order."""
    text = (ROOT / "README.md").read_text().partition("## One farm, many runs\n")[2].partition("\n## ")[0]
    return [shlex.split(line.removesuffix(" &")) for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]


def as_python(command: list[str]) -> tuple[str, ...]:
    """Arguments of the interpreter that do the same."""
    match command:
        case [".venv/bin/python", *arguments]:
            return tuple(arguments)
        case [".venv/bin/run-api", *arguments]:
            return ("-m", "atroposlib.cli.run_api", *arguments)
        case _:
            raise AssertionError(f"what is {command}?")


def end_containers(command: Command) -> None:
    with command.started("gc", "--kept", "default") as process:
        process.communicate(timeout=START_S)


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    with free_ports("farm", "model", "api") as found:
        yield found


async def test_the_readme_s_commands_train_two_environments_on_one_farm(tmp_path: Path, ports: dict[str, int]) -> None:
    """As they stand there, on ports of this test, with fewer groups."""
    tokenizer = str(tmp_path / "tokenizer")
    api = f"http://127.0.0.1:{ports['api']}"
    served = ("--env.runs_dir", str(tmp_path / "runs"),
              "--env.rollout_server_url", api, "--env.tokenizer_name", tokenizer,
              "--openai.base_url", f"http://127.0.0.1:{ports['model']}/v1")  # fmt: skip
    more = [
        ("--port", str(ports["farm"])),
        ("--port", str(ports["model"]), "--tokenizer", tokenizer),
        served,
        served,
        ("--port", str(ports["api"])),
        ("--url", api, "--tokenizer", tokenizer, "--groups", "8"),
    ]
    env = {**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state")}
    env |= {} if os.geteuid() == 0 else {"AGENTENV_ISOLATION": "user"}
    farm, *others = commands()
    command = Command(env)
    assert farm[0] == ".venv/bin/agentenv"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, end_containers, command)
        stack.enter_context(command.started(*farm[1:], *more[0]))
        await until(lambda: list((tmp_path / "state").glob("service-*/said.json")), START_S)
        for number, (words, extra) in enumerate(zip(others, more[1:], strict=True)):
            started = program(*as_python(words), *extra, cwd=ROOT, env=env, stdout=tmp_path / f"{number}.log")
            process = await stack.enter_async_context(started)
            if number == 0:  # the model, whose tokenizer the others read
                await eventually(lambda: reachable(f"http://127.0.0.1:{ports['model']}", 1.0), START_S)
        await until(lambda: process.returncode is not None, 3 * START_S)
    said = [tail(log) for log in sorted(tmp_path.glob("*.log"))]
    assert process.returncode == 0, said
    assert "every one right" in said[-1], said
