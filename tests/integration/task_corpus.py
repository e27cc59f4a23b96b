"""Task directories of our own, one for each feature that real task sets use, and what a check comes to on each.

python -m tests.integration.task_corpus [DIRECTORY]     # prints the table of docs/harbor.md; makes the directories
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SAYS: Final = "Make /tmp/done."
WRITE: Final = "echo $r > /logs/verifier/reward.txt\n"
DEFAULT: Final = "echo ${r:-0} > /logs/verifier/reward.txt\n"
TEST: Final = f"[ -e /tmp/done ] && r=1 || r=0\n{WRITE}"
HARBOR: Final[Mapping[str, str]] = {
    "task.toml": "",
    "instruction.md": f"{SAYS}\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "solution/solve.sh": "touch /tmp/done\n",
    "tests/test.sh": TEST,
}
"""A task of Harbor with nothing unusual about it."""
TERMINAL_BENCH: Final[Mapping[str, str]] = {
    "task.yaml": f"instruction: {SAYS}\n",
    "Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir -p /app/old\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n    working_dir: /app\n    tty: true\n",
    "tests/test_a.py": "",
    "run-tests.sh": "echo == short test summary info ==\n"
    "[ -e /tmp/done ] && found=PASSED || found=FAILED\necho $found a.py::test_a\n",
    "solution.sh": "touch /tmp/done\n",
}
"""The same for Terminal-Bench 1."""


@dataclass(frozen=True)
class Case:
    """One task directory."""

    files: Mapping[str, str]
    """What differs from the usual task; without text, the file is not there."""
    share: float | None = None
    """Percent of 5,916 public tasks of 18 repositories that have the feature; None: not counted."""
    refused: str = ""
    """What the reason begins with, if it is not played."""
    here: str = ""
    """What the table says, where it is more than whether it is played."""
    of: Mapping[str, str] = field(default_factory=lambda: HARBOR)

    def write(self, directory: Path) -> None:
        """Make the directory."""
        for name, text in {**self.of, **self.files}.items():
            if text or name in ("task.toml", "tests/test_a.py"):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text)


def _step(name: str, solve: str, test: str, **more: str) -> dict[str, str]:
    files = {"instruction.md": f"Do {name}.\n", "solution/solve.sh": solve, "tests/test.sh": test, **more}
    return {f"steps/{name}/{file}": text for file, text in files.items()}


STEPS: Final = {
    "task.toml": "multi_step_reward_strategy = 'mean'\n[verifier.env]\nA = 'all'\nB = 'all'\n"
    "[[steps]]\nname = 'first'\nmin_reward = 1.0\nagent.timeout_sec = 60\n[steps.verifier.env]\nB = 'own'\n"
    "[[steps]]\nname = 'second part'\nmin_reward = {reward = 0.5, style = 0.5}\nartifacts = ['/tmp/two']\n"
    "[steps.verifier]\nenvironment_mode = 'separate'\n"
    "[steps.healthcheck]\ncommand = 'test -e /srv/ready && test ! -e /tests'\n"
    "[[steps]]\nname = 'third'\n",
    "instruction.md": "",
    "tests/test.sh": "[ \"$(cat /srv/data/three)\" = 3 ] && r=1 || r=0\n" + WRITE,
    "tests/shared": "x\n",
    "solution/solve.sh": "mkdir -p /srv/data; echo 3 > /srv/data/three\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /srv\n",
    **_step("first", "touch /tmp/one\n", f"[ -e /tmp/one -a $A$B$(cat /tests/shared) = allownx ] && r=1\n{DEFAULT}"),
    **_step(
        "second part",
        "[ -e /tmp/one ] && cp given/b /tmp/two\n",
        "[ \"$(cat /tmp/two)\" = given ] && [ ! -e /tmp/one ] && r=1 || r=0\n"
        'echo "{\\"reward\\": $r, \\"style\\": $r}" > /logs/verifier/reward.json\n',
        **{"workdir/given/b": "given\n", "workdir/setup.sh": "touch ready; [ ! -e /tests/shared ]\n"},
    ),
    "steps/third/instruction.md": "Do third.\n",
}  # fmt: skip
"""A check of every field of a step: what it inherits, what its verifier sees, and what the agent does not."""

SERVICES: Final = {
    "environment/docker-compose.yaml": "services:\n"
    "  main:\n    depends_on: {server: {condition: service_healthy}}\n    volumes: ['kept:/kept:ro']\n"
    "  server:\n    build: ./server\n    expose: [8000]\n    volumes: ['kept:/var/lib/server']\n"
    "    healthcheck: {test: 'exec 3<>/dev/tcp/127.0.0.1/8000', interval: 1s, retries: 120}\n"
    "volumes: {kept: }\n",
    "environment/server/Dockerfile": 'FROM debian:bookworm-slim\nCOPY serve.pl /srv/\nCMD ["perl", "/srv/serve.pl"]\n',
    "environment/server/serve.pl": "use IO::Socket::INET;\n"
    "my $port = IO::Socket::INET->new(LocalPort => 8000, Listen => 5, ReuseAddr => 1) or die $!;\n"
    "open(my $kept, '>', '/var/lib/server/word') or die $!; print $kept 'word'; close $kept;\n"
    'while (my $client = $port->accept) { print $client "word\\n"; close $client; }\n',
    "solution/solve.sh": "read -r said < /dev/tcp/server/8000\n"
    "[ \"$said $(cat /kept/word)\" = 'word word' ] && [ ! -e /srv/serve.pl ] && touch /tmp/done\n",
}
"""An agent's machine and a server, which it reaches by name and shares a volume with, and of which it sees no file."""

