"""atropos' own commands on an AgentEnv, as processes: what they write, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Call, Failure, Reply, ScriptedPolicy, build_tokenizer
from tests import programs
from tests.unit.env.env_stubs import IDLE, SOLVE
from tests.waiting import START_S, until

ENVIRONMENT = Path(__file__).parent / "answer_env.py"
FOREVER = [Reply("", (Call("bash", {"command": "touch started; exec sleep 300"}),))]


def flags(directory: Path, policy: ScriptedPolicy, **changed: Any) -> list[str]:
    chosen = {
        "env.tokenizer_name": build_tokenizer(directory / "tokenizer"),
        "env.tool_pool_mode": "fake",
        "env.group_size": 2,
        "env.use_wandb": False,
        "env.rollouts_path": directory / "rollouts.jsonl",
        "env.send_trajectory_id": True,
        "env.infra_retry_delay_s": 0,
        "env.enabled_toolsets": "terminal,files",
        "openai.base_url": policy.base_url,
        "openai.model_name": "scripted",
        "openai.api_key": "sk-secret-key",
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return [text for name, value in chosen.items() for text in (f"--{name}", str(value))]


@asynccontextmanager
async def running(
    directory: Path, *arguments: str, own_interpreter: bool = False
) -> AsyncIterator[Process | programs.Forked]:
    """The environment's command as a process, killed at the end if it still lives."""
    env = {**os.environ, "TMPDIR": str(directory), "AGENTENV_STATE_DIR": str(directory / "state")}
    async with programs.program(
        str(ENVIRONMENT), *arguments, cwd=directory, env=env, stdout=directory / "log.txt",
        own_interpreter=own_interpreter,
    ) as process:  # fmt: skip
        yield process


async def run(
    directory: Path, *arguments: str, timeout_s: float = 2 * START_S, own_interpreter: bool = False
) -> tuple[int, str]:
    async with (
        running(directory, *arguments, own_interpreter=own_interpreter) as process,
        asyncio.timeout(timeout_s),
    ):
        status = await process.wait()
    return status, (directory / "log.txt").read_text()


async def test_process_writes_the_groups_it_was_asked_for(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy:
        status, log = await run(
            tmp_path,
            "process",
            *flags(tmp_path, policy, env__total_steps=3, env__data_path_to_save_groups=tmp_path / "groups.jsonl"),
            own_interpreter=True,
        )
    assert status == 0, log
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, 0.0]] * 3
    assert all(set(mask) == {-100} for group in groups for mask in group["masks"])
    records = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert {GroupRecord.model_validate_json(line).outcome for line in records} == {"complete"}
    assert (tmp_path / "groups.html").exists()
    assert not list(tmp_path.glob("agentenv-fake-*"))
    shown = log.splitlines()
    assert sum(line.startswith("group ") for line in shown) in (1, 2, 3)
    end = [line.split(maxsplit=1) for line in shown[-8:-1]]
    assert [name for name, _ in end] == ["mean", "faults", "groups", "page", "records", "run", "next"]
    [made] = (tmp_path / "runs").iterdir()
    assert [line for _, line in end[-2:]] == [f"runs/{made.name}", f"agentenv runs show {made.name}"]
    assert shown[-1].strip() == f"agentenv report {tmp_path / 'rollouts.jsonl'}"
    assert {path.name for path in made.iterdir()} == {"run.json", "lock"}, "its results are where they were wanted"
    assert "scored   6 of 6 rollouts" in log
    assert "INFO" not in log
    assert "group " not in shown[0]
    assert shown[0].startswith("process: 3 groups of 2; model scripted at http://")
    assert len(shown) <= 1 + 3 + 9, "nothing but progress and results"


async def test_settings_are_shown_for_debugging_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_DEBUG", "1")
    async with ScriptedPolicy({"*": [SOLVE]}) as policy:
        status, log = await run(tmp_path, "evaluate", *flags(tmp_path, policy, env__eval_items=1))
    assert status == 0
    assert "model_name='scripted'" in log
    assert "You are using a local Base URL" in log
    assert "sk-secret-key" not in log


