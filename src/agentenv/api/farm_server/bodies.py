"""Bodies of requests: parsed once, and refused by their first error only."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from agentenv.errors import ProtocolError

_NAME_CHARS: Final = 200
"""Of the place of an error, which may be a name of the body's."""


class MalformedError(ProtocolError):
    """The request is not as /openapi.json describes it."""


class TypedRequest(Request):
    """A request whose body was parsed: FastAPI gets the object, and validates no JSON itself."""

    def __init__(self, request: Request, raw: bytes, parsed: object) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._parsed = parsed

    async def body(self) -> bytes:
        """As it came."""
        return self._raw

    async def json(self) -> object:
        """As it was parsed."""
        return self._parsed


def parsed(adapter: TypeAdapter[Any], raw: bytes, content_type: str) -> Any:
    """What a body of JSON means. Raises MalformedError, by the first error."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise MalformedError("the body: it is not JSON", next_step="send Content-Type: application/json")
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        raise malformed(error) from None


def malformed(error: ValidationError, where: str = "the body") -> MalformedError:
    """The first of its errors; there may be one for every few bytes of a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    named = ".".join(map(str, first["loc"]))[:_NAME_CHARS] or where
    return MalformedError(f"{named}: {first['msg']}", next_step="see /openapi.json")
