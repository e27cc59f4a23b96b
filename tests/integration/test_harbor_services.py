"""A task of several services, end to end: the oracle scores 1, an idle agent 0; what fails is the task's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from tests.debian_images import base_in_cache
from tests.integration.results import rows
from tests.integration.test_harbor import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

SERVER = """\
use IO::Socket::INET;
my $listener = IO::Socket::INET->new(LocalPort => 8000, Listen => 5, ReuseAddr => 1) or die "listen: $!";
while (my $client = $listener->accept) {
    while (defined(my $line = <$client>) and $line =~ /\\S/) {}
    print $client "HTTP/1.0 200 OK\\r\\n\\r\\n", `cat /srv/word.txt`;
    close $client;
}
"""
FILES = {
    "task.toml": '[environment]\ncpus = 1\nmemory_mb = 1024\nstorage_mb = 512\nnetwork_mode = "no-network"\n',
    "instruction.md": "Fetch http://server:8000/ and write what it answers to /app/word.txt.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "environment/server/Dockerfile": 'FROM debian:bookworm-slim\nCOPY . /srv/\nCMD ["perl", "/srv/serve.pl"]\n',
    "environment/server/serve.pl": SERVER,
    "environment/server/word.txt": "a secret of the server\n",
    "environment/docker-compose.yaml": """\
services:
  main:
    depends_on: {server: {condition: service_healthy}}
    volumes: ["shared:/shared:ro"]
  init:
    build: ./server
    command: sh -c 'echo prepared > /data/state'
    volumes: ["shared:/data"]
  server:
    build: ./server
    expose: [8000]
    depends_on: {init: {condition: service_completed_successfully}}
    volumes: ["shared:/var/lib/state"]
    healthcheck:
      test: exec 3<>/dev/tcp/127.0.0.1/8000 && grep -q prepared /var/lib/state/state
      interval: 1s
      retries: 60
volumes: {shared: }
""",
    "solution/solve.sh": "#!/bin/bash\nexec 3<>/dev/tcp/server/8000; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3\n"
    "sed '1,/^\\r*$/d' <&3 > /app/word.txt\n",
    "tests/test.sh": "#!/bin/bash\n{ grep -qx 'a secret of the server' /app/word.txt && grep -qx prepared /shared/state"
    " && [ ! -e /srv/word.txt ] && echo 1 || echo 0; } > /logs/verifier/reward.txt\n",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = base_in_cache(tmp_path_factory.mktemp("services") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(directory))
        make_base(Store.open(store_directory()))
    return directory


@pytest.fixture
def task(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(cache))
    directory = tmp_path / "tasks/fetch-a-word"
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def test_the_oracle_scores_1_and_the_empty_agent_0(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(task.parent) == 0
    assert rows(capsys.readouterr().out) == ["ok fetch-a-word 1 0 S", "1 of 1 ok"]


def test_a_service_that_fails_is_the_tasks_fault_with_what_it_printed(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "environment/server/serve.pl").write_text("die 'no such port';\n")
    assert run(task.parent, "--agent", "empty") == 1
    assert "no such port" in capsys.readouterr().out


def test_a_slot_with_services_is_not_sealed(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(task.parent, "--sealed") != 0
    printed = capsys.readouterr()
    assert "which end when its slot is sealed" in printed.out + printed.err
