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
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.config import cache_dir
from agentenv.dev import docker_engine
from agentenv.dev.agent import mounts_below
from agentenv.dev.program import nomad_program
from agentenv.image import silent
from agentenv.image.base import base_tarball
from hosts.guests import PACKAGES, Guest

CHECKOUT: Final = Path(__file__).parents[1]
AT: Final = "/srv/agentenv"
"""The checkout in the guest."""
BASE: Final = "/srv/base.tar"
"""A small Debian, which image slots have as their root there."""
SANDBOX: Final = "/srv/sandbox.tar"
"""The image of a Nomad job's containers, as `docker save` writes it."""
USERS: Final = ("ann", "bob")
"""Ann has subordinate ids, bob has none."""
_KERNEL: Final = "linux-image-cloud-amd64"
_BYTES: Final = 14 * 1024**3
"""Of a disk; the file is sparse."""
_TASKS: Final = """
import dataclasses, sys
from examples.repair import packages, tasks
every = packages.fetch()
wanted = tuple(every.by_name[name] for name in sys.argv[1:] or every.by_name)
tasks.make_tasks(dataclasses.replace(every, packages=wanted), seed=1)
"""
TASKS_OF_CI: Final = "parse"
"""The package whose tasks are verified on every disk; its rollouts are those of CI."""
_BUILD_IMAGE: Final = """
import sys
from agentenv.image import IMAGE, connect, ensure_image
engine = connect()
ensure_image(IMAGE, client=engine)
with open(sys.argv[1], "wb") as file:
    for part in engine.images.get(IMAGE).save(named=True):
        file.write(part)
"""
_PIP_CACHE: Final = "/root/.cache/pip"
_IN_CHROOT: Final = f"""set -e
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount --bind "$1" "$0{_PIP_CACHE}"
shift
exec chroot "$0" "$@"
"""
_NETWORK: Final = """[Match]
MACAddress={mac}
[Network]
Address={address}/24
IPv6AcceptRA=no
LinkLocalAddressing=no
"""
_OWN_MAC: Final = "52:54:00:12:34:56"
"""QEMU's for a machine's first card: the one that ssh comes in by."""


def node_mac(number: int) -> str:
    """Of the second card of a machine that is node 1 or 2 of a cluster (:mod:`hosts.nodes`)."""
    return f"52:54:00:0a:d5:{number:02x}"


