"""The container tests its own promises before it serves any client.

One shell script is run in slot 0 through its agent and reports what it sees; :func:`judge` (pure) turns the report
into proofs. Tests that need the supervisor (limits in effect, KILL_ALL) follow. Slot 0 is reset afterwards, so
nothing of the test is left for a trajectory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.deadlines import scaled
from agentenv.errors import ProtocolError, SelfTestError, StartTimeoutError
from agentenv.sandbox.slot_env import command_env
from agentenv.sandbox.slot_paths import WORKSPACE
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.protocol import Kind, Message
from agentenv.sandbox.supervisor import cgroups
from agentenv.sandbox.supervisor.isolation import (
    AGENT_PATH,
    FILES_PATH,
    MAX_TERMINALS,
    USER,
)
from agentenv.sandbox.supervisor.limits import OWN_PROCESSES
from agentenv.sandbox.supervisor.reaper import readable
from agentenv.sandbox.supervisor.slot_process import SlotProcess, SlotSetup

DEADLINE_S = scaled(20.0)
SETTLE_S = scaled(5.0)
"""Killed processes end within this time."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_WRITABLE = frozenset({"/workspace", "/tmp", "/dev/shm", "/dev/pts"})  # noqa: S108
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console"))
_MAX_PROCESSES_SEEN = 8
_OUTSIDE, _UNSUPPORTED_KERNEL = 200, 201
"""Exit codes of slotfiles (``slotagent/files/io.h``)."""

# Builtins wherever possible: a fork costs more than everything else here. `unshare -U` and the
# connection are really tried, because a kernel setting may differ from the kernel's behaviour.
SCRIPT = r"""
while IFS=$'\t ' read -r name value _; do case $name in
  Uid:|CapPrm:|CapEff:|CapBnd:|NoNewPrivs:) echo "status.${name%:}=$value";; esac; done < /proc/self/status
while read -r id parent dev root point flags rest; do
  echo "mount.$point=$flags"; case $rest in *upperdir=*) echo "layers.$point=1";; esac
  case $point in /dev/pts) echo "terminals=${rest##*max=}";; esac
done < /proc/self/mountinfo
while IFS=': ' read -r name _; do case $name in Inter-\||face) ;; *) echo "net.$name=1";; esac; done < /proc/net/dev
set -- /proc/[0-9]*; echo "processes=$#"; read -r comm < /proc/1/comm; echo "init=$comm"
readlink /proc/self/ns/{cgroup,ipc,mnt,net,pid,user,uts} | while IFS=: read -r kind id; do echo "ns.$kind=$id"; done
(: > /usr/.agentenv) 2>/dev/null && echo usr_written=1
(: > /.agentenv) 2>/dev/null && echo root_written=1
(: > /dev/.agentenv) 2>/dev/null && echo dev_written=1
(echo 0 > /proc/self/oom_score_adj) 2>/dev/null && echo proc_written=1
while read -r key; do echo "key.$key=1"; done 2>/dev/null < /proc/keys
echo probe > /workspace/.agentenv && read -r back < /workspace/.agentenv && echo "workspace=$back"
read -r blocks size nodes <<< "$(stat -f -c '%b %S %c' /workspace)"; echo "workspace_bytes=$((blocks * size))"
echo "workspace_inodes=$nodes"
read -r blocks size <<< "$(stat -f -c '%b %S' /tmp)"; echo "tmp_bytes=$((blocks * size))"
printf 'max_processes=%s\n' "$(ulimit -Hu)"; printf 'max_data_kib=%s\n' "$(ulimit -Hd)"
unshare -U true 2>/dev/null; echo "unshare=$?"
[ -n "$PROBE_ADDRESS" ] && { (exec 3<>"/dev/tcp/$PROBE_ADDRESS/$PROBE_PORT") 2>/dev/null; echo "connect=$?"; }
while IFS= read -r -d '' entry; do echo "env.${entry%%=*}=1"; done < /proc/self/environ
exit 0
"""