async def test_results_are_one_json_document(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy:
        groups = tmp_path / "groups.jsonl"
        arguments = flags(tmp_path, policy, env__total_steps=2, env__data_path_to_save_groups=groups)
        env = {**os.environ, "TMPDIR": str(tmp_path), "AGENTENV_STATE_DIR": str(tmp_path / "state")}
        out, errors = tmp_path / "out.json", tmp_path / "errors.txt"
        async with (
            programs.program(
                str(ENVIRONMENT), "process", "--json", *arguments, cwd=tmp_path, env=env, stdout=out, stderr=errors
            ) as process,
            asyncio.timeout(START_S),
        ):
            assert await process.wait() == 0, errors.read_text()
    document = json.loads(out.read_text())
    assert (document["rollouts"], document["scored"], document["mean"]) == (4, 4, 0.5)
    assert (document["faults"], document["errors"], document["warnings"], document["missing"]) == ({}, [], [], [])
    assert document["files"] == {
        "groups": str(groups), "page": str(tmp_path / "groups.html"), "records": str(tmp_path / "rollouts.jsonl")
    }  # fmt: skip


async def test_a_bug_in_a_hook_is_one_error_and_the_tasks(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy:
        arguments = flags(tmp_path, policy, env__give_up_after_failed_groups=4, env__max_num_workers=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANSWER_ENV_BUG", "score")
            status, log = await run(tmp_path, "process", *arguments)
    assert status == 1
    assert log.count("Traceback") == 1, log
    assert "ERROR score_trajectory raised KeyError: 'no such key'\n  item item-1, rollout item-1-" in log
    assert "no running event loop" not in log
    assert "WARNING again ×7: score_trajectory raised KeyError at answer_env.py" in log
    assert "8 × TaskError: score_trajectory raised KeyError: 'no such key'" in log
    assert log.splitlines()[-1].startswith("TaskError: 4 groups in a row had no scored member (faults: 8 task)")


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_a_dry_run_says_what_would_run_and_runs_nothing(tmp_path: Path, verb: str) -> None:
    async with ScriptedPolicy({"*": [SOLVE]}) as policy:
        groups = tmp_path / "groups.jsonl"
        arguments = flags(tmp_path, policy, env__eval_items=3, env__data_path_to_save_groups=groups)
        status, log = await run(tmp_path, verb, "--dry-run", *arguments, "--env.total_steps", "5")
        requests = policy.requests
    assert status == 0, log
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in log.splitlines()}
    assert shown["would"] == {"process": "process 5 groups of 2", "evaluate": "evaluate 3 items"}[verb]
    assert shown["model"] == f"scripted at {policy.base_url}"
    assert (shown["item"], shown["task"]) == ("item-1", "[task:item-1] write 42 to the file answer")
    assert shown["records"].startswith(f"{tmp_path / 'rollouts.jsonl'} (")
    assert requests == 0
    assert not groups.exists()
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert not list(tmp_path.glob("agentenv-fake-*"))


@pytest.mark.parametrize(
    ("verb", "bug", "said"),
    [
        ("process", "task", "TaskError: build_task raised KeyError: 'no such task'"),
        ("evaluate", "none", "TaskError: get_next_item returned None at once"),
        ("serve", "", "ConfigError: --dry-run: is for process and evaluate"),
    ],
)
async def test_a_dry_run_that_finds_something_wrong_ends_with_status_2(
    tmp_path: Path, verb: str, bug: str, said: str
) -> None:
    async with ScriptedPolicy({}) as policy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANSWER_ENV_BUG", bug)
            status, log = await run(tmp_path, verb, "--dry-run", *flags(tmp_path, policy, env__eval_items=1))
    assert status == 2, log
    assert log.splitlines()[-1].startswith(said)


async def test_without_a_tokenizer_an_openai_server_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a download would fail
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy:
        arguments = flags(tmp_path, policy, env__total_steps=1, env__data_path_to_save_groups=tmp_path / "g.jsonl")
        at = arguments.index("--env.tokenizer_name")
        status, log = await run(tmp_path, "process", *arguments[:at], *arguments[at + 2 :])
    assert status == 0, log
    [group] = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert (group["tokens"], group["masks"], group["scores"]) == ([[0], [0]], [[-100], [-100]], [1.0, 0.0])
    assert [messages[-1]["content"] for messages in group["messages"]] == ["done", "I give up"]
    assert "WARNING" not in log


async def test_a_misspelt_hook_is_one_line_and_status_2(tmp_path: Path) -> None:
    async with ScriptedPolicy({}) as policy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANSWER_ENV_BUG", "misspelt")
            status, log = await run(tmp_path, "process", *flags(tmp_path, policy))
    assert status == 2
    assert log.splitlines()[-1].startswith("HookError: CommandEnv: has neither score_trajectory nor")
    assert log.splitlines()[-1].endswith("(did you mean score_trajectory by score_trajectroy?)")
    assert "Traceback" not in log


async def test_a_wrong_score_is_named_with_the_hook_that_returned_it(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy:
        arguments = flags(tmp_path, policy, env__give_up_after_failed_groups=2, env__max_num_workers=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANSWER_ENV_BUG", "text")
            status, log = await run(tmp_path, "process", *arguments)
    assert status == 1
    assert "ERROR score_trajectory must return a finite number, got '1.0'\n" in log
    assert "WARNING again ×3: TaskError: score_trajectory must return a finite number, got '1.0'" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("verb", ["process", "evaluate"])
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("item", "TaskError: get_next_item raised KeyError: 'no such item'"),
        ("none", "TaskError: get_next_item returned None at once: no items to process"),
    ],
)
async def test_a_command_without_items_fails_and_says_why(tmp_path: Path, verb: str, bug: str, said: str) -> None:
    async with ScriptedPolicy({"*": [SOLVE]}) as policy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANSWER_ENV_BUG", bug)
            status, log = await run(tmp_path, verb, *flags(tmp_path, policy, env__eval_items=2))
    assert status == 1, log
    assert log.splitlines()[-1].startswith(said), log
    assert log.count("Traceback") == (bug == "item")
    assert ("answer_env.py" in log) == (bug == "item")
    assert "no running event loop" not in log


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_a_model_server_that_is_down_is_named(tmp_path: Path, unused_tcp_port: int, verb: str) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    async with ScriptedPolicy({}) as policy:
        arguments = flags(tmp_path, policy, env__eval_items=1, openai__base_url=url)
        status, log = await run(tmp_path, verb, *arguments)
    assert status == 1
    assert f"ModelServerError: no model server answers at {url}: " in log
    assert "--openai.base_url" in log
    assert not (tmp_path / "rollouts.jsonl").exists()


async def test_a_missing_key_is_one_line_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with ScriptedPolicy({}) as policy:
        status, log = await run(tmp_path, "process", *flags(tmp_path, policy, openai__api_key=""))
    assert status == 2
    assert "ConfigError: openai.api_key: is not set" in log
    assert "Traceback" not in log


async def test_evaluate_fails_when_nothing_has_a_score(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [[Failure(404)]]}) as policy:
        arguments = flags(tmp_path, policy, env__eval_items=2, env__infra_retries=0)
        status, log = await run(tmp_path, "evaluate", *arguments)
    assert status == 1
    assert "attempt 1 failed, not scored: ModelServerError" in log
    assert "scored   0 of 2 rollouts" in log
    assert "InfraError: none of 2 rollouts has a score (faults: 2 infra)" in log


async def test_evaluate_writes_its_metrics(tmp_path: Path) -> None:
    async with ScriptedPolicy({"item-1": [SOLVE], "item-2": [IDLE]}) as policy:
        arguments = flags(tmp_path, policy, env__eval_items=2, env__data_dir_to_save_evals=tmp_path / "evals")
        status, log = await run(tmp_path, "evaluate", *arguments)
    assert status == 0, log
    metrics = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert metrics["results"]["all"]["mean_score"] == 0.5
    assert "scored   2 of 2 rollouts" in log
    assert "mean     0.500 ± 0.500 (sd 0.707)" in log
    assert f"metrics  {tmp_path / 'evals'}" in log
    assert f"records  {tmp_path / 'rollouts.jsonl'}" in log


async def test_process_gives_up_when_nothing_works(tmp_path: Path) -> None:
    async with ScriptedPolicy({"*": [[Failure(404)]]}) as policy:
        arguments = flags(tmp_path, policy, env__give_up_after_failed_groups=2, env__infra_retries=0)
        status, log = await run(tmp_path, "process", *arguments)
    assert status == 1
    assert "2 groups in a row had no scored member" in log
    assert "check base_url" in log
    assert not list(tmp_path.glob("agentenv-fake-*"))


@pytest.mark.parametrize("verb", ["process", "evaluate", "serve"])
async def test_what_the_models_server_would_always_refuse_ends_a_command_at_once(tmp_path: Path, verb: str) -> None:
    async with ScriptedPolicy({}) as policy:
        url = policy.base_url.removesuffix("/v1")
        arguments = flags(tmp_path, policy, env__eval_items=1, openai__base_url=url)
        status, log = await run(tmp_path, verb, *arguments)
        requests = policy.requests
    assert status == 2, log
    assert log.splitlines()[-1].startswith(
        f"ConfigError: openai.base_url: there is no {url}/chat/completions (HTTP 404"
    )
    assert f"did you mean {url}/v1?" in log
    assert "Traceback" not in log
    assert requests == 0
    assert not list(tmp_path.glob("agentenv-fake-*"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"env__driver": "raw_exec", "env__sandbox_image": "some:image"},
            "sandbox_image: is set with driver='raw_exec'",
        ),
        ({"env__max_agent_turns": 3, "env__agent_max_steps": 4}, "max_agent_turns=3 and agent_max_steps=4 disagree"),
        ({"env__agent_max_steps": "many"}, "agent_max_steps"),
        ({"openai__server_type": "vllm"}, "tool_call_parser: is not set, and 'vllm' gives text"),
        ({"openai__base_url": "127.0.0.1:9/v1"}, "openai.base_url: '127.0.0.1:9/v1' is no http(s) address"),
        ({"env__group_size": 0}, "group_size: got 0 (allowed: 1 or more)"),
        ({"env__total_steps": -1}, "total_steps: -1 is a trainer's number"),
        ({"openai__num_max_requests_at_once": 0}, "openai.num_max_requests_at_once: got 0"),
        ({"openai__base_url": ""}, "openai.base_url: is empty"),
        ({"openai__server_type": "trl"}, "server_type: 'trl' gives no tokens with logprobs"),
    ],
)
async def test_a_wrong_setting_is_one_clear_line_and_status_2(tmp_path: Path, changed: Any, said: str) -> None:
    async with ScriptedPolicy({}) as policy:
        status, log = await run(tmp_path, "process", *flags(tmp_path, policy, **changed))
    assert status == 2, log
    assert said in log
    assert "Traceback" not in log


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_signals_in_mid_rollout_leave_nothing_behind(
    tmp_path: Path, number: int, status: int, times: int
) -> None:
    async with (
        ScriptedPolicy({"*": [FOREVER]}) as policy,
        running(tmp_path, "process", *flags(tmp_path, policy)) as process,
    ):
        await until(lambda: list(tmp_path.glob("agentenv-fake-*/**/started")), START_S)
        for _ in range(times):  # the others come while everything is being closed
            with suppress(ProcessLookupError):  # unless that was quicker than this test
                process.send_signal(number)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(START_S):
            assert await process.wait() == status
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
    assert not list(tmp_path.glob("agentenv-fake-*"))
    assert not _running_below(tmp_path)


