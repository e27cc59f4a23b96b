"""The browser tools' pure parts: refs, and what a snapshot says of them."""

from __future__ import annotations

import pytest

from agentenv.api.web.browser import plain_ref
from agentenv.api.web.chromium import described

SNAPSHOT = """- generic [active] [ref=e1]:
  - button "Buy [ref=e9]" [disabled] [ref=e2]
  - 'link "a: \\"b\\"" [ref=e3] [cursor=pointer]':
    - /url: /x
  - paragraph [ref=e12]: text with [ref=e5] in it
  - iframe [ref=e4]:
    - button "In a frame" [ref=f2e1]"""


@pytest.mark.parametrize("text", ["e5", "@e5", "ref=e5", "[ref=e5]", " e5 "])
def test_a_ref_is_read_as_it_is_written_elsewhere(text: str) -> None:
    assert plain_ref(text) == "e5"


@pytest.mark.parametrize("text", ["", "5", "button", "#buy", "e5 >> body", "e5e6", "e٣"])
def test_what_is_no_ref_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as e5"):
        plain_ref(text)


@pytest.mark.parametrize(
    ("ref", "element"),
    [
        ("e1", "generic"),
        ("e2", 'button "Buy [ref=e9]"'),
        ("e3", 'link "a: \\"b\\""'),
        ("e12", "paragraph"),
        ("f2e1", 'button "In a frame"'),
        ("e5", None),  # only in a text
        ("e9", None),  # only in a name
        ("e", None),
    ],
)
def test_an_element_is_what_the_snapshot_calls_it(ref: str, element: str | None) -> None:
    assert described(SNAPSHOT, ref) == element
