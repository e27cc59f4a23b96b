"""Network access of a slot with ``allow_network``: slirp4netns in the slot's own namespace.

The slot keeps its own network namespace. A user-mode stack, outside the slot and dying with it, carries its TCP and
UDP as ordinary sockets of an unprivileged process; an egress policy can be added there later. The machine's
loopback is cut off by slirp4netns and, as its own addresses (where the sandbox server listens) and the link-local
range (cloud metadata), by unreachable routes that no process inside can remove without a capability over the namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.closed_networks import closed_now
from agentenv.sandbox.supervisor import mounts, syscalls
from agentenv.sandbox.supervisor.child import EXEC_FAILED, reset_signals, take_descriptors
from agentenv.sandbox.supervisor.isolation import ROOT_LINKS, USER
from agentenv.sandbox.supervisor.reaper import Reaper, end_of, readable
from agentenv.sandbox.supervisor.rootfs import root_entry
from agentenv.sandbox.supervisor.slot_process import SlotProcess, SlotSetup
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.spec import SandboxSpec

READY_DEADLINE_S = scaled(10.0)
_TOOL = "slirp4netns"
TUN = Path("/dev/net/tun")
_NET_FD, _USER_FD, _READY_FD = 3, 4, 5
_ALWAYS_CLOSED = (IPv4Network("0.0.0.0/8"), IPv4Network("127.0.0.0/8"), IPv4Network("169.254.0.0/16"))
"""Link-local addresses are the cloud's metadata. Loopback is the slot's own by the kernel's local routes, which
come first; a socket bound to the tap device bypasses them, and slirp4netns would forward it to the machine's."""

_STACKS_OWN = IPv4Network("10.0.2.0/24")
"""The network between a slot and its slirp4netns, which has its gateway and its resolver. No other host of these
addresses can be reached, and an unreachable route in it would close everything."""
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_REQUEST_ACK, _CREATE = 0x0001 | 0x0004, 0x0400
_RT_TABLE_MAIN, _RTPROT_STATIC, _RTN_UNREACHABLE, _RTA_DST = 254, 4, 7, 1  # linux/rtnetlink.h
_NLMSG_HEADER = struct.Struct("=IHHII")
_RTMSG = struct.Struct("=BBBBBBBBI")


def find_tool(wanted: str = "allow_network", otherwise: str = "set allow_network = false") -> str:
    """The path of slirp4netns. Raises SandboxUnavailableError naming what is missing for ``wanted``."""
    found = shutil.which(_TOOL)
    if found is None:
        raise SandboxUnavailableError(
            f"{wanted} needs {_TOOL}, which is not installed",
            next_step=f"apt-get install {_TOOL} (or the package of that name), or {otherwise}",
        )
    if not TUN.exists():
        raise SandboxUnavailableError(
            f"{wanted} needs {TUN}, which this machine does not have",
            next_step=f"modprobe tun, or give the container the device {TUN}",
        )
    if not everybody_may_open(TUN):
        raise SandboxUnavailableError(
            f"{wanted} needs a {TUN} that every user may open; here only its owner may",
            next_step=f"chmod 0666 {TUN} (as udev does: only the owner of a network namespace can use it)",
        )
    return found


def everybody_may_open(device: Path) -> bool:
    """Whether a slot's uid, whichever it is, may read and write the device."""
    return device.exists() and device.stat().st_mode & 0o006 == 0o006


def closed_networks(spec: SandboxSpec) -> list[IPv4Network]:
    """Addresses on this machine that a slot with network must not reach, at present."""
    closed = [network for network in closed_now(spec.closed_networks) if isinstance(network, IPv4Network)]
    # One route each: the kernel refuses the same twice.
    return sorted({*_ALWAYS_CLOSED, *(network for network in closed if not network.is_loopback)})


def denied_routes(policy: NetworkPolicy) -> frozenset[IPv4Network]:
    """What has to be unreachable for a policy beside what always is: the stack carries no IPv6."""
    denied = (network for network in policy.denied_networks if isinstance(network, IPv4Network))
    return frozenset(network for network in denied if not network.subnet_of(_STACKS_OWN))


