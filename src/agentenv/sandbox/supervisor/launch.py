"""From a specification file to a running supervisor: ``python -m agentenv.sandbox SPEC.json``.

This process checks and opens everything that can fail because of the caller, enters the namespaces, forks the
supervisor (PID 1 there) and then only forwards signals and waits. However it dies, the kernel then kills the
supervisor and with it everything in the container.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import logging
import os
import select
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentenv import apparmor, subordinate_ids
from agentenv.errors import AgentEnvError, ConfigError, MachineFullError, SandboxUnavailableError
from agentenv.process_marks import own_mark
from agentenv.sandbox.slotagent.build import compiled_launcher, ensure_built
from agentenv.sandbox.supervisor import (
    cgroups,
    disk_layers,
    events,
    isolation,
    mounts,
    network,
    server_process,
    static_bash,
    supervisor,
    sweep,
    syscalls,
)
from agentenv.sandbox.supervisor.isolation import USER, Identity
from agentenv.sandbox.supervisor.limits import CgroupLayout
from agentenv.sandbox.supervisor.preparation import Launch, Owner
from agentenv.sandbox.supervisor.selftest import NAMESPACES
from agentenv.wire.spec import SandboxSpec

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MIN_TOKEN_CHARACTERS = 16
_UID_BLOCKS = 40
_NOBODY = "65534"
_SHARE = "stop some of them, or let sandboxes share containers: agentenv.Farm(slots=50) serves 50 from 5 of them"
_STDERR = 2
_OF_USER = "--of-ordinary-user"
"""Given by this program to itself."""
_TRIM_EVERY_S = 60.0
_LOG_BYTES = 1024 * 1024
_LOG_KEPT_BYTES = 256 * 1024


@dataclass(frozen=True)
class HeldLocks:
    """Resources held for the container's life: its lock, its block of uids."""

    lock: int
    uids: socket.socket | None


def main(arguments: Sequence[str], server_argv: Sequence[str] | None = None) -> int:
    """Run one container to its end; returns the exit code (0 stopped on request, 2 failed).

    ``server_argv`` replaces the sandbox server, for tests.
    """
    # Blocked from the start, so that none is lost: the supervisor unblocks them when it can
    # act, and this process takes them with sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, signal.SIGCHLD})
    parser = argparse.ArgumentParser(prog="python -m agentenv.sandbox")
    parser.add_argument("spec", type=Path, help="the container's specification (JSON)")
    parser.add_argument("--lifeline", action="store_true", help="stop when standard input reaches EOF")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="run in the background, in a session of its own; standard error must be a file that it can keep short",
    )
    parser.add_argument(_OF_USER, dest="of_user", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help="where to build missing programs, if not next to this package")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s supervisor %(levelname)s %(message)s"
    )
    _keep_descriptors_private()
    try:
        if options.lifeline:
            check_lifeline()
        if options.detach and not log_can_be_cut(_STDERR):
            raise ConfigError("--detach", "standard error is not a file opened to be read and appended to")
        spec = SandboxSpec.load(options.spec)
        owner = _owner(spec, of_user=options.of_user)
        if options.detach and not _detach():
            return 0
        argv = server_argv or server_process.default_argv()
        code = _contain(spec, argv, options.cache, owner, lifeline=options.lifeline)
        if options.detach:
            events.emit("exited", code=code)
        return code
    except AgentEnvError as error:
        return events.emit_failure(error)
    except OSError as error:
        return events.emit_failure(SandboxUnavailableError(f"the container could not be prepared: {error}"))


def _keep_descriptors_private() -> None:
    """Make descriptors left open by our caller close-on-exec: no slot and no server may inherit them."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > _STDERR:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(entry.name), False)


def _detach() -> bool:
    """Leave our starter: none of its processes is our parent, or in our session. False in the process that is to
    exit, so that the starter can continue.

    The first event names the process, because the starter may end before any other process has noted it.
    """
    if os.fork():
        return False
    os.setsid()
    events.emit("detached", pid=os.getpid(), mark=own_mark())
    return True


def _owner(spec: SandboxSpec, *, of_user: bool) -> Owner:
    """Who has started us. An ordinary user with subordinate ids, where slots of images are wanted, is made root of a
    namespace of them: there this program is executed again (``of_user``), because what the kernel reports about a
    process belongs to the namespace of its exec. From then on it is as in a container whose engine maps ids."""
    if of_user or os.geteuid() == 0:
        return Owner(root=not of_user)
    wanted = spec.store_dir and spec.isolation != USER
    if found := subordinate_ids.refusal_when_tried() if wanted else subordinate_ids.refusal():
        return Owner(root=False, one_id=str(found))
    if not wanted:
        reason = "as isolation = user requests, in the settings or by AGENTENV_ISOLATION"
        return Owner(root=False, one_id=reason if spec.isolation == USER else "it was started without an image store")
    subordinate_ids.enter(subordinate_ids.own_maps())
    return os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], _OF_USER])  # noqa: S606


def log_can_be_cut(fd: int) -> bool:
    """Whether it is a file that :func:`trim_log` can cut: not what a shell's ``2>`` or ``2>>`` opens."""
    try:
        flags, kind = fcntl.fcntl(fd, fcntl.F_GETFL), os.fstat(fd).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISREG(kind) and flags & (os.O_ACCMODE | os.O_APPEND) == os.O_RDWR | os.O_APPEND


