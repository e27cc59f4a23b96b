"""Base of all wire models: frozen, no extra fields, versioned, bounded."""

from __future__ import annotations

import base64
import binascii
import unicodedata
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.json_schema import SkipJsonSchema

PROTOCOL_VERSION = 8
"""Increased by any change that a peer of the previous version could not read. Exchanged in ``ServerInfo``."""

MAX_BATCH_CALLS = 1_000
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest stream message, and largest JSON body."""
LARGE_BYTES = 256 * 1024
"""Content larger than this travels as an attachment instead of in the message (:mod:`agentenv.wire.calls`)."""
MAX_PIECE_BYTES = 256 * 1024
"""Largest piece of a stream of bytes: a container handles so much at once, and a WebSocket message carries no more."""
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Largest file one file operation can carry."""
MAX_COMMAND_BYTES = 8 * 1024 * 1024
MAX_ARGUMENTS = 262_144
"""Most arguments of a program: Linux gives them 2 MiB by default, and each takes 9 bytes at least."""
MAX_CALL_VARIABLES = 100_000
"""Most variables that a call adds to the environment: about as many as Linux has room for in 2 MiB."""
MAX_TIMEOUT_S = 24 * 3600.0


def control_character_in(text: str) -> str | None:
    """The first character that would move a terminal's cursor, end a line or end a C string, as a Python escape."""
    found = next((each for each in text if unicodedata.category(each) in ("Cc", "Zl", "Zp")), None)
    return None if found is None else ascii(found)


def _on_one_line(text: str) -> str:
    if found := control_character_in(text):
        raise ValueError(f"contains the control character {found}")
    return text


TrajectoryName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_on_one_line)]
"""Name of the trajectory that holds a lease. Shown to operators verbatim."""
MAX_TAG_CHARS = 128
Tag = Annotated[str, Field(max_length=MAX_TAG_CHARS), AfterValidator(_on_one_line)]
"""A short name that operators see verbatim; empty: none."""
MAX_COUNT = 2**63 - 1
"""Of numbers that nothing else limits: what 64 bits hold. JSON has no limit."""


Count = Annotated[int, Field(ge=0, le=MAX_COUNT), WithJsonSchema({"minimum": 0, "type": "integer"})]
"""A number that nothing else limits. The schema that models see leaves out that bound."""
CheckpointName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""A secret: whoever has it may read the files."""
BootName = Annotated[str, Field(max_length=128)]
"""One life of a server."""
CallId = Annotated[str, Field(min_length=1, max_length=128)]
SlotIndex = Annotated[int, Field(ge=0, le=9_999)]
Arguments = dict[str, JsonValue]


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


NOT_BOOL = BeforeValidator(_not_bool)
"""For the numbers among a tool's arguments, which a language model writes: pydantic would take ``true`` for 1. It is
the last of a type's annotations: bounds that follow it would have other names in the JSON schema."""


def _from_base64(value: object) -> object:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"is not base64: {error}") from error
    return value


Base64 = Annotated[
    bytes,
    BeforeValidator(_from_base64),
    PlainSerializer(lambda value: base64.b64encode(value).decode("ascii"), when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""``bytes`` in Python (str input is decoded as base64), a base64 string in JSON."""


_T = TypeVar("_T")
_NOT_SHOWN: type = SkipJsonSchema
ForCode = Annotated[_T, SkipJsonSchema()]
"""An argument that hooks, scripts and verifiers may give, and models may not: their schema does not show it, and a call
of their arguments with it is refused (:func:`for_code`)."""


def for_code(arguments: type[BaseModel]) -> frozenset[str]:
    """The arguments of a tool that are :data:`ForCode`."""
    fields = arguments.model_fields.items()
    return frozenset(name for name, field in fields if any(isinstance(one, _NOT_SHOWN) for one in field.metadata))


@cache
def carried_as(arguments: type[BaseModel], field: str) -> Literal["bytes", "text", "json"]:
    """What an attachment of this argument contains: the bytes of a :data:`Base64` field, the UTF-8 of a text field, the
    JSON of any other value."""
    found = arguments.model_fields.get(field)
    types = _leaf_types(found.annotation) if found is not None else {str}  # an unknown name is refused with its value
    return "bytes" if bytes in types else "text" if types <= {str, type(None)} else "json"


def _leaf_types(annotation: object) -> set[object]:
    """The alternatives of a union, without what only annotates them; a container is one alternative."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _leaf_types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set[object]().union(*map(_leaf_types, get_args(annotation)))
    return {annotation}


class WireModel(BaseModel):
    """Base of every model both sides share."""

    # JSON has no NaN and no infinity, and pydantic would write null for them.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class KeptModel(WireModel):
    """Base of models of which a service keeps tens of thousands: without pydantic's note of which fields were given,
    which takes 216 bytes an object, and 728 from five fields on. All of them count as given."""

    _every_field: ClassVar[set[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._every_field = set(cls.model_fields)

    def model_post_init(self, _: Any, /) -> None:
        """Called by pydantic, after it has set the fields."""
        object.__setattr__(self, "__pydantic_fields_set__", self._every_field)
