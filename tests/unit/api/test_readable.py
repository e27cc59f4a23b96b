"""Web pages as text: what is read, what is left out, what no page can do."""

from __future__ import annotations

import pytest

from agentenv.api.web.readable import readable

PAGE = """<!doctype html><html><head><title> The  title </title><style>p { color: red }</style></head><body>
<nav><a href="/home">Home</a></nav><header><h2>Site</h2></header>
<main><h1>Head</h1><p>Some <b>bold</b> words &amp; a <a href="../rel?a=1">link</a>.</p>
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<ul><li>one</li><li>two</li></ul><pre><code>x = 1
y = 2</code></pre><script>alert("no")</script><a href="javascript:alert(1)">bad</a>
<img alt="pic" src="data:image/png;base64,AAAA"></main>
<aside>Buy this</aside><footer>Imprint</footer></body></html>"""


def test_the_main_part_with_its_structure() -> None:
    read = readable(PAGE, "http://host/dir/page")
    assert read.title == "The  title"
    assert "# Head" in read.text
    assert "Some **bold** words & a [link](http://host/rel?a=1)." in read.text
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in read.text
    assert "- one\n- two" in read.text
    assert "x = 1\ny = 2" in read.text
    for gone in ("Home", "Site", "alert", "Buy this", "Imprint", "color", "base64", "javascript"):
        assert gone not in read.text
    assert not read.truncated


def test_without_a_main_part_what_is_around_is_left_out() -> None:
    articles = "<article><header><p>by</p></header>a</article><article>b</article>"
    page = f"<body><nav>menu</nav><header>top</header><div>words</div>{articles}</body>"
    assert readable(page, "http://h/").text.split() == ["words", "by", "a", "b"]


def test_a_small_main_is_not_what_a_page_is_about() -> None:
    assert "long" in readable("<body><main>x</main><div>" + "long text " * 20 + "</div></body>", "http://h/").text


def test_a_page_of_nothing_but_navigation_is_shown() -> None:
    assert "[a](http://h/a)" in readable("<body><nav><a href=/a>a</a></nav></body>", "http://h/").text


@pytest.mark.parametrize(
    "html",
    ["", "plain words", "<", "<a href='http://[::1'>x</a>", "<div>" * 3_000 + "deep", "<table>" * 500, "\0\ud800",
     "<main></main>", "<!doctype", "<title>" * 100, "<svg><script>", "<a href>x</a><img>", "<ul><li>" * 700 + "x"],
)  # fmt: skip
def test_no_page_makes_it_raise(html: str) -> None:
    read = readable(html, "http://h/")
    assert isinstance(read.text, str)
    assert ("deep" in html) == ("deep" in read.text)


def test_a_page_longer_than_is_read_says_so() -> None:
    read = readable("<p>" + "word " * 320_000, "http://h/")
    assert read.truncated
