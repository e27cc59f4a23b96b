"""The network of one slot while it runs: follows the policy of its lease, without a restart of its processes."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network

from agentenv.background import finish
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.slot_env import proxy_env
from agentenv.sandbox.supervisor import network, syscalls
from agentenv.sandbox.supervisor.network import NetworkProcess, SlotNamespaces
from agentenv.sandbox.supervisor.proxy_process import ProxyTemplate, SlotProxy
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.spec import SandboxSpec

_NONE = NO_NETWORK
_USUAL_PORT = 3128
_BACKLOG = 1024  # connections beyond the slot's share wait here


@dataclass(frozen=True)
class NetworkServices:
    """What the networks of a container's slots share."""

    spec: SandboxSpec
    reaper: Reaper
    proxies: ProxyTemplate


class SlotNetwork:
    """The network of one run of a slot. It starts as ``none``: the slot's namespace has only its loopback.

    ``public`` attaches a user-mode stack. ``allow`` needs no device at all: the slot's proxy is a socket on its
    loopback. That socket stays for as long as the slot runs, and says why when a later policy refuses.
    """

    def __init__(
        self, services: NetworkServices, namespaces: SlotNamespaces, on_lost: Callable[[int], None] = lambda _: None
    ) -> None:
        """``namespaces`` stay the caller's and open until :meth:`aclose`. ``on_lost`` is called with a wait status
        when the stack of a public network ends by itself."""
        self.policy = _NONE
        self._services = services
        self._namespaces = namespaces
        self._on_lost = on_lost
        self._stack: NetworkProcess | None = None
        self._denied: frozenset[IPv4Network] = frozenset()
        """What the slot has unreachable routes to because a policy denied it."""
        self._port = 0
        self.proxy: SlotProxy | None = None
        """The slot's, once a policy has named hosts."""
        self._changing = asyncio.Lock()

    @property
    def env(self) -> Mapping[str, str]:
        """Variables for commands started under the present policy."""
        return proxy_env(self._port) if self.policy.kind == "allow" else {}

    async def apply(self, policy: NetworkPolicy) -> None:
        """Change to ``policy``. When this returns, nothing that it does not allow is open any more. A caller that is
        cancelled gets its cancellation when the change is complete.

        Raises SandboxUnavailableError when it cannot be applied (``next_step`` has the cure where one is known);
        the slot's network is then ``none``.
        """
        await finish(asyncio.create_task(self._change(policy), name=f"network of slot {self._namespaces.slot}"))

    async def aclose(self) -> None:
        """Take every network away. Repeatable. Raises OSError (TimeoutError) when the stack could not be ended."""
        await finish(asyncio.create_task(self._close(), name=f"end of the network of slot {self._namespaces.slot}"))

    async def _change(self, policy: NetworkPolicy) -> None:
        async with self._changing:
            try:
                await self._apply(policy)
            except SandboxUnavailableError:
                await self._close_all()
                raise
            except OSError as error:
                await self._close_all()
                reason = error or type(error).__name__
                raise SandboxUnavailableError(f"the network of slot {self._namespaces.slot}: {reason}") from error

    async def _close(self) -> None:
        async with self._changing:
            await self._close_all()

    async def _apply(self, policy: NetworkPolicy) -> None:
        if policy.kind != "none" and not self._services.spec.allow_network:
            raise SandboxUnavailableError(
                f"the lease requests network {policy.kind}, but this container's slots have no network",
                next_step="set allow_network = true, or lease with network none",
            )
        tool, denied = "", network.denied_routes(policy)
        stays = self._stack is not None and denied == self._denied
        if policy.kind == "public" and not stays:
            tool = network.find_tool("the network policy public", "list the hosts you need (policy allow)")
        if policy.kind != "public" or not stays:
            await self._detach()
        self.policy = policy
        if self.proxy is not None:
            await self.proxy.change(policy)
        elif policy.kind == "allow":
            listener = _open_listener(self._namespaces.network_fd)
            self._port = listener.getsockname()[1]
            self.proxy = SlotProxy(self._services.proxies, self._namespaces.slot, listener, policy)
            await self.proxy.start()
        if tool:
            services = self._services
            former, self._denied = self._denied, self._denied | denied  # whatever of it is done if this fails
            stack = await network.attach_to(
                self._namespaces, services.spec, services.reaper, tool, denied=denied, former=former
            )
            self._stack, self._denied = stack, denied
            stack.exited.add_done_callback(lambda ended: self._ended(stack, ended))

    async def _detach(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.kill()

    async def _close_all(self) -> None:
        self.policy, self._port = _NONE, 0
        proxy, self.proxy = self.proxy, None
        if proxy is not None:
            await proxy.aclose()
        await self._detach()

    def _ended(self, stack: NetworkProcess, ended: asyncio.Future[int]) -> None:
        if stack is self._stack and not ended.cancelled():
            self._stack = None
            self._on_lost(ended.result())


def _open_listener(namespace_fd: int) -> socket.socket:
    """The socket at which a slot reaches its proxy, made inside the slot's network namespace, served from outside: it
    listens on 127.0.0.1 there. If a process of the slot holds the usual port, it gets a free one: read it from the
    socket. It belongs to the namespace and to no process in it.

    The caller needs CAP_SYS_ADMIN over the namespace, as its owner's parent has, and the loopback device has to be up.
    Raises OSError. A thread of its own enters the namespace, because it could not be sure to come back.
    """
    made: list[socket.socket] = []
    failures: list[OSError] = []

    def make() -> None:
        try:
            syscalls.setns(namespace_fd, syscalls.CLONE_NEWNET)
            made.append(_listening())
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=make, name="slot listener")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def _listening() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(("127.0.0.1", _USUAL_PORT))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
