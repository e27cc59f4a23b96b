"""What a wire model holds comes out of its JSON as it went in: any value that a field takes, and any JSON."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from agentenv.errors import ConfigError
from agentenv.wire.base import WireModel
from agentenv.wire.calls import CallResult
from tests.golden.test_wire_samples import MODELS

TEXTS = (
    "",
    " ",
    "\n",
    "\r\n",
    "\0",
    "\x7f\u2028",
    "\\u0000",
    "é\U0001f600",
    "e\u0301",
    "NaN",
    "null",
    "0",
    "x" * 300,
    '"',
)
NUMBERS = (0, -0.0, 1, -1, 0.1, 5e-324, 1e308, 2**53 + 1, 2**63, 10**30, math.nan, math.inf, -math.inf)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    b"",
    b"\xff\x00",
    b"text",
    (),
    (b"\xff",),
    {},
    {"": None},
    {"a": [math.nan]},
    ("", "\0"),
    [[]],
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("sample", MODELS, ids=lambda sample: type(sample).__name__)
def test_a_model_is_what_its_json_says(sample: WireModel) -> None:
    kind = type(sample)
    values = {name: getattr(sample, name) for name in kind.model_fields}
    for name in values:
        for value in (*TEXTS, *NUMBERS, *OTHERS):
            _check(kind, {**values, name: value})


def _check(kind: type[WireModel], values: dict[str, Any]) -> None:
    try:
        model = kind(**values)
    except (ValidationError, ConfigError):  # the second is of a root, or a network
        return
    encoded = model.model_dump_json()
    again = kind.model_validate_json(encoded)
    assert again == model
    assert again.model_dump_json() == encoded


@given(TREES)
def test_any_json_is_carried_as_a_reply(content: JsonValue) -> None:
    result = CallResult(id="c", content=content)
    assert CallResult.model_validate_json(result.model_dump_json()).content == content
