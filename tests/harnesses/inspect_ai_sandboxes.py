"""inspect_ai on slots of this machine: its own checks of a provider, and evaluations. Run in an environment that has
inspect_ai (scripts/harnesses makes it)."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log
from inspect_ai.model import ChatMessageAssistant, ModelOutput, execute_tools
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, bash
from inspect_ai.util import (
    ComposeConfig,
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    override_sandbox_output_limit,
    sandbox,
)
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from agentenv.errors import ConfigError
from agentenv.harnesses.inspect_ai import AgentEnvSandbox, AgentEnvSandboxConfig
from agentenv.harnesses.inspect_config import planned
from tests.integration.window import Window

HERE = Path(__file__).parent / "inspect_ai"
IMAGE = f"dockerfile:{HERE}"
AS_APP = AgentEnvSandboxConfig(image=IMAGE, user="app", workdir="/work", memory_mib=3072)
COMPOSE = """\
x-agentenv: {slots: 20}
services:
  default:
    x-local: true
    init: true
    build: ./image
    command: tail -f /dev/null
    user: app
    working_dir: /work
    environment: {COLOUR: "${SAMPLE_METADATA_COLOUR-grey}"}
    mem_limit: 512m
    cpus: 1.0
    network_mode: none
"""


@pytest.fixture
async def sandbox_env() -> AsyncIterator[AgentEnvSandbox]:
    async with sandboxes(AS_APP) as found:
        yield found["default"]


@asynccontextmanager
async def sandboxes(config: Any, **metadata: str) -> AsyncIterator[dict[str, Any]]:
    made = await AgentEnvSandbox.sample_init("check", config, metadata)
    try:
        yield made
    finally:
        await AgentEnvSandbox.sample_cleanup("check", config, made, False)


def compose(directory: Path, text: str) -> str:
    """A compose file that may build what is in ``image``."""
    shutil.copytree(HERE, directory / "image")
    place = directory / "compose.yaml"
    place.write_text(text)
    return str(place)


def test_the_provider_is_found_by_its_entry_point() -> None:
    assert registry_find_sandboxenv("agentenv").__name__ == "AgentEnvSandbox"


# -- whole evaluations ---------------------------------------------------------------------------------


@solver
def command(text: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        done = await sandbox().exec(["bash", "-c", text])
        state.output = ModelOutput.from_content("none", done.stdout.strip())
        return state

    return solve


@scorer(metrics=[accuracy()])
def equal() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=state.output.completion == target.text, answer=state.output.completion)

    return score


async def scored(task: Task, directory: Path) -> EvalLog:
    (log,) = await eval_async(task, model="mockllm/model", log_dir=str(directory / "logs"))
    assert log.status == "success", log.error
    assert log.results is not None
    for one in log.samples or ():
        assert one.error is None, one.error
        assert one.scores is not None
        assert one.scores["equal"].value is True, (one.id, one.scores)
    (listed,) = list_eval_logs(str(directory / "logs"))
    assert read_eval_log(listed).eval.sandbox == log.eval.sandbox
    return log


async def test_twenty_samples_at_once_each_with_a_call_of_bash(tmp_path: Path) -> None:
    """Also what the log says of a configuration object is read back."""
    samples = [Sample(str(n), target=f"{n} app /work", metadata={"colour": "red"}) for n in range(20)]

    @solver
    def calling_bash() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            text = f"echo {state.input_text} > mine; sleep 0.5; echo $(cat mine) $(id -un) $(pwd)"
            call = ToolCall(id="1", function="bash", arguments={"command": text})
            answered, _ = await execute_tools([ChatMessageAssistant(content="", tool_calls=[call])], [bash()])
            state.output = ModelOutput.from_content("none", answered[-1].text.strip())
            return state

        return solve

    task = Task(samples, solver=calling_bash(), scorer=equal(), sandbox=SandboxEnvironmentSpec("agentenv", AS_APP))
    began_s = time.monotonic()
    log = await scored(task, tmp_path)
    print(f"20 samples with a bash call of 0.5 s: {time.monotonic() - began_s:.1f} s")
    assert len(log.samples or ()) == 20


async def test_a_compose_file_and_the_metadata_of_its_samples(tmp_path: Path) -> None:
    samples = [
        Sample("a", target="red app /work 536870912", metadata={"colour": "red"}),
        Sample("b", target="grey app /work 536870912"),
    ]
    text = "echo $COLOUR $(id -un) $(pwd) $(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo 536870912)"
    task = Task(samples, solver=command(text), scorer=equal(), sandbox=("agentenv", compose(tmp_path, COMPOSE)))
    await scored(task, tmp_path)


async def test_a_dockerfile_and_no_image(tmp_path: Path) -> None:
    image = Task([Sample("a", target="root /")], solver=command("echo $(id -un) $(pwd)"), scorer=equal())
    image.sandbox = SandboxEnvironmentSpec("agentenv", str(HERE / "Dockerfile"))
    await scored(image, tmp_path)
    plain = Task([Sample("a", target="/workspace")], solver=command("pwd"), scorer=equal(), sandbox="agentenv")
    await scored(plain, tmp_path / "plain")


async def test_several_services_are_sandboxes_by_their_names(tmp_path: Path) -> None:
    text = """\
