"""mini-swe-agent on slots of this machine, by examples/harnesses/mini_swe_agent.py. Run in an environment that has
mini-swe-agent (scripts/harnesses makes it)."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from minisweagent.exceptions import Submitted
from pydantic import ValidationError

from agentenv.errors import InfraError
from agentenv.testing import Call, Player, Reply, ScriptedPolicy, Turn
from examples.harnesses.mini_swe_agent import SlotEnvironment
from tests.harnesses import program
from tests.harnesses.lost_container import kill_container_of

IMAGE = "debian:bookworm-slim"
RECIPE = Path(sys.modules[SlotEnvironment.__module__].__file__ or "")
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> Reply:
    return Reply("", (Call("bash", {"command": command}),))


async def run(*argv: str, policy: ScriptedPolicy) -> tuple[int, str]:
    """A program of mini-swe-agent's: its exit code and what it printed."""
    words = [*argv, "-m", "openai/scripted"]
    words += ["-c", f"model.model_kwargs.api_base={policy.base_url}", "-c", "model.model_kwargs.api_key=none"]
    words += ["-c", "model.cost_tracking=ignore_errors"]
    settings = {"MSWEA_CONFIGURED": "true", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return await program.run(*words, env=settings)


@pytest.fixture(scope="module")
def env() -> Iterator[SlotEnvironment]:
    env = SlotEnvironment(image=IMAGE, cwd="/made", env={"COLOUR": "blue"})
    yield env
    env.cleanup()


def test_answers_of_commands(env: SlotEnvironment) -> None:
    assert env.execute({"command": "pwd; echo $COLOUR; echo oops >&2; echo out; exit 3"}) == {
        "output": "/made\nblue\noops\nout\n",
        "returncode": 3,
        "exception_info": "",
    }
    assert env.execute({"command": "nosuch"})["returncode"] == 127
    assert "syntax error" in env.execute({"command": "for do"})["output"]
    late = env.execute({"command": "echo so far; sleep 60"}, timeout=1)
    assert (late["output"], late["returncode"]) == ("so far\n", -1)
    assert "timed out after 1 s" in late["exception_info"]
    assert env.execute({"command": "echo a\0b"})["returncode"] == -1
    assert env.execute({"command": "sleep 1000 & echo $! > pid"})["returncode"] == 0
    assert env.execute({"command": "kill -0 $(cat /made/pid)"}, cwd="/tmp")["returncode"] == 0
    assert len(env.execute({"command": "head -c 5000000 /dev/zero | tr '\\0' x"})["output"]) == 5_000_000
    with pytest.raises(Submitted) as submitted:
        env.execute({"command": f"{DONE}; echo a patch"})
    assert submitted.value.messages[0]["extra"]["submission"] == "a patch\n"


def test_without_an_image() -> None:
    env = SlotEnvironment(cwd="/workspace/repo")
    assert env.execute({"command": "pwd"})["output"] == "/workspace/repo\n"
    env.cleanup()


def test_environments_give_their_slots_back() -> None:
    for number in range(3):
        env = SlotEnvironment(image=IMAGE, slots=1, start_timeout_s=60)
        assert env.execute({"command": f"echo {number} >> /f; cat /f"})["output"] == f"{number}\n"
        del env
        gc.collect()


def test_settings_of_docker_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="run_args"):
        SlotEnvironment(image=IMAGE, run_args=["--gpus=all"])


def test_a_lost_container_is_raised() -> None:
    env = SlotEnvironment(image=IMAGE, slots=2)

    async def both() -> Any:
        killed = asyncio.to_thread(kill_container_of, "sleep", "300.75")
        ran = asyncio.to_thread(env.execute, {"command": "sleep 300.75"}, timeout=600)
        return await asyncio.gather(ran, killed, return_exceptions=True)

    ended, killed = asyncio.run(both())
    assert killed is None
    assert isinstance(ended, InfraError)
    env.cleanup()


async def test_mini(tmp_path: Path) -> None:
    player = [bash("echo $((6 * 7)) > answer; cat answer; hostname"), bash(DONE)]
    environment = f"{SlotEnvironment.__module__}.SlotEnvironment"
    words = [
        "-m",
        "minisweagent.run.mini",
        "--environment-class",
        environment,
        "-c",
        "mini.yaml",
        "-y",
        "-t",
        "Answer.",
    ]
    words += ["--exit-immediately", "-o", str(tmp_path / "out.json"), "-c", f"environment.image={IMAGE}"]
    async with ScriptedPolicy({"*": [player]}) as policy:
        code, printed = await run(*words, policy=policy)
    assert code == 0, printed
    messages = json.loads((tmp_path / "out.json").read_text())["messages"]
    assert '"output": "42\\n' in messages[3]["content"]
    assert messages[-1]["extra"]["exit_status"] == "Submitted"


async def test_instances_of_swe_bench(tmp_path: Path) -> None:
    """The second one loses its container: it has no prediction, and the next run tries it again."""
    (tmp_path / "tasks").mkdir()
    names = ["one", "two", "three"]
    lines = [{"instance_id": name, "image_name": IMAGE, "problem_statement": f"[task:{name}]"} for name in names]
    (tmp_path / "tasks/test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    submitted = bash(f"{DONE}; cat /testbed/patch")
    losses: list[asyncio.Future[None]] = []
    seen: list[str] = []

    def loses(turn: Turn) -> Reply:
        seen.append(turn.last_output)
        if not losses:
            losses.append(asyncio.ensure_future(asyncio.to_thread(kill_container_of, "sleep", "300.5")))
            return bash("sleep 300.5; echo patch > patch")
        return bash("echo again > patch") if turn.step == 0 else submitted

    players: dict[str, list[Player]] = {name: [[bash(f"echo {name} > patch"), submitted]] for name in names}
    words = [
        str(RECIPE),
        "--subset",
        str(tmp_path / "tasks"),
        "--split",
        "test",
        "-o",
        str(tmp_path / "out"),
        "-w",
        "1",
    ]
    words += ["-c", "swebench.yaml", "-c", "environment.timeout=600"]
    async with ScriptedPolicy({**players, "two": [loses]}) as policy:
        code, printed = await run(*words, policy=policy)
        assert code == 0, printed
        assert len(losses) == 1, printed
        await losses[0]
        assert predictions(tmp_path / "out") == {"one": "one\n", "three": "three\n"}, printed
        assert len(seen) == 1
        code, printed = await run(*words, policy=policy)
    assert predictions(tmp_path / "out") == {"one": "one\n", "three": "three\n", "two": "again\n"}, printed


def predictions(out: Path) -> dict[str, str]:
    return {name: found["model_patch"] for name, found in json.loads((out / "preds.json").read_text()).items()}