@dataclass(frozen=True)
class Verdict:
    """One promise, tested. The same fields as :class:`agentenv.wire.server.Proof`."""

    name: str
    holds: bool
    required: bool = True
    detail: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Expected:
    """Expected values of the report."""

    uid: int
    host_namespaces: Mapping[str, str]
    workspace_bytes: int
    workspace_inodes: int
    tmp_bytes: int
    environment: frozenset[str]
    allow_network: bool


def parse_report(text: str) -> dict[str, str]:
    """Parse the script's ``key=value`` lines."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def judge(report: Mapping[str, str], want: Expected) -> list[Verdict]:
    """Every proof that follows from the report. Pure; a missing line never counts as proof."""
    status = {name: report.get(f"status.{name}", "?") for name in ("Uid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs")}
    capabilities = {name: status[name] for name in ("CapPrm", "CapEff", "CapBnd")}
    shared = [
        kind
        for kind in NAMESPACES
        if kind != "cgroup" and report.get(f"ns.{kind}") in (None, want.host_namespaces.get(kind))
    ]
    written = [name for name in ("usr", "root", "dev", "proc") if f"{name}_written" in report]
    return [
        Verdict("own uid", status["Uid"] == str(want.uid), detail=f"uid {status['Uid']}, wanted {want.uid}"),
        Verdict("no capabilities", all(v.strip("0") == "" for v in capabilities.values()), detail=str(capabilities)),
        Verdict("no new privileges", status["NoNewPrivs"] == "1", detail=f"NoNewPrivs {status['NoNewPrivs']}"),
        Verdict("own namespaces", not shared, detail=f"shared with the machine: {', '.join(shared) or 'none'}"),
        Verdict(
            "system read-only", not written and not writable_mounts(report), detail=_writable_detail(report, written)
        ),
        _engine(report),
        Verdict("workspace writable", report.get("workspace") == "probe", detail="wrote and read back a file"),
        _at_most("workspace size limit", report.get("workspace_bytes"), want.workspace_bytes),
        _at_most("workspace file limit", report.get("workspace_inodes"), want.workspace_inodes),
        _at_most("temporary files size limit", report.get("tmp_bytes"), want.tmp_bytes),
        _terminals(report.get("terminals", "?")),
        _network(report, want),
        _user_namespaces(report.get("unshare", "?")),
        _keys(report),
        _environment(report, want),
        _processes(report),
    ]


def writable_mounts(report: Mapping[str, str]) -> list[str]:
    """Mounts of the slot that are neither read-only nor meant to be writable."""
    return sorted(
        point
        for point, flags in ((key[len("mount.") :], value) for key, value in report.items() if key.startswith("mount."))
        if "ro" not in flags.split(",") and point not in _WRITABLE | _DEVICES and not point.startswith("/proc/")
    )


def _writable_detail(report: Mapping[str, str], written: list[str]) -> str:
    found = [*written, *writable_mounts(report)]
    return f"writable: {', '.join(found)}" if found else "every mount but the slot's own is read-only"


def _engine(report: Mapping[str, str]) -> Verdict:
    """Not required: it shows a policy where the engine keeps this container's files, without giving access to them."""
    layers = sorted(key[len("layers.") :] for key in report if key.startswith("layers."))
    named = f"the engine's directories are named at {', '.join(layers)}" if layers else "no mount names one"
    cure = "the kernel refuses an overlay over the engine's: docs/isolation.md"
    return Verdict("no paths of the engine", not layers, required=False, detail=named, cure=cure if layers else "")


