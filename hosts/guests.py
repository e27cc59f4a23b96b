"""The machines: which Debian; each has its own kernel, the newest the one of Debian's testing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PACKAGES: Final = (
    # a machine that people log in to
    *("systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "udev", "kmod", "apparmor"),
    *("initramfs-tools", "zstd", "openssh-server", "sudo", "procps", "ca-certificates", "less", "util-linux"),
    # what `make setup` installs with apt-get
    *("make", "git", "bubblewrap", "gcc", "libc6-dev", "slirp4netns", "iproute2", "tmux", "python3", "python3-venv"),
    *("e2fsprogs", "bash-static", "uidmap", "skopeo", "docker.io", "iptables", "mmdebstrap"),
)
_SINCE_TRIXIE: Final = ("docker-cli",)
"""docker.io of Debian 12 has it."""


@dataclass(frozen=True)
class Guest:
    """A Debian. ``packages``: besides :data:`PACKAGES`."""

    suite: str
    packages: tuple[str, ...] = ()


GUESTS: Final[Mapping[str, Guest]] = MappingProxyType(
    {
        "bookworm": Guest("bookworm"),
        "trixie": Guest("trixie", _SINCE_TRIXIE),
        "forky": Guest("forky", _SINCE_TRIXIE),
    }
)