def check_lifeline() -> None:
    """Raise ConfigError where standard input never reaches EOF when its other end goes."""
    kind = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(0)):
        raise ConfigError("--lifeline", "standard input is neither a pipe nor a socket nor a terminal")


def _contain(spec: SandboxSpec, server_argv: Sequence[str], cache: Path | None, owner: Owner, *, lifeline: bool) -> int:
    directory = Path(spec.data_dir).absolute() / spec.container
    token = read_token(Path(spec.token_file))
    held = _hold(directory, claim=os.geteuid() == 0 and spec.uid_block < 0)
    try:
        launch = _prepare(spec, directory, token, held, server_argv, cache, owner, lifeline=lifeline)
        return _fork_supervisor(launch)
    finally:
        os.close(held.lock)
        if held.uids is not None:
            held.uids.close()
        sweep.sweep_container(directory)


def read_token(path: Path) -> str:
    """The bearer token. Raises ConfigError when the file is missing, readable by others or too short."""
    try:
        found = path.stat()
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        cure = "write a token there, mode 0600"
        if isinstance(error, PermissionError):  # root of a user namespace that the engine made does not own the file
            cure += ", owned by the container's user; with Docker's userns-remap, start it with --userns=host"
        raise ConfigError("token_file", f"cannot read {path}: {error}", next_step=cure) from error
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError("token_file", f"{path} is readable by others", next_step=f"chmod 600 {path}")
    if len(text) < _MIN_TOKEN_CHARACTERS:
        raise ConfigError("token_file", f"the token in {path} has fewer than {_MIN_TOKEN_CHARACTERS} characters")
    return text


def _hold(directory: Path, *, claim: bool) -> HeldLocks:
    """Sweep dead containers, then take this container's name and, with ``claim``, its uids."""
    sweep.sweep(directory.parent)
    try:
        lock = sweep.take_lock(directory)
    except sweep.StillRunningError:
        raise ConfigError(
            "container",
            f"a container named {directory.name} is running in {directory.parent}",
            next_step="stop it, or choose another name",
        ) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "free some space" if full else "name a directory this user can write to"
        raise ConfigError("data_dir", f"cannot write {directory}: {error.strerror}", next_step=cure) from error
    return HeldLocks(lock, claim_uids() if claim else None)


def claim_uids() -> socket.socket:
    """Claim a block of slot uids that no other container on this machine uses, while the socket is open.

    Containers side by side must not share uids: quotas (inotify, keys, processes) are per uid. An abstract socket
    name is a lock that no crash can leave behind. Raises MachineFullError.
    """
    for block in range(_UID_BLOCKS):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0agentenv-uids-{block}")
        except OSError:
            claim.close()
        else:
            return claim
    # Not permanent: any of them may end at any time.
    raise MachineFullError(f"{_UID_BLOCKS} containers run on this machine already", next_step=_SHARE)


def _block_of(spec: SandboxSpec, held: HeldLocks) -> int:
    if os.geteuid() != 0:
        return 0
    wanted = spec.uid_block if held.uids is None else int(held.uids.getsockname().decode().rsplit("-", 1)[1])
    block = isolation.fitting_block(wanted, Path("/proc/self/uid_map").read_text())
    if block != wanted:
        logging.warning("uid block %d is not in this user namespace: using %d", wanted, block)
    return block


def _prepare(
    spec: SandboxSpec,
    directory: Path,
    token: str,
    held: HeldLocks,
    server_argv: Sequence[str],
    cache: Path | None,
    owner: Owner,
    *,
    lifeline: bool,
) -> Launch:
    """Do everything that can fail before a namespace is entered, each with its own clear error."""
    mode = isolation.choose_mode(spec.isolation, os.geteuid())
    isolation.check_binds(spec.binds)
    bwrap = find_bwrap()
    built = ensure_built(cache)
    network_tool = network.find_tool() if spec.allow_network else None
    listener = listen(spec.host, spec.port)
    identity = Identity(mode, os.geteuid(), os.getegid(), _block_of(spec, held))
    if mode != USER:
        with contextlib.suppress(OSError):
            mounts.make_cgroups_writable()
    layout, why_none = _claim_cgroups(directory)
    weaker = isolation.weaker(identity, layout.controllers if layout else (), why_none, owner.one_id)
    if spec.isolation == isolation.FULL and weaker:
        raise SandboxUnavailableError(
            f"isolation=full is not possible here: {' '.join(weaker)}",
            next_step="give this process writable cgroups (a systemd unit: Delegate=yes), or accept less explicitly: "
            "isolation=auto",
        )
    disk = _disk(spec, directory)
    return Launch(
        spec=spec,
        token=token,
        identity=identity,
        owner=owner,
        directory=directory,
        listener=listener,
        layout=layout,
        weaker=tuple(weaker),
        host_namespaces={kind: _namespace(kind) for kind in NAMESPACES},
        bwrap=bwrap,
        agent=built.agent,
        files=built.files,
        launcher=built.launch,
        root_launcher=built.root,
        tar_program=built.tar,
        as_user=built.as_user,
        dial=built.dial,
        listen=built.listen,
        ripgrep=built.ripgrep,
        network_tool=network_tool,
        shell=static_bash.find(),
        disk=disk,
        disk_refusal=disk_layers.refusal(disk, Path("/proc/self/mountinfo").read_text()) if spec.store_dir else "",
        server_argv=server_argv,
        lifeline=lifeline,
    )


