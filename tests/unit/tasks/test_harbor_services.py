"""Compose files of several services: what is read, in which order services start, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.directories import read_task
from agentenv.tasks.harbor.env import HarborConfig, as_configured
from agentenv.tasks.harbor.starting import argv_of
from agentenv.tasks.harbor.task import HarborTask, Healthcheck, SideService
from agentenv.wire.image_config import ImageConfig

IMAGE = "sha256:" + 64 * "0"
GROUP = """\
services:
  main:
    networks: [inner]
    depends_on: {web: {condition: service_healthy}}
    volumes: ["data:/data"]
  web:
    build: ./web
    stop_signal: TERM
    depends_on: [main, db, init]
    mem_limit: 256m
    healthcheck: {test: [CMD, pg_isready, -U, $$USER], interval: 1m30s, timeout: 500ms, retries: 7}
    hostname: www
    networks: {inner: {aliases: [site]}}
    links: ["db:store"]
    ports: ["8080:80"]
  init:
    image: IMAGE
    networks: [inner]
    command: sh -c 'echo $$HOME'
    volumes: ["data:/a:ro", "/scratch"]
    restart: on-failure:3
  db:
    image: IMAGE
    networks: [inner]
    entrypoint: [serve]
    environment: {A: $$B}
    depends_on: {init: {condition: service_completed_successfully}, gone: {condition: service_started, required: false}}
  unused:
    image: x
    profiles: [dev]
