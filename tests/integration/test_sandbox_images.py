"""Sandboxes with an image: users, programs, background processes, connections, checkpoints and forks. As root: an image
slot needs 65,536 ids."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentenv import AsyncFarm, AsyncSandbox, ImageRoot, NetworkPolicy, Sandbox, ToolContext
from agentenv.containers.transfer import get_tar
from agentenv.errors import (
    CheckpointError,
    ConfigError,
    InfraError,
    PoolClosedError,
    SandboxUnavailableError,
    UserUnsupportedError,
)
from agentenv.sdk.processes import ExecResult
from tests.integration.awaited import awaited
from tests.small_image import small_image
from tests.waiting import START_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """References to the image, by its user."""
    place = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(place / "cache"))
        yield {user: small_image(place / f"layout-{user}", user=user) for user in ("", "app", "1234:staff")}


@pytest.fixture(params=["awaited", "plain"])
async def box(images: dict[str, str], request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    """Of both kinds: what one can the other can."""
    if request.param == "awaited":
        async with AsyncSandbox(image=images[""], memory_mib=512, storage_mib=128, forks=2) as opened:
            yield opened
        return
    plain = Sandbox(image=images[""], memory_mib=512, storage_mib=128, forks=2)
    try:
        yield awaited(await asyncio.to_thread(plain.open))
    finally:
        await asyncio.to_thread(plain.close)


USERS = [
    (None, "uid=0(root) gid=0(root) groups=0(root)", "/root", "root"),
    ("app", "uid=1234(app) gid=1234(app) groups=1234(app),777(extra)", "/home/app", "app"),
    ("1234", "uid=1234(app) gid=1234(app) groups=1234(app),777(extra)", "/home/app", "app"),
    ("app:staff", "uid=1234(app) gid=50(staff) groups=50(staff)", "/home/app", "app"),
    ("app:5", "uid=1234(app) gid=5 groups=5", "/home/app", "app"),
    ("4321", "uid=4321 gid=0(root) groups=0(root)", "/", ""),
    ("0:777", "uid=0(root) gid=777(extra) groups=777(extra)", "/root", "root"),
]


async def test_a_command_runs_as_its_user(box: AsyncSandbox) -> None:
    for user, ids, home, name in USERS:
        asked = ["sh", "-c", "id; echo $HOME; echo $USER; echo seen >/dev/stdout"]
        result = await box.exec(asked, user=user)
        assert (result.exit_code, result.stdout.splitlines(), result.stderr) == (0, [ids, home, name, "seen"], "")
        told = await box.run("id; echo $HOME; set -x", user=user)
        assert told.stdout.splitlines() == [ids, home]


async def test_users_that_are_not_there_are_told_apart(box: AsyncSandbox) -> None:
    for user, code, said in [
        ("nobody", 210, "slotas: no such user: nobody\n"),
        ("app:wheel", 211, "slotas: no such group: wheel\n"),
        ("4294967295", 210, "slotas: no such user: 4294967295\n"),
        ("app:", 125, "slotas: not a valid user name: app:\n"),
    ]:
        result = await box.exec(["id"], user=user)
        assert (result.exit_code, result.stdout, result.stderr) == (code, "", said)
    assert (await box.exec(["nonsense"], user="app")).exit_code == 127
    assert (await box.exec(["/etc/passwd"], user="app")).exit_code == 126
    told = await box.exec(["env"], user="app", env={"HOME": "/elsewhere"})
    assert "HOME=/elsewhere" in told.stdout.splitlines()


async def test_sessions_and_processes_have_users_too(box: AsyncSandbox) -> None:
    assert (await box.terminal("id -un; cd; pwd; tty", user="app", pty=True)).stdout.split()[:2] == ["app", "/home/app"]
    assert (await box.terminal("pwd")).stdout == "/home/app\n"
    process = await box.start(["cat"], user="app")
    await process.write(b"\xff\x00")
    await process.close_input()
    assert (await process.wait(30), await process.read()) == (0, b"\xff\x00")
    sleeping = await box.start("echo begun; sleep 1000")
    async for piece in sleeping.output():
        assert piece == b"begun\n"
        await sleeping.kill("TERM")
    assert sleeping.exit_code == 143


@pytest.mark.parametrize("user", ["", "app"])
async def test_programs_of_an_image_reach_what_answers_here(images: dict[str, str], user: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.path} {await request.text()}")

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    ask = (
        "exec 3<>/dev/tcp/127.0.0.1/$0; printf 'POST /a HTTP/1.0\\r\\nContent-Length: 5\\r\\n\\r\\nasked' >&3; cat <&3"
    )
    async with AsyncSandbox(image=images[user], memory_mib=512) as box, box.serve(app) as served:
        done = await box.exec(["bash", "-c", ask, str(served.port)])
        assert done.stdout.endswith("\r\n\r\n/a asked"), done


def test_an_application_is_served_without_asyncio(images: dict[str, str]) -> None:
    app = web.Application()
    ask = "exec 3<>/dev/tcp/127.0.0.1/$0; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
    with Sandbox(image=images[""], memory_mib=512) as box, box.serve(app) as served:
        assert box.exec(["bash", "-c", ask, str(served.port)]).stdout == "HTTP/1.0 404 Not Found\r\n"
        assert served.error is None


async def test_files_are_a_users_by_name_or_number(tmp_path: Path, images: dict[str, str]) -> None:
    (tmp_path / "up").write_text("x")
    async with AsyncSandbox(image=images["app"], memory_mib=512, storage_mib=64) as box:
        await box.write_file("/tests/secret", "roots", mode=0o600, user="root")
        await box.upload(tmp_path / "up", "/tests/up", user="0")
        await box.mkdir("/tests/made", user="0:0")
        for path in ("/tests/secret", "/tests/up", "/tests/made"):
            assert (await box.exec(["stat", "-c", "%u:%g", path])).stdout == "0:0\n"
        for refused in (
            box.read_file("/tests/secret"),
            box.download("/tests/secret", tmp_path / "down"),
            box.remove("/tests/up"),
            box.rename("/tests/up", "/tests/down"),
            box.write_file("/tests/up", "x"),
            box.write_file("/tests/x", "x", user="4321"),
        ):
            with pytest.raises(PermissionError):
                await refused
        assert await box.read_file("/tests/secret", user="root") == "roots"
        assert (await box.download("/tests/secret", tmp_path / "down", user="root")).files == 1
        packed = (await box.archive("/tests", user="root")).data
        assert packed is not None
        await box.extract(packed, "/opt/copy", user="root")
        assert {entry.path for entry in (await box.list_files("/opt/copy", user="root")).entries} >= {"secret", "up"}
        await box.rename("/tests/up", "/tests/down", user="root")
        await box.remove("/tests/down", user="root")
        await box.write_file("~/mine", "of app", user="app")
        assert await box.read_file("/home/app/mine") == "of app", "and ~ is that user's home"
        await box.upload(tmp_path / "up", "~/sent", user="app")
        assert (await box.exec(["stat", "-c", "%U", "/home/app/sent"])).stdout == "app\n"
        with pytest.raises(PermissionError, match="no such user"):
            await box.read_file("/etc/passwd", user="nobody-here")


async def test_a_slot_with_one_user_refuses_another_for_its_files(tmp_path: Path) -> None:
    (tmp_path / "up").write_text("x")
    async with AsyncSandbox() as box:
        for refused in (
            box.write_file("a", "x", user="root"),
            box.read_file("a", user="0"),
            box.stat(".", user="root"),
            box.upload(tmp_path / "up", "up", user="root"),
            box.download(".", tmp_path / "down", user="root"),
            box.archive(".", user="root"),
        ):
            with pytest.raises(UserUnsupportedError, match="one user"):
                await refused


async def test_the_images_user_is_whose_everything_runs(tmp_path: Path, images: dict[str, str]) -> None:
    async with AsyncSandbox(image=images["app"], memory_mib=512, workdir="/home/app") as box:
        assert (await box.run("id -un; echo $HOME; pwd")).stdout.split() == ["app", "/home/app", "/home/app"]
        assert (await box.run("id -un; echo $HOME", user="root")).stdout.split() == ["root", "/root"]
        await box.write_file("~/notes/a", "mine")
        found = await box.search(r"^\p{L}+$", "~", glob="**/notes/*")
        assert [(match.line, match.text) for match in found.matches] == [(1, "mine")]
        assert (await box.exec(["stat", "-c", "%U %n", "notes/a"])).stdout == "app notes/a\n"
        with pytest.raises(PermissionError):
            await box.write_file("/etc/passwd", "")
        (tmp_path / "up").write_text("x")
        await box.upload(tmp_path / "up", "up")
        assert (await box.exec(["stat", "-c", "%U", "up"])).stdout == "app\n"
        assert (await box.terminal("id -un")).stdout == "app\n"


async def test_what_paths_name_is_changed_with_the_rights_of_the_images_user(images: dict[str, str]) -> None:
    async with AsyncSandbox(image=images["app"], workdir="/home/app", memory_mib=512, storage_mib=128) as box:
        await box.mkdir("made")
        await box.write_file("made/f", "1")
        await box.rename("made/f", "~/f")
        await box.rename("~/f", "/tmp/f")
        assert (await box.exec(["ls", "-ld", "/home/app/made", "/tmp/f"])).stdout.count(" app ") == 2
        with pytest.raises(PermissionError):
            await box.mkdir("/etc/new")
        with pytest.raises(PermissionError):
            await box.remove("/etc/passwd")
        await box.remove("/tmp/f")


async def test_bytes_pass_unchanged_up_to_the_cap(box: AsyncSandbox) -> None:
    every = bytes(range(256)) * 4096
    result = await box.exec(["cat"], stdin=every, output_bytes=2 * len(every))
    assert result.stdout_bytes == every
    cut = await box.exec(["cat"], stdin=every, output_bytes=1000)
    assert cut.stdout_bytes == every[:500] + every[-500:]
    assert cut.stdout_dropped_bytes == len(every) - 1000
    assert (await box.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
    in_bash = await box.run("cat", stdin=b"\xff" + 5000 * b"a", output_bytes=2000)
    assert in_bash.stdout.startswith("\ufffdaaa")
    assert in_bash.stdout_dropped_bytes == 3001


async def test_checkpoints_and_forks_are_files_and_no_processes(box: AsyncSandbox) -> None:
    await box.run("echo one > /opt/f; chmod 640 /opt/f; sleep 1000 >/dev/null 2>&1 &")
    checkpoint = await box.checkpoint()
    await box.run("echo two > /opt/f; rm /etc/group")
    forks = await box.fork(2)
    for number, fork in enumerate(forks):
        assert (await fork.run(f"cat /opt/f; ls /etc/group; echo {number} > /opt/own")).stdout == "two\n"
    assert [await fork.read_file("/opt/own") for fork in forks] == ["0\n", "1\n"]
    await box.restore(checkpoint)
    assert (await box.run("cat /opt/f; stat -c %a /opt/f; ls /opt; ls -d /proc/[0-9]*")).stdout.split()[:3] == [
        "one", "640", "f"
    ]  # fmt: skip
    for fork in forks:
        await fork.close()
    await box.drop(checkpoint)
    (again,) = await box.fork()
    assert await again.read_file("/opt/f") == "one\n", "what it stands on is there, though it was dropped"
    await again.close()


async def test_a_network_is_changed_while_it_runs(images: dict[str, str]) -> None:
    def seen(box: AsyncSandbox) -> Awaitable[ExecResult]:
        return box.exec(["bash", "-c", "cat /proc/net/dev; echo proxy=$http_proxy"])

    async with AsyncSandbox(image=images[""], memory_mib=512, network=["example.org"], forks=1) as box:
        sleeping = await box.start("sleep 1000")
        allowed = await seen(box)
        assert "tap0" not in allowed.stdout
        assert "proxy=http://127.0.0.1:" in allowed.stdout
        await box.set_network("public")
        opened = await seen(box)
        assert "tap0" in opened.stdout
        assert opened.stdout.endswith("proxy=\n")
        await box.set_network(NetworkPolicy("public", denied=("192.0.2.0/24",)))
        refused = await box.run("true > /dev/tcp/192.0.2.1/80")
        assert "No route to host" in refused.stderr
        await box.set_network("none")
        assert "tap0" not in (await seen(box)).stdout
        assert (await sleeping.state()).state == "running"
        await box.set_network(["*.example.org"])
        (fork,) = await box.fork()
        assert "proxy=http" in (await seen(fork)).stdout, "a fork begins with the network of that time"
        started = await fork.start("echo proxy=$http_proxy")
        assert b"".join([piece async for piece in started.output()]).startswith(b"proxy=http")
        await fork.set_network("none")
        assert (await fork.terminal("echo proxy=$http_proxy")).stdout == "proxy=\n"


async def test_a_container_without_a_network_has_none_to_give(images: dict[str, str]) -> None:
    async with AsyncSandbox(image=images[""], memory_mib=512) as box:
        with pytest.raises(SandboxUnavailableError, match="allow_network"):
            await box.set_network("public")
        assert (await box.run("echo still here")).stdout == "still here\n"


async def test_a_lone_sandbox_has_the_limits_it_asks_for(images: dict[str, str]) -> None:
    async with AsyncSandbox(image=images[""], memory_mib=3072, storage_mib=2048, cpus=0.5) as box:
        large = await box.run("head -c 1500000000 /dev/zero > /opt/large; stat -c %s /opt/large", timeout_s=START_S)
        assert large.exit_code == 0
        more = await box.run("head -c 1000000000 /dev/zero > /opt/more", timeout_s=START_S)
        assert more.exit_code != 0
    async with AsyncSandbox(memory_mib=3072, storage_mib=2048) as plain:
        large = await plain.run("head -c 1500000000 /dev/zero > large && stat -c %s large", timeout_s=START_S)
        assert large.stdout == "1500000000\n"


async def test_sandboxes_of_a_farm_have_its_memory_unless_they_name_their_own(images: dict[str, str]) -> None:
    async with AsyncFarm(slots=3, memory_mib=300, limits={"max_memory_bytes": 600 << 20}) as farm:
        for asked, most_mib in (({}, 300), ({"memory_mib": 600}, 600), ({"memory_mib": 100}, 100)):
            async with farm.sandbox(images[""], **asked) as box:  # type: ignore[arg-type]
                assert (await box.metrics()).memory_limit_bytes == most_mib << 20
        async with farm.sandbox() as plain:
            assert (await plain.metrics()).memory_limit_bytes == 300 << 20
        with pytest.raises(ConfigError, match=r"root\.memory_bytes: .* slot here has .*limits\.max_memory_bytes"):
            await farm.sandbox(images[""], memory_mib=601).open()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"cpus": 4096}, "root.cpu_millis: 4096 cores"),
        ({"memory_mib": 1 << 30}, "root.memory_bytes: 1125899906842624 b"),
    ],
)
async def test_more_than_the_machine_has_is_refused(images: dict[str, str], asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.* more than this machine has"):
        async with AsyncSandbox(image=images[""], **asked):
            pass


async def test_capabilities_are_asked_for_by_name(images: dict[str, str]) -> None:
    async def has_net_admin(**asked: Any) -> bool:
        async with AsyncSandbox(image=images[""], memory_mib=512, **asked) as box:
            status = (await box.exec(["cat", "/proc/self/status"])).stdout
            (effective,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
            return bool(int(effective.split()[1], 16) >> 12 & 1)  # linux/capability.h

    assert not await has_net_admin()
    assert await has_net_admin(capabilities=["net_admin"], nested_namespaces=True)


async def test_an_image_is_made_of_what_was_written(images: dict[str, str]) -> None:
    async with AsyncFarm(slots=2) as farm:
        async with farm.sandbox(ImageRoot(images["app"], memory_mib=512)) as box:
            await box.run("echo kept > /opt/state; rm /etc/group", user="root")
            digest = await box.commit("prepared:1")
            await box.run("echo later > /opt/state", user="root")
            with pytest.raises(ConfigError, match="name"):
                await box.commit("oci:/tmp/x")
        for image in (digest, "committed:prepared:1"):
            async with AsyncSandbox(image=image, pool=farm, memory_mib=512) as again:
                assert (await again.run("cat /opt/state; id -un; ls /etc/group")).stdout == "kept\napp\n"


async def test_what_an_image_cannot_have_is_refused_by_its_path(images: dict[str, str], tmp_path: Path) -> None:
    async with AsyncFarm(slots=2) as farm, farm.sandbox(ImageRoot(images[""], memory_mib=512)) as box:
        await box.run("mkdir /opt/d; echo > /opt/d/.wh.passwd; echo > /etc/.whether")
        with pytest.raises(CheckpointError, match=r"/opt/d/\.wh\.passwd cannot be in an image.*remove or rename it"):
            await box.commit("odd:1")
        await box.run("rm /opt/d/.wh.passwd")
        async with farm.sandbox(ImageRoot(await box.commit("odd:1"), memory_mib=512)) as again:
            assert (await again.run("ls -A /opt/d; ls /etc/passwd /etc/.whether")).exit_code == 0
        deep = "n=" + "n" * 250 + "; cd /opt/d; for i in {1..18}; do mkdir $n; cd -P $n 2>/dev/null; done; : > file"
        await box.run(deep + "; head -c 1000000 /dev/zero > /opt/d/a")
        async with box.lease_for_transfer() as lease:
            with pytest.raises(InfraError, match=r"/opt/d: its tar was cut short .*over 4096 bytes"):
                await get_tar(lease, "/opt/d", tmp_path / "tar")
        with pytest.raises(CheckpointError, match=r"its files cannot be read: .* more than 4096 bytes: File name"):
            await box.commit()


async def test_a_hook_has_checkpoints_and_forks_which_end_with_it(images: dict[str, str]) -> None:
    async with AsyncFarm(slots=3) as farm, farm.sandbox(ImageRoot(images[""], memory_mib=512)) as box:
        async with box.slot_session() as session:
            hook = ToolContext(session)
        await hook.write_file("/opt/f", "one")
        checkpoint = await hook.checkpoint()
        await hook.write_file("/opt/f", "two")
        one, other = await hook.fork(2)
        async with one:
            await one.write_file("/opt/f", "changed")
        assert await other.read_file("/opt/f") == "two"
        await hook.restore(checkpoint)
        assert await hook.read_file("/opt/f") == "one"
        await hook.cleanup()
        for ended in (one, other):
            with pytest.raises(PoolClosedError):
                await ended.read_file("/opt/f")
        async with farm.sandbox(), farm.sandbox():
            pass  # their slots are free again


async def test_many_sandboxes_of_several_images_share_a_farm(images: dict[str, str]) -> None:
    async def used(number: int) -> tuple[str, ...]:
        image = [*images.values()][number % 3]
        async with AsyncSandbox(image=image, memory_mib=256, storage_mib=64, pool=farm) as box:
            await box.run(f"echo {number} > ~/mine; echo {number} > /tmp/mine")
            await everybody.wait()
            told = await box.exec(["sh", "-c", "cat ~/mine /tmp/mine; id -un; ls ~ | cat"])
            return tuple(told.stdout.split())

    everybody = asyncio.Barrier(50)
    async with AsyncFarm(slots=50, start_timeout_s=300, timeout_s=300) as farm:
        found = await asyncio.gather(*(used(number) for number in range(50)))
    users = ["root", "app", "app"]
    assert found == [(str(n), str(n), users[n % 3], "mine") for n in range(50)]


async def test_a_directory_to_start_in_that_is_missing_is_made(images: dict[str, str]) -> None:
    """By root, as docker does, whoever the image's user is."""
    async with AsyncSandbox(image=images["app"], workdir="/opt/made/here", forks=1) as box:
        assert (await box.run("pwd; stat -c %U:%a . ..")).stdout == "/opt/made/here\nroot:755\nroot:755\n"
        await box.exec(["sh", "-c", "echo 1 > note"], user="root")
        assert await box.read_file("note") == "1\n"
        (fork,) = await box.fork()
        async with fork:
            assert (await fork.run("pwd; cat note")).stdout == "/opt/made/here\n1\n"
    async with AsyncSandbox(image=images[""], workdir="/etc/passwd/below") as box:
        refused = await box.run("pwd")
        assert refused.exit_code != 0
        assert "/etc/passwd/below" in refused.stderr


