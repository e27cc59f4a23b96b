"""The image and the job on a real cluster: what a container proves, what it may not do, how it ends."""

from __future__ import annotations

import dataclasses
import errno
import json
import platform
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import docker
import pytest

from agentenv import shipped
from agentenv.config import Driver
from agentenv.errors import SandboxUnavailableError
from agentenv.slots.backends.nomad.job import JobShape
from agentenv.wire.spec import MIB, ContainerSpec, SlotLimits
from tests.nomad.cluster import Cluster
from tests.nomad.containers import run_in_slot, server_info
from tests.waiting import DEADLINE_S, START_S, wait_for

SPEC = {
    "slots": 2,
    "binds": [{"source": "/usr/share/common-licenses", "target": "/opt/licences"}],
    "allow_network": True,
    "env": {"GREETING": "it's ${1 + 1} %{ if true } {{ no }}"},
}


@dataclass(frozen=True)
class Running:
    """Two containers of one job on one client."""

    cluster: Cluster
    job_id: str
    token: str
    urls: dict[str, str]

    @property
    def allocation(self) -> str:
        return min(self.urls)

    @property
    def container(self) -> docker.models.containers.Container:
        return self.cluster.container(self.allocation)

    def bash(self, command: str, *, allocation: str | None = None, slot: int = 0) -> str:
        """What a command in a slot says, both ways."""
        url = self.urls[allocation or self.allocation]
        result = run_in_slot(url, self.token, command, slot=slot)
        return result.stdout + result.stderr

    def inside(self, *argv: str, user: str = "0") -> tuple[int, str]:
        """Run something in the container, beside its server. Again when the end of what it printed is missing: a
        loaded engine can lose it."""
        told = ["sh", "-c", '"$@" 2>&1; printf "\\nended %d\\n" $?', "sh", *argv]

        def ended() -> tuple[str, str] | None:
            output = self.container.exec_run(told, user=user).output.decode()
            printed, end, code = output.rpartition("\nended ")
            return (printed, code) if end else None

        printed, code = wait_for(ended)
        return int(code), printed


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[Running]:
    job_id = cluster.job_id("image")
    token = cluster.run(job_id, SPEC, count=2)
    yield Running(cluster, job_id, token, cluster.serving(job_id, 2))
    cluster.purge(job_id)


def test_every_promise_is_proved(running: Running) -> None:
    for allocation, url in running.urls.items():
        info = server_info(url, running.token)

        assert info.container == allocation
        assert (info.isolation, info.weaker) == ("full", ())
        assert len(info.proofs) >= 15
        assert [proof for proof in info.proofs if not proof.holds] == []


def test_containers_of_one_client_share_no_uid(running: Running) -> None:
    uids = [
        int(running.bash("id -u", allocation=allocation, slot=slot)) for allocation in running.urls for slot in (0, 1)
    ]

    assert len(set(uids)) == 4
    assert all(20_000 <= uid < 2**31 for uid in uids)


def test_docker_was_asked_for_no_more_than_the_recipe(running: Running) -> None:
    asked = running.container.attrs["HostConfig"]

    added = sorted(name.upper().removeprefix("CAP_") for name in asked["CapAdd"])
    assert added == ["KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN"]
    assert [name.lower() for name in asked["CapDrop"]] == ["all"]
    assert asked["Privileged"] is False
    assert asked["ReadonlyRootfs"] is True
    assert asked["Init"] is True
    assert asked["CgroupnsMode"] == "private"
    assert asked["PidsLimit"] == 16384
    assert asked["Memory"] == (2 * 2048 + 4096 + 512) * 1024 * 1024, "all slots may use theirs at once"
    profile = next(option for option in asked["SecurityOpt"] if option.startswith("seccomp="))
    assert json.loads(profile.removeprefix("seccomp=")) == json.loads(shipped.path("docker/seccomp.json").read_text())
    assert "no-new-privileges" in asked["SecurityOpt"]


