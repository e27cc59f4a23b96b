"""The OpenAPI document of the farm service: FastAPI's, completed by what is the same for many routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from agentenv.api.farm_server.access import ROUTES, Needs
from agentenv.api.farm_server.request_gate import BODY_S, MAX_REQUEST_BYTES, OF_EACH_PROCESS, REQUEST_ID
from agentenv.errors import ForbiddenError, QuotaError, TooManyRequestsError, UnauthorizedError
from agentenv.wire import farm as wire
from agentenv.wire.base import WireModel
from agentenv.wire.leases import LeaseKey
from agentenv.wire.server import ErrorReply

Json = dict[str, Any]

_SCHEME: Final = "runToken"
_LIMITED: Final = frozenset({"DELETE /v1/asks/{request_id}", "GET /v1/news"})
"""Routes that a token may use only so often, or so many times at once, besides those with a body."""
_TOKENS: Final[Mapping[Needs, str]] = {
    "read": "Any token.",
    "look": "A token of scope `look`, `run` or `admin`.",
    "run": "A token of scope `run` or `admin`.",
    "admin": "A token of scope `admin`.",
    "operate": "A token of scope `admin` for `*`.",
}
_REFUSALS: Final[Mapping[int, tuple[str, str]]] = {
    307: ("Elsewhere", "This service is a standby: send the request to the leader, at `Location`."),
    400: ("Malformed", "The request is not as described here."),
    401: ("Unauthorized", "The token is missing, garbled, expired or revoked."),
    403: ("Forbidden", "The token does not allow this, or not for this run."),
    404: ("NotFound", "Nothing of that name exists (any more)."),
    408: ("TooSlow", f"The body did not come within {BODY_S:g} s."),
    413: ("TooLarge", f"The body is larger than {MAX_REQUEST_BYTES} bytes."),
    429: ("TooMany", "The token exceeds its request rate; retry after `retry_after_s`."),
    503: ("Unavailable", "The service is starting or shutting down, or is a standby that does not know the leader."),
}
"""Status: its name among the components, and what it means. The body is always an ErrorReply."""
_HEADERS: Final[Mapping[int, Json]] = {
    307: {"Location": {"schema": {"type": "string"}, "description": "The same path at the leader."}},
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
}
_NAMED: Final[Json] = {REQUEST_ID: {"schema": {"type": "string"}, "description": "The request's id, or a new one."}}
_ERRORS: Final[Mapping[int, ErrorReply]] = {
    401: ErrorReply.of(UnauthorizedError("farm_token", "the token has expired")),
    403: ErrorReply.of(ForbiddenError("farm_run", "the token is for 'exp7', not for 'exp8'")),
    429: ErrorReply.of(TooManyRequestsError("try again in 1.5 s", retry_after_s=1.5)),
}

_ASK = wire.Ask(request_id="5f0c1c9e5b7a4d2a", trajectories=("g1-0", "g1-1"), tags=wire.AskTags(group="g1"))
_GRANTS = tuple(
    wire.Grant(
        lease=f"local-0-5f0c1c9e/{slot}/7",
        trajectory=f"g1-{slot}",
        base_url="http://10.0.0.1:23400",
        token="the pass of the run",  # noqa: S106
        key=LeaseKey(slot=slot, epoch=7, secret="the secret of this lease"),  # noqa: S106
        ttl_s=30.0,
        index=0,
        slots=10,
    )
    for slot in (0, 1)
)
_GRANTED = wire.AskState(request_id=_ASK.request_id, state="granted", leases=_GRANTS)
_PLACE = wire.Place(why="queue", position=1, slots_ahead=4, eta_s=12.5, run_held=8, run_fair_share=10.0, total=20)
_WAITING = wire.AskState(request_id=_ASK.request_id, state="waiting", place=_PLACE)
_REFUSED = wire.AskState(
    request_id=_ASK.request_id,
    state="refused",
    error=ErrorReply.of(QuotaError("farm", "64 slots were asked for at once, and the farm has at most 20")),
)
_REQUESTS: Final[Mapping[str, WireModel]] = {
    "POST /v1/asks": wire.AsksRequest(asks=(_ASK,), run="exp7", client="trainer-0", wait_s=5.0),
    "POST /v1/leases/release": wire.ReleaseLeases(leases=(_GRANTS[0].lease,)),
    "POST /v1/tokens": wire.TokenRequest(run="vision/*", scope="run", cap=100, expires_s=30 * 86_400.0),
}
_ANSWERS: Final[Mapping[str, Mapping[str, WireModel]]] = {
    "POST /v1/asks": {
        "granted": wire.AsksReply(asks=(_GRANTED,)),
        "waiting": wire.AsksReply(asks=(_WAITING,)),
        "refused": wire.AsksReply(asks=(_REFUSED,)),
    },
    "GET /v1/asks/{request_id}": {"waiting": _WAITING, "granted": _GRANTED},
    "GET /v1/news": {
        "hello": wire.NewsHello(boot="0011223344556677", generation=4),
        "granted": wire.NewsAsk(ask=_GRANTED),
        "beat": wire.NewsBeat(),
    },
}


def document(app: FastAPI) -> Json:
    """The whole document."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = made.setdefault("components", {})
    components["securitySchemes"] = {
        _SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "JWT",
            "description": "A token of `agentenv farm token`. What it allows, it allows for the runs it covers.",
        }
    }
    components["responses"] = {name: _response(status, meaning) for status, (name, meaning) in _REFUSALS.items()}
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own: ours is another
        components["schemas"].pop(name, None)
    components["schemas"] |= _schemas(components["schemas"])
    for key, path, operation in _operations(app, made["paths"]):
        _complete(key, path, operation)
    return made


