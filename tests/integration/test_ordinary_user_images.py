"""Slots of images for an ordinary user with subordinate ids, by what he types and writes: no root is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.image_sources import oci_layout
from tests.ordinary_user import FIRST, UID, as_ordinary_user, delegated_cgroups, give, own_directory
from tests.security.image_slots import usual_files
from tests.security.test_image_slots import EXPECTED, OTHERWISE
from tests.small_root import PROGRAMS, RUNTIME, files, programs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user with ids of the test's")
_AGENTENV = "import sys; from agentenv.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class User:
    """Runs commands as him; ``cgroups`` are those that he may make others in."""

    home: Path
    cgroups: tuple[Path, ...]
    cache: str = "cache"

    @property
    def image(self) -> str:
        return f"oci:{self.home}/layout:t"

    @property
    def store(self) -> Path:
        return self.home / self.cache / "store"

    def run(self, command: Sequence[str], *, subordinate: bool = True) -> subprocess.CompletedProcess[str]:
        env = {
            "HOME": str(self.home),
            "AGENTENV_CACHE_DIR": str(self.home / self.cache),
            "AGENTENV_STATE_DIR": str(self.home / "state"),
        }
        return as_ordinary_user(command, subordinate=subordinate, cgroups=self.cgroups, env=env)

    def agentenv(self, *words: str, subordinate: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-c", _AGENTENV, *words], subordinate=subordinate)

    def sandboxes(self, body: str) -> Any:
        """What a program of his prints as JSON. It has ``image``, and ``farm`` with four slots."""
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        program = (
            f"import json\nfrom agentenv import Farm, Sandbox\nimage = {self.image!r}\nwith Farm(slots=4) as farm:\n"
        )
        done = self.run([sys.executable, "-c", program + lines])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with own_directory() as directory:
        oci_layout(directory / "layout", programs(*PROGRAMS), files(*usual_files()), tag="t", config=RUNTIME)
        give(*directory.rglob("*"))
        yield directory


@pytest.fixture(params=["delegated", "none"])
def user(request: pytest.FixtureRequest, home: Path) -> Iterator[User]:
    with ExitStack() as stack:
        yield User(home, stack.enter_context(delegated_cgroups()) if request.param == "delegated" else ())


@pytest.fixture
def with_cgroups(home: Path) -> Iterator[User]:
    with delegated_cgroups() as groups:
        yield User(home, groups)


@pytest.fixture
def without_cgroups(home: Path) -> User:
    return User(home, ())


def test_a_command_in_an_image(user: User) -> None:
    script = "id -u; echo x > /work/f; python3 -c 'import os; os.chown(\"/work/f\", 1000, 5)'; stat -c %u:%g /work/f"
    done = user.agentenv("exec", "--image", user.image, script)
    assert (done.stdout, done.returncode) == ("0\n1000:5\n", 0), done.stderr
    owners = {path.lstat().st_uid for path in (user.store / "trees").rglob("*")}
    assert owners, "it is unpacked"
    assert min(owners) > FIRST, "nothing of an image is the user's own"
    assert max(owners) < FIRST + 65_536


def test_users_checkpoints_forks_and_commits(user: User) -> None:
    told = user.sandboxes(
        """
with Sandbox(image=image, pool=farm) as box:
    raised = box.run("/usr/bin/setuid -c 'import os; print(os.getuid(), os.geteuid())'", user="1000").stdout
    box.run("echo one > /work/f; python3 -c 'import os; os.chown(\\"/work/f\\", 1000, 1000)'; rm /attacks.py")
    checkpoint = box.checkpoint()
    box.run("echo two > /work/f; rm -r /usr/bin/tail")
    (fork,) = box.fork(1)
    with fork:
        fork.run("echo three > /work/f")
        forked = fork.run("cat /work/f").stdout
    mine = box.run("cat /work/f").stdout
    box.restore(checkpoint)
    restored = box.run("cat /work/f; stat -c %u /work/f; ls /attacks.py 2>&1 | wc -l").stdout
    digest = box.commit("prepared:1")
with Sandbox(image=digest, pool=farm) as again:
    committed = again.run("cat /work/f; stat -c %u /work/f; ls /attacks.py 2>&1 | wc -l").stdout
    again.run("sleep 1000 > /dev/null 2>&1 & echo x > /tmp/x")
    again.seal()
    sealed = again.run("cat /work/f; ls /proc | grep -c '^[0-9]'").stdout.split()
print(json.dumps([raised, forked, mine, restored, committed, sealed]))
"""
    )
    *others, (kept, processes) = told
    assert others == ["1000 0\n", "three\n", "two\n", "one\n1000\n1\n", "one\n1000\n1\n"]
    assert kept == "one"
    assert int(processes) < 10


def test_what_root_inside_cannot_do(user: User) -> None:
    """The kit of tests/security, of which nothing may succeed that does not where root has started the container."""
    done = user.agentenv("exec", "--image", user.image, "python3 /attacks.py")
    outcomes: dict[str, str] = json.loads(done.stdout)
    other = {name: told for name, told in outcomes.items() if told not in (EXPECTED[name], OTHERWISE.get(name))}
    assert (outcomes.keys(), other) == (EXPECTED.keys(), {})


def test_two_slots_do_not_reach_each_other(user: User) -> None:
    told = user.sandboxes(
        """
