"""What the policy wrote is what runs, or the model is told: never another call, with any text in any value.

The texts are rendered by programs that are not ours (``raw_forms``). Where values are quoted, every call must be read
exactly. Where they are not, a call may be Malformed, and what is read must render to the very text that was written.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.agent.parsers import PARSERS, Parsed, parser_named
from tests.unit.agent.parser_samples import tool
from tests.unit.agent.raw_forms import BARE_FAMILIES, COMMON, END, JSON_FAMILIES, MARKS, Calls, Layout, raw_text

STRING = {"type": "string"}
TOOLS = [
    tool(
        "f", s=STRING, t=STRING, n={"type": "integer"}, x={"type": "number"}, b={"type": "boolean"},
        a={"type": "array", "items": {}}, o={"type": "object"}, maybe={"type": ["string", "null"]},
    ),
    tool("g"),
]  # fmt: skip
BETWEEN_VALUES = {"qwen3_coder": "<parameter=", "glm45": "<arg_value>", "glm47": "<arg_value>"}
"""The mark that a value may not contain: it may mean that a value was not closed."""


def read(family: str, text: str, **options: Any) -> tuple[Parsed, list[tuple[str, Any]]]:
    parsed = parser_named(family).parse(text, TOOLS, **options)
    assert not (parsed.calls and parsed.problem)
    return parsed, [(call.name, call.arguments) for call in parsed.calls]


def exactly(value: Any) -> str:
    """``True``, ``1`` and ``1.0`` are equal in Python, and not in what runs."""
    return json.dumps(value)


def squeezed(text: str) -> str:
    """Without what differs between the two layouts of GLM, which may be mixed in one call."""
    return re.sub(r"\s|\\n", "", text)


def check(family: str, calls: Calls, layout: Layout, *, exact: bool) -> None:
    text = raw_text(family, calls, layout)
    for written in (text, "I look.\n" + text + END[family], "<think>hm</think>\n\n" + text):
        parsed, found = read(family, written)
        if parsed.problem and not exact:
            kept = written.removeprefix("<think>hm</think>").removesuffix(END[family])
            assert parsed.content == kept or "<think>" in text  # which is reasoning, if a call seems to end before it
            continue
        assert not parsed.problem, (written, parsed.problem)
        if exact or family in JSON_FAMILIES:
            assert exactly(found) == exactly(list(calls)), written
        else:
            assert found, written
            assert exactly(found) == exactly(list(calls)) or squeezed(raw_text(family, found, layout)) == squeezed(text)
        assert parsed.content == ("I look." if written.startswith("I") else "")
        assert parsed.reasoning == ("hm" if written.startswith("<think>") else "")


def placed(mark: str) -> list[str]:
    return [
        mark,
        f"{mark} end",
        f"echo {mark}",
        f"a\n{mark}\nb",
        f"{mark}{mark}",
        f"  {mark}\n",
        f"'{mark}' f && rm -rf b",
    ]


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_marks_inside_json_are_text(family: str, layout: Layout) -> None:
    every = [mark for marks in MARKS.values() for mark in marks]
    for mark in dict.fromkeys([*every, *COMMON]):
        for text in placed(mark):
            check(family, [("f", {"s": text, "t": text}), ("g", {}), ("f", {"o": {text: [text]}})], layout, exact=True)


@pytest.mark.parametrize("family", BARE_FAMILIES)
def test_marks_inside_unquoted_values_are_text_or_told(family: str) -> None:
    """Exact, but for the mark that begins a value and for marks in the order in which they end one."""
    own = MARKS[family]
    for mark in dict.fromkeys([*own, *COMMON, *MARKS["hermes"], *MARKS["mistral"]]):
        alone = mark in COMMON or mark.count("<") <= 1
        for text in placed(mark):
            exact = alone and BETWEEN_VALUES[family] not in text
            for arguments in ({"s": text}, {"s": text, "t": "end"}, {"t": "begin", "s": text}):
                check(family, [("f", arguments)], "plain", exact=exact)
            check(family, [("g", {}), ("f", {"s": text, "t": text}), ("g", {})], "plain", exact=exact)
            check(family, [("f", {"o": {text: [text]}, "a": [text]})], "plain", exact=False)


@pytest.mark.parametrize("family", BARE_FAMILIES)
@pytest.mark.parametrize(
    "text",
    ["", " ", "\n", "\n\n", "  x = 1\ny = 2\n", "\tx\t", "\xa0x\xa0", "null", "NULL", "None", "true", "True", "5",
     "1e5", "007", "1.0", "[1]", "['a']", '"q"', "{}", "NaN", "&lt;", "\\n", "\r\n", "a\r\n"],
)  # fmt: skip
def test_a_string_keeps_every_byte(family: str, text: str) -> None:
    check(family, [("f", {"s": text})], "plain", exact=True)
    check(family, [("f", {"t": text, "s": text}), ("f", {"s": text, "t": "x"})], "plain", exact=True)


words = st.lists(
    st.sampled_from(sorted({*COMMON, *(mark for marks in MARKS.values() for mark in marks)})) | st.text(max_size=6),
    max_size=6,
).map("".join)
texts = words.filter(lambda text: text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text))
numbers = st.integers(-(2**70), 2**70)
fractions = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | fractions | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": texts, "t": texts, "n": numbers, "x": numbers | fractions, "b": st.booleans(),
        "a": st.lists(values, max_size=3), "o": st.dictionaries(texts, values, max_size=3),
        "maybe": st.just("text"),
    },
)  # fmt: skip
several = st.lists(st.tuples(st.just("f"), arguments) | st.just(("g", {})), min_size=1, max_size=3)


@pytest.mark.parametrize("family", PARSERS)
@given(calls=several, layout=st.sampled_from(get_args(Layout)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_calls_are_read_exactly_or_told(family: str, calls: Any, layout: Layout) -> None:
    check(family, calls, layout, exact=family in JSON_FAMILIES)


@pytest.mark.parametrize("family", PARSERS)
def test_a_message_cut_at_any_place_runs_only_whole_calls_of_it(family: str) -> None:
    for mark in (*MARKS[family], "x", "</think>"):
        if mark.count("<") > 1:  # a call may really end there
            continue
        calls: Calls = [("f", {"s": f"rm -rf '{mark}' b", "t": f"{mark}\n"}), ("g", {}), ("f", {"o": {mark: mark}})]
        text = "so: " + raw_text(family, calls)
        for end in range(len(text)):
            parsed, found = read(family, text[:end])
            if not parsed.open_ended:
                assert exactly(found) == exactly(list(calls[: len(found)])), text[:end]


@pytest.mark.parametrize("family", PARSERS)
def test_calls_drafted_while_reasoning_never_run(family: str) -> None:
    meant: Calls = [("f", {"s": "ls"})]
    for mark in (*MARKS[family], *COMMON):
        draft = raw_text(family, [("f", {"s": f"rm {mark} x"}), ("g", {})])
        for written, options in (
            (f"<think>{draft}</think>\n{raw_text(family, meant)}", {}),
            (f"{draft}</think>\n{raw_text(family, meant)}", {"reasoning_open": True}),
            (f"<think>{draft}</think>Done.", {}),
        ):
            parsed, found = read(family, written, **options)
            assert parsed.problem or found == (meant if written.endswith(raw_text(family, meant)) else []), written


@pytest.mark.parametrize("family", PARSERS)
@pytest.mark.parametrize("broken", ["first", "last"])
def test_a_broken_call_takes_no_other_with_it(family: str, broken: str) -> None:
    """Nothing runs: what seems to be the next call may be a part of the broken one's value."""
    whole = raw_text(family, [("f", {"s": "ls"})])
    for end in range(len(raw_text(family, [("g", {})])) // 2, len(whole) - len(END[family])):
        cut = whole[:end] if family != "llama3_json" else whole[: max(end, whole.index('"parameters"') + 13)]
        if not parser_named(family).parse(cut, TOOLS).problem:
            continue
        text = f"{cut}\n{whole}" if broken == "first" else f"{whole}\n{cut}"
        parsed, found = read(family, text)
        assert parsed.problem, text
        assert found == []
        assert parsed.content == text


@pytest.mark.parametrize("family", PARSERS)
def test_text_around_calls_is_kept(family: str) -> None:
    call = raw_text(family, [("f", {"s": "ls"})])
    parsed, found = read(family, f"before\n{call}\nbetween\n{call} behind {END[family]}")
    assert [name for name, _ in found] == ["f", "f"]
    assert parsed.content == "before\nbetween\nbehind"


@pytest.mark.parametrize("family", JSON_FAMILIES)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"s": "ls", "s": "rm"}', 'the key "s" appears twice'),
        ('{"o": {"k": 1, "k": 2}}', 'the key "k" appears twice'),
        ('{"s": "ls", "\\u0073": "rm"}', 'the key "s" appears twice'),
        ('{"x": NaN}', "NaN is not a JSON value"),
        ('{"x": -Infinity}', "-Infinity is not a JSON value"),
        ('{"x": 1e400}', "1e400 is beyond the range of numbers"),
        ('{"x": 1e-400}', "1e-400 is beyond the range of numbers"),
        ('{"n": ' + "9" * 5000 + "}", "a number has 5000 digits; at most 4300 are read"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "it is nested too deeply"),
    ],
)
def test_json_that_python_would_change_is_told(family: str, arguments: str, reason: str) -> None:
    text = raw_text(family, [("f", {"s": "MARK"})]).replace('{"s": "MARK"}', arguments)
    parsed, found = read(family, text)
    assert found == []
    assert parsed.problem.endswith(reason)


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_json_keeps_every_value(family: str) -> None:
    written = (
        '{"n": 9007199254740993, "x": 1.0, "s": "\\u0000\\ud83d\\ude00<\\/", "a": [1E2, -0.0, true], "o": {"": null}}'
    )
    _, found = read(family, raw_text(family, [("f", {"s": "MARK"})]).replace('{"s": "MARK"}', written))
    expected = {"n": 2**53 + 1, "x": 1.0, "s": "\0😀</", "a": [100.0, -0.0, True], "o": {"": None}}
    assert exactly(found) == exactly([("f", expected)])