def route_message(network: IPv4Network, sequence: int, *, remove: bool = False) -> bytes:
    """The netlink request that makes ``network`` unreachable; ``remove``: no longer so."""
    route = _RTMSG.pack(socket.AF_INET, network.prefixlen, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, 0, _RTN_UNREACHABLE, 0)
    attribute = struct.pack("=HH", 8, _RTA_DST) + network.network_address.packed
    total = _NLMSG_HEADER.size + len(route) + len(attribute)
    kind, flags = (_RTM_DELROUTE, _REQUEST_ACK) if remove else (_RTM_NEWROUTE, _REQUEST_ACK | _CREATE)
    return _NLMSG_HEADER.pack(total, kind, flags, sequence, 0) + route + attribute


def tool_argv(tool: str, *, joins: bool = True) -> list[str]:
    """slirp4netns for one slot: no host loopback, seccomp. ``joins``: it joins the slot's user namespace itself.

    Its own ``--enable-sandbox`` needs root in the slot's user namespace: :func:`_enter_jail` replaces it."""
    user = [f"--userns-path=/proc/self/fd/{_USER_FD}"] if joins else []
    return [
        tool, "--configure", "--mtu=65520", "--disable-host-loopback", "--enable-seccomp",
        "--netns-type=path", *user, f"--ready-fd={_READY_FD}", f"/proc/self/fd/{_NET_FD}", "tap0",
    ]  # fmt: skip


