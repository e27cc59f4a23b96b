"""Anything as JSON: for records that must be written whatever an environment put into them. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

ID_KEYS = ("id", "item_id", "task_id", "instance_id", "name")


def clean_text(text: str) -> str:
    """``text`` without lone surrogates (JSON can carry them, UTF-8 cannot): each becomes ``?``."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def jsonable(value: Any) -> Any:
    """``value`` with everything JSON has no word for replaced by its ``repr``."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(entry) for entry in value), key=str)
    return repr(value)


def item_record(item: Any) -> dict[str, Any]:
    """An item as a JSON object."""
    record = jsonable(item)
    return record if isinstance(record, dict) else {"item": record}


def item_id(item: Any) -> str:
    """The item's own id where it has one, else a digest of its content: the same for the same item."""
    if isinstance(item, Mapping):
        for key in ID_KEYS:
            if isinstance(item.get(key), (str, int)) and str(item[key]):
                return str(item[key])
    text = json.dumps(jsonable(item), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
