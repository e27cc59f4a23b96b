from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.directories import read_task, read_tasks
from agentenv.tasks.harbor.players import oracle
from agentenv.tasks.harbor.task import HarborTask, Mount
from agentenv.wire.network import NetworkPolicy

TASK = "instruction: Do it.\ndifficulty: easy\n"
USUAL = """\
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
CLIENT = "services:\n  client:\n    build: .\n"


def written(tmp_path: Path, task: str = TASK, compose: str | None = USUAL, **files: str) -> Path:
    directory = tmp_path / "one"
    (directory / "tests").mkdir(parents=True)
    files = {"task.yaml": task, "Dockerfile": "FROM debian\n", "run-tests.sh": "pytest -rA\n", **files}
    if compose is not None:
        files["docker-compose.yaml"] = compose
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def read(tmp_path: Path, task: str = TASK, compose: str | None = USUAL, **files: str) -> HarborTask:
    return read_task(written(tmp_path, task, compose, **files), {"OFFERED": "given"})


def test_a_usual_task(tmp_path: Path) -> None:
    more = "author_name: a\nmax_agent_timeout_sec: 900\nmax_test_timeout_sec: 30.5\nparser_name: pytest\ntags: [a]\n"
    found = read(tmp_path, TASK + more)
    one = tmp_path / "one"
    assert (found.name, found.instruction, found.image) == ("one", "Do it.", f"dockerfile:{one}")
    assert (found.agent.timeout_s, found.verifier.timeout_s) == (900, 30.5)
    assert (found.agent.network, found.verifier.network) == (NetworkPolicy("public"), NetworkPolicy("public"))
    assert (found.tests, found.script, found.results) == (
        (one / "tests", one / "run-tests.sh"),
        "run-tests.sh",
        "pytest",
    )
    assert (found.env, found.unknown) == ({"TEST_DIR": "/tests"}, ())
    assert (found.cpus, found.memory_mib, found.workdir, found.agent.user) == (None, None, "", "")


def test_defaults_are_terminal_benchs_and_a_dockerfile_is_enough(tmp_path: Path) -> None:
    directory = written(tmp_path, compose=None)
    (directory / "tests").rmdir()
    found = read_task(directory, {})
    assert (found.agent.timeout_s, found.verifier.timeout_s, found.results) == (360, 60, "pytest")
    assert found.tests == (directory / "run-tests.sh",)
    assert found.image == f"dockerfile:{directory}"


def test_what_the_service_says_of_its_machine(tmp_path: Path) -> None:
    service = """\
    working_dir: /srv
    user: 1000
    network_mode: none
    mem_limit: 4g
    deploy: {resources: {limits: {cpus: "1.5", memory: 1G}}}
    environment: {A: 1, B: true, C: "${OFFERED}-${MISSING:-x}", OFFERED: , MISSING: , TEST_DIR: /elsewhere}
    shm_size: 1g
    ports: ["8000:8000"]
    platform: linux/amd64
    command: tail -f /dev/null
