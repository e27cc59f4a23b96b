"""Does a slot answer on this cluster? One container with one slot, one command, and nothing left of it."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from agentenv import shipped
from agentenv.dev.nomad_http import NomadHttp
from agentenv.errors import SandboxUnavailableError
from agentenv.image import IMAGE
from agentenv.wire.base import WireModel
from agentenv.wire.calls import Batch, Call, CallResult, Result
from agentenv.wire.leases import LeaseGrant, LeaseRequest
from agentenv.wire.server import ServerInfo

_DEADLINE_S = 90.0
_QUICK_S = 10.0
_OVER = ("complete", "failed", "lost")
_LOOK = "see the container's log (`nomad alloc logs -stderr`), and docs/nomad.md, 'When it does not start'"


def check(nomad: NomadHttp, *, image: str = IMAGE) -> ServerInfo:
    """Register a job, lease its slot, run ``echo`` in it, purge the job; the server's account of itself
    (``isolation``, ``proofs``, …).

    Raises SandboxUnavailableError saying which of these failed, in Nomad's or the container's own words.
    """
    job_id = f"agentenv-check-{secrets.token_hex(4)}"
    token = secrets.token_hex(32)
    with job(nomad, job_id, token, {"spec": json.dumps(json.dumps({"slots": 1})), "image": json.dumps(image)}):
        base_url = wait_serving(nomad, job_id)
        server = server_info(base_url, token)
        result = run_in_slot(base_url, token, "echo $((6 * 7))")
    if result.stdout != "42\n":
        raise SandboxUnavailableError(
            f"a slot answered, but `echo` gave {result!r}", next_step="`agentenv doctor` says what this machine lacks"
        )
    return server


@contextmanager
def job(nomad: NomadHttp, job_id: str, token: str, variables: dict[str, str]) -> Iterator[None]:
    """The shipped job, registered and afterwards purged; ``variables`` are HCL expressions by name."""
    try:
        register(nomad, job_id, token, variables)
        yield
    except BaseException:
        with suppress(SandboxUnavailableError):  # what failed first is what there is to say
            purge(nomad, job_id)
        raise
    purge(nomad, job_id)


def register(nomad: NomadHttp, job_id: str, token: str, variables: dict[str, str]) -> None:
    """Put the token where the shipped job finds it, and register that job."""
    source = shipped.path("nomad/sandbox.nomad.hcl").read_text()
    nomad.put_token(job_id, token)
    nomad.put("/v1/jobs", {"Job": nomad.parse_job(source, {"job_id": json.dumps(job_id), **variables})})


def purge(nomad: NomadHttp, job_id: str, *, namespace: str = "default") -> None:
    """Stop a job, wait until its allocations are over, remove it and its token. Repeatable."""
    stop(nomad, job_id, namespace=namespace)
    deadline = time.monotonic() + _DEADLINE_S
    while running := _unfinished(nomad, job_id, namespace):
        if time.monotonic() > deadline:
            raise SandboxUnavailableError(
                f"allocations of {job_id} do not end: {', '.join(running)}",
                next_step="see `nomad alloc status`; `agentenv dev down` ends whatever a cluster here runs",
            )
        time.sleep(0.1)
    nomad.delete(f"/v1/job/{job_id}", purge="true", namespace=namespace)
    nomad.delete(f"/v1/var/nomad/jobs/{job_id}", namespace=namespace)


def stop(nomad: NomadHttp, job_id: str, *, namespace: str = "default") -> None:
    """Have Nomad stop a job's allocations now, whatever delay they ask for. Returns before they are over.

    Not with ``purge``: a purged job's allocations keep their ``shutdown_delay`` and cannot be asked about.
    """
    nomad.delete(f"/v1/job/{job_id}", no_shutdown_delay="true", namespace=namespace)


def _unfinished(nomad: NomadHttp, job_id: str, namespace: str) -> list[str]:
    allocations = nomad.get(f"/v1/job/{job_id}/allocations", namespace=namespace, all="true") or []
    return [found["ID"] for found in allocations if found["ClientStatus"] not in _OVER]


def wait_serving(nomad: NomadHttp, job_id: str) -> str:
    """The address of the job's one container, once it says it is well."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        allocations = nomad.get(f"/v1/job/{job_id}/allocations")
        for found in allocations:
            url = url_of(nomad.get(f"/v1/allocation/{found['ID']}"))
            if found["ClientStatus"] == "running" and url and healthy(url):
                return url
        if time.monotonic() > deadline:
            raise SandboxUnavailableError(
                f"no slot answered within {_DEADLINE_S:.0f} s: {_explain(nomad, job_id, allocations)}",
                next_step="docs/nomad.md, 'When it does not start'",
            )
        time.sleep(0.1)


