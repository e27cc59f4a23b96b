"""E2B's own Python SDK against E2B's API of a farm: what it does to sandboxes, and with ``--inside`` in them.

Run by the Python of an environment that has ``e2b`` (scripts/harnesses makes it), with ``E2B_API_URL``,
``E2B_SANDBOX_URL`` and ``E2B_API_KEY`` set. It prints a line for each check, and how many failed.
"""

from __future__ import annotations

import datetime
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from e2b import Sandbox, SandboxQuery, SandboxState, Template
from e2b.exceptions import NotFoundException, SandboxException

checks: list[Callable[[], None]] = []
inside: list[Callable[[], None]] = []


@contextmanager
def sandbox(**asked: object) -> Iterator[Sandbox]:
    box = Sandbox.create("base", timeout=120, **asked)
    try:
        yield box
    finally:
        box.kill()


@checks.append
def a_sandbox_is_listed_until_it_is_killed() -> None:
    mark = uuid.uuid4().hex
    with sandbox(metadata={"mark": mark}) as box:
        query = SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING])
        assert [one.sandbox_id for one in Sandbox.list(query=query).next_items()] == [box.sandbox_id]
        assert box.is_running()
        assert box.get_info().metadata == {"mark": mark}
    assert Sandbox.list(query=query).next_items() == []
    assert box.kill() is False


@checks.append
def timeouts_are_changed() -> None:
    with sandbox() as box:
        box.set_timeout(1000)
        left = box.get_info().end_at - datetime.datetime.now(datetime.UTC)
        assert 900 < left.total_seconds() <= 1000


@checks.append
def a_pause_is_continued_by_connecting() -> None:
    with sandbox() as box:
        box.pause()
        assert box.get_info().state == SandboxState.PAUSED
        again = Sandbox.connect(box.sandbox_id, timeout=120)
        assert again.sandbox_id == box.sandbox_id
        assert again.get_info().state == SandboxState.RUNNING


@checks.append
def metrics_are_measured() -> None:
    with sandbox() as box:
        (measured,) = box.get_metrics()
        assert 0 < measured.mem_used < measured.mem_total
        assert 0 < measured.disk_used < measured.disk_total


@checks.append
def snapshots_are_templates() -> None:
    with sandbox() as box:
        taken = box.create_snapshot()
        other = Sandbox.create(taken.snapshot_id, timeout=60)
        assert other.kill()


def refused(wrong: Callable[[], object]) -> str:
    """What the SDK says of it."""
    try:
        wrong()
    except (NotFoundException, SandboxException) as error:
        return str(error)
    return "nothing"


@checks.append
def what_is_missing_is_said() -> None:
    for wrong, said in (
        (lambda: Sandbox.create("missing"), "not found"),
        (lambda: Sandbox.connect("missing"), "not found"),
        (lambda: Sandbox.create("base", network={"deny_out": ["8.8.8.8"], "allow_out": ["a.org"]}), "no exceptions"),
    ):
        assert said in refused(wrong)


@checks.append
def templates_are_built() -> None:
    name = f"built-{uuid.uuid4().hex[:8]}"
    built = Template.build(Template().from_template("base").run_cmd("echo built > made").set_envs({"A": "b"}), name)
    assert built.template_id == name
    assert Template.exists(name)
    assert not Template.exists(f"{name}-not")


@inside.append
def commands_and_files() -> None:
    with sandbox(envs={"GREETING": "hi"}) as box:
        done = box.commands.run("echo $GREETING; id -un; pwd; echo err >&2")
        assert (done.stdout, done.stderr, done.exit_code) == ("hi\nuser\n/home/user\n", "err\n", 0)
        box.files.write("a/b.txt", "text")
        assert box.files.read("/home/user/a/b.txt") == "text"
        assert [entry.name for entry in box.files.list("a")] == ["b.txt"]
        assert box.commands.run("id -un", user="root").stdout == "root\n"


@inside.append
def processes_and_terminals() -> None:
    with sandbox() as box:
        cat = box.commands.run("cat", background=True, stdin=True)
        box.commands.send_stdin(cat.pid, "typed\n")
        box.commands.close_stdin(cat.pid)
        assert cat.wait().stdout == "typed\n"
        sleep = box.commands.run("sleep 1000", background=True)
        assert sleep.pid in [one.pid for one in box.commands.list()]
        assert sleep.kill()


@inside.append
def files_outlive_a_pause_and_processes_do_not() -> None:
    with sandbox() as box:
        box.files.write("kept", "files")
        box.commands.run("sleep 1000", background=True)
        box.pause()
        again = Sandbox.connect(box.sandbox_id, timeout=120)
        assert again.files.read("kept") == "files"
        assert again.commands.list() == []


@inside.append
def links_to_files_are_signed() -> None:
    import httpx

    with sandbox() as box:
        box.files.write("linked", "by link")
        assert httpx.get(box.download_url("linked")).text == "by link"
        assert httpx.get(box.download_url("linked")[:-4] + "AAAA").status_code == 401


def figures() -> None:
    """Medians; they compare only within one run."""
    created, killed, ran = [], [], []
    for _ in range(10):
        start = time.monotonic()
        box = Sandbox.create("base", timeout=120)
        created.append(time.monotonic() - start)
        start = time.monotonic()
        box.kill()
        killed.append(time.monotonic() - start)
    up, down, data = [], [], bytes(range(256)) * (20 * 4096)
    with sandbox() as box:
        for _ in range(50):
            start = time.monotonic()
            box.commands.run("true")
            ran.append(time.monotonic() - start)
        for _ in range(3):
            start = time.monotonic()
            box.files.write("big", data)
            up.append(time.monotonic() - start)
            start = time.monotonic()
            assert bytes(box.files.read("big", format="bytes")) == data
            down.append(time.monotonic() - start)
    named = {"create": created, "kill": killed, "command": ran, "20 MiB up": up, "20 MiB down": down}
    for name, times in named.items():
        print(f"{name}: {sorted(times)[len(times) // 2] * 1000:.1f} ms (best {min(times) * 1000:.1f})")


def main() -> int:
    failed = 0
    for check in [*checks, *(inside if "--inside" in sys.argv else [])]:
        name = check.__name__.replace("_", " ")
        try:
            check()
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
        else:
            print(f"ok {name}")
        sys.stdout.flush()
    if "--figures" in sys.argv:
        figures()
    total = len(checks) + (len(inside) if "--inside" in sys.argv else 0)
    print(f"{total - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
