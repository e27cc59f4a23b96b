"""A guest's disk: a Debian made by mmdebstrap, this checkout in it, set up by the project's own ``make``.

Both are kept in the cache under a hash of what goes in: the Debian by its packages, the disk by the commit as well.
pip, the C compiler and the runs that verify the demo's tasks work in a chroot: minutes here, hours in an emulated
machine. Guests have no network, so all that they will ever need is on the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.config import cache_dir
from agentenv.image.base import base_tarball
from hosts.guests import PACKAGES, Guest

CHECKOUT: Final = Path(__file__).parents[1]
AT: Final = "/srv/agentenv"
"""The checkout in the guest."""
BASE: Final = "/srv/base.tar"
"""A small Debian, which image slots have as their root there."""
USERS: Final = ("ann", "bob")
"""Ann has subordinate ids, bob has none."""
_BYTES: Final = 14 * 1024**3
"""Of a disk; the file is sparse."""
_TASKS: Final = "from examples.repair import packages, tasks; tasks.make_tasks(packages.fetch(), seed=1)"
_NETWORK: Final = """[Match]
Name=en* eth*
[Network]
Address=10.0.2.15/24
Gateway=10.0.2.2
IPv6AcceptRA=no
LinkLocalAddressing=no
"""
_FILES: Final = {
    "etc/systemd/network/10-guest.network": _NETWORK,
    "etc/fstab": "/dev/vda / ext4 defaults,noatime 0 1\n",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
    "etc/ssh/sshd_config.d/guest.conf": "UseDNS no\nLoginGraceTime 600\nMaxStartups 100\nAcceptEnv AGENTENV_*\n",
    "etc/systemd/system.conf.d/slow.conf": "[Manager]\nDefaultTimeoutStartSec=600s\nDefaultDeviceTimeoutSec=600s\n",
}


@dataclass(frozen=True)
class Disk:
    """What a machine is booted from, and the key of its users."""

    image: Path
    kernel: Path
    initrd: Path
    key: Path


def made(guest: Guest) -> Disk:
    """The guest's disk for this checkout's commit; made (10 minutes) where the cache does not have it.

    Ends the program with the output of what failed.
    """
    place = cache_dir() / "hosts"
    place.mkdir(parents=True, exist_ok=True)
    root = _debian(guest, place)
    commit = _out("git", "-C", str(CHECKOUT), "rev-parse", "HEAD")
    name = _digest(root.name, commit)
    disk = Disk(place / f"{name}.disk", place / f"{name}.vmlinuz", place / f"{name}.initrd", _key(place))
    if not disk.image.exists():
        _forget(place, ".disk", ".vmlinuz", ".initrd")
        with _copied(root, place) as tree:
            _set_up(tree, commit)
            _configure(tree, disk.key)
            shutil.copy(next((tree / "boot").glob("vmlinuz-*")), disk.kernel)
            shutil.copy(next((tree / "boot").glob("initrd.img-*")), disk.initrd)
            _write(tree, disk.image)
    return disk


# -- the Debian ----------------------------------------------------------------------------------------


def _debian(guest: Guest, place: Path) -> Path:
    archive, security = _archives()
    lines = [f"deb {archive} {suite} main" for suite in (guest.suite, f"{guest.suite}-updates", *guest.more)]
    lines.append(f"deb {security} {guest.suite}-security main")
    how = [
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join((*PACKAGES, guest.kernel))}",
        '--aptopt=Acquire::Languages "none"', "--dpkgopt=force-unsafe-io", "--skip=cleanup/apt/lists", guest.suite,
    ]  # fmt: skip
    root = place / f"debian-{_digest(*how, *lines)}"
    if root.exists():
        return root
    part = root.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    print(f"making Debian {guest.suite} with {guest.kernel} (minutes)", flush=True)
    _run(*how, str(part), *lines)
    part.rename(root)
    return root


def _archives() -> tuple[str, str]:
    """Debian's archive and that of its security updates, as this machine uses them."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(re.sub(r"#.*", "", file.read_text()) for file in files if file.is_file())
    archive = re.search(r"https?://\S+/debian/?(?=\s)", text)
    security = re.search(r"https?://\S+/debian-security/?(?=\s)", text)
    if archive is None:
        raise SystemExit("no archive of Debian is named in /etc/apt: the machines are made from one")
    return archive[0], security[0] if security else f"{archive[0].rstrip('/')}-security"