def url_of(allocation: dict[str, Any]) -> str | None:
    """Where an allocation (as ``/v1/allocation/ID`` describes it) serves; None before it was placed. Pure."""
    ports = ((allocation.get("AllocatedResources") or {}).get("Shared") or {}).get("Ports") or []
    return next((f"http://{port['HostIP']}:{port['Value']}" for port in ports if port["Label"] == "http"), None)


def _explain(nomad: NomadHttp, job_id: str, allocations: list[dict[str, Any]]) -> str:
    """The last thing Nomad said of the job."""
    for found in allocations:
        events = [
            event.get("DisplayMessage", "")
            for task in (found.get("TaskStates") or {}).values()
            for event in task.get("Events") or []
        ]
        if events:
            return str(events[-1])
    evaluations = nomad.get(f"/v1/job/{job_id}/evaluations") or []
    failures = [evaluation.get("FailedTGAllocs") for evaluation in evaluations]
    return f"not placed: {json.dumps(next(filter(None, failures), None))[:400]}"


def healthy(base_url: str) -> bool:
    """Whether a sandbox server answers there."""
    try:
        _ask(base_url, "", "/health")
    except SandboxUnavailableError:
        return False
    return True


def run_in_slot(base_url: str, token: str, command: str, *, slot: int = 0) -> CallResult:
    """Lease a slot over the plain endpoints, run one command in it, give it back.

    Raises SandboxUnavailableError with the server's words when one of these is refused.
    """
    boot = server_info(base_url, token).boot
    wanted = LeaseRequest(slot=slot, trajectory="agentenv-check", ttl_s=_DEADLINE_S, request_id=secrets.token_hex(8))
    grant = LeaseGrant.model_validate(_ask(base_url, token, "/v1/leases", wanted))
    try:
        call = Call(
            id=secrets.token_hex(8),
            lease=grant.key,
            tool="bash",
            arguments={"command": command},
            timeout_s=_QUICK_S,
            boot=boot,
        )
        return Result.model_validate(_ask(base_url, token, "/v1/batch", Batch(calls=(call,)))).result
    finally:
        _ask(base_url, token, "/v1/leases/release", grant.key)


def server_info(base_url: str, token: str) -> ServerInfo:
    """The server's account of itself. Raises SandboxUnavailableError: no answer, or the token is wrong."""
    return ServerInfo.model_validate(_ask(base_url, token, "/v1/info"))


def _ask(base_url: str, token: str, path: str, body: WireModel | None = None) -> Any:
    """The last line of the answer, parsed."""
    content = None if body is None else body.model_dump_json().encode()
    request = urllib.request.Request(f"{base_url}{path}", data=content)  # noqa: S310 - our own http address
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_QUICK_S) as answer:
            lines = answer.read().splitlines()
    except urllib.error.HTTPError as error:
        with error:
            words = error.read().decode(errors="replace")
        raise SandboxUnavailableError(f"{base_url}{path}: {error.code} {words}", next_step=_LOOK) from error
    except OSError as error:
        raise SandboxUnavailableError(f"{base_url}{path}: {error}", next_step=_LOOK) from error
    return json.loads(lines[-1])
