"""The network of a slot by policy: nothing, the outside, or named hosts through the proxy it cannot pass by."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slot_networks import CLOSED, CONTAINER, OTHER, WEB, Networks, Slot, networks, until_open
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces with addresses takes root")


@pytest.fixture(scope="module")
def world() -> Iterator[Networks]:
    with networks() as made:
        yield made


def status(slot: Slot, *argv: str) -> str:
    """The status of a request, or of the tunnel it did not get; and what it was told."""
    done = slot.curl("-o", "answer", "-w", "%{http_code} %{http_connect}", *argv)
    got = done.stdout.split()
    answer = slot.home / "answer"
    said = answer.read_text() if answer.exists() else ""
    answer.unlink(missing_ok=True)
    return f"{max(got)} {said}"


ASK = """
import os, socket, sys
proxy = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
proxy.sendall(sys.stdin.buffer.read())
while got := proxy.recv(65536): os.write(1, got)
"""
TUNNEL = """
import os, select, socket, sys
proxy = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
proxy.sendall(f"CONNECT {sys.argv[2]} HTTP/1.1\\r\\n\\r\\n".encode())
ends = {proxy: 1, 0: proxy}
while ends:
    for end in select.select(list(ends), [], [])[0]:
        got = os.read(0, 65536) if end == 0 else proxy.recv(65536)
        if got and end == 0: proxy.sendall(got)
        elif got: os.write(1, got)
        elif end == 0: proxy.shutdown(socket.SHUT_WR)
        else: sys.exit()
        if not got: del ends[end]