CASES: Final[Mapping[str, Case]] = {
    "usual": Case({}),
    "verifier-installs-from-the-network": Case({"task.toml": "[verifier]\nnetwork_mode = 'public'\n"}, 14.2),
    "bind-mounts": Case(
        {
            "docker-compose.yaml": TERMINAL_BENCH["docker-compose.yaml"]
            + "    volumes: ['./:/app', '${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}']\n",
            "main.cpp": "int\n",
            "data/two": "2\n",
            "solution.sh": "there='Dockerfile data docker-compose.yaml main.cpp task.yaml'\n"
            '[ "$(pwd) $(echo *) $(cat data/two)" = "/app $there 2" ] && touch /tmp/done\n',
        },
        10.8,
        of=TERMINAL_BENCH,
    ),
    "memory-over-4-gib": Case({"task.toml": "[environment]\nmemory_mb = 8192\n"}, 6.3),
    "storage-over-10-gib": Case({"task.toml": "[environment]\nstorage_mb = 20480\n"}, 5.7),
    "no-solution": Case({"solution/solve.sh": ""}, 65.9, "solution", "played by a model; a check has no oracle for it"),
    "docker-image": Case(
        {"task.toml": "[environment]\ndocker_image = 'debian:bookworm-slim'\n", "environment/Dockerfile": ""}, 0.1
    ),
    "docker-image-and-dockerfile": Case(
        {"task.toml": "[environment]\ndocker_image = 'ghcr.io/private/of-others:1'\n"}, 5.5
    ),
    "both-reward-files": Case(
        {
            "tests/test.sh": "[ -e /tmp/done ] && r=1 || r=0\necho 50 > /logs/verifier/reward.txt\n"
            'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
        },
        4.2,
    ),
    "no-network-agent": Case({"task.toml": "[agent]\nnetwork_mode = 'no-network'\n"}, 3.6),
    "verifier-of-its-own-and-artifacts": Case(
        {"task.toml": "artifacts = ['/tmp/done']\n[verifier]\nenvironment_mode = 'separate'\n"}, 2.1
    ),
    "tests-in-the-verifiers-image": Case(
        {
            "task.toml": "artifacts = ['/tmp/done']\n[verifier.environment]\nmemory_mb = 512\n",
            "tests/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir /tests && "
            "printf '#!/bin/bash\\n[ ! -e /tmp/done ]; echo $? > /logs/verifier/reward.txt\\n' > /tests/test.sh\n",
            "tests/test.sh": "",
        },
        2.1,
    ),
    "compose-of-main": Case(
        {
            "environment/docker-compose.yaml": "services:\n  main:\n    environment: [A=b]\n"
            "    volumes: ['./notes:/srv/notes', './notes/one:/usr/bin/one:ro']\n",
            "environment/notes/one": "1\n",
            "solution/solve.sh": '[ "$A$(cat /srv/notes/one /usr/bin/one | wc -l)" = b2 ] && touch /tmp/done\n',
        },
        2.0,
    ),
    "compose-of-the-verifier": Case(
        {
            "task.toml": "artifacts = ['/tmp/done']\n[verifier]\nenvironment_mode = 'separate'\n",
            "tests/docker-compose.yaml": "services:\n  main:\n    volumes:\n"
            "      - {type: bind, source: ./key, target: /tests/keys/one, read_only: true}\n",
            "tests/key": "a\n",
            "tests/test.sh": f"[ -e /tmp/done ] && [ -s /tests/keys/one ] && r=1 || r=0\n{WRITE}",
        },
        2.0,
    ),
    "keys-of-this-machine": Case(
        {
            "task.toml": "[verifier.env]\nKEY = '${A_KEY}'\nOTHER = '${NOT_OFFERED:-d}'\n",
            "tests/test.sh": f"[ -e /tmp/done ] && [ $KEY$OTHER = secretd ] && r=1 || r=0\n{WRITE}",
        },
        1.8,
    ),
    "steps": Case(STEPS, 1.7),
    "steps-of-which-the-last-counts": Case(
        {
            "task.toml": "multi_step_reward_strategy = 'final'\n[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n",
            "instruction.md": "",
            "tests/test.sh": "echo 0.5 > /logs/verifier/reward.txt\n",
            "steps/a/instruction.md": "Do a.\n",
            **_step("b", "touch /tmp/done\n", TEST),
        },
        0.0,
    ),
    "no-agent-timeout": Case({"task.toml": "[verifier]\ntimeout_sec = 60\n"}, 1.4),
    "tests-in-the-same-shell": Case(
        {"task.yaml": f"instruction: {SAYS}\nrun_tests_in_same_shell: true\n"}, 1.1, of=TERMINAL_BENCH
    ),
    "allow-list": Case(
        {"task.toml": "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org', '*.example.org']\n"},
        0.8,
    ),
    "more-cores-than-there-are": Case({"task.toml": "[environment]\ncpus = 4096\n"}, 0.8),
    "two-stages": Case(
        {
            "environment/Dockerfile": "FROM debian:bookworm-slim AS made\nRUN echo made > /made\n"
            "FROM debian:bookworm-slim\nCOPY --from=made /made /srv/made\n",
            "solution/solve.sh": "cp /srv/made /tmp/done\n",
        },
        0.7,
    ),
    "refused-by-harbor": Case(
        {"task.toml": "[environment]\nmemory = '2G'\nmemory_mb = 1024\n"}, 0.2, refused="environment.memory"
    ),
    "copy-from-an-image": Case(
        {
            "environment/Dockerfile": "FROM scratch\nCOPY --from=debian:bookworm-slim / /\n"
            "ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
        },
        0.1,
    ),
    "docker-in-docker": Case(
        {"environment/docker-compose.yaml": "services:\n  main:\n    privileged: true\n"},
        0.1,
        "services.main.privileged",
    ),
    "entrypoint": Case(
        {
            "environment/Dockerfile": 'FROM debian:bookworm-slim\nENTRYPOINT ["touch", "/tmp/done"]\nCMD ["x"]\n',
        },
        0.1,
    ),
    "compose-that-is-missing": Case(
        {"docker-compose.yaml": "services:\n  client:\n    build: ./other\n"},
        0.1,
        refused="services.client.build",
        of=TERMINAL_BENCH,
    ),
    "several-services": Case(SERVICES, 0.1),
    "an-init-system": Case(
        {
            "environment/docker-compose.yaml": "services: {main: {}, server: {image: 'debian:bookworm-slim', "
            "command: /sbin/init}}\n"
        },
        0.0,
        "services.server.command",
    ),
    "a-device": Case(
        {"environment/docker-compose.yaml": "services:\n  main:\n    devices: ['/dev/kvm']\n"},
        0.0,
        "services.main.devices",
    ),
    "a-tmpfs": Case(
        {"docker-compose.yaml": TERMINAL_BENCH["docker-compose.yaml"] + "    tmpfs: [/run]\n"},
        0.0,
        refused="services.client.tmpfs",
        of=TERMINAL_BENCH,
    ),
    "a-gpu": Case({"task.toml": "[environment]\ngpus = 1\n"}, 0.0, refused="environment.gpus"),
    "user-of-the-image": Case({"environment/Dockerfile": "FROM debian:bookworm-slim\nUSER games\n"}, 0.1),
    "another-user": Case(
        {
            "task.toml": '[agent]\nuser = "games"\n',
            "solution/solve.sh": 'stat -c %U "$0" > /tmp/owner; id -un > /tmp/done\n',
            "tests/test.sh": f'[ "$(cat /tmp/done) $(cat /tmp/owner)" = "games root" ] && r=1 || r=0\n{WRITE}',
        },
    ),
    "healthcheck": Case(
        {
            "environment/Dockerfile": "FROM debian:bookworm-slim\nHEALTHCHECK CMD false\n",
            "task.toml": "[environment.healthcheck]\ncommand = 'echo up >> /tmp/up'\n",
            "solution/solve.sh": "cp /tmp/up /tmp/done\n",
        },
        0.1,
    ),
    "a-compose-file-that-is-material": Case(
        {"environment/docker-compose.yml": "services: {a: {image: a}, b: {image: b}}\n"}, 0.1
    ),
    "in two words": Case({}, 0.7),
    "with  two blanks": Case({}),
    "marked": Case({"instruction.md": f"<!-- bench-canary GUID 0 -->\n\n{SAYS}\n"}),
    "true-or-false": Case(
        {
            "tests/test.sh": "[ -e /tmp/done ] && r=true || r=false\n"
            'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
        }
    ),
    "in-perl": Case(
        {
            "tests/test.sh": "#!/usr/bin/perl\nopen(F, '>', '/logs/verifier/reward.txt');\n"
            "print F 0 + -e '/tmp/done';\n",
            "solution/solve.sh": '#!/usr/bin/perl\nopen(F, ">", "/tmp/done");\n',
        }
    ),
    "literal-template": Case(
        {
            "task.toml": '[environment.env]\nP = "a-${NOPE:-x}-b"\n',
            "solution/solve.sh": "[ \"$P\" = 'a-${NOPE:-x}-b' ] && touch /tmp/done\n",
        }
    ),
    "a-large-solution": Case({"solution.sh": "touch /tmp/done\n# " + "large " * 2_000_000}, of=TERMINAL_BENCH),
}


def table() -> str:
    """The rows of docs/harbor.md: the features, most frequent first."""
    counted = [(name, case) for name, case in CASES.items() if case.share is not None]
    lines = ["| feature | of 5,916 real tasks | here |", "|---|---|---|"]
    for name, case in sorted(counted, key=lambda each: -(each[1].share or 0)):
        share = f"{case.share:.1f} %" if case.share else "less than 0.1 %"
        here = case.here or (f"refused: `{case.refused}`" if case.refused else "played")
        lines.append(f"| {name.replace('-', ' ')} | {share} | {here} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for place in sys.argv[1:]:
        for task, one in CASES.items():
            one.write(Path(place) / task)
    print(table(), end="")