def _at_most(name: str, value: str | None, limit: int) -> Verdict:
    # The kernel rounds sizes up to whole pages.
    rounded = -(-limit // resource.getpagesize()) * resource.getpagesize()
    holds = value is not None and value.isdigit() and 0 < int(value) <= rounded
    return Verdict(name, holds, detail=f"{value} of at most {limit}")


def _terminals(limit: str) -> Verdict:
    return Verdict("terminals limit", limit == str(MAX_TERMINALS), detail=f"{limit} of {MAX_TERMINALS}")


def _network(report: Mapping[str, str], want: Expected) -> Verdict:
    devices = sorted(key[len("net.") :] for key in report if key.startswith("net."))
    if not want.allow_network:
        return Verdict("no network", devices == ["lo"], detail=f"interfaces: {', '.join(devices) or 'none seen'}")
    holds = len(devices) == 2 and "lo" in devices and report.get("connect") not in (None, "0")
    detail = f"interfaces: {', '.join(devices)}; connecting to the server: {report.get('connect', 'not tried')}"
    return Verdict("network without the server", holds, detail=detail)


def _user_namespaces(status: str) -> Verdict:
    detail = {"0": "unshare(1) made one", "127": "the slot has no unshare(1) to try it with"}.get(status, "refused")
    cure = "install util-linux in the image" if status == "127" else ""
    return Verdict("no user namespaces", status not in ("0", "127", "?"), detail=detail, cure=cure)


def _keys(report: Mapping[str, str]) -> Verdict:
    found = sum(key.startswith("key.") for key in report)
    return Verdict("no keys of the machine", found == 0, detail=f"{found} in /proc/keys")


def _environment(report: Mapping[str, str], want: Expected) -> Verdict:
    seen = {key[len("env.") :] for key in report if key.startswith("env.")}
    extra = sorted(seen - want.environment)
    return Verdict("clean environment", bool(seen) and not extra, detail=f"unexpected: {', '.join(extra) or 'none'}")


def _processes(report: Mapping[str, str]) -> Verdict:
    count, init = report.get("processes", "?"), report.get("init", "?")
    holds = count.isdigit() and int(count) <= _MAX_PROCESSES_SEEN and init == "slotagent"
    return Verdict("own /proc", holds, detail=f"{count} processes visible, the first is {init}")


def guard_proof(ran: Ran) -> Verdict:
    """Result of the agent's own attempts at the system calls it refuses to a slot."""
    lines = ran.stdout.splitlines()
    allowed = [line.removeprefix("allowed ") for line in lines if line.startswith("allowed ")]
    refused = next((line.removeprefix("refused ") for line in lines if line.startswith("refused ")), "0")
    holds = ran.status == 0 and not allowed and refused.isdigit() and int(refused) > 0
    return Verdict(
        "system calls refused",
        holds,
        detail=f"{refused} refused; not refused: {', '.join(allowed) or 'none'}",
        cure="the kernel needs seccomp filters (CONFIG_SECCOMP_FILTER)",
    )


def files_proof(ran: Ran) -> Verdict:
    """Result of an attempt of slotfiles to leave the directory it is kept in (as when it unpacks an archive)."""
    lacking = ran.status == _UNSUPPORTED_KERNEL
    return Verdict(
        "paths confined below a directory",
        ran.status == _OUTSIDE,
        detail="openat2 is missing" if lacking else f"reading outside of it ended with {ran.status}",
        cure="use Linux 5.6 or newer, and a seccomp profile that allows openat2" if lacking else "",
    )


def failure(proofs: list[Verdict]) -> SelfTestError | None:
    """The error to fail with when a required proof does not hold."""
    broken = [proof for proof in proofs if proof.required and not proof.holds]
    if not broken:
        return None
    what = "; ".join(f"{proof.name}: {proof.detail}" for proof in broken)
    cure = next((proof.cure for proof in broken if proof.cure), "")
    return SelfTestError(
        f"the container could not prove what it promises: {what}",
        next_step=cure or "run `agentenv doctor`; docs/isolation.md lists what each promise needs",
    )


async def prove(
    setup: SlotSetup, slot: SlotProcess, host_namespaces: Mapping[str, str], address: tuple[str, int]
) -> list[Verdict]:
    """Run the whole self-test in an unused slot. Raises StartTimeoutError when it takes too long, SelfTestError
    when the agent fails. Whether every required proof holds is decided by :func:`failure`."""
    runner = AgentRunner(slot.agent, DEADLINE_S)
    try:
        return await _prove(setup, slot, runner, host_namespaces, address)
    except TimeoutError as error:  # before OSError, of which it is one: lateness proves nothing
        raise StartTimeoutError(
            f"the self-test did not finish within {DEADLINE_S:.0f} s", next_step="reduce the load of the machine"
        ) from error
    except (ProtocolError, OSError) as error:
        raise SelfTestError(f"the self-test did not finish: {str(error) or type(error).__name__}") from error


async def _prove(
    setup: SlotSetup,
    slot: SlotProcess,
    runner: AgentRunner,
    host_namespaces: Mapping[str, str],
    address: tuple[str, int],
) -> list[Verdict]:
    spec = setup.spec
    env = command_env(spec.env)
    probe = {"PROBE_ADDRESS": address[0], "PROBE_PORT": str(address[1])} if spec.allow_network else {}
    want = Expected(
        uid=setup.identity.slot_uid(slot.slot),
        host_namespaces=host_namespaces,
        workspace_bytes=spec.limits.workspace_bytes,
        workspace_inodes=spec.limits.workspace_inodes,
        tmp_bytes=spec.limits.tmp_bytes,
        environment=frozenset(env) | frozenset(probe),
        allow_network=spec.allow_network,
    )
    ran = await runner.run(["bash", "-c", SCRIPT], env | probe)
    if ran.status != 0:
        reason = (
            f"bash could not be started: {os.strerror(ran.errno)}" if ran.errno else f"bash ended with {ran.status}"
        )
        return [Verdict("commands run", False, detail=reason, cure="the machine needs /usr/bin/bash")]
    report = parse_report(ran.stdout)
    return [
        *judge(report, want),
        guard_proof(await runner.run([AGENT_PATH, "prove"], {})),
        files_proof(await runner.run([FILES_PATH, "--beneath", WORKSPACE, "read", "../etc/passwd", "0", "1"], {})),
        await _process_limit(setup, slot, runner, env, report),
        _memory_limit(setup, slot, report),
        await _kill_all(slot, runner, env),
    ]


async def _process_limit(
    setup: SlotSetup, slot: SlotProcess, runner: AgentRunner, env: Mapping[str, str], report: Mapping[str, str]
) -> Verdict:
    """Lower the real limit to the number of running processes, and check that the next start is refused."""
    name, wanted = "process limit holds", str(setup.spec.limits.processes + OWN_PROCESSES)
    if slot.plan is not None and slot.plan.pids_limit is not None:
        before = slot.plan.pids_limit.read_text().strip()
        slot.plan.pids_limit.write_text("1")
        try:
            refused = await runner.run(["true"], env)
        finally:
            slot.plan.pids_limit.write_text(before)
        holds = refused.errno == errno.EAGAIN and before == wanted
        return Verdict(name, holds, detail=f"pids.max {before}; at its limit a start gives errno {refused.errno}")
    before = report.get("max_processes", "?")
    if setup.identity.mode != USER:  # another uid's limits cannot be changed without CAP_SYS_RESOURCE
        return Verdict("process limit", before == wanted, detail=f"RLIMIT_NPROC {before} of {wanted}")
    # Only the soft limit: no process here could raise a hard one again.
    resource.prlimit(slot.agent_pid, resource.RLIMIT_NPROC, (1, int(wanted)))
    try:
        refused = await runner.run(["true"], env)
    finally:
        resource.prlimit(slot.agent_pid, resource.RLIMIT_NPROC, (int(wanted), int(wanted)))
    holds = refused.errno == errno.EAGAIN and before == wanted
    return Verdict(name, holds, detail=f"RLIMIT_NPROC {before}; at its limit a start gives errno {refused.errno}")


def _memory_limit(setup: SlotSetup, slot: SlotProcess, report: Mapping[str, str]) -> Verdict:
    wanted = setup.spec.limits.memory_bytes
    rounded = wanted - wanted % resource.getpagesize()
    if slot.plan is not None and slot.plan.memory_limit is not None:
        value = slot.plan.memory_limit.read_text().strip()
        holds = value.isdigit() and rounded <= int(value) <= wanted
        return Verdict("memory limit", holds, detail=f"{slot.plan.memory_limit.name} {value} of {wanted}")
    value = report.get("max_data_kib", "?")
    return Verdict("memory limit", value == str(wanted // 1024), detail=f"RLIMIT_DATA {value} KiB, per process")


async def _kill_all(slot: SlotProcess, runner: AgentRunner, env: Mapping[str, str]) -> Verdict:
    """Processes that left their session, their parent and their group must be killed like any other."""
    script = "sleep 1000 & setsid sleep 1000 & (setsid setsid sleep 1000 &) ; echo up; sleep 1000"
    await runner.leave_running(["bash", "-c", script], env)
    killed = await runner.kill_all()
    left = await _settled(slot)
    return Verdict("kill ends everything", left <= 1, detail=f"{killed} killed, {max(0, left - 1)} left")


async def _settled(slot: SlotProcess) -> int:
    """Number of processes in the slot's pid namespace once it is quiet (a killed one takes a moment, longer on a
    busy machine)."""
    ends = time.monotonic() + SETTLE_S
    while (count := slot_population(slot)) > 1 and time.monotonic() < ends:  # noqa: ASYNC110 - polls /proc
        await asyncio.sleep(0.001)
    return count


def slot_population(slot: SlotProcess) -> int:
    """Number of processes in the slot, including the agent."""
    if slot.plan is not None:
        return len(cgroups.members(slot.plan)) - 1
    children = f"/proc/{slot.agent_pid}/task/{slot.agent_pid}/children"
    return 1 + len(Path(children).read_text().split())


def as_packets(proofs: list[Verdict]) -> list[dict[str, object]]:
    """The proofs in the form used by the server and the wire."""
    return [asdict(proof) for proof in proofs]


_OUTPUT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ran:
    """The end of one command. ``errno`` is not 0 when it could not be started."""

    status: int = -1
    stdout: str = ""
    errno: int = 0


class AgentRunner:
    """Client of one agent; ``deadline_s`` bounds every wait. The socket stays the caller's."""

    def __init__(self, agent: socket.socket, deadline_s: float) -> None:
        self._agent = agent
        self._ends = time.monotonic() + deadline_s
        self._run = 0

    async def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Ran:
        """Run a command to the end of its first process. Output beyond the capacity of a pipe would block: keep it
        short.

        Raises TimeoutError past the deadline, ProtocolError when the agent breaks the contract.
        """
        run, first = await self._spawn(argv, env)
        if first.kind is Kind.SPAWN_FAILED:
            return Ran(errno=first.arg)
        try:
            ended = await self._expect(Kind.EXIT, run)
            return Ran(os.waitstatus_to_exitcode(ended.arg), _drain(first.fds[0]))
        finally:
            _close(first.fds)

    async def leave_running(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a command, wait for its first output (or its end), and leave it running."""
        _, first = await self._spawn(argv, env)
        try:
            if first.fds:
                await readable(first.fds[0], max(0.0, self._ends - time.monotonic()))
        finally:
            _close(first.fds)

    async def kill_all(self) -> int:
        """Send KILL_ALL; returns how many processes the agent reports as killed."""
        protocol.send(self._agent, protocol.encode(Kind.KILL_ALL))
        return (await self._expect(Kind.KILLED, 0)).arg

    async def _spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, Message]:
        self._run += 1
        payload = protocol.spawn_text(argv, env, WORKSPACE)
        protocol.send(self._agent, protocol.encode(Kind.SPAWN, run=self._run, payload=payload))
        while True:
            message = await self._next()
            if message.run == self._run and message.kind in (Kind.SPAWNED, Kind.SPAWN_FAILED):
                return self._run, message
            _close(message.fds)

    async def _expect(self, kind: Kind, run: int) -> Message:
        while True:
            message = await self._next()
            if message.kind is kind and message.run == run:
                return message
            _close(message.fds)

    async def _next(self) -> Message:
        await readable(self._agent.fileno(), max(0.0, self._ends - time.monotonic()))
        message = protocol.receive(self._agent)
        if message is None:
            raise ProtocolError("the slot's agent ended")
        return message


def _drain(fd: int) -> str:
    os.set_blocking(fd, False)
    found = b""
    try:
        while chunk := os.read(fd, _OUTPUT_BYTES):
            found += chunk
    except BlockingIOError:
        pass
    return found.decode(errors="replace")


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
