"""Reads requests by tables that say how each field is treated, so that none is lost silently. Pure.

A field is *read* (it becomes part of the request), *inert* (ignored, since it changes no answer), *overruled* (the
environment's own setting is used; the request notes that the field was given), *dropped* (left out of the prompt, and
counted) or *refused* (the request fails with status 400). A field that is in no table is dropped: the next version of a
program may send it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentenv.agent.assistant_messages import as_history, requested_calls, sendable_id
from agentenv.agent.jsonable import clean_text, deeper_than
from agentenv.agent.parsers.base import as_json
from agentenv.agent.protocols import Message, ToolDefinition
from agentenv.gateway.canonical import RefusalError, function_tool
from agentenv.gateway.history import Histories, Read, keys_of

DEEPEST_REQUEST: Final = 150
"""Maximum nesting of lists and objects in a request."""
LONGEST_PATH: Final = 200
"""Characters of a path that are kept; programs name their fields."""
_INDEX: Final = re.compile(r"\[\d+\]")
_NOUNS: Final = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "input_file": "file",
    "fileData": "file",
    "inlineData": "data",
}
"""Words for types of content whose name is none."""
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_INNER: Final = frozenset({"items", "additionalProperties", "not"})
"""Fields of schemas that are objects of schemas, lists of them, and one."""
_MEDIA: Final = re.compile(r"[\w.+-]{1,64}(/[\w.+-]{1,64})?")
_DATA_URL: Final = re.compile(r"data:([\w.+-]{1,64}/[\w.+-]{1,64})[;,]")


@dataclass(frozen=True)
class Field:
    """How a field is treated. ``unless``: values that request the default, which are ignored. ``why``: reason of a
    refusal, for the program's author."""

    fate: Literal["read", "inert", "overruled", "dropped", "refused"]
    unless: tuple[Any, ...] = ()
    why: str = ""


Table = Mapping[str, Field]
READ: Final = Field("read")
INERT: Final = Field("inert")
DROPPED: Final = Field("dropped")


def overruled(*unless: Any) -> Field:
    """A setting that the environment chooses."""
    return Field("overruled", unless)


def refused(why: str, *unless: Any) -> Field:
    """A field that is not supported, unless it has one of these values."""
    return Field("refused", unless, why)