@pytest.mark.parametrize("family", BARE_FAMILIES)
@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("n", "9007199254740993", 2**53 + 1), ("n", " 5\n", 5), ("n", "1.0", 1.0), ("n", "1.5", "1.5"),
        ("n", "007", "007"), ("n", "1_000", "1_000"), ("n", "٣", "٣"), ("n", "five", "five"), ("n", '"5"', '"5"'),
        ("n", "true", "true"), ("n", "null", None), ("n", "9" * 5000, "9" * 5000),
        ("x", "9007199254740993", 2**53 + 1), ("x", "3.0", 3.0), ("x", "1e400", "1e400"), ("x", "1e-400", "1e-400"),
        ("x", "NaN", "NaN"), ("x", "inf", "inf"), ("x", "2.50", 2.5),
        ("b", "True", True), ("b", " false ", False), ("b", "yes", "yes"), ("b", "1", "1"), ("b", "None", None),
        ("a", "['a', None, True, (1, -2.5)]", ["a", None, True, [1, -2.5]]), ("a", "{'a': 1}", "{'a': 1}"),
        ("a", "[1e400]", "[1e400]"), ("a", "['x', 1e-999]", "['x', 1e-999]"), ("a", "[b'x']", "[b'x']"),
        ("a", "[-True]", "[-True]"), ("a", "[-1e999, 'x']", "[-1e999, 'x']"), ("a", "[1j]", "[1j]"), ("a", "5", "5"),
        ("o", "{'a': 1}", {"a": 1}), ("o", "{'a': 1, 'a': 2}", "{'a': 1, 'a': 2}"), ("o", "{1: 2}", "{1: 2}"),
        ("o", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'), ("o", "{**{}}", "{**{}}"),
        ("maybe", "null", None), ("maybe", "None", "None"), ("maybe", " null", " null"),
    ],
)  # fmt: skip
def test_values_by_type_are_never_changed(family: str, key: str, text: str, expected: Any) -> None:
    """What fits no type stays the text, which validation refuses by name."""
    _, found = read(family, raw_text(family, [("f", {"s": "x", key: "MARK"})]).replace("MARK", text))
    assert exactly(found) == exactly([("f", {"s": "x", key: expected})])