def test_server_is_nobody_in_particular(running: Running) -> None:
    _, processes = running.inside("ps", "-eo", "pid=,args=")
    pid = next(line.split()[0] for line in processes.splitlines() if "agentenv.sandbox.serve" in line)
    _, text = running.inside("cat", f"/proc/{pid}/status")
    status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    assert status["Uid"].split() == ["10000"] * 4
    assert status["Gid"].split() == ["10000"] * 4
    assert {status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"


@pytest.mark.parametrize(
    "attempt",
    [
        ("touch", "/usr/x"),
        ("touch", "/opt/agentenv/x"),
        ("chroot", "/", "true"),
        ("dmesg",),
        ("mknod", "/run/disk", "b", "8", "0"),
    ],
    ids=lambda attempt: attempt[0] + attempt[-1].replace("/", "-"),
)
def test_even_root_in_the_container_is_refused(running: Running, attempt: tuple[str, ...]) -> None:
    code, output = running.inside(*attempt)

    assert code != 0, output


BLOCKED = {  # by number: the C library has no name for some
    "x86_64": {"bpf": 321, "perf_event_open": 298, "keyctl": 250, "add_key": 248, "open_by_handle_at": 304,
               "io_uring_setup": 425, "syslog": 103, "kexec_load": 246, "clone3": 435},
    "aarch64": {"bpf": 280, "perf_event_open": 241, "keyctl": 219, "add_key": 217, "open_by_handle_at": 265,
                "io_uring_setup": 425, "syslog": 116,
                "kexec_load": 104, "clone3": 435},
}  # fmt: skip
TRY = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    found[name] = ctypes.get_errno()
print(json.dumps(found))
"""


def test_seccomp_profile_refuses_what_slots_do_not_need(running: Running) -> None:
    numbers = BLOCKED[platform.machine()]
    _, said = running.inside("python3", "-c", TRY, json.dumps(numbers))
    found = json.loads(said)

    assert found.pop("clone3") == errno.ENOSYS, "callers fall back to clone, whose flags a filter can see"
    assert found == dict.fromkeys(found, errno.EPERM)


def test_token_is_nowhere_but_in_its_file(running: Running) -> None:
    job = json.dumps(running.cluster.nomad.get(f"/v1/job/{running.job_id}"))
    described = json.dumps(running.container.attrs)
    _, environments = running.inside("sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true")

    assert running.token not in job
    assert running.token not in described
    assert running.token not in environments
    assert running.inside("cat", "/secrets/token")[1].strip() == running.token
    assert running.inside("stat", "-c", "%a", "/secrets/token")[1].strip() == "600"
    assert running.inside("cat", "/secrets/token", user="10000")[0] != 0
    assert "No such file" in running.bash("cat /secrets/token /local/spec.json")
    with pytest.raises(SandboxUnavailableError, match="401"):
        server_info(running.urls[running.allocation], "0" * 64)


def test_slots_get_what_the_job_says(running: Running) -> None:
    assert running.bash('echo "$GREETING"') == "it's ${1 + 1} %{ if true } {{ no }}\n"
    assert "GNU GENERAL PUBLIC LICENSE" in running.bash("head -1 /opt/licences/GPL-3")
    assert "Read-only" in running.bash("touch /opt/licences/x")


def test_slots_have_what_agents_use(running: Running) -> None:
    others = ("tmux", "rg", "jq", "patch", "ps", "less", "unzip", "xz")
    for program in ("git", "curl", "python", "python3", "pip", *others):
        assert running.bash(f"command -v {program}").startswith("/usr/bin/"), program
    assert running.bash("command -v gcc cc docker; true") == ""
    assert "externally-managed" not in running.bash("pip install --no-index nothing-of-this-name")
    assert running.bash("python -m venv --without-pip made && made/bin/python -c 'import ensurepip'") == ""
    assert running.bash("find / -xdev -perm /6000 -type f 2>/dev/null; ls /opt") == "licences\n"


def test_kernel_takes_a_slot_before_the_server_when_memory_is_out(running: Running) -> None:
    assert int(running.bash("cat /proc/self/oom_score_adj")) > 0


@contextmanager
def listening(host: str) -> Iterator[int]:
    """Something on the client that answers whoever reaches it; its port."""
    server = socket.create_server((host, 0))

    def answer() -> None:
        while True:
            try:
                accepted, _ = server.accept()
            except OSError:
                return
            with accepted:
                accepted.sendall(b"reached\n")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_slot_with_network_reaches_neither_its_host_nor_its_neighbours(running: Running) -> None:
    networks = [
        running.cluster.container(allocation).attrs["NetworkSettings"]["Networks"]["bridge"]
        for allocation in sorted(running.urls)
    ]
    gateway, neighbour = networks[0]["Gateway"], networks[1]["IPAddress"]
    connect = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 20).recv(9))"
    with listening(gateway) as port:
        # The container itself could: without this, "cannot" below would prove nothing.
        assert "reached" in running.inside("python3", "-c", connect, gateway, str(port))[1]

        said = running.bash(f"exec 3<>/dev/tcp/{gateway}/{port} && cat <&3")

    assert "reached" not in said
    assert "unreachable" in said or "No route to host" in said
    said = running.bash(f"exec 3<>/dev/tcp/{neighbour}/8642 && echo reached")
    assert "reached\n" not in said
    assert "unreachable" in said or "No route to host" in said


def test_stop_is_orderly_and_leaves_nothing(cluster: Cluster) -> None:
    job_id = cluster.job_id("stop")
    cluster.run(job_id, {"slots": 1})
    [allocation] = cluster.serving(job_id)

    cluster.nomad.stop(job_id)

    def over() -> dict[str, Any] | None:
        [found] = cluster.allocations(job_id)
        return found if found["ClientStatus"] == "complete" else None

    found = wait_for(over, START_S, lambda: cluster.tell(job_id))
    (end,) = (event for event in found["TaskStates"]["sandbox"]["Events"] if event["Type"] == "Terminated")
    assert end["Details"]["exit_code"] == "0", "it ended by itself: a killed one would say 137"
    cluster.purge(job_id)
    assert not [one for one in cluster.containers() if allocation in one.name]


def test_missing_token_keeps_the_container_from_starting_until_it_is_there(cluster: Cluster, job_id: str) -> None:
    cluster.run(job_id, {"slots": 1}, token="")
    wait_for(lambda: "Missing: nomad.var" in cluster.tell(job_id), START_S, lambda: cluster.tell(job_id))

    cluster.nomad.put_token(job_id, "a-token-that-comes-late")

    [url] = cluster.serving(job_id).values()
    assert server_info(url, "a-token-that-comes-late").slots == 1


def test_raw_exec_runs_the_same_server(cluster: Cluster, job_id: str, tmp_path: Path) -> None:
    place = {"python": sys.executable, "pythonpath": str(shipped.PACKAGE.parent), "data_dir": str(tmp_path)}
    token = cluster.run(job_id, {"slots": 2}, driver="raw_exec", **place)
    [(allocation, url)] = cluster.serving(job_id).items()

    info = server_info(url, token)
    assert (info.container, info.isolation, info.slots) == (allocation, "full", 2)
    assert run_in_slot(url, token, "echo $((6 * 7))").stdout == "42\n"

    cluster.purge(job_id)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("driver", get_args(Driver))
def test_job_of_every_driver_is_understood(cluster: Cluster, driver: str) -> None:
    limits = dataclasses.asdict(SlotLimits(processes=7000, memory_bytes=2048 * MIB))
    parsed = cluster.parse("any", {"slots": 3, "limits": limits}, driver=driver)
    [task] = parsed["TaskGroups"][0]["Tasks"]

    pids = 3 * 7010 + 512 if driver == "docker" else 0
    assert JobShape.of(parsed) == JobShape(3, 2048 * MIB, 3 * 2048 + 4096 + 512, 0, 7000, pids)
    by_default = JobShape.of(cluster.parse("any", {}, driver=driver))
    assert by_default is not None
    assert (by_default.slots, by_default.slot_memory_bytes) == (ContainerSpec().slots, SlotLimits().memory_bytes)
    assert task["Driver"] == ("docker" if driver == "docker" else "raw_exec")
    assert ("command" in task["Config"]) is (driver != "docker")


def prepull(cluster: Cluster, job_id: str, image: str) -> str:
    """Run the prepull job; how its one task ended."""
    text = shipped.path("nomad/prepull.nomad.hcl").read_text()
    job = cluster.nomad.parse_job(text, {"job_id": json.dumps(job_id), "image": json.dumps(image)})
    for group in job["TaskGroups"]:
        group["RestartPolicy"]["Attempts"] = 0
    cluster.nomad.put("/v1/jobs", {"Job": job})

    def over() -> str | None:
        ended = [one["ClientStatus"] for one in cluster.allocations(job_id)]
        return ended[0] if ended and ended[0] in ("complete", "failed") else None

    return wait_for(over, START_S, lambda: cluster.tell(job_id))


def test_prepull_says_whether_each_client_has_the_image(cluster: Cluster) -> None:
    has, lacks = cluster.job_id("has"), cluster.job_id("lacks")

    assert prepull(cluster, has, cluster.image) == "complete"
    assert prepull(cluster, lacks, "registry.invalid/agentenv-sandbox:1") == "failed"
    assert "Failed to pull" in cluster.tell(lacks)
    for job_id in (has, lacks):
        cluster.purge(job_id)


def test_client_that_is_not_prepared_is_left_out(cluster: Cluster, job_id: str) -> None:
    [node] = cluster.nomad.get("/v1/nodes")
    path = "/v1/client/metadata"
    cluster.nomad.post(path, {"NodeID": node["ID"], "Meta": {"agentenv_data_dir": None}})
    try:
        cluster.run(job_id, {"slots": 1})

        def failures() -> str | None:
            found = [one.get("FailedTGAllocs") for one in cluster.nomad.get(f"/v1/job/{job_id}/evaluations")]
            return json.dumps(found) if any(found) else None

        assert "agentenv_data_dir" in wait_for(failures, START_S, lambda: cluster.tell(job_id))
    finally:
        cluster.nomad.post(path, {"NodeID": node["ID"], "Meta": {"agentenv_data_dir": str(cluster.data_dir)}})
    cluster.serving(job_id)


def test_image_has_the_labels_that_say_what_it_is(cluster: Cluster) -> None:
    labels = cluster.docker.images.get(cluster.image).labels

    assert labels["org.opencontainers.image.title"] == "agentenv sandbox"
    assert len(labels["agentenv.content"]) == 16
    assert labels["agentenv.base"] in ("agentenv-base:bookworm", "debian:bookworm-slim")


def test_image_refuses_to_be_less_than_it_is_asked_to_be(cluster: Cluster, tmp_path: Path) -> None:
    """Without the recipe (plain ``docker run``) it says what is missing instead of serving."""
    (tmp_path / "token").write_text("x" * 64)
    (tmp_path / "token").chmod(0o600)
    spec = {"container": "c", "token_file": "/in/token", "data_dir": "/run/agentenv", "isolation": "full", "slots": 1}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    made = cluster.docker.containers.create(
        cluster.image, ["/in/spec.json"], volumes={str(tmp_path): {"bind": "/in", "mode": "ro"}}
    )
    try:
        made.start()
        assert made.wait(timeout=DEADLINE_S)["StatusCode"] == 2
        said = json.loads(made.logs(stderr=False).splitlines()[-1])
    finally:
        made.remove(force=True)

    assert said["event"] == "failed"
    assert "CAP_SYS_ADMIN" in said["next_step"] or "cgroup" in said["message"]
