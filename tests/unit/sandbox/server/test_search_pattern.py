from __future__ import annotations

import contextlib
import gc
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.server.tools.search import Translated, translated
from agentenv.wire.tools import SearchArguments


def made(pattern: str, **more: bool) -> Translated:
    return translated(SearchArguments(pattern=pattern, **more))


@pytest.mark.parametrize(
    ("pattern", "posix"),
    [
        ("abc", "abc"),
        (r"\d+\.\d*", r"[0-9]+\.[0-9]*"),
        (r"\bdef \w+\(", r"\bdef [[:alnum:]_]+\("),
        (r"(?:a|b)+?", "(a|b)+"),
        (r"(?P<name>a)(?<b>c)", "(a)(c)"),
        (r"a{2,3}b{4}c{2,}?", "a{2,3}b{4}c{2,}"),
        ("x{", r"x\{"),
        ("x{,3}", "x{0,3}"),
        ("x{a}", r"x\{a\}"),
        (r"[\w.-]", "[.[:alnum:]_-]"),
        (r"[\]^-]", "[]^-]"),
        ("[^]a]", "[^]a]"),
        ("[^^]", "[^^]"),
        ("[]]", "[]]"),
        (r"[\^]", r"\^"),
        ("[a-z0-9_]", "[a-z0-9_]"),
        (r"[[:alpha:]\d]", "[[:alpha:]0-9]"),
        (r"[\\n]", r"[\n]"),
        (r"\x41\u00e9\x{1F600}", "Aé😀"),
        (r"\A\t$\Z", "^\t$$"),
        ("]}", r"\]\}"),
    ],
)
def test_what_models_write_becomes_posix(pattern: str, posix: str) -> None:
    assert made(pattern).pattern == posix


def test_flags_and_literals() -> None:
    assert made("a.b", literal=True) == Translated("a.b", "F")
    assert made("a.b", literal=True, ignore_case=True) == Translated(r"a\.b", "i")
    assert made("(?i)a.b") == Translated("a.b", "i")
    assert made("a.b", ignore_case=True).flags == "i"


@pytest.mark.parametrize(
    ("pattern", "needle"),
    [
        ("import os", "import os"),
        (r"def \w+_total\(", "_total("),
        ("foo|barbar", ""),
        ("abcd?ef", "abc"),
        ("(abcd)?efg", "efg"),
        ("(?i)abcd", ""),
        ("ab", ""),
        ("abcd*", "abc"),
        (r"abc\+def", "abc+def"),
        ("abc{2}d", ""),
    ],
)
def test_the_needle_is_in_every_matching_line(pattern: str, needle: str) -> None:
    assert made(pattern).needle == needle


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", r"unclosed '\('"),
        ("[a", r"unclosed '\['"),
        ("*a", "nothing to repeat"),
        ("a\nb", "line break"),
        (r"a\nb", "cannot match"),
        (r"(a)\1", "back-references"),
        ("(?=a)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"\p{L}", r"\\p is not supported"),
        ("a{5000}", "1000 repetitions"),
        ("[z-a]", "is reversed"),
        (r"[\W]", "inside"),
        (r"abc[\p{L}]", r"\\p inside"),
        (r"abc[\P]", r"\\P inside"),
        (r"[\1]", r"\\1 inside"),
        ("[[:nope:]]", "is not a character class"),
        ("a\\", "ends with a backslash"),
        ("a**", "multiple repeat"),
        ("[а-я]" * 20, "may span 512 in all"),
        ("a++", "possessive"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(pattern: str, why: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=why) as caught:
        made(pattern)
    assert "literal" in caught.value.next_step


@settings(max_examples=300)
@example(r"a b[\P]")
@example(r"a b[\x{b}]")
@example("a b(?<a>b)")
@given(st.text(st.sampled_from(r"ab01 .*+?|()[]{}^$\\wdsbx-,:=!<P"), min_size=1, max_size=12))
def test_no_pattern_breaks_the_translator(pattern: str) -> None:
    try:
        done = made(pattern)
    except InvalidArgumentsError:
        return
    try:
        same = re.compile(pattern)
    except re.error:
        assert re.search(r"\\[zx]|\[:|\(\?<", pattern), "only these are understood here and not by Python"
        return
    if done.needle:
        assert all(done.needle in line for line in ("ab", "0101", "a b x") if same.search(line))


@pytest.mark.parametrize("pattern", ["(?i)" + "[!-\uffff]" * 190, "(?i)" + "[ -~]" * 199, "(?i)" + "[!-\u0220]" * 160])
def test_no_pattern_holds_the_loop_up(pattern: str) -> None:
    """In CPU time, which other processes do not change. Each of these took 0.03 to 1 s."""
    gc.disable()  # what other tests have left behind may take longer than the bound
    try:
        began_s = time.process_time()
        with contextlib.suppress(InvalidArgumentsError):
            made(pattern)
        took_s = time.process_time() - began_s
    finally:
        gc.enable()
    assert took_s < 0.02
