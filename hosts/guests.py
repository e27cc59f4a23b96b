"""The machines: which Debian, which kernel."""

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
    *("e2fsprogs", "bash-static", "uidmap", "skopeo"),
)


@dataclass(frozen=True)
class Guest:
    """A Debian. ``more``: suites beside its own, from which ``kernel`` comes."""

    suite: str
    kernel: str = "linux-image-cloud-amd64"
    more: tuple[str, ...] = ()


GUESTS: Final[Mapping[str, Guest]] = MappingProxyType(
    {
        "bookworm": Guest("bookworm"),
        "trixie": Guest("trixie"),
        "backports": Guest("trixie", "linux-image-cloud-amd64/trixie-backports", ("trixie-backports",)),
    }
)