class Reading:
    """One request while it is read: what was left out of it, and what was overruled, so far."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._overruled: dict[str, None] = {}

    @property
    def overruled(self) -> tuple[str, ...]:
        """Paths of settings, in the order they came."""
        return tuple(self._overruled)

    def fields(self, given: Any, table: Table, at: str = "") -> dict[str, Any]:
        """The object at this path, with its fields treated as ``table`` says. Raises: RefusalError."""
        found = an_object(given, at)
        for name, value in found.items():
            path = f"{at}.{name}" if at else name
            rule = table.get(name, DROPPED)
            if rule.fate in ("read", "inert") or _absent(value) or value in rule.unless:
                continue
            if rule.fate == "refused":
                raise RefusalError(rule.why, param=path)
            if rule.fate == "dropped":
                self.drop(path)
            else:
                self.overrule(path)
        return found

    def drop(self, path: str) -> None:
        """Count something that is left out of the prompt."""
        self.dropped[_INDEX.sub("", clean_text(path))[:LONGEST_PATH]] += 1

    def leave_out(self, kind: str, part: Mapping[str, Any]) -> str:
        """Count content that is not text. Returns: the note for the model in its place. Such requests are not refused,
        because programs that read an image by themselves would end."""
        kind = clean_text(kind)[:64]
        self.drop(f"content {kind}")
        media = _media_type(part)
        return f"[{_NOUNS.get(kind, kind)}{f' ({media})' if media else ''} is not shown]"

    def overrule(self, path: str) -> None:
        """Note a setting."""
        self._overruled[_INDEX.sub("", clean_text(path))[:LONGEST_PATH]] = None

    def text(self, content: Any, at: str, parts: Mapping[str, str], table: Table, *, between: str = "\n") -> str:
        """The text of a message: a string, or a list of parts. ``parts`` maps the types of parts that are text to the
        field that has it; parts of other types become a note that they are not shown. Raises: RefusalError."""
        if content is None or isinstance(content, str):
            return clean_text(content or "")
        found = []
        for n, part in enumerate(a_list(content, at)):
            where = f"{at}[{n}]"
            kind = a_text(an_object(part, where).get("type"), f"{where}.type")
            if kind not in parts:
                found.append(self.leave_out(kind, part))
                continue
            self.fields(part, table, where)
            found.append(a_text(part.get(parts[kind]), f"{where}.{parts[kind]}"))
        return between.join(found)

    def tools(self, given: Any, read: Callable[[dict[str, Any], str], ToolDefinition | None]) -> list[ToolDefinition]:
        """The tools of a request. ``read`` returns the definition of one, or None for one that is not offered. Raises:
        RefusalError, also for two tools of one name, and for names that no server takes."""
        found: dict[str, ToolDefinition] = {}
        for n, tool in enumerate(a_list(given, "tools") if given is not None else ()):
            at = f"tools[{n}]"
            one = read(an_object(tool, at), at)
            if one is None:
                continue
            name = one["function"]["name"]
            if not _TOOL_NAME.fullmatch(name):
                raise RefusalError("a tool's name has 1 to 128 letters, digits and characters of _ - . : /", param=at)
            if name in found:
                raise RefusalError(f"there is another tool of the name {name!r}", param=at)
            found[name] = one
        return list(found.values())

    def history(
        self,
        opening: Any,
        elements: Any,
        at: str,
        take: Callable[[Reading, Any, str, list[Message]], None],
        known: Histories | None,
    ) -> list[Message]:
        """The messages of a request in the form that chat templates take: one system message, which is the first (later
        ones become the user's), and assistant messages as the agent's own loop keeps them.

        ``opening`` is the system's text outside of the messages; ``take`` reads one of the ``elements`` and adds its
        messages to a list. A beginning that is ``known`` is not read again: its messages are the same objects. Raises:
        RefusalError, also for a result without a call before it.
        """
        listed = a_list(elements, at)
        try:
            keys = [] if known is None else keys_of(opening, listed)
        except ValueError as error:  # JSON may nest deeper than what its keys are made of
            raise RefusalError(f"nests more than {DEEPEST_REQUEST} levels deep", param=at) from error
        before = Read() if known is None else known.longest(keys)
        inner = Reading()
        added: list[Message] = [] if before.keys else [{"role": "system", "content": opening}]
        for n in range(max(0, len(before.keys) - 1), len(listed)):
            if deeper_than(listed[n], DEEPEST_REQUEST):
                raise RefusalError(f"nests more than {DEEPEST_REQUEST} levels deep", param=f"{at}[{n}]")
            take(inner, listed[n], f"{at}[{n}]", added)
        read = inner.settled(before, keys, added)
        if not read.messages:
            raise RefusalError("there is no message with a text", param=at)
        if known is not None and read.messages[-1]["role"] in ("user", "tool"):  # an assistant's may not be complete
            known.keep(read, before)
        self.dropped += read.dropped
        self._overruled |= dict.fromkeys(read.overruled)
        return list(read.messages)

    def settled(self, before: Read, keys: list[bytes], added: list[Message]) -> Read:
        """What was read before, and what was ``added``. Raises: RefusalError."""
        found, asked = list(before.messages), set(before.call_ids)
        opening = 0
        if not before.keys:
            opening = next((n for n, one in enumerate(added) if one["role"] != "system"), len(added))
            system = "\n\n".join(filter(None, (one["content"] for one in added[:opening])))
            found = [{"role": "system", "content": system}] if system else []
        for message in added[opening:]:
            asked.update(call["id"] for call in message.get("tool_calls") or ())
            if message["role"] == "tool" and message["tool_call_id"] not in asked:
                raise RefusalError(f"no call before it has the id {message['tool_call_id']!r} of this result")
            if message["role"] == "system":
                self.drop("role of a later system message")
                message = {**message, "role": "user"}
            elif message["role"] == "assistant":
                message = as_history(message, requested_calls(message, len(found)))
            found.append(message)
        overruled = tuple(dict.fromkeys((*before.overruled, *self.overruled)))
        return Read(keys, found, frozenset(asked), before.dropped + self.dropped, overruled)


def body_of(given: Any, history: str) -> dict[str, Any]:
    """A request's body; ``history`` is the field that :meth:`Reading.history` reads. Raises: RefusalError when it is no
    object, or nests too deeply for what reads it."""
    body = an_object(given, "")
    if deeper_than({name: value for name, value in body.items() if name != history}, DEEPEST_REQUEST):
        raise RefusalError(f"the request nests more than {DEEPEST_REQUEST} levels deep")
    return body


def an_object(given: Any, at: str) -> dict[str, Any]:
    """Raises: RefusalError when it is none."""
    if not isinstance(given, dict):
        raise RefusalError(f"has to be an object, not {_kind(given)}", param=at or "body")
    return given


def a_list(given: Any, at: str) -> list[Any]:
    """Raises: RefusalError when it is none."""
    if not isinstance(given, list):
        raise RefusalError(f"has to be a list, not {_kind(given)}", param=at)
    return given


def a_text(given: Any, at: str, *, default: str | None = None) -> str:
    """Text that can be encoded. Raises: RefusalError when it is none, or missing without a default."""
    if given is None and default is not None:
        return default
    if not isinstance(given, str):
        raise RefusalError(f"has to be a string, not {_kind(given)}", param=at)
    return clean_text(given)


def a_name(given: Any, at: str) -> str:
    """Text that is not empty. Raises: RefusalError."""
    if not (found := a_text(given, at)):
        raise RefusalError("is empty", param=at)
    return found


def a_limit(given: Any, at: str) -> int | None:
    """A number of tokens, if there is one. Raises: RefusalError when it is none."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise RefusalError("has to be a whole number of at least 1", param=at)
    return given


def a_flag(given: Any, at: str) -> bool:
    """Raises: RefusalError when it is neither true, false nor missing."""
    if given is not None and not isinstance(given, bool):
        raise RefusalError(f"has to be true or false, not {_kind(given)}", param=at)
    return bool(given)


def function_of(given: Mapping[str, Any], at: str, schema: str) -> ToolDefinition:
    """The definition of the function at this path, whose field ``schema`` has the schema of its parameters. Raises:
    RefusalError."""
    return function_tool(
        a_name(given.get("name"), f"{at}.name"),
        a_text(given.get("description"), f"{at}.description", default=""),
        _parameters(given.get(schema), f"{at}.{schema}"),
    )


def _parameters(given: Any, at: str) -> dict[str, Any] | None:
    """A tool's schema, if it has one. Raises: RefusalError where it is none: a chat template would fail on it."""
    if given is None:
        return None
    found = an_object(given, at)
    if found.get("type") not in (None, "object"):
        raise RefusalError("has to be 'object'", param=f"{at}.type")
    for n, name in enumerate(a_list(found.get("required") or [], f"{at}.required")):
        a_text(name, f"{at}.required[{n}]")
    _check_schema(found, at)
    return found


def _check_schema(given: Any, at: str) -> None:
    """Raises: RefusalError where a schema, or one inside it, has not the shape of one."""
    if given is None or isinstance(given, bool):
        return
    schema = an_object(given, at)
    types = schema.get("type") or []
    for name in types if isinstance(types, list) else [types]:
        a_text(name, f"{at}.type")
    for field in _SCHEMA_MAPS & schema.keys():
        for name, inner in an_object(schema[field] or {}, f"{at}.{field}").items():
            _check_schema(inner, f"{at}.{field}.{name}")
    for field in _SCHEMA_LISTS & schema.keys():
        for n, inner in enumerate(a_list(schema[field] or [], f"{at}.{field}")):
            _check_schema(inner, f"{at}.{field}[{n}]")
    for field in _SCHEMA_INNER & schema.keys():
        if not isinstance(schema[field], list):  # of a tuple's entries, as they were once written
            _check_schema(schema[field], f"{at}.{field}")


def a_call_id(given: Any, at: str) -> str:
    """The id of a call, for the call and its result: one that servers would refuse is replaced by its digest. Raises:
    RefusalError when it is empty."""
    found = a_name(given, at)
    return sendable_id(found, "") or f"call_{hashlib.blake2b(found.encode(), digest_size=16).hexdigest()}"


def call_of(call_id: Any, name: Any, arguments: Any, at: str) -> dict[str, Any]:
    """A call in the assistant's message at this path. Raises: RefusalError."""
    if isinstance(arguments, dict):
        arguments = as_json(arguments)
    text = a_text(arguments, f"{at}.arguments", default="")
    function = {"name": a_name(name, f"{at}.name"), "arguments": text}
    return {"id": a_call_id(call_id, f"{at}.id"), "type": "function", "function": function}


def result_of(call_id: Any, content: str, at: str) -> Message:
    """The message with a call's result; ``at`` is the path of the call's id. Raises: RefusalError."""
    return {"role": "tool", "tool_call_id": a_call_id(call_id, at), "content": content}


def _media_type(part: Mapping[str, Any]) -> str:
    """What some content says of its own format, if anything."""
    for fields in (part, *(value for value in part.values() if isinstance(value, dict))):
        for name, value in fields.items():
            if not isinstance(value, str):
                continue
            if found := _DATA_URL.match(value):
                return found[1]
            if name in ("media_type", "mimeType", "mime_type", "format") and _MEDIA.fullmatch(value):
                return value
    return ""


def _absent(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _kind(value: Any) -> str:
    return {"NoneType": "nothing", "dict": "an object", "list": "a list", "str": "a string"}.get(
        type(value).__name__, "a number" if not isinstance(value, bool) else "a truth value"
    )