def _disk(spec: SandboxSpec, directory: Path) -> Path:
    """The directory for layers on the disk, made if it is named and not there."""
    if not spec.disk_dir or not spec.store_dir:
        return directory
    disk = Path(spec.disk_dir)
    with contextlib.suppress(OSError):  # the attempt reports why there is none
        disk.mkdir(parents=True, exist_ok=True, mode=0o700)
    return disk.resolve()


def _claim_cgroups(directory: Path) -> tuple[CgroupLayout | None, str]:
    """Those of the container whose directory this is; None and the reason where none can be created."""
    try:
        return cgroups.claim(directory.name, partial(sweep.record_cgroups, directory))
    except FileExistsError as error:
        raise ConfigError(
            "container",
            f"another container named {directory.name} runs on this machine ({error.strerror})",
            next_step="choose another name",
        ) from error


def find_bwrap() -> str:
    """The path of bubblewrap. Raises SandboxUnavailableError naming the package."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailableError("bubblewrap (bwrap) is not installed", next_step="apt-get install bubblewrap")
    return found


def trial(bwrap: str, command: Sequence[str], cache: Path) -> list[str] | None:
    """A command line that makes the namespaces of a plain slot as its start does, and runs ``command`` in them. None:
    root's way needs a program that is not compiled yet."""
    privileged = os.geteuid() == 0
    steps: list[str] = []
    if privileged:
        if (launcher := compiled_launcher(cache)) is None:
            return None
        steps = [str(launcher), "-n", _NOBODY, _NOBODY, str(isolation.UNUSED_ID), "--"]
    user = isolation.user_namespace_options(given=privileged)
    others = ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-net", "--ro-bind", "/", "/")
    return [*steps, bwrap, *user, *others, "--proc", "/proc", "--dev", "/dev", "--", *command]


def listen(host: str, port: int) -> socket.socket:
    """The server's listening socket. Raises ConfigError: port taken, or not an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        cure = "choose another port, or 0 for a free one" if taken else "name an address of this machine"
        raise ConfigError(
            "port" if taken else "host", f"cannot listen on {host}:{port}: {error.strerror}", next_step=cure
        ) from error
    return listener


def _namespace(kind: str) -> str:
    text = str(Path(f"/proc/self/ns/{kind}").readlink())
    return text.partition(":")[2]


def _fork_supervisor(launch: Launch) -> int:
    """Enter the namespaces, fork PID 1, wait for it."""
    try:
        _enter_namespaces(launch.identity)
    except OSError as error:
        raise isolation.explain_namespaces(error) from error
    alive_read, alive_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        _be_supervisor(launch, alive_read)
    os.close(alive_read)
    launch.listener.close()
    try:
        return _wait(pid)
    finally:
        os.close(alive_write)


def _enter_namespaces(identity: Identity) -> None:
    if identity.mode != USER:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        return
    apparmor.take_profile()
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{identity.own_uid} {identity.own_uid} 1\n")
    Path("/proc/self/gid_map").write_text(f"{identity.own_gid} {identity.own_gid} 1\n")


def _be_supervisor(launch: Launch, alive: int) -> None:
    """In the forked child. Never returns."""
    code = events.EXIT_FAILED
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        # The launcher may have died before that call: then its end of this pipe is already closed.
        if not select.select([alive], [], [], 0)[0]:
            code = supervisor.run(launch)
    except BaseException as error:
        logging.exception("the supervisor failed")
        events.emit_failure(SandboxUnavailableError(f"the supervisor failed: {error!r}"))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    """Forward signals to the supervisor until it ends; returns its exit code."""
    while True:
        number = _next_signal()
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            continue
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _next_signal() -> int:
    """Wait for a signal, and keep the log short until then."""
    signals = {*_SIGNALS, signal.SIGCHLD}
    while log_can_be_cut(_STDERR):
        if (found := signal.sigtimedwait(signals, _TRIM_EVERY_S)) is not None:
            return found.si_signo
        trim_log(_STDERR)
    return signal.sigwait(signals)


def trim_log(fd: int) -> None:
    """Cut a log of more than 1 MiB to its last lines. ``fd`` can read and appends, like those of all its writers.

    A line written during that may be lost.
    """
    size = os.fstat(fd).st_size
    if size > _LOG_BYTES:
        _, _, tail = os.pread(fd, _LOG_KEPT_BYTES, size - _LOG_KEPT_BYTES).partition(b"\n")
        os.ftruncate(fd, 0)
        os.write(fd, tail)
