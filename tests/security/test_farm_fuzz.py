"""The farm service asked at random, by its own OpenAPI document and with every kind of token.

Short and always the same here; for longer, and at random: ``AGENTENV_FUZZ_EXAMPLES=2000 pytest
tests/security/test_farm_fuzz.py -n 2`` (2,000 requests for each route: about ten minutes).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.farm_server.access import ROUTES, Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.openapi import document
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.api.serving import served
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.server import ErrorReply
from tests.farm_service import KEY, KEYS, token
from tests.waiting import START_S, wait_for

EXAMPLES: Final = int(os.environ.get("AGENTENV_FUZZ_EXAMPLES", "40"))
RUN: Final = "team/exp7"
TOKENS: Final = {
    "nobody": "garbage",
    "read": token(RUN, "read"),
    "run": token(RUN, "run"),
    "team": token("team/*", "run"),
    "other": token("team/exp8", "run"),
    "admin": token(RUN, "admin"),
    "operator": token("*", "admin"),
}
CHECKS: Final = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
UNDESCRIBED: Final = {"GET /openapi.json", "GET /", "GET /page.js", "GET /page.css"}
FUZZED: Final = sorted(ROUTES.keys() - UNDESCRIBED, key=lambda route: (route != "POST /v1/asks", route))
"""The document describes neither itself nor the page. Asks first, so that there are leases."""

NOT_THE_FARMS: Final = ("Authorization", "Transfer-Encoding", "Content-Length")
"""Headers that are not sent as generated: the scheme's, which we send, and those that the HTTP server reads itself."""


class FirstLine:
    """The application for clients that cannot read a stream without end: they get its first line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].endswith(("/v1/news", "/changes", "/tail")):
            await self._app(scope, receive, send)
            return
        seen = asyncio.Event()

        async def gone() -> Message:
            await seen.wait()
            return {"type": "http.disconnect"}

        async def first(message: Message) -> None:
            if not seen.is_set():
                await send({**message, "more_body": False})
                if message["type"] == "http.response.body":
                    seen.set()

        await self._app(scope, gone, first)


class Hosted:
    """The farm in an event loop of its own thread: schemathesis waits for each answer."""

    def __init__(self) -> None:
        backend = FakeBackend(ContainerSettings(slots_per_container=4))
        self.farm = Farm(
            backend, PoolSettings(min_containers=1, max_containers=2), plain=PlainSettings(acquire_timeout_s=0.1)
        )
        self.url = ""
        app = farm_app(self.farm, Access(KEYS))
        self.schema: Any = schemathesis.openapi.from_dict(document(app))
        self._app = FirstLine(app)

    @property
    def container(self) -> str:
        return next(iter(self.farm.manager.links), "none")

    @contextmanager
    def running(self) -> Iterator[None]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        ended = asyncio.Event()
        serving = asyncio.run_coroutine_threadsafe(self._serve(ended), loop)
        try:
            wait_for(
                lambda: (self.url and any(link.listed for link in self.farm.manager.links.values())) or serving.done()
            )
            yield
        finally:
            loop.call_soon_threadsafe(ended.set)
            serving.result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _serve(self, ended: asyncio.Event) -> None:
        async with self.farm, served(self._app, "farm", host="127.0.0.1", port=0, ending=self.farm.leave) as self.url:
            await ended.wait()


@pytest.fixture(scope="module")
def hosted() -> Iterator[Hosted]:
    made = Hosted()
    with made.running():
        yield made


@pytest.fixture(scope="module")
def http() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


GRANTED: Final[set[str]] = set()
"""Passes and keys that were answered so far."""


@pytest.mark.parametrize("route", FUZZED)
def test_whatever_is_asked_is_answered_as_documented(hosted: Hosted, http: requests.Session, route: str) -> None:
    method, path = route.replace(":path", "").split()
    operation = hosted.schema[path][method]
    cases = st.one_of(*(operation.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)))

    @settings(
        max_examples=EXAMPLES,
        derandomize="AGENTENV_FUZZ_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=cases, sender=st.sampled_from(sorted(TOKENS)), at=st.none() | st.integers(0, 3))
    def ask(case: Case[Any], sender: str, at: int | None) -> None:
        _do_not_wait(case)
        if at is not None:
            _aim(case, hosted, at)
        for name in NOT_THE_FARMS:
            case.headers.pop(name, None)
        headers = {"Authorization": f"Bearer {TOKENS[sender]}"}
        response = case.call(base_url=hosted.url, session=http, headers=headers, timeout=START_S)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code != 500
        if response.status_code >= 400:
            assert ErrorReply.model_validate_json(response.content).message
        _check_secrets(hosted, sender, response.content)

    ask()


def _aim(case: Case[Any], hosted: Hosted, number: int) -> None:
    """At what is there, which is hardly ever met at random: runs, asks, leases and containers."""
    request_id = f"an-ask-that-is-known-{number}"
    leases = [f"{lease.container}/{lease.slot}/{lease.epoch}" for lease in hosted.farm.queue.leases(lambda _: True)]
    container, slot, epoch = (leases[number % len(leases)] if leases else f"{hosted.container}/0/1").split("/")
    known = {"run": RUN, "request_id": request_id, "container": container, "slot": slot, "epoch": epoch}
    for named in (case.path_parameters, case.query):
        named.update({name: known[name] for name in known.keys() & named.keys()})
    if isinstance(case.body, dict) and isinstance(asks := case.body.get("asks"), list) and asks:
        ask: Any = {"trajectories": [f"t-{number}"], "request_id": request_id}
        case.body.update(run=RUN, asks=[ask], wait_s=2)
    elif isinstance(case.body, dict) and "leases" in case.body:
        case.body["leases"] = [f"{container}/{slot}/{epoch}"]


def _do_not_wait(case: Case[Any]) -> None:
    if isinstance(case.body, dict) and isinstance(wait_s := case.body.get("wait_s"), int | float):
        case.body["wait_s"] = min(0.01, wait_s)


def _check_secrets(hosted: Hosted, sender: str, content: bytes) -> None:
    if content.startswith(b"{"):
        GRANTED.update(_secrets_in(json.loads(content.partition(b"\n")[0])))
    never = {KEY, *(link.handle.token for link in hosted.farm.manager.links.values())}
    hidden = never | GRANTED if sender in ("nobody", "read") else never
    assert not [secret for secret in hidden if secret.encode() in content]


def _secrets_in(answer: Any) -> Iterator[str]:
    if isinstance(answer, list):
        for part in answer:
            yield from _secrets_in(part)
    elif isinstance(answer, dict):
        for name, part in answer.items():
            if name in ("secret", "token") and isinstance(part, str):
                yield part
            yield from _secrets_in(part)


def test_leases_were_granted_at_random_too() -> None:
    """Else nothing was tested about their keys."""
    assert any(secret.startswith("p1.") for secret in GRANTED)