async def test_plain_slots_have_one_user_and_cannot_become_images() -> None:
    async with AsyncSandbox() as box:
        for call in (box.exec(["id"], user="root"), box.terminal("id", user="root"), box.start("id", user="root")):
            with pytest.raises(UserUnsupportedError, match="a slot without an image has one user"):
                await call
        with pytest.raises(UserUnsupportedError):
            await box.start("id", user="root", output="stream")
        with pytest.raises(CheckpointError, match="cannot become one"):
            await box.commit("plain:1")
        assert (await box.exec(["echo", "$HOME"])).stdout == "$HOME\n"


SERVER = """
import asyncio

async def echo(reader, writer):
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.write(b"over")
    writer.close()

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 8000)
    deaf = await asyncio.start_server(lambda *_: asyncio.sleep(1000), "127.0.0.1", 8001)
    print("up", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_connections_to_a_server_in_the_slot() -> None:
    async with AsyncSandbox() as box:
        await box.write_file("server.py", SERVER)
        server = await box.start(["python3", "server.py"])
        assert await anext(server.output()) == b"up\n"
        sent = os.urandom(1_000_000)

        async def echoed() -> bytes:
            async with box.connect(8000) as (reader, writer):
                writer.write(sent)
                writer.write_eof()
                return await reader.read()

        assert await asyncio.gather(*(echoed() for _ in range(4))) == [sent + b"over"] * 4
        with pytest.raises(ConnectionRefusedError):
            async with box.connect(9):
                pass
        async with box.connect(8001) as (reader, _):
            waiting = asyncio.create_task(reader.read())
            await box.seal()
            with pytest.raises(Exception, match="lost"):
                await waiting


def test_blocking_connections_to_a_server_in_the_slot() -> None:
    with Sandbox() as box:
        box.write_file("server.py", SERVER)
        assert next(box.start(["python3", "server.py"]).output()) == b"up\n"
        sent = os.urandom(1_000_000)
        with box.connect(8000) as connected:

            def send() -> None:
                connected.sendall(sent)
                connected.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            assert connected.makefile("rb").read() == sent + b"over"
            sender.join()
        with pytest.raises(ConnectionRefusedError), box.connect(9):
            pass

        def until_lost() -> None:
            with box.connect(8001) as waiting:
                box.seal()
                assert waiting.recv(1) == b""

        with pytest.raises(InfraError, match="lost"):
            until_lost()


async def test_a_server_in_the_slot_at_a_port_of_this_machine() -> None:
    async with AsyncSandbox() as box:
        await box.write_file("server.py", SERVER)
        server = await box.start(["python3", "server.py"])
        assert await anext(server.output()) == b"up\n"
        sent = os.urandom(1_000_000)
        async with box.forward(8000) as url:
            host, port = url.removeprefix("http://").split(":")

            async def echoed() -> bytes:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                writer.write_eof()
                try:
                    return await reader.read()
                finally:
                    writer.close()

            assert await asyncio.gather(*(echoed() for _ in range(4))) == [sent + b"over"] * 4
            reader, cut = await asyncio.open_connection(host, int(port))
            await box.seal()
            with pytest.raises(ConnectionError):
                await reader.read()
            cut.close()
            with pytest.raises(ConfigError, match="local_port"):
                async with box.forward(8000, local_port=int(port)):
                    pass
        with pytest.raises(ConnectionRefusedError):
            await echoed()


async def test_a_server_in_the_slot_at_a_unix_socket_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with AsyncSandbox() as box:
        await box.write_file("server.py", SERVER)
        server = await box.start(["python3", "server.py"])
        assert await anext(server.output()) == b"up\n"
        async with box.forward(8000, unix=path) as where:
            assert (where, stat.S_IMODE(path.stat().st_mode)) == (str(path), 0o600)
            reader, writer = await asyncio.open_unix_connection(where)
            writer.write(b"hello")
            writer.write_eof()
            assert await reader.read() == b"helloover"
            writer.close()
            with pytest.raises(ConfigError, match=r"unix: cannot listen on .*Address already in use"):
                async with box.forward(8000, unix=path):
                    pass
            with pytest.raises(ConfigError, match="local_port"):
                async with box.forward(8000, unix=tmp_path / "other", local_port=1):
                    pass
            with pytest.raises(ConfigError, match="AF_UNIX path too long"):
                async with box.forward(8000, unix=tmp_path / ("x" * 200)):
                    pass
        assert list(tmp_path.iterdir()) == []


def test_an_http_server_in_the_slot_is_asked_by_its_url() -> None:
    with Sandbox() as box:
        box.write_file("page", "from the slot")
        server = box.start(["python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", "8000"])
        next(server.output())
        with box.forward(8000) as url, urllib.request.urlopen(f"{url}/page", timeout=60) as answer:
            assert answer.read() == b"from the slot"


async def test_a_working_directory_may_be_below_the_home(box: AsyncSandbox) -> None:
    await box.write_file("~/notes/a", "")
    for told in (
        (await box.run("pwd", cwd="~/notes")).stdout,
        (await box.exec(["bash", "-c", "pwd"], cwd="~/notes")).stdout,
        (await box.terminal("pwd", cwd="~/notes")).stdout,
        (b"".join([piece async for piece in (await box.start("pwd", cwd="~/notes")).output()])).decode(),
    ):
        assert told == "/root/notes\n"


async def test_an_images_configuration_can_be_asked_and_its_command_started(tmp_path: Path) -> None:
    config = {"Env": ["GREETING=hello"], "WorkingDir": "/opt", "Entrypoint": ["sh", "-c"]}
    image = small_image(tmp_path / "layout", user="app", Cmd=["echo $GREETING from $PWD; id -un"], **config)
    async with AsyncSandbox(image=image, memory_mib=512, storage_mib=64) as box:
        told = await box.image_config()
        assert (told.user, told.workdir, told.env["GREETING"]) == ("app", "/opt", "hello")
        assert (told.entrypoint, told.cmd) == (("sh", "-c"), ("echo $GREETING from $PWD; id -un",))
        started = await box.start_command()
        assert (await started.wait(30), await started.read()) == (0, b"hello from /opt\napp\n")
        other = await box.start_command(["id -un; echo $GREETING"], user="root", env={"GREETING": "bye"})
        assert (await other.wait(30), await other.read()) == (0, b"root\nbye\n"), "its CMD is replaced, as by an engine"


async def test_what_has_no_command_cannot_be_started(images: dict[str, str]) -> None:
    async with AsyncSandbox(image=images[""], memory_mib=512, storage_mib=64) as box:
        with pytest.raises(ConfigError, match="no ENTRYPOINT and no CMD"):
            await box.start_command()
    async with AsyncSandbox() as box:
        with pytest.raises(ConfigError, match="image"):
            await box.image_config()
