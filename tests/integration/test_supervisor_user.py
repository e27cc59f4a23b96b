"""A container of an ordinary user: the same promises where namespaces can keep them, the rest said plainly.

Run by root, the tests become another user first (:mod:`tests.ordinary_user`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import sweep
from agentenv.sandbox.supervisor.isolation import MAX_TERMINALS, SERVER_UID
from agentenv.store.layout import Layout
from agentenv.wire.spec import Bind, SlotLimits
from tests.integration.supervisor_harness import REPOSITORY, Container, living, processes_with, wait_for_death
from tests.ordinary_user import FIRST, UID, delegated_cgroups, give, own_directory, prefix
from tests.waiting import START_S, wait_for

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user with ids of the test's")


@pytest.fixture
def place() -> Iterator[Path]:
    with own_directory() as directory:
        (directory / "stderr").touch()
        token = directory / "token"
        token.write_text("a-token-for-tests-only")
        token.chmod(0o600)
        give(token)
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
        container.process.wait(START_S)
        wait_for(lambda: not processes_with(marker), explain="the slot's daemon died with its container")
        wait_for_death(container)
        assert [swept.container for swept in sweep.sweep(place / "state")] == [container.spec.container]
        gone(container)


def test_full_isolation_is_refused_to_an_ordinary_user(place: Path) -> None:
    with Container(place, prefix=prefix(), isolation="full") as container:
        event = container.event("failed")
        assert "needs root" in event["message"]
        assert "isolation=user" in event["next_step"]
        assert container.process.wait(START_S) == 2


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


# ---- with subordinate ids: root of a namespace of his own


@pytest.fixture(params=["delegated", "none"])
def cgroups(request: pytest.FixtureRequest) -> Iterator[tuple[Path, ...]]:
    if request.param == "none":
        yield ()
        return
    with delegated_cgroups() as groups:
        yield groups


@as_root
def test_with_subordinate_ids_he_has_what_root_has(place: Path, cgroups: tuple[Path, ...]) -> None:
    give(*made_store(place))
    with Container(place, prefix=prefix(subordinate=True, cgroups=cgroups), store_dir=str(place / "store")) as one:
        ready = one.ready()
        assert ready["isolation"] == "full"
        assert [sentence.split()[0] for sentence in ready["weaker"]] == (
            [] if cgroups else ["Processes", "Memory", "An", "CPU"]
        )
        assert one.server_lines is not None
        proofs = one.server_lines.seen[0]["packet"]["proofs"]
        assert [proof for proof in proofs if not proof["holds"]] == []
        assert len({one.bash(slot, "id -u") for slot in (0, 1)}) == 2
        outside = [FIRST + int(one.bash(slot, "id -u")) - 1 for slot in (0, 1)]
        one.bash(0, "echo secret > file; setsid sleep 1000 > /dev/null 2>&1 & echo $! > pid")
        assert uids_here() >= {UID, outside[0], FIRST + SERVER_UID - 1}
        one.bash(1, "kill -9 -1")
        assert one.bash(0, "kill -0 $(cat pid) && cat file") == "secret\n"
        one.bash(1, "echo other > file")
        one.send(op="reset", slot=1)
        one.packet("slot_ready", slot=1, kept=False, epoch=1)
        assert one.bash(1, "ls -A") == ""
        assert one.stop() == 0
        gone(one)
        assert [path for group in cgroups for path in group.rglob("*") if one.spec.container in path.name] == []


def uids_here() -> set[int]:
    """Of all processes of this machine."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            (line,) = (line for line in status.read_text().splitlines() if line.startswith("Uid:"))
            found.add(int(line.split()[1]))
    return found


def made_store(place: Path) -> list[Path]:
    Layout(place / "store").create()
    return [place / "store", *(place / "store").rglob("*")]


@as_root
def test_one_id_is_what_he_asks_for_by_name(place: Path) -> None:
    store = str(place / "store")
    with Container(place, prefix=prefix(subordinate=True), store_dir=store, isolation="user") as container:
        assert container.ready()["isolation"] == "user"
        assert "as isolation = user requests" in no_images(container)


def test_without_ids_he_is_told_how_to_get_them(place: Path) -> None:
    with Container(place, prefix=prefix(), store_dir=str(place / "store")) as container:
        assert container.ready()["isolation"] == "user"
        if os.geteuid() == 0:
            assert "usermod --add-subuids" in no_images(container)


def no_images(container: Container) -> str:
    """Why it has none."""
    assert container.server_lines is not None
    (told,) = container.server_lines.seen[0]["packet"]["image_weaker"]
    assert isinstance(told, str)
    return told


@as_root
def test_killed_it_leaves_only_what_a_sweep_removes(place: Path) -> None:
    give(*made_store(place))
    with Container(place, prefix=prefix(subordinate=True), store_dir=str(place / "store")) as container:
        container.ready()
        container.bash(0, "setsid sleep 1000 > /dev/null 2>&1 & echo x > file")
        container.process.send_signal(signal.SIGKILL)
        container.process.wait(START_S)
        wait_for_death(container)
        assert [swept.container for swept in sweep.sweep(place / "state")] == [container.spec.container]
        gone(container)