# -- what it gets ----------------------------------------------------------------------------------------


@contextmanager
def _copied(root: Path, place: Path) -> Iterator[Path]:
    tree = place / "tree"
    _unmount(tree)
    shutil.rmtree(tree, ignore_errors=True)
    _run("cp", "--archive", "--reflink=auto", str(root), str(tree))
    try:
        yield tree
    finally:
        _unmount(tree)
        shutil.rmtree(tree, ignore_errors=True)


def _set_up(tree: Path, commit: str) -> None:
    """Users, the checkout, its packages, the demo's tasks, and what image slots are made from."""
    _run("cp", "--dereference", "/etc/resolv.conf", str(tree / "etc/resolv.conf"))
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")  # a proxy's own are there, where one is needed
    if certificates.exists():
        shutil.copy(certificates, tree / "etc/ssl/certs/ca-certificates.crt")
    _run("mount", "-t", "proc", "proc", str(tree / "proc"))
    _run("mount", "--rbind", "--make-rslave", "/dev", str(tree / "dev"))
    for user in USERS:
        _inside(tree, "useradd", "--create-home", "--shell", "/bin/bash", user)
    _inside(tree, "usermod", "--del-subuids", "1-999999999", "--del-subgids", "1-999999999", "bob")
    _run("git", "clone", "--quiet", str(CHECKOUT), f"{tree}{AT}")
    _run("git", "-C", f"{tree}{AT}", "checkout", "--quiet", commit)
    print("setting the checkout up in it: make slotagent, and the demo's tasks (minutes)", flush=True)
    _inside(tree, "make", "-C", AT, "slotagent")
    _inside(tree, "sh", "-c", f"cd {AT} && .venv/bin/python -c '{_TASKS}'")
    image = cache_dir() / "image"
    image.mkdir(parents=True, exist_ok=True)
    shutil.copy(base_tarball(image), f"{tree}{BASE}")
    _inside(tree, "chown", "-R", "ann:ann", AT)
    _unmount(tree)


def _configure(tree: Path, key: Path) -> None:
    for path, text in _FILES.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    (tree / "etc/resolv.conf").write_text("")
    for user, home in (("root", "root"), *((user, f"home/{user}") for user in USERS)):
        ssh = tree / home / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(f"{key}.pub", ssh / "authorized_keys")
        _inside(tree, "chown", "-R", f"{user}:{user}", f"/{home}")
    _inside(tree, "systemctl", "enable", "--quiet", "ssh", "systemd-networkd")
    timers = ("apt-daily", "apt-daily-upgrade", "e2scrub_all", "fstrim", "dpkg-db-backup")
    _inside(tree, "systemctl", "mask", "--quiet", *(f"{name}.timer" for name in timers))


def _write(tree: Path, image: Path) -> None:
    part = image.with_suffix(".part")
    part.unlink(missing_ok=True)
    with part.open("wb") as file:
        file.truncate(_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", str(tree), str(part))
    part.rename(image)


# -- small things ----------------------------------------------------------------------------------------


def _key(place: Path) -> Path:
    key = place / "key"
    if not key.exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    return key


def _forget(place: Path, *suffixes: str) -> None:
    """Disks of other commits: each takes 3 GB."""
    for old in place.iterdir():
        if old.suffix in suffixes:
            old.unlink()


def _inside(tree: Path, *command: str) -> None:
    """In the guest's tree, natively. pip's own settings reach it."""
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _run("chroot", str(tree), "/usr/bin/env", "-i", path, "HOME=/root", "LC_ALL=C.UTF-8", *kept, *command)


def _unmount(tree: Path) -> None:
    for name in ("proc", "dev"):
        subprocess.run(["umount", "--recursive", str(tree / name)], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {' '.join(command)[:300]}")


def _out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