_FILES: Final = {
    "etc/systemd/network/10-guest.network": _NETWORK.format(mac=_OWN_MAC, address="10.0.2.15") + "Gateway=10.0.2.2\n",
    **{
        f"etc/systemd/network/20-node{node}.network": _NETWORK.format(mac=node_mac(node), address=f"10.213.{node}.2")
        + f"[Route]\nDestination=10.213.0.0/16\nGateway=10.213.{node}.1\n"  # a server is known by one address to both
        for node in (1, 2)
    },
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


def made(guest: Guest, *, whole: bool = True) -> Disk:
    """The guest's disk for this checkout's commit; made (10 minutes) where the cache does not have it. Unless it is to
    be ``whole``, it has nothing of a Nomad cluster, and of the demo the tasks of one package.

    Ends the program with the output of what failed.
    """
    place = cache_dir() / "hosts"
    place.mkdir(parents=True, exist_ok=True)
    if whole:
        nomad_program(silent)  # what may not be there to be had is looked for before anything is made
    root = _debian(guest, place)
    commit = _out("git", "-C", str(CHECKOUT), "rev-parse", "HEAD")
    name = f"{root.name}-{commit[:12]}{'' if whole else '-ci'}"
    disk = Disk(place / f"{name}.disk", place / f"{name}.vmlinuz", place / f"{name}.initrd", _key(place))
    if not disk.image.exists():
        _forget(place, f"{root.name}-")
        with _copied(root, place) as tree:
            _set_up(tree, commit, whole=whole)
            _configure(tree, disk.key)
            shutil.copy(next((tree / "boot").glob("vmlinuz-*")), disk.kernel)
            shutil.copy(next((tree / "boot").glob("initrd.img-*")), disk.initrd)
            _write(tree, disk.image)
    return disk


# -- the Debian ----------------------------------------------------------------------------------------


def _debian(guest: Guest, place: Path) -> Path:
    archive, security = _archives()
    lines = [f"deb {archive} {suite} main" for suite in (guest.suite, f"{guest.suite}-updates")]
    lines.append(f"deb {security} {guest.suite}-security main")
    packages = ",".join((*PACKAGES, *guest.packages, _KERNEL))
    how = [
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={packages}",
        '--aptopt=Acquire::Languages "none"', "--dpkgopt=force-unsafe-io", "--skip=cleanup/apt/lists", guest.suite,
    ]  # fmt: skip
    root = place / f"debian-{_digest(*how, *lines)}"
    if root.exists():
        return root
    part = root.with_suffix(".part")
    _remove(part)
    print(f"making Debian {guest.suite} (minutes)", flush=True)
    # A mirror may be older than what testing's lists allow; a machine without a network loses nothing by that.
    _run(*how, '--aptopt=Acquire::Check-Valid-Until "false"', str(part), *lines)
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
    _remove(tree)
    _run("cp", "--archive", "--reflink=auto", str(root), str(tree))
    try:
        yield tree
    finally:
        _remove(tree)


def _set_up(tree: Path, commit: str, *, whole: bool) -> None:
    """Users, the checkout, its packages, the demo's tasks, and what image slots are made from."""
    _run("cp", "--dereference", "/etc/resolv.conf", str(tree / "etc/resolv.conf"))
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")  # a proxy's own are there, where one is needed
    if certificates.exists():
        shutil.copy(certificates, tree / "etc/ssl/certs/ca-certificates.crt")
    for user in USERS:
        _inside(tree, "useradd", "--create-home", "--shell", "/bin/bash", user)
    _inside(tree, "usermod", "--del-subuids", "1-999999999", "--del-subgids", "1-999999999", "bob")
    _run("git", "clone", "--quiet", str(CHECKOUT), f"{tree}{AT}")
    _run("git", "-C", f"{tree}{AT}", "checkout", "--quiet", commit)
    print("setting the checkout up in it: make slotagent, and the demo's tasks (minutes)", flush=True)
    _inside(tree, "make", "-C", AT, "slotagent")
    _inside(tree, "sh", "-c", f"cd {AT} && .venv/bin/python -c '{_TASKS}' {'' if whole else TASKS_OF_CI}")
    base = base_tarball(cache_dir() / "image")
    shutil.copy(base, f"{tree}{BASE}")
    if whole:
        _copy_cluster(tree, base)
    _inside(tree, "chown", "-R", "ann:ann", AT)


def _copy_cluster(tree: Path, base: Path) -> None:
    """What a Nomad cluster in the guest is made of: the program, the image of its own checkout, and what the images of
    its tests are made from."""
    with docker_engine.using():
        started = docker_engine.ensure()
        _run("env", f"PYTHONPATH={tree}{AT}/src", sys.executable, "-c", _BUILD_IMAGE, f"{tree}{SANDBOX}")
    if started:
        docker_engine.stop()
    _run("install", "-D", str(nomad_program(silent)), f"{tree}/usr/local/bin/nomad")
    _run("install", "-D", "-t", f"{tree}/root/.cache/agentenv/image", str(base))


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
    _inside(tree, "systemctl", "disable", "--quiet", "docker.service", "docker.socket", "containerd.service")
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


def _forget(place: Path, prefix: str) -> None:
    """The guest's disks of other commits: each takes 3 GB."""
    for old in place.glob(f"{prefix}*"):
        old.unlink()


def _inside(tree: Path, *command: str) -> None:
    """In the guest's tree, natively. pip's own settings reach it, and what it has downloaded before. What is mounted
    there is for this command's processes alone, so that nothing stays mounted where this is killed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    pip_cache = Path(os.environ.get("PIP_CACHE_DIR") or caches / "pip")
    for directory in (pip_cache, tree / _PIP_CACHE.lstrip("/")):
        directory.mkdir(parents=True, exist_ok=True)
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _run(
        "unshare", "--mount", "sh", "-c", _IN_CHROOT, str(tree), str(pip_cache),
        "/usr/bin/env", "-i", path, "HOME=/root", "LC_ALL=C.UTF-8", *kept, f"PIP_CACHE_DIR={_PIP_CACHE}", *command,
    )  # fmt: skip


def _unmount(tree: Path) -> None:
    """Everything that is mounted below, by an mmdebstrap that was killed. Ends the program when something stays: the
    machine's own /dev is among it, and what comes next deletes."""
    for point in _mounts(tree):
        subprocess.run(["umount", "--", point], capture_output=True, check=False)
    if left := _mounts(tree):
        raise SystemExit(f"{', '.join(left)} cannot be unmounted: see what uses it, unmount it, and run this again")


def _mounts(tree: Path) -> list[str]:
    """Where something is mounted in a directory of ours, innermost first; the kernel's list has no links in it."""
    return mounts_below(Path("/proc/self/mountinfo").read_text(), tree.resolve())


def _remove(tree: Path) -> None:
    """The directory, and nothing that is mounted in it."""
    _unmount(tree)
    if tree.exists():
        _run("rm", "--recursive", "--force", "--one-file-system", "--", str(tree))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {' '.join(command)[:300]}")


def _out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