"""


def proxy_port(slot: Slot) -> str:
    return slot.env["http_proxy"].rpartition(":")[2]


def ask(slot: Slot, request: str) -> str:
    """Exactly these bytes to the proxy; all it answers, with ``\\n`` at the ends of lines."""
    return slot.run("python3", "-c", ASK, proxy_port(slot), stdin=request).stdout


def tunnelled(slot: Slot, host: str, said: str) -> str:
    """What the echo of that host answers through a tunnel."""
    return slot.run("python3", "-c", TUNNEL, proxy_port(slot), f"{host}:7", stdin=said).stdout


def tunnel(slot: Slot, host: str) -> subprocess.Popen[bytes]:
    client = slot.start("python3", "-c", TUNNEL, proxy_port(slot), f"{host}:7")
    assert client.stdout is not None
    assert client.stdout.readline() == b"HTTP/1.1 200 Connection established\r\n"
    assert client.stdout.readline() == b"\r\n"
    return client


def echo(client: subprocess.Popen[bytes], line: bytes) -> None:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(line)
    client.stdin.flush()
    assert client.stdout.readline() == line


def test_named_hosts_are_reached(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test", "*.wild.test:80")
    assert slot.curl("http://web.test/").stdout == f"hello from {WEB}\n"
    assert slot.curl("http://WEB.test.:80/").stdout == f"hello from {WEB}\n"
    assert slot.curl("http://a.wild.test/").stdout == f"hello from {WEB}\n"
    assert tunnelled(slot, "web.test", "over\n").endswith("\n\nover\nthe end\n")
    assert slot.curl("-I", "http://web.test/").stdout.startswith("HTTP/1.1 200")


def test_the_refusal_tells_the_host_and_the_policy(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test", "*.wild.test:80")
    told = "This sandbox may connect only to: web.test, *.wild.test:80."
    assert status(slot, "http://other.test/") == f"403 other.test is not an allowed host. {told}\n"
    assert status(slot, "https://other.test/") == "403 "
    assert status(slot, "http://a.wild.test:81/").startswith("403 Port 81 of a.wild.test is not allowed, only 80.")
    assert status(slot, f"http://{WEB}/").startswith(f"403 {WEB} is not an allowed host.")


@pytest.mark.parametrize("name", ["loops.test", "own.test", "closed.test", "metadata.test", "private.test"])
def test_an_allowed_name_that_leads_to_a_closed_address_leads_nowhere(world: Networks, name: str) -> None:
    slot = world.apply(0, "allow", name, CLOSED, CONTAINER, "127.0.0.1", "169.254.0.0/16")
    assert status(slot, f"http://{name}/").startswith(f"403 {name} is refused:")
    assert tunnelled(slot, name, "over\n").startswith("HTTP/1.1 403")


def test_closed_addresses_are_closed_by_number_too(world: Networks) -> None:
    numbers = (CLOSED, CONTAINER, "127.0.0.1", "169.254.169.254")
    slot = world.apply(0, "allow", *numbers, "0.0.0.0/0")
    assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
    for number in (*numbers, f"[::ffff:{CLOSED}]", "[::1]", "0.0.0.0"):
        assert status(slot, "--noproxy", "none", f"http://{number}/").startswith("403"), number
    for number in ("127.1", "0x7f000001", "2130706433", "0177.0.0.1"):
        written = f"GET http://{number}/ HTTP/1.1\r\nHost: web.test\r\n\r\n"
        assert ask(slot, written).startswith("HTTP/1.1 400"), number


def test_there_is_no_way_past_the_proxy(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test")
    assert slot.curl("--noproxy", "*", f"http://{WEB}/").returncode == 7  # no route
    assert slot.curl("--noproxy", "*", "http://[2606:4700::1]/").returncode == 7
    datagram = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'?', ('%s', 53))"
    for address in (WEB, CONTAINER, "10.0.2.3"):
        assert "Network is unreachable" in slot.run("python3", "-c", datagram % address).stderr
    raw = "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).sendto(b'?' * 8, ('%s', 0))"
    assert "Network is unreachable" in slot.run("python3", "-c", raw % WEB).stderr
    assert "lo" in slot.run("ip", "-br", "link").stdout.split()[:1]
    assert slot.run("ip", "route").stdout == ""
    assert not [asked for asked in world.requests() if asked["server"] == "datagram"]


def test_even_with_every_capability_over_its_network_it_has_no_device_to_the_outside(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test")
    assert slot.run("ip", "link", "add", "d0", "type", "veth", "peer", "d1").returncode == 0  # it does have them
    slot.run("ip", "addr", "add", "11.22.33.9/24", "dev", "d0")
    for device in ("d0", "d1"):
        slot.run("ip", "link", "set", device, "up")
    before = len(world.requests())
    assert slot.curl("-m", "1", "--noproxy", "*", f"http://{WEB}/").returncode in (7, 28)
    assert len(world.requests()) == before
    slot.run("ip", "link", "del", "d0")


def test_the_host_that_was_judged_is_the_one_that_is_asked(world: Networks) -> None:
    """A lie in Host, a second request behind the first one or behind its body: only what was judged is sent."""
    slot = world.apply(0, "allow", "web.test")
    lie = "Host: other.test\r\n"
    second = "GET http://other.test/second HTTP/1.1\r\nHost: other.test\r\n\r\n"
    before = len(world.requests())
    for request in (
        f"GET http://web.test/one HTTP/1.1\r\n{lie}{lie}X-Host: a\r\n\r\n{second}",
        f"POST http://web.test/two HTTP/1.1\r\n{lie}Content-Length: 3\r\n\r\nabc{second}",
        f"POST http://web.test/three HTTP/1.1\r\n{lie}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n{second}",
    ):
        answer = ask(slot, request)
        assert answer.startswith("HTTP/1.1 200 OK\n")
        assert answer.count("HTTP/1.1") == 1
        assert "Connection: close" in answer
        assert "keep-alive" not in answer
    asked = world.requests()[before:]
    assert [each["line"].split()[1] for each in asked] == ["/one", "/two", "/three"]
    assert {each["headers"]["Host"] for each in asked} == {"web.test"}
    assert {each["headers"]["Connection"] for each in asked} == {"close"}


@pytest.mark.parametrize(
    "request_text",
    [
        "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n",
        "GET https://web.test/ HTTP/1.1\r\n\r\n",
        "GET http://user:pw@web.test/ HTTP/1.1\r\n\r\n",
        "POST http://web.test/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST http://web.test/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "GET http://web.test/ HTTP/1.1\r\nX: a\r\n continued\r\n\r\n",
        "GET http://web.test/ HTTP/1.1\r\nX : a\r\n\r\n",
        "CONNECT web.test HTTP/1.1\r\n\r\n",
        "\x16\x03\x01 a TLS client that takes it for a server\r\n\r\n",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(world: Networks, request_text: str) -> None:
    slot = world.apply(0, "allow", "web.test")
    assert ask(slot, request_text).startswith("HTTP/1.1 400")


def test_requests_with_bodies_pass_whole(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test")
    body = os.urandom(3 << 20)
    (slot.home / "body").write_bytes(body)
    digest = hashlib.sha256(body).hexdigest() + "\n"
    assert slot.curl("-T", "body", "http://web.test/").stdout == digest  # with Expect: 100-continue
    assert slot.curl("-T", "body", "-H", "Transfer-Encoding: chunked", "http://web.test/").stdout == digest
    assert slot.curl("-T", "body", "-p", "http://web.test/").stdout == digest
    size = slot.curl("-o", "/dev/null", "-w", "%{size_download}", "http://web.test/large")
    assert size.stdout == str(64 << 20)


def test_a_half_closed_tunnel_still_answers(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test")
    at_once = "CONNECT web.test:7 HTTP/1.1\r\n\r\nat once"
    script = ASK.replace("while", "proxy.shutdown(socket.SHUT_WR)\nwhile")
    said = slot.run("python3", "-c", script, proxy_port(slot), stdin=at_once).stdout
    assert said == "HTTP/1.1 200 Connection established\n\nat oncethe end\n"


def test_git_clones_and_pushes_through_it(world: Networks) -> None:
    served = world.directory / "r.git"
    for command in (f"git init -q --bare {served}", f"git -C {served} config http.receivepack true"):
        subprocess.run(command.split(), check=True, timeout=60)
    slot = world.apply(0, "allow", "web.test")
    script = """
        set -e; export GIT_CONFIG_GLOBAL=$PWD/gitconfig
        git config --global user.name a; git config --global user.email a@b; git config --global http.postBuffer 65536
        git clone -q http://web.test/git/r.git one; cd one
        head -c 1000000 /dev/urandom > large; git add large; git commit -qm large; git push -q origin HEAD:main
        cd ..; git clone -q -b main http://web.test/git/r.git two; cmp one/large two/large && echo same
        git clone -q http://other.test/git/r.git three 2>&1 || true
    """
    done = slot.run("bash", "-c", script)
    assert "same" in done.stdout, done.stderr
    assert "The requested URL returned error: 403" in done.stdout


def test_apt_fetches_through_it(world: Networks) -> None:
    """apt pipelines: it sends ten requests at once, of which the first is answered and the others are sent again."""
    slot = world.apply(0, "allow", "web.test")
    helper = "/usr/lib/apt/apt-helper"
    names = [f"f{number}" for number in range(12)]
    files = [word for name in names for word in (f"http://web.test/{name}", f"{slot.home}/{name}")]
    done = slot.run(helper, "-o", "APT::Sandbox::User=root", "download-file", *files)
    assert done.returncode == 0, done.stderr + done.stdout
    assert {(slot.home / name).read_text() for name in names} == {f"hello from {WEB}\n"}


def test_a_change_of_policy_closes_what_it_no_longer_allows_and_leaves_the_rest(world: Networks) -> None:
    slot = world.apply(0, "allow", "web.test", "other.test")
    kept, cut, silent = (tunnel(slot, host) for host in ("other.test", "web.test", "web.test"))
    try:
        for client in (kept, cut):
            echo(client, b"before\n")
        until_open(world, 0, 3)
        refused = world.counts(0)["refused"]
        assert world.apply(0, "allow", "other.test") is slot
        assert world.counts(0)["open"] == 1
        assert world.counts(0)["refused"] == refused + 2
        assert cut.wait(60) == 0
        assert silent.wait(60) == 0
        echo(kept, b"after\n")
        assert status(slot, "http://web.test/").startswith("403")
        world.apply(0, "none")
        assert kept.wait(60) == 0
    finally:
        for client in (kept, cut, silent):
            client.kill()
            client.communicate()


def test_every_change_of_kind_holds_at_once_and_the_processes_stay(world: Networks) -> None:
    slot = world.apply(1, "allow", "web.test")
    env = dict(slot.env)
    assert slot.curl("http://web.test/").stdout == f"hello from {WEB}\n"

    world.apply(1, "public")
    assert slot.env == {}
    assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
    for closed in (CLOSED, CONTAINER, "169.254.169.254"):
        assert slot.curl(f"http://{closed}/").returncode == 7, closed
    slot.env = env  # a shell that was started before
    assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
    assert status(slot, f"http://{CLOSED}/").startswith("403")

    world.apply(1, "none")
    assert slot.env == {}
    assert slot.curl(f"http://{OTHER}/").returncode == 7
    assert [line.split()[0] for line in slot.run("ip", "-br", "link").stdout.splitlines()] == ["lo"]
    slot.env = env
    assert status(slot, "http://web.test/") == (
        "403 web.test is not an allowed host. This sandbox has no network access.\n"
    )

    world.apply(1, "public")
    slot.env = {}
    assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
    assert slot.curl(f"http://{CLOSED}/").returncode == 7
    world.apply(1, "none")


def test_what_is_denied_cannot_be_reached_by_any_way(world: Networks) -> None:
    slot = world.apply(1, "allow", "web.test")
    env = dict(slot.env)
    world.apply(1, "public", denied=[OTHER])
    try:
        assert slot.curl(f"http://{WEB}/").stdout == f"hello from {WEB}\n"
        datagram = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'?', ('{OTHER}', 53))"
        for denied in (OTHER, CLOSED):
            assert slot.curl(f"http://{denied}/").returncode == 7, denied
            assert slot.curl("--interface", "tap0", f"http://{denied}/").returncode != 0, denied
        assert "No route to host" in slot.run("python3", "-c", datagram).stderr
        slot.env = env  # the proxy of the former policy
        assert status(slot, "http://other.test/").startswith(f"403 other.test is refused: {OTHER} is denied.")
        assert status(slot, f"http://{OTHER}/").startswith(f"403 {OTHER} is refused: {OTHER} is denied.")
        assert slot.curl("http://web.test/").stdout == f"hello from {WEB}\n"

        world.apply(1, "public", denied=[WEB, "10.0.2.0/24", "2001:db8::/32"])
        assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
        assert slot.curl(f"http://{WEB}/").returncode == 7
        world.apply(1, "none")
        world.apply(1, "public")
        for reached in (WEB, OTHER):
            assert slot.curl(f"http://{reached}/").stdout == f"hello from {reached}\n"
        assert slot.curl(f"http://{CLOSED}/").returncode == 7
    finally:
        world.apply(1, "none")


def test_a_denial_ends_what_is_connected(world: Networks) -> None:
    """With the process that carried it."""
    slot = world.apply(1, "public")
    (before,) = world.stacks()
    world.apply(1, "public")
    assert world.stacks() == [before], "nothing has changed"
    try:
        world.apply(1, "public", denied=[OTHER])
        (after,) = world.stacks()
        assert after != before
        assert slot.curl(f"http://{WEB}/").stdout == f"hello from {WEB}\n"
        assert world.lost == [], "it was ended, not lost"
    finally:
        world.apply(1, "none")


def test_a_public_network_that_ends_by_itself_is_reported_and_comes_back_with_the_next_policy(world: Networks) -> None:
    slot = world.apply(1, "public")
    (stack,) = world.stacks()
    told = Path(f"/proc/{stack}/status").read_text()
    assert "CapEff:\t0000000000201000" in told  # SYS_ADMIN and NET_ADMIN, over the slot's own namespaces only
    assert Path(f"/proc/{stack}/ns/user").readlink() == Path(f"/proc/{slot.pid}/ns/user").readlink()
    os.kill(stack, signal.SIGKILL)
    wait_for(lambda: world.counts(0) and world.lost)
    assert [each["lost"] for each in world.lost] == [1]
    assert slot.curl(f"http://{OTHER}/").returncode == 7
    world.apply(1, "public")
    assert slot.curl(f"http://{OTHER}/").stdout == f"hello from {OTHER}\n"
    world.apply(1, "none")
    assert world.stacks() == []
    assert len(world.lost) == 1


def test_a_container_without_network_refuses_every_policy_but_none() -> None:
    with networks(slots=1, allow_network=False) as world:
        world.apply(0, "none")
        for policy in ({"kind": "public"}, {"kind": "allow", "hosts": ["web.test"]}):
            assert "slots have no network" in world.ask(slot=0, policy=policy)["error"]


def test_a_port_that_a_process_of_the_slot_holds_is_not_needed() -> None:
    with networks(slots=1) as world:
        (slot,) = world.slots
        squatter = "import socket; s = socket.create_server(('127.0.0.1', 3128)); print(1, flush=True); s.accept()"
        holder = slot.start("python3", "-c", squatter)
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            world.apply(0, "allow", "web.test")
            assert not slot.env["http_proxy"].endswith(":3128")
            assert slot.curl("http://web.test/").stdout == f"hello from {WEB}\n"
        finally:
            holder.kill()
            holder.communicate()


def test_a_proxy_that_dies_is_replaced_and_knows_its_last_policy_and_no_other_slots_is_touched() -> None:
    with networks() as world:
        one, two = world.apply(0, "allow", "web.test"), world.apply(1, "allow", "other.test")
        world.apply(1, "allow", "web.test")
        untouched = world.counts(0)["pid"]
        killed = world.ask(kill=1)["pid"]
        for slot in (one, two):  # no request meets a closed listener, however early it comes
            assert slot.curl("--retry", "5", "--retry-all-errors", "http://web.test/").stdout == f"hello from {WEB}\n"
            assert status(slot, "http://other.test/").startswith("403")
        assert world.counts(1)["pid"] != killed
        assert world.counts(0)["pid"] == untouched


def test_the_proxy_has_no_rights_and_sees_no_files_of_slots() -> None:
    with networks(slots=1) as world:
        world.apply(0, "allow", "web.test")
        process = Path(f"/proc/{world.counts(0)['pid']}")
        told = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        assert told["Uid"].split() == ["10001"] * 4
        assert told["Groups"].split() == []
        assert {told[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {"0" * 16}
        assert told["NoNewPrivs"].strip() == "1"
        mounted = {line.split()[4] for line in (process / "mountinfo").read_text().splitlines()}
        assert str(world.directory / "private") not in mounted


def test_one_slots_misuse_is_its_own() -> None:
    """A thousand connections that say nothing, or little, or something wrong: another slot's requests all succeed, and
    nothing of the flood is served beyond its share."""
    with networks() as world:
        flooding, quiet = world.apply(0, "allow", "web.test"), world.apply(1, "allow", "web.test")
        flood = """
