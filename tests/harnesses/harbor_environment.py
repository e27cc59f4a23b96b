"""What Harbor asks of an environment, of a slot in a container of its own and of one in a shared farm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harbor.environments.base import (
    HealthcheckError,
    SandboxBuildFailedError,
    ServiceOperationsUnsupportedError,
)
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig, HealthcheckConfig, NetworkMode, NetworkPolicy, TaskOS
from harbor.models.trial.paths import TrialPaths

from agentenv.errors import ConfigError
from agentenv.harnesses.harbor import AgentEnvEnvironment

BASE = "debian:bookworm-slim"
DOCKERFILE = f"FROM {BASE}\nRUN useradd -m app\n"
KINDS: Mapping[str, Mapping[str, Any]] = {"own": {}, "shared": {"slots": 4, "slot_memory_mb": 2048}}
NONE = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
PUBLIC = NetworkPolicy(network_mode=NetworkMode.PUBLIC)
SERVICES = """\
services:
  main:
    environment: [A=b]
    working_dir: /srv
    depends_on: {server: {condition: service_healthy}}
    volumes: ['kept:/kept:ro', './notes:/srv/notes']
  server:
    build: ./server
    environment: {WORD: word}
    volumes: ['kept:/var/lib/server']
    healthcheck: {test: 'grep -q word /var/lib/server/said', interval: 1s, retries: 120}