def _running_below(directory: Path) -> list[str]:
    """Processes whose working directory is below ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str((entry / "cwd").readlink()).startswith(str(directory)):
                found.append(f"{entry.name} {(entry / 'cmdline').read_text()}")
        except OSError:
            continue
    return found


async def test_serve_feeds_a_real_trainer_api_and_ends_on_sigterm(tmp_path: Path, unused_tcp_port: int) -> None:
    api = f"http://127.0.0.1:{unused_tcp_port}"
    address = ("--host", "127.0.0.1", "--port", str(unused_tcp_port))
    async with (
        programs.program(
            "-m", "atroposlib.cli.run_api", *address, cwd=tmp_path, env=os.environ, stdout=tmp_path / "api.txt"
        ),
        aiohttp.ClientSession(api) as trainer,
        ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy,
    ):
        await _register(trainer)
        arguments = flags(tmp_path, policy, env__rollout_server_url=api, env__total_steps=100)
        async with running(tmp_path, "serve", *arguments) as process:
            batch = await _first_batch(trainer, process)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(START_S):
                assert await process.wait() == 143
    assert batch[0]["scores"] == [1.0, 0.0]
    assert batch[0]["group_overrides"]["trainable"] is False
    assert set(batch[0]["masks"][0]) == {-100}
    assert not list(tmp_path.glob("agentenv-fake-*"))
    assert not _running_below(tmp_path)


@asynccontextmanager
async def trainer_api(directory: Path, port: int) -> AsyncIterator[aiohttp.ClientSession]:
    """A real ``run-api``, registered with as a trainer does; killed at the end."""
    argv = ("-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    async with (
        programs.program(*argv, cwd=directory, env=os.environ, stdout=directory / "api.txt"),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as trainer,
    ):
        await _register(trainer)
        yield trainer


async def test_serve_goes_on_with_its_slots_when_the_trainer_api_died_and_came_back(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    log = tmp_path / "log.txt"
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}) as policy, AsyncExitStack() as first_api:
        trainer = await first_api.enter_async_context(trainer_api(tmp_path, unused_tcp_port))
        arguments = flags(tmp_path, policy, env__rollout_server_url=url, env__total_steps=1000)
        async with running(tmp_path, "serve", *arguments) as process:
            await _first_batch(trainer, process)
            assert "the trainer's API" not in log.read_text()
            await first_api.aclose()
            await until(lambda: "the trainer's API at" in log.read_text(), explain=log.read_text)
            farms = list(tmp_path.glob("agentenv-fake-*"))
            async with trainer_api(tmp_path, unused_tcp_port) as trainer:
                batch = await _first_batch(trainer, process)
                async with trainer.get("/status-env", json={"env_id": 0}) as status:
                    assert status.status == 200
                assert farms
                assert list(tmp_path.glob("agentenv-fake-*")) == farms
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(START_S):
                    assert await process.wait() == 143
    assert batch[0]["scores"] == [1.0, 0.0]
    said = log.read_text()
    assert said.count("lost this environment's registration") == 1, said
    assert said.count("the trainer's API answers, after") == 1


async def test_serve_without_a_trainer_api_says_so_and_leaves_nothing(tmp_path: Path, unused_tcp_port: int) -> None:
    async with ScriptedPolicy({}) as policy:
        url = f"http://127.0.0.1:{unused_tcp_port}"
        arguments = flags(tmp_path, policy, env__rollout_server_url=url, env__trainer_wait_s=1)
        status, log = await run(tmp_path, "serve", *arguments)
    assert status == 1
    assert "InfraError: the trainer's API at" in log
    assert "run-api" in log
    assert not list(tmp_path.glob("agentenv-fake-*"))


async def test_wandb_without_a_login_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    async with ScriptedPolicy({}) as policy:
        status, log = await run(tmp_path, "process", *flags(tmp_path, policy, env__use_wandb=True))
    assert status == 2, log
    assert "ConfigError: use_wandb" in log
    assert "--env.use_wandb false" in log


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"env__tokenizer_name": "/no/such/place"}, "tokenizer_name: '/no/such/place' cannot be loaded"),
        ({"env__data_path_to_save_groups": "/proc/no/groups.jsonl"}, "data_path_to_save_groups: "),
    ],
)
async def test_what_cannot_be_opened_is_one_line_that_names_the_setting(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    async with ScriptedPolicy({}) as policy:
        status, log = await run(tmp_path, "process", *flags(tmp_path, policy, **fields))
    assert status == 2, log
    assert f"ConfigError: {said}" in log
    assert "Traceback" not in log


async def test_a_negative_timeout_is_refused_and_not_read_as_one_second(tmp_path: Path) -> None:
    async with ScriptedPolicy({}) as policy:
        arguments = [*flags(tmp_path, policy), "--env.tool_timeout_s", "-3"]
        status, log = await run(tmp_path, "process", *arguments, own_interpreter=True)
    assert (status, "ConfigError: tool_timeout_s: Input should be greater than 0" in log) == (2, True), log


async def _register(trainer: aiohttp.ClientSession) -> None:
    registration = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 100_000,
        "checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 100,
    }  # fmt: skip
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with trainer.post("/register", json=registration) as reply:
                    reply.raise_for_status()
                async with trainer.get("/batch") as reply:  # starts the API: environments may register now
                    reply.raise_for_status()
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)


async def _first_batch(trainer: aiohttp.ClientSession, process: Process | programs.Forked) -> list[dict[str, Any]]:
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None
            async with trainer.get("/batch") as reply:
                if batch := (await reply.json())["batch"]:
                    return list(batch)
            await asyncio.sleep(0.1)


async def test_a_scripted_policy_is_a_process_too(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"tasks": {"a": [[{"text": "hello"}]]}}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", "agentenv.testing", str(script), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            said = json.loads(await process.stdout.readline())
        body = {"model": said["model"], "messages": [{"role": "user", "content": "[task:a]"}]}
        url = said["base_url"] + "/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
            assert (await reply.json())["choices"][0]["message"]["content"] == "hello"
    finally:
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