services:
  attacker: {build: ./image, x-default: true, depends_on: {victim: {condition: service_healthy}}}
  victim:
    build: ./image
    command: [sh, -c, "echo secret > /flag; sleep infinity"]
    healthcheck: {test: [CMD, test, -e, /flag], interval: 1s}
"""
    async with sandboxes(compose(tmp_path, text)) as found:
        assert list(found) == ["attacker", "victim"]
        assert await found["victim"].read_file("/flag") == "secret\n"
        with pytest.raises(FileNotFoundError):
            await found["attacker"].read_file("/flag")


# -- what is said of commands --------------------------------------------------------------------------


async def test_what_a_sandbox_does_while_a_command_runs(sandbox_env: AgentEnvSandbox) -> None:
    """An agent runs in the sandbox, and asks for what inspect writes into it."""
    waiting = asyncio.create_task(sandbox_env.exec(["sh", "-c", "until [ -e answer ]; do sleep 0.1; done; cat answer"]))
    await sandbox_env.exec(["true"])
    assert not waiting.done()
    await sandbox_env.write_file("answer", "yes")
    assert (await waiting).stdout == "yes"


async def test_a_command_has_no_limit_of_time_of_its_own(sandbox_env: AgentEnvSandbox) -> None:
    with pytest.raises(TimeoutError) as late:
        await sandbox_env.exec(["sh", "-c", "echo so far; sleep 60"], timeout=1)
    assert late.value.truncated_output == "so far\n"  # type: ignore[attr-defined]


async def test_too_much_output(sandbox_env: AgentEnvSandbox) -> None:
    with override_sandbox_output_limit(1000), pytest.raises(OutputLimitExceededError) as much:
        await sandbox_env.exec(["sh", "-c", "for n in $(seq 1000); do echo $n; done; touch went-on"])
    line, _, kept = str(much.value.truncated_output).partition("\n")
    assert line == "[... 2893 bytes left out ...]"
    assert kept.endswith("999\n1000\n")
    assert len(kept) == 1000
    assert await sandbox_env.read_file("went-on") == ""


async def test_files_larger_than_a_call(sandbox_env: AgentEnvSandbox) -> None:
    data = bytes(range(256)) * (280 * 1024)  # 70 MiB
    await sandbox_env.write_file("made/large", data)
    assert await sandbox_env.read_file("made/large", text=False) == data
    assert (await sandbox_env.exec(["stat", "-c", "%U", "made/large"])).stdout == "app\n"
    with override_sandbox_output_limit(len(data) - 1), pytest.raises(OutputLimitExceededError):
        await sandbox_env.read_file("made/large", text=False)


async def test_arguments_that_linux_does_not_take_are_a_result(sandbox_env: AgentEnvSandbox) -> None:
    done = await sandbox_env.exec(["echo", "x" * 200_000])
    assert (done.success, done.returncode) == (False, 126)
    assert "Argument list too long" in done.stderr


async def test_an_ended_sandbox_is_unavailable_to_a_model(sandbox_env: AgentEnvSandbox) -> None:
    """Its own commands did that; a failure of the farm fails the sample instead."""
    await asyncio.gather(sandbox_env.exec(["true"]), sandbox_env.exec(["true"]))
    await sandbox_env.box.close()
    with pytest.raises(Exception) as closed:  # noqa: PT011
        await sandbox_env.exec(["true"])
    assert not isinstance(closed.value, SandboxUnavailableError)


async def test_a_sandbox_without_an_image_has_one_user() -> None:
    async with sandboxes(None) as found:
        with pytest.raises(SandboxUserUnsupportedError):
            await found["default"].exec(["true"], user="root")


async def test_a_cancelled_sample_gives_its_slot_back() -> None:
    config = AgentEnvSandboxConfig(image=IMAGE, slots=1)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), sandboxes(config) as found:
                await found["default"].exec(["sleep", "60"])
    async with sandboxes(config) as found:
        assert (await found["default"].exec(["echo", "mine"])).stdout == "mine\n"


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("privileged: true", "privileged"),
        ("volumes: [/etc:/host]", "volumes"),
        ("devices: [/dev/kvm]", "devices"),
        ("network_mode: host", "network_mode"),
        ("entrypoint: [serve]", "entrypoint"),
        ("command: [serve]", "command"),
    ],
)
def test_what_slots_cannot_have_is_refused_by_name(tmp_path: Path, field: str, named: str) -> None:
    text = f"services:\n  default:\n    image: debian:bookworm-slim\n    {field}\n"
    with pytest.raises(ConfigError, match=rf"services\.default\.{named}"):
        planned(compose(tmp_path, text), {})


def test_configurations_that_mean_the_same(tmp_path: Path) -> None:
    text = "services: {default: {image: debian, mem_limit: 1g, environment: {A: b}, network_mode: none}}"
    of_file = planned(compose(tmp_path, text), {})
    of_object = planned(
        ComposeConfig.model_validate(
            {
                "services": {
                    "default": {"image": "debian", "mem_limit": "1g", "environment": ["A=b"], "network_mode": "none"}
                }
            }
        ),
        {},
    )
    config = AgentEnvSandboxConfig(image="debian", memory_mib=1024, env={"A": "b"})
    assert of_file.root() == of_object.root() == planned(config, {}).root()
    assert AgentEnvSandbox.config_deserialize(config.model_dump()) == config
    with pytest.raises(ConfigError, match="user"):
        planned(AgentEnvSandboxConfig(user="app"), {})
    with pytest.raises(ConfigError, match=r"x-agentenv\.image"):
        planned(compose(tmp_path / "other", "x-agentenv: {image: debian}\nservices: {default: {image: debian}}"), {})


@pytest.mark.parametrize(("user", "name"), [(None, "app"), ("root", "root")])
async def test_connection_is_a_terminal_for_a_person(
    sandbox_env: AgentEnvSandbox, tmp_path: Path, user: str | None, name: str
) -> None:
    connection = await sandbox_env.connection(user=user)
    assert connection.type == "agentenv"

    def typed() -> int:
        shell = Window(tmp_path, ["bash", "-c", connection.command])
        try:
            shell.until_prompt()
            shell.type("id -un; exit 7\r")
            shell.until(rf"[\r\n]{name}\r\n")  # after what readline prints before a command
            return shell.end()
        finally:
            shell.close()

    assert await asyncio.to_thread(typed) == 7
    assert (await sandbox_env.exec(["echo", "alive"])).stdout == "alive\n"


async def test_connection_as_a_user_that_a_slot_without_an_image_has_not() -> None:
    async with sandboxes(None) as found:
        with pytest.raises(SandboxUserUnsupportedError, match="one user"):
            await found["default"].connection(user="app")
