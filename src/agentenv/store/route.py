"""The only way out of a program that talks to registries: a proxy, which judges each address before it connects.

A registry may send the program elsewhere, by a redirect or to a token server. Go's programs use no proxy for addresses
of loopback, whatever their environment. So the program, where the kernel can do that (Landlock, Linux 6.7), may
connect to the proxy's port and to nothing else.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's, the same on every architecture
_VERSION_OF_IT: Final = 1
_WITH_NETWORK: Final = 4
"""The first version of Landlock that knows ports."""
_CONNECT_TCP: Final = 1 << 1
_PORT_RULE: Final = 2
_NO_NEW_PRIVILEGES: Final = 38  # linux/prctl.h; Landlock requires it of a process without CAP_SYS_ADMIN
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


@dataclass(frozen=True)
class Route:
    """``proxy``: its URL, with a user and a password. ``ports``: of TCP, which may be connected to: the proxy's, and
    those of registries on this machine that were named."""

    proxy: str
    ports: tuple[int, ...]

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program that has no other way out. Raises OSError."""
        env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        env |= {"HTTP_PROXY": self.proxy, "HTTPS_PROXY": self.proxy}

        def start() -> subprocess.Popen[bytes]:
            if is_enforced():
                _restrict(self.ports)  # this thread, and what it starts
            return subprocess.Popen(argv, env=env, **options)

        with ThreadPoolExecutor(1, "confined") as thread:
            return thread.submit(start).result()


def is_enforced() -> bool:
    """Whether the kernel can keep a program to some ports."""
    version: int = _libc().syscall(_CREATE_RULESET, None, 0, _VERSION_OF_IT)
    return version >= _WITH_NETWORK


def _restrict(ports: Sequence[int]) -> None:
    """Let the calling thread, and what it starts, connect to these ports only. Raises OSError."""
    libc = _libc()
    ruleset = _checked(libc.syscall(_CREATE_RULESET, struct.pack("QQ", 0, _CONNECT_TCP), 16, 0))
    try:
        for port in ports:
            rule = struct.pack("QQ", _CONNECT_TCP, port)
            _checked(libc.syscall(_ADD_RULE, ruleset, _PORT_RULE, rule, 0))
        _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