"""
    found = read(tmp_path, TASK + "colour: 1\n", CLIENT + service)
    assert (found.workdir, found.cpus, found.memory_mib) == ("/srv", 1.5, 4096)
    assert (found.agent.user, found.verifier.user, found.other_user) == ("1000", "1000", "root")
    assert found.agent.network == found.verifier.network == NetworkPolicy("none")
    variables = {"A": "1", "B": "true", "C": "given-x", "OFFERED": "given"}
    assert found.env == {**variables, "TEST_DIR": "/elsewhere"}
    assert found.unknown == ("colour", "services.client.ports", "services.client.shm_size")


@pytest.mark.parametrize(("memory", "mib"), [("512m", 512), ("2G", 2048), ("1.5gb", 1536), ("1073741824", 1024)])
def test_memory_is_written_as_for_docker(tmp_path: Path, memory: str, mib: int) -> None:
    compose = f"{CLIENT}    deploy: {{resources: {{limits: {{memory: {memory}}}}}}}\n"
    assert read(tmp_path, compose=compose).memory_mib == mib


def test_an_image_of_its_own_and_a_context_below(tmp_path: Path) -> None:
    named = "services:\n  main:\n    image: registry.example/t/one:2\n    command: sleep infinity\n"
    directory = written(tmp_path, compose=named)
    assert read_task(directory, {}).image == "registry.example/t/one:2"
    (directory / "client").mkdir()
    (directory / "client/Dockerfile").touch()
    below = "services:\n  client:\n    build:\n      context: ./client\n      dockerfile: ./Dockerfile\n"
    (directory / "docker-compose.yaml").write_text(below)
    assert read_task(directory, {}).image == f"dockerfile:{directory}/client"


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ("difficulty: easy\n", "instruction"),
        (TASK + "parser_name: mlebench\n", "parser_name"),
        (TASK + "max_test_timeout_sec: soon\n", "max_test_timeout_sec"),
        ("- a\n", "task.yaml"),
        ("a: [", "task.yaml"),
    ],
)
def test_what_is_wrong_in_task_yaml_is_refused_by_name(tmp_path: Path, task: str, field: str) -> None:
    with pytest.raises(ConfigError, match="task one: ") as caught:
        read(tmp_path, task)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("compose", "field"),
    [
        ("services: {web: {image: x}, database: {image: postgres}}\n", "docker-compose.yaml"),
        ("services: {}\n", "docker-compose.yaml"),
        ("a: [", "docker-compose.yaml"),
        (CLIENT + "volumes:\n  data: {external: true}\n", "volumes.data"),
        (CLIENT + "    privileged: true\n", "services.client.privileged"),
        (CLIENT + "    cap_add: [NET_ADMIN]\n", "services.client.cap_add"),
        (CLIENT + "    entrypoint: /start.sh\n", "services.client.entrypoint"),
        (CLIENT + "    networks: [inner]\n", "services.client.networks"),
        (CLIENT + "    network_mode: host\n", "services.client.network_mode"),
        *(
            (CLIENT + f"    volumes: [{volume}]\n", "services.client.volumes")
            for volume in (
                "'./missing:/data'",
                "'data:/data'",
                "'/etc:/data'",
                "'../two:/data'",
                "'./Dockerfile:data'",
                "'.:/'",
                "'./tests:/app'",
                "'./tests/a:/app'",
                "'./x/../solution.sh:/app'",
                "'~/x:/app'",
                "'./Dockerfile'",
                "{type: tmpfs, target: /a}",
                "{type: bind, source: ./Dockerfile}",
                "1",
            )
        ),
        (CLIENT + "    command: bash -c '/usr/sbin/sshd && sleep infinity'\n", "services.client.command"),
        (CLIENT + "    working_dir: srv\n", "services.client.working_dir"),
        (CLIENT + "    mem_limit: much\n", "services.client.mem_limit"),
        (CLIENT + "    cpus: many\n", "services.client.cpus"),
        (CLIENT + "    user: [1]\n", "services.client.user"),
        (CLIENT + "    environment: 1\n", "services.client.environment"),
        (CLIENT + "    environment: ['KEY=${SECRET}']\n", "services.client.environment.KEY"),
        ("services:\n  client:\n    build: {args: {A: b}}\n", "services.client.build.args"),
        ("services:\n  client:\n    build: {dockerfile: other}\n", "services.client.build.dockerfile"),
        ("services:\n  client:\n    build: ./missing\n", "services.client.build"),
        ("services:\n  client:\n    build: [a]\n", "services.client.build"),
        ("services:\n  client:\n    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}\n", "services.client.build"),
        ("services:\n  client:\n    image: UPPER CASE\n", "services.client.image"),
    ],
)
def test_what_a_slot_cannot_do_is_refused_by_name(tmp_path: Path, compose: str, field: str) -> None:
    with pytest.raises(ConfigError, match="task one: ") as caught:
        read(tmp_path, compose=compose)
    assert caught.value.field == field


def test_what_is_mounted_is_copied_without_what_the_agent_must_not_see(tmp_path: Path) -> None:
    volumes = (
        "['./:/app/', './data/one.txt:/etc/one.txt:ro', {type: bind, source: ./data, target: /srv/d, read_only: true},"
        " '${T_BENCH_TASK_LOGS_PATH}:/logs']"
    )
    directory = written(tmp_path, TASK, f"{CLIENT}    volumes: {volumes}\n", **{"solution.sh": "", "main.cpp": ""})
    (directory / "data").mkdir()
    (directory / "data/one.txt").touch()
    whole, file, below = read_task(directory, {}).mounts
    assert whole == Mount(
        "/app",
        tuple(
            (name, directory / name) for name in ("Dockerfile", "data", "docker-compose.yaml", "main.cpp", "task.yaml")
        ),
    )
    assert file == Mount("/etc/one.txt", (("", directory / "data/one.txt"),))
    assert below == Mount("/srv/d", (("", directory / "data"),))
    (directory / "another").symlink_to("solution.sh")
    assert read_task(directory, {}).mounts[0] == whole
    (directory / "docker-compose.yaml").write_text(f"{CLIENT}    volumes: ['./another:/a']\n")
    with pytest.raises(ConfigError, match="has what the agent must not see"):
        read_task(directory, {})
    (directory / "docker-compose.yaml").write_text(f"{CLIENT}    volumes: ['.:/a']\n")
    (directory / "out").symlink_to("/etc")
    with pytest.raises(ConfigError, match="out: task one: leads out of the task"):
        read_task(directory, {})


def test_the_shell_of_the_tests_is_their_own(tmp_path: Path) -> None:
    assert read(tmp_path, TASK + "run_tests_in_same_shell: true\n").unknown == ("run_tests_in_same_shell",)


def test_tests_are_needed(tmp_path: Path) -> None:
    directory = written(tmp_path)
    (directory / "run-tests.sh").unlink()
    with pytest.raises(ConfigError, match=r"run-tests\.sh: task one: is missing"):
        read_task(directory, {})


def test_a_directory_may_have_tasks_of_both_formats(tmp_path: Path) -> None:
    written(tmp_path)
    two = tmp_path / "two"
    (two / "tests").mkdir(parents=True)
    (two / "tests/test.sh").touch()
    (two / "instruction.md").write_text("Do it.")
    (two / "task.toml").write_text('[environment]\ndocker_image = "debian"\n')
    (tmp_path / "neither").mkdir()
    found = read_tasks(tmp_path, {})
    assert [(task.name, task.results) for task in found.tasks] == [("one", "pytest"), ("two", "reward")]
    (tmp_path / "one/task.toml").write_text("[environment]\n")
    assert "tests/test.sh" in str(read_tasks(tmp_path, {}).refused["one"])


def calls(task: HarborTask) -> list[Any]:
    return [call.arguments for call in oracle(task)[0].calls]


def test_the_oracle_runs_the_script_or_types_the_keys(tmp_path: Path) -> None:
    keys = "- command: vim a\n  min_timeout_sec: 1.5\n- command: make\n  block: true\n  max_timeout_sec: 60\n"
    files = {"solution.yaml": f"{keys}- command: C-c\n  append_enter: false\n"}
    typed = read(tmp_path, **files)
    waiting = {"action": "send_keys", "block": False, "min_wait_s": 0.0, "max_wait_s": 180.0}
    assert calls(typed) == [
        {"action": "start"},
        {**waiting, "keys": ["vim a", "Enter"], "min_wait_s": 1.5},
        {**waiting, "keys": ["make", "Enter"], "block": True, "max_wait_s": 60.0},
        {**waiting, "keys": ["C-c"]},
    ]
    (typed.directory / "solution.sh").write_text("true\n")
    (script,) = calls(read_task(typed.directory, {}))
    assert script["command"].endswith("bash /solution/solution.sh </dev/null")


@pytest.mark.parametrize(("name", "text"), [("solution.yaml", "- comand: a\n"), ("solution.yaml", "a: ["), ("", "")])
def test_a_solution_that_cannot_be_played_is_named(tmp_path: Path, name: str, text: str) -> None:
    task = read(tmp_path, **({name: text} if name else {}))
    with pytest.raises(ConfigError, match="task one: ") as caught:
        oracle(task)
    assert caught.value.field == (name or "solution.sh")
