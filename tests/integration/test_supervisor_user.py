"""A container of an ordinary user: the same promises where namespaces can keep them, the rest said plainly.

Run by root, the tests become uid 10001 first, in a mount namespace where this interpreter and this
checkout can be reached although they may lie below a directory only root may enter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sandbox.supervisor import sweep
from agentenv.sandbox.supervisor.isolation import MAX_TERMINALS
from agentenv.wire.spec import Bind, SlotLimits
from tests.integration.supervisor_harness import REPOSITORY, Container, living, processes_with, wait_for_death
from tests.waiting import wait_for

UID = 10_001
_BECOME = """
import os, sys
from pathlib import Path
from agentenv.sandbox.supervisor import mounts
mounts.enter_private_namespace()
mounts.show_to_everybody(mounts.unreachable([*mounts.interpreter_directories(), Path(sys.argv[1])]))
uid = int(sys.argv[2])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
os.chdir("/")
os.execv(sys.argv[3], sys.argv[3:])
"""


def prefix() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    return (sys.executable, "-c", _BECOME, str(REPOSITORY), str(UID))


@pytest.fixture
def place() -> Iterator[Path]:
    ensure_built()  # by whoever owns the checkout: uid 10001 may not write there
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / "stderr").touch()
        token = directory / "token"
        token.write_text("a-token-for-tests-only")
        token.chmod(0o600)
        if os.geteuid() == 0:
            directory.chmod(0o755)
            for path in (directory, token):
                os.chown(path, UID, UID)
        yield directory


@pytest.fixture
def container(place: Path) -> Iterator[Container]:
    with Container(place, prefix=prefix()) as made:
        made.ready()
        yield made


def gone(container: Container) -> None:
    wait_for(lambda: not living(container), explain="every process of the container is gone")
    assert not container.state.exists()
    assert container.spec.container not in Path("/proc/self/mountinfo").read_text()


def test_it_serves_and_says_what_is_weaker(container: Container) -> None:
    ready = next(line for line in container.events.seen if line["event"] == "ready")
    assert ready["isolation"] == "user"
    assert any("share one uid" in sentence for sentence in ready["weaker"])
    assert container.server_lines is not None
    proofs = container.server_lines.seen[0]["packet"]["proofs"]
    assert len(proofs) >= 16
    assert [proof for proof in proofs if not proof["holds"]] == []


def test_the_server_has_no_capabilities(container: Container) -> None:
    container.order(status=True)
    assert container.server_lines is not None
    told = container.server_lines.until(lambda line: "environ" in line)
    status = dict(line.split(":\t", 1) for line in told["status"].splitlines() if ":\t" in line)
    assert all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
    assert status["NoNewPrivs"] == "1"
    assert "SECRET_OF_HOST" not in told["environ"]


def test_slots_of_one_uid_neither_see_nor_reach_each_other(container: Container) -> None:
    container.bash(0, "echo secret > file; mkdir /tmp/x; setsid sleep 1000 > /dev/null 2>&1 & echo $! > pid")
    assert container.bash(1, "ls -A /workspace /tmp; pgrep sleep").split() == ["/tmp:", "/workspace:"]
    assert "Killed" not in container.bash(0, "cat file")
    container.bash(1, "kill -9 -1")
    assert container.bash(0, "kill -0 $(cat pid) && cat file") == "secret\n"


def test_reset_and_seal(container: Container) -> None:
    marker = f"98762.{os.getpid()}"
    container.bash(1, f"echo work > kept; setsid sleep {marker} > /dev/null 2>&1 & sleep 0.05")
    wait_for(lambda: bool(processes_with(marker)), explain="the daemon runs")
    container.send(op="seal", slot=1)
    container.packet("slot_ready", slot=1, kept=True, epoch=0)
    assert processes_with(marker) == []
    assert container.bash(1, "cat kept") == "work\n"
    container.send(op="reset", slot=1)
    container.packet("slot_ready", slot=1, kept=False, epoch=1)
    assert container.bash(1, "ls -A") == ""


def test_git_commits_and_clones_what_belongs_to_another_user(place: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(place)]
    subprocess.run([*git, "init", "-q", "made"], check=True)
    subprocess.run([*git, "-C", "made", "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    with Container(place, prefix=prefix(), binds=(Bind(str(place / "made"), "/opt/made"),)) as container:
        container.ready()
        container.bash(0, "git clone -q --shared /opt/made c && cd c && git commit -q --allow-empty -m two")
        assert container.bash(0, "git -C c log --format=%an") == "agent\na\n"
        assert container.bash(1, "/run/agentenv/bin/python -c 'print(1)'") == "1\n"


def test_the_process_limit_is_the_slot_s_own(place: Path) -> None:
    """One uid, but each slot counts in its own user namespace: a full slot leaves its neighbour room."""
    with Container(place, prefix=prefix(), limits=SlotLimits(processes=20)) as container:
        container.ready()
        fill = (
            "import os, time\nn = 0\ntry:\n while os.fork(): n += 1\n"
            "except BlockingIOError: print(n)\nelse: time.sleep(1000)"
        )
        assert 10 <= int(container.bash(0, f"python3 -c '{fill}'")) <= 20
        assert container.bash(1, "for i in 1 2 3 4 5; do /bin/echo $i & wait; done").split() == list("12345")


def test_terminals_are_the_slot_s_own(container: Container) -> None:
    """Also where nobody is privileged: a devpts can be given a limit in a user namespace."""
    hold = (
        "import errno, os, time\nheld = []\ntry:\n"
        ' while len(held) < 4096: held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))\n'
        "except OSError as error: print(len(held), errno.errorcode[error.errno], flush=True)\ntime.sleep(1000)"
    )
    script = f"setsid python3 -c '{hold}' > held 2>&1 & until [ -s held ]; do sleep 0.05; done; cat held"
    all_of_them = f"{MAX_TERMINALS} ENOSPC\n"
    assert [container.bash(slot, script) for slot in (0, 1)] == [all_of_them] * 2
    container.send(op="reset", slot=1)
    container.packet("slot_ready", slot=1, kept=False, epoch=1)
    assert container.bash(1, script) == all_of_them, "nothing of before is counted"


def test_the_end_leaves_nothing(place: Path) -> None:
    with Container(place, prefix=prefix()) as container:
        container.ready()
        container.bash(0, "setsid sleep 1000 > /dev/null 2>&1 & echo x > file")
        assert container.stop() == 0
        gone(container)


def test_sigkill_leaves_only_what_a_sweep_removes(place: Path) -> None:
    marker = f"98761.{os.getpid()}"
    with Container(place, prefix=prefix()) as container:
        container.ready()
        container.bash(0, f"setsid sleep {marker} > /dev/null 2>&1 & sleep 0.05")
        container.process.send_signal(signal.SIGKILL)
        container.process.wait(30)
        wait_for(lambda: not processes_with(marker), explain="the slot's daemon died with its container")
        wait_for_death(container)
        assert [swept.container for swept in sweep.sweep(place / "state")] == [container.spec.container]
        gone(container)


def test_full_isolation_is_refused_to_an_ordinary_user(place: Path) -> None:
    with Container(place, prefix=prefix(), isolation="full") as container:
        event = container.event("failed")
        assert "needs root" in event["message"]
        assert "isolation=user" in event["next_step"]
        assert container.process.wait(30) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lower the machine's limit, in a namespace of its own")
def test_forbidden_user_namespaces_are_named_with_the_cure(place: Path) -> None:
    """In a user namespace whose own limit of further ones is 0, as the sysctl sets it."""
    probe = subprocess.run(
        [*prefix(), sys.executable, "-c", _FORBIDDEN, str(place / "spec.json")],
        capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "src")},
    )  # fmt: skip
    assert probe.returncode == 0, probe.stderr
    assert "refuses namespaces" in probe.stdout
    assert "max_user_namespaces" in probe.stdout


_FORBIDDEN = """
import os
from agentenv.sandbox.supervisor import syscalls
from pathlib import Path
from agentenv.sandbox.supervisor import launch, isolation
identity = isolation.Identity("user", os.geteuid(), os.getegid())
launch._enter_namespaces(identity)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
try:
    launch._enter_namespaces(identity)
except OSError as error:
    print(isolation.explain_namespaces(error))
"""