volumes: {data: }
networks: {inner: }
""".replace("IMAGE", IMAGE)


def read(tmp_path: Path, compose: str, toml: str = "") -> HarborTask:
    """A task of Harbor's with this compose file."""
    directory = tmp_path / "one"
    for name in ("environment/web", "tests"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in ("environment/Dockerfile", "environment/web/Dockerfile"):
        (directory / name).write_text("FROM debian\n")
    (directory / "task.toml").write_text(toml)
    (directory / "instruction.md").write_text("Do it.\n")
    (directory / "tests/test.sh").touch()
    (directory / "environment/docker-compose.yaml").write_text(compose)
    return read_task(directory, {})


def test_services_are_started_after_those_that_they_wait_for(tmp_path: Path) -> None:
    task = read(tmp_path, GROUP, "[environment]\nmemory_mb = 1024\n")
    assert [service.name for service in task.group.services] == ["init", "db", "web"]
    assert task.group.after == {"web": "service_healthy"}
    assert task.group.hosts == ("main", "web", "www", "site", "store", "init", "db")
    assert (task.memory_mib, task.volumes, task.unknown) == (1024 + 256, {"/data": "data"}, ())
    init, db, web = task.group.services
    assert (init.command, init.volumes, init.restart) == (("sh", "-c", "echo $HOME"), {"/a": "data:ro"}, "on-failure")
    assert (db.entrypoint, db.env, db.after) == (("serve",), {"A": "$B"}, {"init": "service_completed_successfully"})
    assert web.image == f"dockerfile:{task.directory}/environment/web"
    assert web.after == {"db": "service_started", "init": "service_started"}
    assert web.healthcheck == Healthcheck("pg_isready -U '$USER'", 90.0, 0.5, 0.0, 5.0, 7)


def test_a_file_may_leave_the_agents_service_out(tmp_path: Path) -> None:
    (web,) = read(tmp_path, "services: {web: {build: ./web}}").group.services
    assert web.name == "web"


@pytest.mark.parametrize(
    ("services", "field", "why"),
    [
        ("web: {build: ./web, depends_on: [db]}", "services.web.depends_on", "no such service"),
        ("web: {build: ./web, depends_on: [web]}", "depends_on", "wait for each other"),
        ("a: {build: ./web, depends_on: [b]}, b: {build: ./web, depends_on: [a]}", "depends_on", "wait for each other"),
        ("web: {build: ./web, depends_on: {main: {condition: service_healthy}}}", "depends_on", "the agent works"),
        ("main: {depends_on: {a: {condition: service_healthy}}}, a: {build: ./web}", "depends_on", "no healthcheck"),
        ("main: {depends_on: {web: {condition: up}}}, web: {build: ./web}", "depends_on", "got 'up'"),
        ("a: {build: ./web, expose: [80]}, b: {build: ./web, ports: ['81:80/tcp']}", "b.ports", "a has port 80"),
        ("a: {build: ./web, networks: {n: {ipv4_address: 10.0.0.2}}}", "ipv4_address", "no addresses"),
        ("a: {build: ./web, networks: [n]}, b: {build: ./web}", "services.a.networks", "share one network"),
        ("a: {build: ./web, network_mode: host}", "services.a.network_mode", "got 'host'"),
        ("a: {build: ./web, privileged: true}", "services.a.privileged", "only the rights"),
        ("a: {build: ./web, gpus: all}", "services.a.gpus", "no GPU"),
        ("a: {build: ./web, command: /sbin/init}", "services.a.command", "systemd"),
        ("a: {build: ./web, volumes: ['/run/docker.sock:/run/docker.sock']}", "services.a.volumes", "not mounted"),
        ("a: {build: ./web, volumes: ['data:/d']}", "services.a.volumes", "not among the file's volumes"),
        ("main: {volumes: ['./web:/w']}, a: {build: ./web, volumes: ['./web:/w:ro']}", "a.volumes", "of its own"),
        ("a: {build: ./web, healthcheck: {test: [CMD]}}", "services.a.healthcheck.test", "got"),
        ("a: {build: ./web, healthcheck: {test: x, interval: soon}}", "services.a.healthcheck.interval", "got 'soon'"),
        ("a: {build: ./web, restart: sometimes}", "services.a.restart", "got 'sometimes'"),
        ("main: {entrypoint: /start}, a: {build: ./web}", "services.main.entrypoint", "not started"),
        ("a: {extends: {file: other.yaml, service: b}, build: ./web}", "services.a.extends", "not supported"),
        ("'a b': {build: ./web}", "services.a b", "not a valid name"),
        ("a: {build: ./web, hostname: \"x\\n1.2.3.4 evil\"}", "services.a.hostname", "host names"),
        ("a: {build: ./web, networks: {n: {aliases: [b c]}}}, main: {networks: [n]}", "a.networks", "got 'b c'"),
        (f"a: {{build: ./web, links: {[f'a:n{n}' for n in range(70)]}}}", "services.main", "72 names"),
        (", ".join(f"s{n}: {{build: ./web}}" for n in range(9)), "services.main", "9 services"),
    ],
)  # fmt: skip
def test_what_one_slot_cannot_do_is_refused_by_name(tmp_path: Path, services: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"services: {{{services}}}\n")
    assert field in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("entrypoint", "command", "argv"),
    [
        (None, None, ("enter", "run")),
        (None, ("other",), ("enter", "other")),
        (("mine",), None, ("mine",)),
        (("mine",), ("other",), ("mine", "other")),
        ((), ("other",), ("other",)),
    ],
)
def test_a_program_is_the_images_unless_the_file_names_one(
    entrypoint: tuple[str, ...] | None, command: tuple[str, ...] | None, argv: tuple[str, ...]
) -> None:
    side = SideService(name="web", image=IMAGE, entrypoint=entrypoint, command=command)
    assert argv_of(side, ImageConfig(entrypoint=("enter",), cmd=("run",))) == argv


@pytest.mark.parametrize(
    ("changed", "field", "why"),
    [
        ({"tool_pool_mode": "farm"}, "tool_pool_mode", "slots of this machine alone"),
        ({"tool_pool_mode": "nomad"}, "tool_pool_mode", "slots of this machine alone"),
        ({"verification": "sealed"}, "verification", "end when its slot is sealed"),
    ],
)
def test_where_services_cannot_be_the_task_and_they_are_named(
    tmp_path: Path, changed: dict[str, str], field: str, why: str
) -> None:
    task = read(tmp_path, "services: {main: {}, web: {build: ./web}}")
    with pytest.raises(ConfigError) as caught:
        as_configured(task, HarborConfig.model_validate({"tasks": str(tmp_path), **changed}))
    assert caught.value.field == field
    assert "task one has services" in str(caught.value)
    assert "services.web of its compose file" in str(caught.value)
    assert why in str(caught.value)