volumes: {kept: }
"""


def made(
    tmp_path: Path,
    files: Mapping[str, str] | None = None,
    policy: NetworkPolicy = NONE,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> AgentEnvEnvironment:
    """An environment over these files of a task."""
    place = tmp_path / "task" / "environment"
    for name, text in {"Dockerfile": DOCKERFILE, **(files or {})}.items():
        if text:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    place.mkdir(parents=True, exist_ok=True)
    paths = TrialPaths(tmp_path / "trial")
    paths.mkdir()
    asked = EnvironmentConfig(**{"memory_mb": 1024, "storage_mb": 256, **(config or {})})
    targets = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
    return AgentEnvEnvironment(
        place,
        "task",
        "task__x__env",
        paths,
        asked,
        logger=logging.getLogger("trial"),
        network_policy=policy,
        auto_mounts=[{"type": "bind", "source": str(tmp_path), "target": target} for target in targets],
        **options,
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    return KINDS[request.param]


@pytest.fixture
async def env(tmp_path: Path, kind: Mapping[str, Any]) -> AsyncIterator[AgentEnvEnvironment]:
    started = made(tmp_path, persistent_env={"WHO": "all"}, **kind)
    await started.start(False)
    yield started
    await started.stop(True)


async def said(env: AgentEnvEnvironment, command: str, /, **given: Any) -> str:
    """What a command prints that succeeds."""
    ran = await env.exec(command, **given)
    assert ran.return_code == 0, ran
    return ran.stdout or ""


async def sleepers(env: AgentEnvEnvironment) -> int:
    return int(await said(env, "grep -lx sleep /proc/[0-9]*/comm 2>/dev/null | wc -l"))


# -- commands ------------------------------------------------------------------------------------------


async def test_both_outputs_and_the_exit_code(env: AgentEnvEnvironment) -> None:
    ran = await env.exec("echo out; echo err >&2; exit 3")
    assert (ran.stdout, ran.stderr, ran.return_code) == ("out\n", "err\n", 3)


async def test_the_directory_and_the_variables(env: AgentEnvEnvironment) -> None:
    assert await said(env, "echo $WHO $A; pwd", cwd="/tmp", env={"A": "1"}) == "all 1\n/tmp\n"
    with env.scoped_exec_env({"WHO": "agent"}):
        assert await said(env, "echo $WHO") == "agent\n"


async def test_a_command_is_bash(env: AgentEnvEnvironment) -> None:
    assert await said(env, "set -o pipefail; false | true; echo $?; [[ a == a ]] && echo yes") == "1\nyes\n"


async def test_nothing_is_to_be_read(env: AgentEnvEnvironment) -> None:
    assert await asyncio.wait_for(said(env, "cat; echo end"), 60) == "end\n"


async def test_a_user_by_name_and_by_number(env: AgentEnvEnvironment) -> None:
    assert await said(env, "id -un", user="app") == "app\n"
    assert await said(env, "id -un") == "root\n"
    assert await said(env, "id -u", user=0) == "0\n"
    with env.with_default_user("app"):
        assert await said(env, "id -un") == "app\n"
    assert (await env.exec("true", user="nobody-here")).return_code != 0


async def test_a_timeout_ends_the_command_and_not_the_slot(env: AgentEnvEnvironment) -> None:
    with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
        await env.exec("sleep 300", timeout_sec=1)
    assert await said(env, "echo alive") == "alive\n"
    assert await sleepers(env) == 0


async def test_commands_run_beside_each_other(env: AgentEnvEnvironment) -> None:
    waiting = asyncio.create_task(env.exec("until [ -e /tmp/go ]; do sleep 0.1; done; echo gone"))
    await said(env, "touch /tmp/go")
    assert (await waiting).stdout == "gone\n"


async def test_a_cancelled_command_ends(env: AgentEnvEnvironment) -> None:
    running = asyncio.create_task(env.exec("touch /tmp/runs; sleep 300"))
    while not await env.is_file("/tmp/runs"):
        await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        while await sleepers(env):
            await asyncio.sleep(0.1)


async def test_what_is_left_in_the_background_goes_on(env: AgentEnvEnvironment) -> None:
    assert await asyncio.wait_for(said(env, "sleep 300 & echo started"), 60) == "started\n"
    assert await sleepers(env) == 1


async def test_large_outputs_commands_and_variables(env: AgentEnvEnvironment) -> None:
    assert len(await said(env, "head -c 5000000 /dev/zero | tr '\\0' x")) == 5_000_000
    assert await said(env, f"wc -c <<'X'\n{'y' * 300_000}\nX\nexit 0\n") == "300001\n"
    assert await said(env, "echo ${#BIG}", env={"BIG": "z" * 100_000}) == "100000\n"


async def test_output_is_told_as_it_comes(env: AgentEnvEnvironment) -> None:
    told: list[tuple[str, str]] = []

    async def tell(text: str, stream: str) -> None:
        await asyncio.sleep(0)
        told.append((stream, text))

    with env.scoped_output_callback(tell):
        running = asyncio.create_task(env.exec("echo a; until [ -e /tmp/told ]; do sleep 0.1; done; echo é >&2"))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while ("stdout", "a\n") not in told:
            await asyncio.sleep(0.05)
    await said(env, "touch /tmp/told")
    assert (await running).return_code == 0
    assert ("stderr", "é\n") in told


# -- files ---------------------------------------------------------------------------------------------


async def test_a_file_there_and_back(env: AgentEnvEnvironment, tmp_path: Path) -> None:
    file = tmp_path / "f.sh"
    file.write_bytes(b"#!/bin/sh\necho hi\xff")
    file.chmod(0o755)
    await env.upload_file(file, "/opt/new/dir/f.sh")
    assert await said(env, "stat -c '%a %U' /opt/new/dir/f.sh") == "755 root\n"
    await env.download_file("/opt/new/dir/f.sh", tmp_path / "deep" / "g")
    assert (tmp_path / "deep" / "g").read_bytes() == file.read_bytes()
    with pytest.raises(FileNotFoundError):
        await env.download_file("/missing", tmp_path / "x")


async def test_a_directory_there_and_back(env: AgentEnvEnvironment, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "x").write_text("1")
    (tree / ".hidden").write_text("2")
    (tree / "empty").mkdir()
    (tree / "link").symlink_to("sub/x")
    await env.upload_dir(tree, "/opt/d")
    there = "cd /opt/d; find . | sort | tr '\\n' ' '; readlink link"
    assert await said(env, there) == ". ./.hidden ./empty ./link ./sub ./sub/x sub/x\n"
    await env.download_dir("/opt/d", tmp_path / "back")
    back = sorted(str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*"))
    assert back == [".hidden", "empty", "link", "sub", "sub/x"]


async def test_an_upload_leaves_what_is_there(env: AgentEnvEnvironment, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "n").write_text("new")
    await said(env, "mkdir -p /opt/e; echo old > /opt/e/o")
    await env.upload_dir(tmp_path / "d", "/opt/e")
    assert (await said(env, "ls /opt/e")).split() == ["n", "o"]


async def test_downloads_that_leave_something_out(env: AgentEnvEnvironment, tmp_path: Path) -> None:
    await said(env, "mkdir -p /a/b; touch /a/b/k /a/skip; mkfifo /a/pipe")
    await env.download_dir_with_exclusions(source_dir="/a", target_dir=tmp_path / "x", exclude=["skip"])
    await env.download_dir("/a", tmp_path / "y")
    assert [path.name for path in (tmp_path / "x").rglob("*") if path.is_file()] == ["k"]
    assert sorted(path.name for path in (tmp_path / "y").rglob("*") if path.is_file()) == ["k", "skip"]


async def test_kinds_of_paths(env: AgentEnvEnvironment) -> None:
    assert await env.is_dir("/etc")
    assert not await env.is_dir("/etc/passwd")
    assert await env.is_file("/etc/passwd")
    assert not await env.is_file("/missing")


async def test_directories_of_logs_are_everybodys(env: AgentEnvEnvironment) -> None:
    await said(env, "touch /logs/agent/a /logs/verifier/b /logs/artifacts/c", user="app")
    await env.empty_dirs(["/logs/agent"])
    assert await said(env, "ls -A /logs/agent; stat -c %a /logs/agent") == "777\n"


# -- network, limits, health ---------------------------------------------------------------------------


async def test_the_network_changes_between_phases_and_processes_go_on(env: AgentEnvEnvironment) -> None:
    proxied = "env | grep -ci http_proxy; true"
    await said(env, "sleep 300 >/dev/null 2>&1 &")
    assert await said(env, proxied) == "0\n"
    hosts = ["example.org", "*.example.com", "10.1.0.0/16", "192.0.2.1", "2001:db8::1", "2001:db8::/32"]
    await env.set_network_policy(NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=hosts))
    assert await said(env, proxied) != "0\n"
    await env.set_network_policy(PUBLIC)
    assert int(await said(env, "ls /sys/class/net | wc -l")) > 1
    await env.set_network_policy(NONE)
    assert (await env.exec("timeout 2 bash -c '</dev/tcp/192.0.2.1/80'")).return_code != 0
    assert await sleepers(env) == 1


async def test_limits_hold(env: AgentEnvEnvironment) -> None:
    assert (await env.exec("head -c 1500000000 /dev/zero | tail")).return_code != 0  # memory: 1024 MB
    assert (await env.exec("head -c 500000000 /dev/zero > /opt/large")).return_code != 0  # storage: 256 MB


async def test_healthchecks(env: AgentEnvEnvironment) -> None:
    await said(env, "(sleep 1; touch /ready) >/dev/null 2>&1 &")
    ready = HealthcheckConfig(command="test -e /ready", interval_sec=0.3, timeout_sec=60, retries=99)
    await env.run_healthcheck(ready)
    with pytest.raises(HealthcheckError):
        await env.run_healthcheck(HealthcheckConfig(command="false", interval_sec=0.1, timeout_sec=60, retries=2))


# -- how it begins and ends ----------------------------------------------------------------------------


async def started_output(env: AgentEnvEnvironment, command: str, *, build: bool = False) -> str:
    """What a command prints in a fresh environment."""
    await env.start(build)
    try:
        return await said(env, command)
    finally:
        await env.stop(True)


async def test_a_dockerfile_and_its_context(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    files = {"Dockerfile": f"FROM {BASE}\nWORKDIR /app\nENV A=b\nCOPY f /app/\n", "f": "text"}
    assert await started_output(made(tmp_path, files, **kind), "pwd; cat f; echo $A") == "/app\ntextb\n"


async def test_a_named_image_and_loose_files(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    files = {"Dockerfile": "", "data.txt": "loose"}
    env = made(tmp_path, files, config={"docker_image": BASE, "workdir": "/work"}, **kind)
    assert await started_output(env, "pwd; cat data.txt") == "/work\nloose"


async def test_the_dockerfile_is_built_instead_of_the_named_image(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    env = made(tmp_path, config={"docker_image": "registry.invalid/of-others:1"}, **kind)
    assert await started_output(env, "id -un app", build=True) == "app\n"


async def test_the_images_user_runs_commands_and_root_has_harbors_files(
    tmp_path: Path, kind: Mapping[str, Any]
) -> None:
    env = made(tmp_path, {"Dockerfile": f"{DOCKERFILE}USER app\n"}, **kind)
    (tmp_path / "u").write_text("1")
    await env.start(False)
    try:
        await env.upload_file(tmp_path / "u", "/tests/u")
        assert await said(env, "id -un; stat -c %U /tests/u; touch /logs/agent/x") == "app\nroot\n"
    finally:
        await env.stop(True)


async def test_a_dockerfile_that_fails_is_the_tasks_fault(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    env = made(tmp_path, {"Dockerfile": f"FROM {BASE}\nRUN false\n"}, **kind)
    with pytest.raises(SandboxBuildFailedError, match="RUN false"):
        await env.start(False)
    await env.stop(True)


async def test_it_ends_twice_or_before_it_began(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    env = made(tmp_path, **kind)
    await env.stop(True)
    await env.start(False)
    await env.stop(True)
    await env.stop(True)
    with pytest.raises(RuntimeError, match="has not been started"):
        await env.exec("true")


async def test_a_start_that_is_cancelled(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    env = made(tmp_path, {"Dockerfile": f"FROM {BASE}\nRUN sleep 300\n"}, **kind)
    starting = asyncio.create_task(env.start(False))
    await asyncio.sleep(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await env.stop(True)
    assert await started_output(made(tmp_path / "again", **kind), "echo after") == "after\n"


async def test_several_trials_at_once(tmp_path: Path) -> None:
    envs = [made(tmp_path / str(number), **KINDS["shared"]) for number in range(6)]  # over 4 slots
    found = await asyncio.gather(*(started_output(env, f"echo {number}") for number, env in enumerate(envs)))
    assert found == [f"{number}\n" for number in range(6)]


# -- compose files -------------------------------------------------------------------------------------


async def test_services_beside_the_agents_machine(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    server = f"FROM {BASE}\nRUN echo secret > /secret\n" + "CMD echo $WORD > /var/lib/server/said; exec sleep 1000\n"
    files = {"docker-compose.yaml": SERVICES, "server/Dockerfile": server, "notes/one": "1\n"}
    env = made(tmp_path, files, **kind)
    assert env.capabilities.docker_compose
    await env.start(False)
    try:
        assert await said(env, "pwd; echo $A; cat /kept/said notes/one; ls /secret 2>&1; true") == (
            "/srv\nb\nword\n1\nls: cannot access '/secret': No such file or directory\n"
        )
        assert await sleepers(env) == 0
        ran = await env.service_exec("echo $WORD $A; cat /secret", service="server")
        assert ran.stdout == "word\nsecret\n"
        await env.service_download_file("/secret", tmp_path / "secret", service="server")
        assert (tmp_path / "secret").read_text() == "secret\n"
        await env.service_download_dir_with_exclusions(
            source_dir="/var/lib/server", target_dir=tmp_path / "said", exclude=["x"], service="server"
        )
        assert (tmp_path / "said" / "said").read_text() == "word\n"
        await said(env, "sleep 1000 >/dev/null 2>&1 &")
        await env.stop_service("main")
        assert await sleepers(env) == 0
        counted = "grep -lx sleep /proc/[0-9]*/comm 2>/dev/null | wc -l"
        assert (await env.service_exec(counted, service="server")).stdout == "1\n"
        await env.stop_service("server")
        assert (await env.service_exec(counted, service="server")).stdout == "0\n"
        with pytest.raises(ServiceOperationsUnsupportedError, match="no service 'other'"):
            await env.service_exec("true", service="other")
    finally:
        await env.stop(True)


async def test_a_service_that_fails_is_the_tasks_fault(tmp_path: Path, kind: Mapping[str, Any]) -> None:
    compose = (
        "services:\n  main: {depends_on: {one: {condition: service_completed_successfully}}}\n"
        f"  one: {{image: '{BASE}', command: 'sh -c \"echo why; exit 3\"'}}\n"
    )
    env = made(tmp_path, {"docker-compose.yaml": compose}, **kind)
    with pytest.raises(SandboxBuildFailedError, match="the service one ended with 3: why"):
        await env.start(False)


# -- what is refused, before anything starts -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"config": {"gpus": 1}}, RuntimeError, "GPU"),
        ({"config": {"os": TaskOS.WINDOWS}}, RuntimeError, "(?i)windows"),
        ({"files": {"docker-compose.yaml": "services: {main: {privileged: true}}"}}, ConfigError, "main.privileged"),
        ({"files": {"docker-compose.yaml": "services: {main: {}, a: {image: a, command: /sbin/init}}"}},
         ConfigError, "services.a.command"),
        ({"files": {"Dockerfile": ""}}, ConfigError, "neither docker_image nor environment/Dockerfile"),
        ({"config": {"docker_image": "oci:/etc"}}, ConfigError, "environment.docker_image"),
        ({"mounts": [{"type": "bind", "source": "/etc", "target": "/x"}]}, ConfigError, "/x: slots have no mounts"),
        ({"slots": 2, "slot_memory_mb": 1024, "config": {"memory_mb": 2048}}, ConfigError, "slot_memory_mb=2048"),
        ({"backend": "farm", "slots": 2}, ValueError, "leave slots out"),
        ({"backend": "nomad",
          "files": {"docker-compose.yaml": SERVICES, "server/Dockerfile": "FROM x", "notes/one": "1"}},
         ConfigError, "server: slots have some on this machine only"),
        ({"memory": 3}, ValueError, "Unknown option 'memory'"),
        ({"auto_mounting": True}, ValueError, "automatic host mounts"),
    ],
)  # fmt: skip
def test_what_slots_cannot_have_is_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        made(tmp_path, **given)


def test_a_farm_service_that_is_not_there_is_missed_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTENV_FARM_URL", raising=False)
    with pytest.raises(SystemExit, match="farm"):
        AgentEnvEnvironment.preflight({"backend": "farm"})


def test_harbor_finds_it_by_its_import_path() -> None:
    found = EnvironmentFactory.get_environment_class(import_path="agentenv.harnesses.harbor:AgentEnvEnvironment")
    assert found is AgentEnvEnvironment
    assert "slot_memory_mb" in found.options_schema()["properties"]
