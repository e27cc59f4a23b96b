"""Nomad as tests ask it: any path of its HTTP API, blocking; by other means than what is tested."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from agentenv.errors import SandboxUnavailableError

_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 90.0


class NomadHttp:
    """A Nomad agent by its address. Every method raises SandboxUnavailableError with Nomad's own words."""

    def __init__(self, address: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.address = address.rstrip("/")
        self._timeout_s = timeout_s
        # No proxy stands between us and this machine, whatever the environment says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **parameters: str) -> Any:
        """The parsed answer."""
        return self._ask("GET", path, None, parameters)

    def put(self, path: str, body: Any, **parameters: str) -> Any:
        """The parsed answer."""
        return self._ask("PUT", path, body, parameters)

    def post(self, path: str, body: Any, **parameters: str) -> Any:
        """The parsed answer."""
        return self._ask("POST", path, body, parameters)

    def delete(self, path: str, **parameters: str) -> Any:
        """The parsed answer."""
        return self._ask("DELETE", path, None, parameters)

    def _ask(self, method: str, path: str, body: Any, parameters: dict[str, str]) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}{query}", data=content, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                words = error.read().decode(errors="replace").strip()
            raise SandboxUnavailableError(
                f"Nomad refused {method} {path}: {error.code} {words}",
                next_step="see the agent's log (`agentenv dev up` says where)",
            ) from error
        except (OSError, ValueError) as error:
            raise SandboxUnavailableError(
                f"no Nomad agent answers at {self.address}: {error}",
                next_step="`make nomad-dev` starts one; `make nomad-dev-status` says what runs",
            ) from error
        return json.loads(text) if text.strip() else None

    def parse_job(self, source: str, variables: dict[str, str]) -> Any:
        """The job a file describes; ``variables`` are HCL expressions by name."""
        given = "".join(f"{name} = {value}\n" for name, value in variables.items())
        return self.put("/v1/jobs/parse", {"JobHCL": source, "Canonicalize": True, "Variables": given})

    def put_token(self, job_id: str, token: str) -> None:
        """The Nomad Variable a job's token is rendered from."""
        path = f"nomad/jobs/{job_id}"
        self.put(f"/v1/var/{path}", {"Path": path, "Items": {"token": token}})

    def stop(self, job_id: str, *, namespace: str = "default") -> None:
        """Have a job's allocations stopped now, whatever delay they ask for. Returns before they are over."""
        self.delete(f"/v1/job/{job_id}", no_shutdown_delay="true", namespace=namespace)

    def purge(self, job_id: str, *, namespace: str = "default") -> None:
        """Stop a job, wait until its allocations are over, remove it and its token. Repeatable."""
        self.stop(job_id, namespace=namespace)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while running := self._unfinished(job_id, namespace):
            if time.monotonic() > deadline:
                raise SandboxUnavailableError(f"allocations of {job_id} do not end: {', '.join(running)}")
            time.sleep(0.1)
        self.delete(f"/v1/job/{job_id}", purge="true", namespace=namespace)
        self.delete(f"/v1/var/nomad/jobs/{job_id}", namespace=namespace)

    def _unfinished(self, job_id: str, namespace: str) -> list[str]:
        allocations = self.get(f"/v1/job/{job_id}/allocations", namespace=namespace, all="true") or []
        return [one["ID"] for one in allocations if one["ClientStatus"] not in ("complete", "failed", "lost")]
