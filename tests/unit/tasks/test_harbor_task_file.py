from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.directories import read_task, read_tasks
from agentenv.tasks.harbor.players import oracle
from agentenv.tasks.harbor.task import HarborTask, Healthcheck, Mount, from_dockerfiles
from agentenv.wire.network import NetworkPolicy

OURS = Path(__file__).parents[3] / "examples/tasks"
IMAGE = '[environment]\ndocker_image = "registry.example/tasks/one:1"\n'


def written(tmp_path: Path, toml: str = IMAGE, name: str = "one", dockerfile: str = "") -> Path:
    directory = tmp_path / name
    (directory / "tests").mkdir(parents=True)
    (directory / "environment").mkdir()
    (directory / "task.toml").write_text(toml)
    (directory / "instruction.md").write_text("Do it.\n")
    (directory / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    if dockerfile:
        (directory / "environment/Dockerfile").write_text(dockerfile)
    return directory


def task(tmp_path: Path, toml: str = IMAGE, **more: Any) -> HarborTask:
    return read_task(written(tmp_path, toml, **more), {"OFFERED": "given"})


def test_a_task_of_today(tmp_path: Path) -> None:
    toml = """
    schema_version = "1.1"
    [task]
    name = "team/one"
    [agent]
    timeout_sec = 900.0
    network_mode = "no-network"
    [verifier]
    timeout_sec = 60
    user = "root"
    env = { KEY = "${OFFERED}", OTHER = "${MISSING:-else}", PLAIN = "$HOME" }
    [solution]
    env = { A = "b" }
    [environment]
    docker_image = "debian:trixie"
    cpus = 2
    memory_mb = 4096
    storage_mb = 10240
    workdir = "/app"
    network_mode = "allowlist"
    allowed_hosts = ["index.example.org", "*.example.org", "10.0.0.0/8"]
    env = { LANG = "C.UTF-8" }
    """
    found = task(tmp_path, toml)
    assert (found.name, found.image, found.workdir, found.instruction) == ("one", "debian:trixie", "/app", "Do it.\n")
    assert (found.cpus, found.memory_mib, found.storage_mib) == (2, 4096, 10240)
    assert (found.agent.timeout_s, found.agent.network) == (900, NetworkPolicy("none"))
    hosts = ("index.example.org", "*.example.org", "10.0.0.0/8")
    assert (found.verifier.timeout_s, found.verifier.network) == (60, NetworkPolicy("allow", hosts))
    assert found.verifier_env == {"KEY": "given", "OTHER": "else", "PLAIN": "$HOME"}
    assert (found.env, found.solution_env, found.unknown) == ({"LANG": "C.UTF-8"}, {"A": "b"}, ())


def test_a_task_of_terminal_bench_2(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\ncpus = 1\n'
    found = task(tmp_path, toml, dockerfile="FROM debian\n")
    assert found.image == f"dockerfile:{tmp_path}/one/environment"
    assert (found.memory_mib, found.storage_mib) == (2048, 512)
    assert (found.agent.network, found.agent.timeout_s) == (NetworkPolicy("none"), math.inf)


@pytest.mark.parametrize("image", ["localhost/base:1", "committed:base:1", f"sha256:{64 * 'a'}"])
def test_an_image_of_a_store_may_be_named(tmp_path: Path, image: str) -> None:
    assert task(tmp_path, f"[environment]\ndocker_image = {image!r}\n").image == image


def test_a_dockerfile_beside_an_image_is_chosen_by_whoever_plays(tmp_path: Path) -> None:
    both = task(tmp_path, f"{IMAGE}[verifier.environment]\ndocker_image = 'debian'\n", dockerfile="FROM debian\n")
    (both.directory / "tests/Dockerfile").touch()
    both = read_task(both.directory, {})
    assert both.separate is not None
    assert (both.image, both.separate.image) == ("registry.example/tasks/one:1", "debian")
    chosen = from_dockerfiles(both)
    assert chosen.separate is not None
    assert chosen.image == f"dockerfile:{both.directory}/environment"
    assert chosen.separate.image == f"dockerfile:{both.directory}/tests"
    alone = task(tmp_path, name="two")
    assert from_dockerfiles(alone) == alone


def test_a_network_is_what_harbor_gives_by_default(tmp_path: Path) -> None:
    assert task(tmp_path).verifier.network == NetworkPolicy("public")


def test_fields_that_nobody_reads_are_named(tmp_path: Path) -> None:
    toml = f"colour = 1\nartifacts = ['/app']\n[agent]\nmood = 2\n{IMAGE}skills_dir = '/s'\n"
    found = task(tmp_path, f"{toml}healthcheck = {{ command = 'true', often = 1 }}\n").unknown
    unread = {"colour", "artifacts", "agent.mood", "environment.skills_dir", "environment.healthcheck.often"}
    assert set(found) == unread


def test_a_healthcheck_has_dockers_defaults(tmp_path: Path) -> None:
    toml = f'{IMAGE}os = "linux"\n[environment.healthcheck]\ncommand = "true"\nretries = 5\nstart_period_sec = 1.5\n'
    found = task(tmp_path, toml)
    assert found.healthcheck == Healthcheck("true", 5.0, 30.0, 1.5, 5.0, 5)
    assert found.unknown == ()


@pytest.mark.parametrize(("agent", "user"), [("", None), ('[agent]\nuser = "games"', "root")])
def test_what_is_not_the_agents_is_the_images_user_unless_the_agent_is_somebody_else(
    tmp_path: Path, agent: str, user: str | None
) -> None:
    assert task(tmp_path, IMAGE + agent).other_user == user


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        (IMAGE + "gpus = 1", "environment.gpus"),
        (IMAGE + "cpus = -1", "environment.cpus"),
        (IMAGE + "cpus = true", "environment.cpus"),
        (IMAGE + 'memory = "2 apples"', "environment.memory"),
        (IMAGE + 'workdir = "app"', "environment.workdir"),
        (IMAGE + 'network_mode = "some"', "environment.network_mode"),
        (IMAGE + 'allowed_hosts = ["no host!"]', "environment.allowed_hosts"),
        (IMAGE + 'network_mode = "public"\nallowed_hosts = ["a.example"]', "environment.allowed_hosts"),
        (IMAGE + "env = { A = 1 }", "environment.env"),
        (IMAGE + "[environment.healthcheck]\nretries = 1", "environment.healthcheck.command"),
        (IMAGE + "healthcheck = 'true'", "environment.healthcheck"),
        (IMAGE + 'os = "Windows"', "environment.os"),
        (IMAGE + "[environment.tpu]\ntype = 'v6e'", "environment.tpu"),
        (IMAGE + "[verifier.environment]\ncpus = 'one'", "verifier.environment.cpus"),
        (IMAGE + "[verifier.environment]\ngpus = 1", "verifier.environment.gpus"),
        (IMAGE + "[verifier.environment.healthcheck]\ncommand = 'true'", "verifier.environment.healthcheck"),
        (IMAGE + "[verifier]\nenvironment_mode = 'shared'\nenvironment = { cpus = 1 }", "verifier.environment_mode"),
        ('artifacts = ["app"]\n[verifier]\nenvironment_mode = "separate"\n' + IMAGE, "artifacts"),
        ('artifacts = ["/a/../b"]\n[verifier]\nenvironment_mode = "separate"\n' + IMAGE, "artifacts"),
        (
            'artifacts = [{ source = "/a", service = "db" }]\n[verifier]\nenvironment_mode = "separate"\n' + IMAGE,
            "artifacts",
        ),
        (
            'artifacts = [{ source = "/a", exclude = ["b"] }]\n[verifier]\nenvironment_mode = "separate"\n' + IMAGE,
            "artifacts",
        ),
        (IMAGE + "[[verifier.collect]]\ncommand = 'true'", "verifier.collect"),
        (IMAGE + "[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers"),
        ('[environment]\ndocker_image = "UPPER CASE"', "environment.docker_image"),
        ("[environment]", "environment.docker_image"),
        ("environment = 1", "environment"),
        (IMAGE + '[verifier]\nenvironment_mode = "elsewhere"', "verifier.environment_mode"),
        (IMAGE + '[verifier.env]\nKEY = "${SECRET}"', "verifier.env.KEY"),
        (IMAGE + "[agent]\nuser = 1.5", "agent.user"),
        (IMAGE + "[agent]\ntimeout_sec = 'soon'", "agent.timeout_sec"),
        (IMAGE + "[[steps]]\nname = 'a'", "steps/a"),
        ("not toml", "task.toml"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(tmp_path: Path, toml: str, field: str) -> None:
    with pytest.raises(ConfigError, match="task one: ") as caught:
        task(tmp_path, toml)
    assert caught.value.field == field


SEPARATE = """
artifacts = ["/app/out", { source = "/srv/log.txt", destination = "log.txt" }]
[verifier]
environment_mode = "separate"
"""


def test_a_verifier_elsewhere_has_a_fresh_machine_of_the_agents_image(tmp_path: Path) -> None:
    found = task(tmp_path, SEPARATE + IMAGE + "memory_mb = 2048\nworkdir = '/app'\n")
    assert found.separate is not None
    assert (found.separate.image, found.separate.has_tests) == ("registry.example/tasks/one:1", False)
    assert found.separate.artifacts == ("/logs/artifacts", "/app/out", "/srv/log.txt")
    assert (found.separate.memory_mib, found.separate.workdir, found.unknown) == (2048, "/app", ())


def test_a_verifier_elsewhere_has_its_own_image_limits_and_network(tmp_path: Path) -> None:
    own = """
    [verifier.environment]
    docker_image = "registry.example/tests/one:1"
    memory_mb = 512
    network_mode = "no-network"
    env = { KEY = "${OFFERED}" }
    """
    found = task(tmp_path, IMAGE + "memory_mb = 2048\n" + own)
    assert found.separate is not None
    assert (found.separate.image, found.separate.has_tests) == ("registry.example/tests/one:1", True)
    assert (found.separate.memory_mib, found.separate.env, found.memory_mib) == (512, {"KEY": "given"}, 2048)
    assert (found.verifier.network, found.agent.network) == (NetworkPolicy("none"), NetworkPolicy("public"))


def test_a_dockerfile_beside_the_tests_is_that_of_a_verifier_elsewhere(tmp_path: Path) -> None:
    directory = written(tmp_path, IMAGE)
    (directory / "tests/Dockerfile").touch()
    assert read_task(directory, {}).separate is None
    (directory / "task.toml").write_text(SEPARATE + IMAGE)
    found = read_task(directory, {}).separate
    assert found is not None
    assert (found.image, found.has_tests) == (f"dockerfile:{directory}/tests", True)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    directory = written(tmp_path)
    (directory / missing).unlink()
    with pytest.raises(ConfigError, match=missing.partition("/")[0]):
        read_task(directory, {})


def test_compose_files_are_read_where_harbor_reads_them(tmp_path: Path) -> None:
    directory = written(tmp_path)
    (directory / "tests/docker-compose.yaml").write_text("services: {}\n")
    (directory / "environment/docker-compose.yml").write_text("services: {}\n")
    assert read_task(directory, {}).separate is None, "both are material"
    (directory / "task.toml").write_text(SEPARATE + IMAGE)
    with pytest.raises(ConfigError, match=r"tests/docker-compose\.yaml: task one: has no services"):
        read_task(directory, {})


def test_a_compose_file_adds_to_main(tmp_path: Path) -> None:
    directory = written(tmp_path, SEPARATE + IMAGE + "env = { A = 'mine' }\n")
    (directory / "environment/docker-compose.yaml").write_text("""\
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    working_dir: /srv
    environment: ["A=theirs", "B=${TEST_DIR}"]
    volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}", "./Dockerfile:/a/b", "../task.toml:/t"]
    shm_size: 1g
""")
    (directory / "environment/Dockerfile").touch()
    mounted = "{type: bind, source: ./test.sh, target: /tests/again.sh, read_only: true}"
    (directory / "tests/docker-compose.yaml").write_text(f"services: {{main: {{volumes: [{mounted}]}}}}\n")
    found = read_task(directory, {})
    assert (found.env, found.workdir) == ({"A": "mine", "B": "/tests"}, "/srv")
    assert found.mounts == (
        Mount("/a/b", (("", directory / "environment/Dockerfile"),)),
        Mount("/t", (("", directory / "task.toml"),)),
    )
    assert found.unknown == ("services.main.shm_size",)
    assert found.separate is not None
    assert found.separate.mounts == (Mount("/tests/again.sh", (("", directory / "tests/test.sh"),)),)


@pytest.mark.parametrize(
    ("service", "field"),
    [
        ("web: {image: x, privileged: true}", "services.web.privileged"),
        ("main: {}, web: {build: ./nowhere}", "services.web.build"),
        ("main: {image: x}", "services.main.image"),
        ("main: {build: .., image: x}", "services.main.build"),
        ("main: {build: ./below}", "services.main.build"),
        ("main: {user: games}", "services.main.user"),
        ("main: {mem_limit: 1g}", "services.main.mem_limit"),
        ("main: {network_mode: none}", "services.main.network_mode"),
        ("main: {privileged: true}", "services.main.privileged"),
        ("main: {volumes: ['../solution:/s']}", "services.main.volumes"),
    ],
)
def test_what_a_compose_file_may_not_add_is_refused_by_file_and_field(tmp_path: Path, service: str, field: str) -> None:
    directory = written(tmp_path, dockerfile="FROM debian\n")
    (directory / "environment/below").mkdir()
    (directory / "environment/below/Dockerfile").touch()
    (directory / "environment/docker-compose.yaml").write_text(f"services: {{{service}}}\n")
    with pytest.raises(ConfigError, match=r"environment/docker-compose\.yaml") as caught:
        read_task(directory, {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("toml", "missing", "field"),
    [
        ("[[steps]]\nname = 'a'\n", ["instruction.md", "tests/test.sh"], "steps/a"),
        (IMAGE + "gpus = 1\n", ["instruction.md"], "environment.gpus"),
        (IMAGE, ["instruction.md"], "instruction.md"),
        (IMAGE, ["tests/test.sh"], "tests/test.sh"),
        (IMAGE, ["task.toml"], "task.toml"),
    ],
)
def test_what_slots_lack_is_named_before_what_the_task_lacks(
    tmp_path: Path, toml: str, missing: list[str], field: str
) -> None:
    directory = written(tmp_path, toml)
    for name in missing:
        (directory / name).unlink()
    with pytest.raises(ConfigError) as caught:
        read_task(directory, {})
    assert caught.value.field == field


def test_tests_may_be_in_the_image_of_a_verifier_elsewhere(tmp_path: Path) -> None:
    directory = written(tmp_path, IMAGE + "[verifier.environment]\ndocker_image = 'registry.example/tests/one:1'\n")
    (directory / "tests/test.sh").unlink()
    found = read_task(directory, {}).separate
    assert found is not None
    assert found.has_tests


def test_an_instruction_of_marks_alone_is_empty(tmp_path: Path) -> None:
    directory = written(tmp_path)
    (directory / "instruction.md").write_text("<!-- canary -->\n\nDo it.\n")
    assert read_task(directory, {}).instruction == "Do it.\n"
    (directory / "instruction.md").write_text("<!-- canary -->\n\n")
    with pytest.raises(ConfigError, match=r"instruction\.md.*is empty"):
        read_task(directory, {})


def test_a_directory_of_tasks_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        written(tmp_path, name=name)
    assert [each.name for each in read_tasks(tmp_path, {}).tasks] == ["a", "b", "c"]
    assert [each.name for each in read_tasks(tmp_path, {}, ["c"]).tasks] == ["c"]
    assert [each.name for each in read_tasks(tmp_path / "b", {}).tasks] == ["b"]
    with pytest.raises(ConfigError, match="'d' is not a task"):
        read_tasks(tmp_path, {}, ["a", "d"])
    with pytest.raises(ConfigError, match=r"has no task\.toml or task\.yaml"):
        read_tasks(tmp_path / "a/tests", {})


def test_our_own_tasks_have_all_that_a_task_has() -> None:
    found = read_tasks(OURS, {}).tasks
    assert len(found) >= 4
    for each in found:
        assert each.unknown == ()
        assert len(oracle(each)) == 2
    assert {each.results for each in found} == {"reward", "pytest"}


def test_a_task_that_cannot_be_played_leaves_the_others(tmp_path: Path) -> None:
    for name in ("a", "two  words", "no:good"):
        written(tmp_path, name=name)
    written(tmp_path, IMAGE + "gpus = 1\n", name="b")
    (written(tmp_path, name="c") / "tests/test.sh").unlink()

    def prepare(task: HarborTask) -> HarborTask:
        if task.name == "a":
            raise ConfigError("max_cpus", "too few")
        return task

    found = read_tasks(tmp_path, {}, prepare=prepare)
    assert [task.name for task in found.tasks] == ["two  words"]
    assert {name: error.message for name, error in found.refused.items()} == {
        "a": "max_cpus: too few",
        "b": "environment.gpus: task b: slots have no GPU (task.toml)",
        "c": "tests/test.sh: task c: is missing",
        "no:good": "tasks: 'no:good' is not a valid task name",
    }