import socket, sys, itertools
tunnel = b"CONNECT web.test:7 HTTP/1.1\\r\\n\\r\\n"
begun = itertools.cycle([b"", b"G", b"GET http://web.test/ HTTP/1.1\\r\\nX: ", tunnel])
held = []
for _ in range(1000):
    s = socket.socket(); s.connect(("127.0.0.1", int(sys.argv[1]))); s.sendall(next(begun)); held.append(s)
print("held", flush=True)
sys.stdin.read()
"""
        port = proxy_port(flooding)
        flooder = flooding.start("bash", "-c", f"ulimit -n 4096; exec python3 -c '{flood}' {port}")
        assert flooder.stdout is not None
        try:
            assert flooder.stdout.readline() == b"held\n"
            until_open(world, 0, 256)
            for _ in range(50):
                assert quiet.curl("http://web.test/").stdout == f"hello from {WEB}\n"
            counts = world.counts(0)
            assert counts["open"] == 256
            until_open(world, 1, 0)
            assert world.counts(1) | {"pid": 0, "received_bytes": 0, "sent_bytes": 0, "stalls": 0} == {
                "connections": 50, "open": 0, "refused": 0, "malformed": 0, "failed": 0,
                "received_bytes": 0, "sent_bytes": 0, "stalls": 0, "pid": 0,
            }  # fmt: skip
        finally:
            flooder.kill()
            flooder.communicate()
        wait_for(lambda: world.counts(0)["connections"] == 1000)  # those that waited are accepted now, and are gone
        until_open(world, 0, 0)
        assert flooding.curl("http://web.test/").stdout == f"hello from {WEB}\n"