with Sandbox(image=image, pool=farm) as one, Sandbox(image=image, pool=farm) as other:
    one.run("echo secret > /work/f; (sleep 1000 & echo $! > /work/pid) > /dev/null 2>&1")
    seen = other.run("ls /work; ls /proc | grep -c '^[0-9]'; kill -9 -1; echo $?").stdout
    mine = one.run("kill -0 $(cat /work/pid) && cat /work/f").stdout
    one.run("kill -9 -1")
    alive = one.run("echo alive").stdout
print(json.dumps([seen, mine, alive]))
"""
    )
    seen, mine, alive = told
    assert (mine, alive) == ("secret\n", "alive\n")
    assert "f" not in seen.split()
    assert int(seen.split()[0]) < 10


def test_what_cannot_be_limited_is_refused_by_name(without_cgroups: User) -> None:
    for option, value in (("--memory", "512"), ("--cpus", "1")):
        done = without_cgroups.agentenv("exec", "--image", without_cgroups.image, option, value, "id")
        assert done.returncode == 2
        assert "cannot be limited here" in done.stderr
        assert "systemd-run --user --scope" in done.stderr.replace("\n", " ")


def test_limits_hold_where_he_has_cgroups(with_cgroups: User) -> None:
    told = with_cgroups.sandboxes(
        """
with Sandbox(image=image, memory_mib=256, cpus=0.5, pool=farm) as box:
    large = box.run("python3 -c 'x = bytearray(300_000_000); print(1)'")
    small = box.run("python3 -c 'x = bytearray(100_000_000); print(1)'")
print(json.dumps([large.exit_code, small.stdout]))
"""
    )
    assert told == [137, "1\n"]


def test_networks(user: User) -> None:
    told = user.sandboxes(
        """
with Sandbox(image=image, network="public") as box:
    public = box.run("cat /proc/net/route").stdout
with Sandbox(image=image, network=["example.org"]) as box:
    proxy = box.run("(echo > ${http_proxy/http:\\/\\/127.0.0.1:/\\/dev\\/tcp\\/127.0.0.1\\/}) && echo up").stdout
print(json.dumps(["tap0" in public, proxy]))
"""
    )
    assert told == [True, "up\n"]


def test_what_was_unpacked_is_given_up(home: Path) -> None:
    user = User(home, (), "another-cache")
    assert user.agentenv("exec", "--image", user.image, "true").returncode == 0
    assert list((user.store / "trees").iterdir())
    done = user.agentenv("images", "gc", "--budget", "0", "--keep", "0")
    assert done.returncode == 0, done.stderr
    assert list((user.store / "trees").iterdir()) == []


def test_a_dockerfile_is_built(user: User) -> None:
    context = user.home / "context"
    context.mkdir(exist_ok=True)
    pulled = user.agentenv("images", "pull", "--json", user.image)
    digest = json.loads(pulled.stdout)["images"][0]["digest"]
    (context / "Dockerfile").write_text(
        f'FROM {digest}\nSHELL ["/bin/bash", "-c"]\nRUN id -u > /work/id; echo {len(user.cgroups)}\n'
    )
    give(context, *context.iterdir())
    done = user.agentenv("exec", "--dockerfile", str(context), "cat /work/id")
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_without_limits_of_a_slot_its_processes_are_bounded(without_cgroups: User) -> None:
    """By a limit of each user of the slot, which no root inside can raise."""
    bomb = (
        "import os, resource, time\nn = 0\n"
        "try: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))\nexcept ValueError: print('refused')\n"
        "try:\n while os.fork(): n += 1\nexcept BlockingIOError: print(n < 420)\nelse: time.sleep(1000)\n"
    )
    told = without_cgroups.sandboxes(
        f"""
with Sandbox(image=image, pool=farm) as box, Sandbox(image=image, pool=farm) as other:
    box.write_file("/work/bomb.py", {bomb!r})
    bombed = box.run("python3 /work/bomb.py").stdout
    others = other.run("seq 3 | cat").stdout
print(json.dumps([bombed, others]))
"""
    )
    assert told == ["refused\nTrue\n", "1\n2\n3\n"]


def test_without_ids_he_is_told_how_to_get_them(without_cgroups: User) -> None:
    done = without_cgroups.agentenv("exec", "--image", without_cgroups.image, "id", subordinate=False)
    assert done.returncode == 125
    assert "usermod --add-subuids" in done.stderr.replace("\n", " ")


def test_who_asks_for_one_id_has_no_images(without_cgroups: User) -> None:
    done = without_cgroups.agentenv("exec", "--isolation", "user", "--image", without_cgroups.image, "id")
    assert done.returncode == 2
    assert "as isolation = user requests" in done.stderr.replace("\n", " ")


def test_the_doctor_says_what_he_has(with_cgroups: User) -> None:
    told = json.loads(with_cgroups.agentenv("doctor", "--json").stdout)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["isolation"]["level"] == "ok"
    assert "shifted" in found["slots with images"]["detail"]
    lacking = json.loads(with_cgroups.agentenv("doctor", "--json", subordinate=False).stdout)
    (isolation,) = (finding for finding in lacking["findings"] if finding["name"] == "isolation")
    assert isolation["level"] == "broken"
    assert isolation["commands"][0].startswith("usermod --add-subuids")
    assert str(UID) in isolation["commands"][0]