@pytest.mark.parametrize("family", BARE_FAMILIES)
def test_an_argument_given_twice_is_told(family: str) -> None:
    text = raw_text(family, [("f", {"s": "ls", "T": "rm"})]).replace("T", "s")
    parsed, found = read(family, text)
    assert found == []
    assert "'s' twice" in parsed.problem


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '{"name": "f", "arguments": {}}\n</tool_call>'),
        ("glm45", "f\n<arg_key>s</arg_key>\n<arg_value>ls</arg_value>\n"),
        ("qwen3_coder", "<parameter=s>\nls\n</parameter>\n</function>"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS]f{"s": "echo "} # "}'),
        ("mistral", '[TOOL_CALLS]a b[CALL_ID]x[ARGS]{}'),
        ("llama3_json", '{"name": "f", "parameters": {"s": "echo "}} # "}}'),
        ("llama3_json", '{"name": "f", "parameters": {}, "arguments": {}}'),
        ("llama3_json", '{"parameters": {"s": "d = " {"name": "g", "parameters": {}}"}, "name": "f"}'),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}, "arguments": {}}</tool_call>'),
        ("qwen", '<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|><|tool_call_begin|>functions.f:0"
                    "<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁call▁end｜><｜tool▁call▁begin｜>function"
                        "<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
    ],
)  # fmt: skip
def test_calls_without_a_beginning_or_of_two_minds_are_told(family: str, text: str) -> None:
    parsed, found = read(family, text)
    assert parsed.problem
    assert found == []
