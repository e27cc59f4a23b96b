"""JSON as models write it, read without a change: what Python cannot hold as it is written is an error. Pure.

Python's own reader keeps the last of two equal keys, reads ``1e400`` as infinity, and reads NaN, which is not JSON.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

MOST_DIGITS: Final = 4300
"""Of a whole number: Python converts no longer ones."""


def read_json(text: str, *, strict: bool = True) -> Any:
    """The value of ``text``. Raises as :func:`read_json_at` does, also when something follows the value."""
    value, end = read_json_at(text, len(text) - len(text.lstrip()), strict=strict)
    if rest := text[end:].lstrip():
        raise json.JSONDecodeError("Extra data", text, len(text) - len(rest))
    return value


def read_json_at(text: str, at: int, *, strict: bool = True) -> tuple[Any, int]:
    """The value that begins at ``at``, and where it ends. Without ``strict``, strings may contain raw line breaks and
    other control characters, which have one meaning.

    Raises: JSONDecodeError where the text is not JSON; ValueError when an object has a key twice, a number has no
    exact place in Python (NaN, infinity, too large or too small for a double, too many digits), or values are nested
    too deeply.
    """
    try:
        return (_STRICT if strict else _LENIENT).raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {json.dumps(name[:80])} appears twice")
        values[name] = value
    return values


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text)


def _fraction(text: str) -> float:
    number = float(text)
    vanished = number == 0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])
    if vanished or not math.isfinite(number):
        raise ValueError(f"{text[:80]} is beyond the range of numbers")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_STRICT, _LENIENT = (
    json.JSONDecoder(
        strict=strict,
        object_pairs_hook=_object,
        parse_int=_integer,
        parse_float=_fraction,
        parse_constant=_constant,
    )
    for strict in (True, False)
)