def _schemas(known: Json) -> Json:
    """Models that FastAPI does not see: errors, and the lines of the news."""
    template = "#/components/schemas/{model}"
    line = wire.news_line.json_schema(ref_template=template, mode="serialization")
    error = ErrorReply.model_json_schema(ref_template=template, mode="serialization")
    found = {**line.pop("$defs"), "NewsLine": line, "ErrorReply": error}
    return {name: schema for name, schema in found.items() if name not in known}


def _operations(app: FastAPI, paths: Json) -> Iterator[tuple[str, str, Json]]:
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                yield f"{method} {route.path}", route.path, paths[route.path_format][method.lower()]


def _complete(key: str, path: str, operation: Json) -> None:
    needs = ROUTES[key]
    operation["tags"] = [path.split("/")[2] if path.startswith("/v1/") else "service"]
    operation["security"] = [] if needs == "nothing" else [{_SCHEME: []}]
    if needs != "nothing":
        operation["description"] = f"{operation.get('description', '')}\n\n{_TOKENS[needs]}".strip()
    responses = operation["responses"]
    responses.pop("422", None)
    for status in _statuses(key, path, operation):
        responses[str(status)] = {"$ref": f"#/components/responses/{_REFUSALS[status][0]}"}
    for status, response in responses.items():
        if "$ref" not in response:
            response["headers"] = {**_HEADERS.get(int(status), {}), **_NAMED}
    if (asked := _REQUESTS.get(key)) is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = _json(asked)
    if (answers := _ANSWERS.get(key)) is not None:
        examples = {name: {"value": _json(answer)} for name, answer in answers.items()}
        for content in responses["200"]["content"].values():
            content["examples"] = examples


def _statuses(key: str, path: str, operation: Json) -> Iterator[int]:
    """The refusals of a route, beside those that it names itself."""
    yield 413
    if path not in OF_EACH_PROCESS:
        yield from (307, 503)
    if ROUTES[key] != "nothing":
        yield from (401, 403)
    if "parameters" in operation or "requestBody" in operation:
        yield 400
    if "{" in path:
        yield 404
    if "requestBody" in operation:
        yield 408
    if "requestBody" in operation or key in _LIMITED:
        yield 429


def _response(status: int, meaning: str) -> Json:
    content: Json = {"schema": {"$ref": "#/components/schemas/ErrorReply"}}
    if status in _ERRORS:
        content["example"] = _json(_ERRORS[status])
    return {
        "description": meaning,
        "headers": {**_HEADERS.get(status, {}), **_NAMED},
        "content": {"application/json": content},
    }


def _json(model: WireModel) -> Any:
    return model.model_dump(mode="json")
