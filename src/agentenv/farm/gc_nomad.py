"""Leftovers of dead runs on a cluster: jobs, tokens, and on this machine Docker containers unknown to Nomad."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentenv.config import NomadSettings
from agentenv.containers.connection import open_session
from agentenv.containers.control import ContainerControl
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError
from agentenv.farm.nomad import NomadFarm, OperatorApi, owned
from agentenv.farm.orphans import JobFacts, Orphan, is_sandbox, judge_job
from agentenv.locks import is_locked
from agentenv.slots.backends.nomad.api import KEPT
from agentenv.slots.backends.nomad.ending import end_job

_ANSWER_TIMEOUT_S = scaled(3.0)
_ALLOCATION_LABEL = "com.hashicorp.nomad.alloc_id"
_RESTART_S, _LOOK_PAUSE_S = scaled(20.0), 0.2
"""For a Nomad client to restart: its containers run on meanwhile, and it takes them over."""


async def collect(
    settings: NomadSettings, *, only: str | None, unattended_after_s: float, dry_run: bool
) -> list[Orphan]:
    """Find and remove. ``only``: leave jobs with other ids alone. Raises what opening Nomad raises."""
    async with OperatorApi.opened(settings) as api:
        ids = [only] if only is not None else await _candidates(api)
        found = []
        for job_id in ids:
            facts = await _facts(api, settings, job_id)
            orphan = judge_job(facts, unattended_after_s)
            if orphan is not None:
                found.append(await _removed(settings, facts, orphan, dry_run=dry_run))
        return found + await _docker_containers(api, dry_run=dry_run)


async def _candidates(api: OperatorApi) -> list[str]:
    """Jobs that could be ours: those with a token in their variable, registered or not."""
    owners = await api.variable_owners()
    variables = await asyncio.gather(*(api.variable(owner) for owner in owners))
    return [owner for owner, found in zip(owners, variables, strict=True) if found is not None and found.token]


async def _facts(api: OperatorApi, settings: NomadSettings, job_id: str) -> JobFacts:
    job = await api.whole_job(job_id)
    variable = await api.variable(job_id)
    facts = JobFacts(job_id, registered=job is not None, token_age_s=variable.age_s if variable else 0.0)
    if job is None:
        return facts
    stopped = bool(job.get("Stop")) or job.get("Status") == "dead"
    kept = variable is not None and KEPT in variable.items
    facts = dataclasses.replace(facts, sandbox=is_sandbox(job), stopped=stopped, kept=kept)
    if stopped or kept or not facts.sandbox:
        return facts
    census = await NomadFarm(settings.model_copy(update={"job_id": job_id})).census()
    running = [place for place in census.places if place.state == "running"]
    async with open_session() as session:
        asked = (ContainerControl(handle, session) for handle in census.handles)
        heard = await asyncio.gather(*map(_heard, asked))
    idle = census.exists and all(place.state == "pending" for place in census.places)
    return dataclasses.replace(
        facts,
        running=len(running),
        heard_s=tuple(seconds for seconds in heard if seconds is not None),
        idle_s=max(0.0, time.time() - submitted / 1e9) if idle and (submitted := job.get("SubmitTime")) else None,
    )


async def _heard(control: ContainerControl) -> float | None:
    try:
        return (await control.slots(timeout_s=_ANSWER_TIMEOUT_S)).heard_s
    except AgentEnvError:
        return None


async def _removed(settings: NomadSettings, facts: JobFacts, orphan: Orphan, *, dry_run: bool) -> Orphan:
    if dry_run or orphan.problem:
        return orphan
    try:
        async with (
            OperatorApi.opened(settings.model_copy(update={"job_id": facts.id})) as api,
            owned(api, "agentenv gc", wait=False),  # its owner is alive, whatever its containers report
        ):
            if orphan.kind == "token":
                await api.forget_token()
            elif facts.idle_s is not None:
                # Not purged: a live run submits it again at any moment, with the existing token.
                await api.deregister(purge=False)
            else:
                await end_job(api)
                await api.forget_token()
    except AgentEnvError as error:
        return dataclasses.replace(orphan, problem=error.message)
    return dataclasses.replace(orphan, removed=True)


async def _docker_containers(api: OperatorApi, *, dry_run: bool) -> list[Orphan]:
    """Containers of this machine's engine, with an image of ours, whose allocation has ended or is unknown to
    Nomad.

    Nomad's clients remove their own containers; these were left by a client that was killed and lost its state.
    """
    found = []
    restarted_s = time.monotonic() + _RESTART_S
    async with contextlib.AsyncExitStack() as stack:
        containers = await asyncio.to_thread(_engine_containers, stack)
        for container in containers:
            allocation = str(container.labels[_ALLOCATION_LABEL])
            status = await api.status_of(allocation)
            if status not in (None, "complete", "failed"):
                continue
            if status is None and await has_a_client(container.attrs.get("Mounts") or (), allocation, restarted_s):
                continue  # of another cluster, which shares this engine
            why = f"allocation {allocation[:8]} is {status or 'unknown to Nomad'}"
            orphan = Orphan("docker container", container.name, why)
            found.append(orphan if dry_run else await asyncio.to_thread(_remove, container, orphan))
    return found


async def has_a_client(mounts: Iterable[Mapping[str, Any]], allocation: str, until_s: float) -> bool:
    """Whether a Nomad client keeps this allocation. One that restarts is waited for until ``until_s``."""
    if (state := _client_state(mounts, allocation)) is None:
        return False
    while True:
        kept = is_locked(state)
        if kept or not state.exists() or time.monotonic() >= until_s:
            return kept
        await asyncio.sleep(_LOOK_PAUSE_S)


def _client_state(mounts: Iterable[Mapping[str, Any]], allocation: str) -> Path | None:
    """The state of the Nomad client that began this allocation, beside it, whose lock the client holds while it runs;
    None if that is unknown."""
    for mount in mounts:
        data_dir, found, _ = str(mount.get("Source") or "").partition(f"/alloc/{allocation}")
        if found:
            return Path(data_dir) / "client" / "state.db"
    return None


def _engine_containers(stack: contextlib.AsyncExitStack) -> Iterable[Any]:
    """Nomad's containers whose image was made by `agentenv image build`: they inherit its label, whatever the image
    was called, and even if a newer image has taken the name."""
    try:
        import docker
        from docker.errors import DockerException

        from agentenv.image import LABEL_CONTENT
    except ImportError:
        return ()
    try:
        client = docker.from_env(timeout=60)
        stack.callback(client.close)
        ours = {"label": [_ALLOCATION_LABEL, LABEL_CONTENT]}
        running: Iterable[Any] = client.containers.list(all=True, filters=ours, ignore_removed=True)
    except (DockerException, OSError):
        return ()  # no engine here that answers: then none of its containers either
    return running


def _remove(container: Any, orphan: Orphan) -> Orphan:
    from docker.errors import APIError, DockerException

    try:
        container.remove(force=True)
    except (DockerException, OSError) as error:
        if isinstance(error, APIError) and error.status_code in (404, 409):
            return dataclasses.replace(orphan, removed=True)  # it is gone, or already being removed
        return dataclasses.replace(orphan, problem=str(error))
    return dataclasses.replace(orphan, removed=True)
