"""Any value as JSON, so that records can be written whatever an environment put into them. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

ID_KEYS = ("id", "item_id", "task_id", "instance_id", "name")

DEEPEST_ARGUMENTS = 100
"""Maximum nesting of lists and objects in a call's arguments; deeper calls are refused."""
DEEPEST_RECORDED = 200
"""Maximum nesting of values in records."""
_SIMPLE = (str, int, float, type(None))


def clean_text(text: str) -> str:
    """``text`` without lone surrogates (JSON can carry them, UTF-8 cannot): each becomes what Python writes for it,
    ``\\udc80``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def deeper_than(value: Any, levels: int) -> bool:
    """Whether ``value`` nests lists and objects more than ``levels`` deep. Does not recurse: a kilobyte of text can
    nest deeper than Python's stack, and most code that reads or writes such a value may fail."""
    inner = [value] if _nests(value) else []
    for _ in range(levels):
        inner = [part for each in inner for part in _parts(each)]
        if not inner:
            return False
    return bool(inner)


def _parts(value: Any) -> list[Any]:
    """The lists and objects directly inside a list or object."""
    found = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [part for part in found if _nests(part)]


def _nests(value: Any) -> bool:
    # An abstract class is asked last, because that takes long and most values are simple.
    return not isinstance(value, _SIMPLE) and isinstance(value, (dict, list, tuple, Mapping))


def jsonable(value: Any, levels: int = DEEPEST_RECORDED) -> Any:
    """``value`` with everything JSON cannot express replaced by its ``repr``, and everything nested deeper than
    ``levels`` by a note."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)) and levels == 0:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        entries: dict[str, Any] = {}
        for key, entry in value.items():
            name = clean_text(str(key))
            while name in entries:  # 1 and "1"
                name = f"{name} ({type(key).__name__})"
            entries[name] = jsonable(entry, levels - 1)
        return entries
    if isinstance(value, (list, tuple)):
        return [jsonable(entry, levels - 1) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(entry, levels - 1) for entry in value), key=str)
    return repr(value)


def item_record(item: Any) -> dict[str, Any]:
    """An item as a JSON object."""
    record = jsonable(item)
    return record if isinstance(record, dict) else {"item": record}


def item_id(item: Any) -> str:
    """The item's own id if it has one, else a digest of its content, which is the same for the same item."""
    if isinstance(item, Mapping):
        for key in ID_KEYS:
            if isinstance(item.get(key), (str, int)) and str(item[key]):
                return str(item[key])
    text = json.dumps(jsonable(item), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
