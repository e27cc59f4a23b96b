"""Nothing of a neighbour can be seen, reached or hurt from a slot (promise 2)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.deadlines import scaled
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor.isolation import MAX_TERMINALS
from tests.security.conftest import Slots, sh
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_neighbours_files_cannot_be_found(slots: Slots) -> None:
    one, two = await slots.open("one"), await slots.open("two")
    await sh(one, "echo secret-of-one > /workspace/file; echo secret-of-one > /tmp/file; echo x > /dev/shm/file")
    assert await sh(two, "ls -A /workspace /tmp /dev/shm") == "/dev/shm:\n\n/tmp:\n\n/workspace:\n"
    found = await sh(
        two, "grep -rIl secret-of-one /workspace /tmp /dev/shm /run /etc /var /home /root /mnt 2>/dev/null"
    )
    assert found == ""


async def test_a_neighbours_processes_cannot_be_seen_or_signalled(slots: Slots) -> None:
    one, two = await slots.open("one"), await slots.open("two")
    await sh(one, "sleep 4321 >/dev/null 2>&1 &")

    async def seen(session: ToolSession) -> bool:
        return "4321" in await sh(session, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    await eventually(lambda: seen(one))
    assert not await seen(two)
    await sh(two, "kill -9 -1; true")
    assert await seen(one)


async def test_slots_have_uids_of_their_own(slots: Slots) -> None:
    one, two = await slots.open("one"), await slots.open("two")
    uids = {await sh(one, "id -u"), await sh(two, "id -u")}
    assert len(uids) == 2
    assert all(int(uid) >= 20_000 for uid in uids)


async def test_the_root_directory_is_roots_and_cannot_be_written(slots: Slots, request: pytest.FixtureRequest) -> None:
    """Some programs trust no path below a directory that is neither root's nor their own. A container of Docker's has
    no right to change the owner."""
    one = await slots.open("one")
    owner = "65534:65534" if "[nomad" in request.node.name else "0:0"
    assert await sh(one, "stat -c %u:%g / && touch /file 2>/dev/null || echo refused") == f"{owner}\nrefused\n"


async def test_ipc_is_not_shared(slots: Slots) -> None:
    one, two = await slots.open("one"), await slots.open("two")
    made = await sh(one, "ipcmk -Q && ipcs -q | grep -c 0x")
    assert "1" in made.split()
    assert (await sh(two, "ipcs -q | grep -c 0x")).strip() == "0"


OPEN_TERMINALS = """
import errno, os, time
held = []
try:
    while len(held) < 4096: held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error: print(len(held), errno.errorcode[error.errno], flush=True)