@dataclass
class NetworkProcess:
    """The slot's user-mode network stack."""

    pid: int
    exited: asyncio.Future[int]

    async def kill(self) -> None:
        """Kill it and wait for its end."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        async with asyncio.timeout(READY_DEADLINE_S):
            await asyncio.shield(self.exited)


@dataclass(frozen=True)
class SlotNamespaces:
    """Descriptors of a slot's network namespace and of the user namespace that owns it. ``jail`` is an empty directory
    for a mount that only the stack sees."""

    slot: int
    network_fd: int
    user_fd: int
    jail: Path


@dataclass(frozen=True)
class _Routes:
    """What becomes unreachable for a slot, and what no longer is."""

    closed: Sequence[IPv4Network]
    opened: Sequence[IPv4Network] = ()


@dataclass(frozen=True)
class _Entrance:
    """The way to a slot's network. ``open`` is called in a forked child: it takes the identity that may enter, and
    returns descriptors of the network namespace and of the user namespace to join for it (None: it has)."""

    slot: int
    jail: Path
    open: Callable[[], tuple[int, int | None]]


async def attach(setup: SlotSetup, slot: SlotProcess, reaper: Reaper, tool: str) -> NetworkProcess:
    """Close what must stay closed, then open the rest. Returns when the slot's network is up.

    Raises SandboxUnavailableError when either fails: the slot must not be used then.
    """
    entrance = _Entrance(slot.slot, setup.tree.jail, partial(_open_namespaces, setup, slot))
    return await _attach(entrance, _Routes(closed_networks(setup.spec)), reaper, tool)


async def attach_to(
    namespaces: SlotNamespaces,
    spec: SandboxSpec,
    reaper: Reaper,
    tool: str,
    *,
    denied: frozenset[IPv4Network] = frozenset(),
    former: frozenset[IPv4Network] = frozenset(),
) -> NetworkProcess:
    """:func:`attach`, to a slot that is known by its namespaces, regardless of their owner. It may be attached to again
    after its stack was killed, which takes the network from its processes without disturbing them otherwise.
    ``denied`` is closed too, and what was ``former`` denied no longer."""
    entrance = _Entrance(namespaces.slot, namespaces.jail, partial(_join_user_namespace, namespaces))
    closed = sorted({*closed_networks(spec), *denied})
    return await _attach(entrance, _Routes(closed, sorted(former.difference(closed))), reaper, tool)


async def _attach(entrance: _Entrance, routes: _Routes, reaper: Reaper, tool: str) -> NetworkProcess:
    pid = os.fork()
    if pid == 0:
        _close_routes(entrance, routes)
    status = await reaper.watch(pid)
    if status != 0:
        raise SandboxUnavailableError(f"blocking the slot's access to the host failed: {end_of(status)}")
    ready_read, ready_write = os.pipe()
    error_read, error_write = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _become_tool(entrance, tool, ready_write, error_write)
        running = NetworkProcess(pid, reaper.watch(pid))
        os.close(ready_write)
        os.close(error_write)
        ready_write = error_write = -1
        try:
            await readable(ready_read, READY_DEADLINE_S)
        except BaseException:
            await running.kill()
            raise
        if os.read(ready_read, 1) != b"1":
            await running.kill()
            output = os.read(error_read, 4096).decode(errors="replace").strip()
            raise SandboxUnavailableError(f"{_TOOL} did not start: {output or 'exited without output'}")
        return running
    finally:
        for fd in (ready_read, ready_write, error_read, error_write):
            if fd >= 0:
                os.close(fd)


def _open_namespaces(setup: SlotSetup, slot: SlotProcess) -> tuple[int, int]:
    """Open descriptors, as the slot's uid, of its network namespace and of the user namespace that owns it.

    Opened under that uid, because it owns the namespaces and needs no CAP_SYS_PTRACE to look.
    """
    if setup.identity.mode != USER:
        uid, gid = setup.identity.slot_uid(slot.slot), setup.identity.slot_gid(slot.slot)
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    net = os.open(f"/proc/{slot.agent_pid}/ns/net", os.O_RDONLY)
    return net, syscalls.owning_user_namespace(net)


def _join_user_namespace(namespaces: SlotNamespaces) -> tuple[int, int | None]:
    """Become root of the slot's user namespace, with no capability but those to enter and set up its network."""
    with contextlib.suppress(PermissionError):  # an ordinary user has no groups to drop
        os.setgroups([])
    syscalls.setns(namespaces.user_fd, syscalls.CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.drop_bounding_capabilities(keep=(syscalls.CAP_SYS_ADMIN, syscalls.CAP_NET_ADMIN))
    return namespaces.network_fd, None


def _close_routes(entrance: _Entrance, routes: _Routes) -> None:
    """In a forked child: join the slot's network and set the unreachable routes. Never returns."""
    code = 1
    try:
        net, user = entrance.open()
        if user is not None:
            syscalls.setns(user, syscalls.CLONE_NEWUSER)
        syscalls.setns(net, syscalls.CLONE_NEWNET)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
            changes = [(network, True) for network in routes.opened] + [(network, False) for network in routes.closed]
            for sequence, (network, remove) in enumerate(changes, 1):
                netlink.send(route_message(network, sequence, remove=remove))
                answer = netlink.recv(4096)
                error = struct.unpack_from("=i", answer, _NLMSG_HEADER.size)[0]
                if -error not in (0, errno.ESRCH if remove else errno.EEXIST):  # it is so since an earlier policy
                    raise OSError(-error, f"unreachable route to {network}")
        code = 0
    except BaseException as error:
        os.write(2, f"network of slot {entrance.slot}: {error}\n".encode())
    finally:
        os._exit(code)


def _enter_jail(jail: Path) -> None:
    """A root with nothing but the system's programs, /proc, the tun device and resolv.conf.

    The program that parses the slot's packets must not see the state directory, homes or cgroups, in case a packet
    compromises it.
    """
    resolver = Path("/etc/resolv.conf").read_text() if Path("/etc/resolv.conf").exists() else ""
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(jail, size_bytes=1024 * 1024, mode=0o755, uid=os.geteuid())
    for name in ("usr", "proc", "dev/net", "etc", "tmp"):
        (jail / name).mkdir(parents=True)
    for device in ("dev/null", "dev/urandom", "dev/net/tun"):
        (jail / device).touch()
        syscalls.mount(f"/{device}", str(jail / device), flags=syscalls.MS_BIND)
    (jail / "etc/resolv.conf").write_text(resolver)
    mounts.bind_read_only("/usr", str(jail / "usr"))
    for name in ROOT_LINKS:
        root_entry(Path("/") / name, jail / name)
    syscalls.mount("/proc", str(jail / "proc"), flags=syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.pivot_into(str(jail))


def _become_tool(entrance: _Entrance, tool: str, ready_fd: int, error_fd: int) -> None:
    """In a forked child: become slirp4netns under the slot's uid, or that of its root. Never returns."""
    try:
        reset_signals()
        _enter_jail(entrance.jail)
        net, user = entrance.open()
        take_descriptors({0: None, 1: error_fd, 2: error_fd, _NET_FD: net, _USER_FD: user, _READY_FD: ready_fd})
        syscalls.set_no_new_privileges()
        os.execve(tool, tool_argv(tool, joins=user is not None), {"PATH": "/usr/bin:/bin"})  # noqa: S606
    except BaseException as error:
        os.write(error_fd, f"{error}".encode())
    finally:
        os._exit(EXEC_FAILED)