time.sleep(1000)
"""


async def test_terminals_are_not_shared(slots: Slots) -> None:
    """The kernel counts them for the whole machine: one slot that holds all it can leaves its neighbours theirs."""
    one, two = await slots.open("one"), await slots.open("two")
    await one.call("write_file", {"path": "hold.py", "text": OPEN_TERMINALS})
    await sh(one, "setsid python3 hold.py > held 2>&1 & until [ -s held ]; do sleep 0.05; done")
    assert await sh(one, "cat held") == f"{MAX_TERMINALS} ENOSPC\n"
    terminal = {"command": "tty", "session": "own", "pty": True}
    in_one = await one.call("terminal", terminal, timeout_s=scaled(20.0))
    assert in_one.fault == "none", "its own doing, and data"
    assert "terminal limit of the slot is reached" in in_one.stdout + in_one.stderr, in_one
    in_two = await two.call("terminal", terminal, timeout_s=scaled(20.0))
    assert "/dev/pts/0" in in_two.stdout
    assert "/dev/pts" in await sh(two, "script -qc tty /dev/null")


async def test_abstract_unix_sockets_and_loopback_are_not_shared(slots: Slots) -> None:
    one, two = await slots.open("one"), await slots.open("two")
    serve = "python3 -m http.server 8099 --bind 127.0.0.1 >/dev/null 2>&1 & "
    reach = "until (exec 3<>/dev/tcp/127.0.0.1/8099) 2>/dev/null; do sleep 0.1; done; echo reached"
    assert await sh(one, serve + reach, timeout_s=60) == "reached\n"
    assert await sh(two, "(exec 3<>/dev/tcp/127.0.0.1/8099) 2>/dev/null && echo reached; true") == ""


async def test_there_is_no_network(slots: Slots) -> None:
    one = await slots.open("one")
    assert (await sh(one, "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | cut -d: -f1")).split() == [
        "lo"
    ]


OF_THE_MACHINE = ("config.gz", "diskstats", "interrupts", "iomem", "ioports", "keys", "partitions")


async def test_files_of_the_machine_are_empty(slots: Slots) -> None:
    one = await slots.open("one")
    assert await sh(one, f"cd /proc; cat {' '.join(OF_THE_MACHINE)} 2>/dev/null | wc -c") == "0\n"
    assert await sh(one, "df / >/dev/null && nproc >/dev/null && free >/dev/null && echo as before") == "as before\n"


async def test_the_servers_port_cannot_be_reached(slots: Slots) -> None:
    one = await slots.open("one")
    port = one.lease.container.base_url.rsplit(":", 1)[1].split("/")[0]
    assert await sh(one, f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached; true") == ""


async def test_the_token_is_nowhere_in_a_slot(slots: Slots) -> None:
    one = await slots.open("one")
    token = one.lease.container.token
    search = (
        "tr '\\0' '\\n' < /proc/1/environ; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env;"
        " cat /run/agentenv/* /etc/* 2>/dev/null | strings 2>/dev/null"
    )
    assert token not in await sh(one, search)
    assert one.lease.key.secret not in await sh(one, search)


async def test_the_token_is_nowhere_in_the_hosts_process_table(slots: Slots) -> None:
    one = await slots.open("one")
    token = one.lease.container.token.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for name in ("cmdline", "environ"):
                try:
                    assert token not in (entry / name).read_bytes()
                except OSError:
                    continue


async def test_nothing_of_the_hosts_environment_is_inherited(slots: Slots) -> None:
    one = await slots.open("one")
    names = {line.split("=", 1)[0] for line in (await sh(one, "env")).splitlines()}
    assert names <= {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LC_CTYPE",
        "PAGER",
        "MANPAGER",
        "GIT_PAGER",
        "PIP_BREAK_SYSTEM_PACKAGES",
        "LESS",
        "TMPDIR",
        "TERM",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "SHELL",
    }
    assert "PATH=" not in await sh(one, "tr '\\0' '\\n' < /proc/1/environ 2>/dev/null")


async def test_the_slot_agent_cannot_be_killed_traced_or_read(slots: Slots) -> None:
    one = await slots.open("one")
    await sh(one, "kill -9 1; kill -STOP 1; kill -SEGV 1; true")
    assert await sh(one, "echo alive") == "alive\n"
    assert (
        await sh(
            one, "cat /proc/1/mem /proc/1/maps /proc/1/environ 2>/dev/null | head -c 10; ls /proc/1/fd 2>/dev/null"
        )
        == ""
    )
    assert await sh(one, "head -c 1 /proc/1/exe 2>/dev/null; echo > /proc/1/mem 2>/dev/null && echo wrote; true") == ""


async def test_no_capabilities_no_privileges_no_user_namespaces(slots: Slots) -> None:
    one = await slots.open("one")
    status = await sh(one, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    values = {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines()}
    assert values.pop("NoNewPrivs") == "1"
    assert set(values.values()) == {"0" * 16}
    assert "namespace" not in await sh(
        one, "unshare -Ur echo namespace 2>/dev/null; unshare -r echo namespace 2>/dev/null; true"
    )
    assert await sh(one, "find / -xdev -perm -4000 -exec {} --version \\; 2>/dev/null | grep -ci uid=0; true") in (
        "0\n",
        "",
    )


async def test_the_system_is_read_only(slots: Slots) -> None:
    one = await slots.open("one")
    for place in ("/usr", "/usr/bin", "/etc", "/", "/dev", "/run", "/run/agentenv", "/proc/sys/kernel"):
        assert await sh(one, f"(echo x > {place}/agentenv-test) 2>/dev/null && echo wrote; true") == "", place
    assert await sh(one, "echo x > /proc/sys/kernel/core_pattern 2>/dev/null && echo wrote; true") == ""
    assert await sh(one, "mount -t tmpfs none /mnt 2>/dev/null && echo mounted; true") == ""


async def test_no_mount_names_a_directory_of_the_machines_container_engine(slots: Slots) -> None:
    """In a container /usr lies on the engine's overlay, whose options name the engine's directories."""
    one = await slots.open("one")
    told = await sh(one, "cat /proc/self/mountinfo /proc/self/mounts /proc/1/mountinfo 2>/dev/null; mount; df -a")
    assert " /usr " in told
    assert re.findall(r".*(?:docker|containerd|overlay2|upperdir).*", told) == []
