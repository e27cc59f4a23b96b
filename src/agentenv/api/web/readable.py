"""Converts a web page to Markdown for a model: its main part with links, without scripts and navigation.

``python -m agentenv.api.web.readable`` runs it as a process: HTML on stdin, JSON on stdout. A malicious page may take
minutes or gigabytes to parse; a process can be killed, and has no secrets.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Final
from urllib.parse import urljoin

from bs4 import BeautifulSoup, Tag
from markdownify import MarkdownConverter

_MACHINERY: Final = (
    "script", "style", "noscript", "template", "svg", "canvas", "iframe", "object", "embed",
    "button", "input", "select", "textarea", "dialog", "link", "meta", "title",
)  # fmt: skip
_AROUND: Final = ("nav", "header", "footer", "aside", "[role=navigation]", "[role=banner]", "[role=contentinfo]")
_MAIN: Final = ("main", "[role=main]", "article")
_LEAST_SHARE: Final = 0.25
"""A <main> with a smaller share of the page's text is not its main part."""
_MOST_CHARS: Final = 1_500_000
_MOST_MEMORY_BYTES: Final = 1024**3
_MOST_CPU_S: Final = 60
_BLANK: Final = re.compile(r"(?<![ \t])[ \t]+\n")  # each run of blanks is looked at once
_GAPS: Final = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Readable:
    """``truncated``: the page exceeded the size limit for parsing."""

    title: str
    text: str
    truncated: bool


def readable(html: str, url: str) -> Readable:
    """The page's title and main text. Never raises, whatever the page contains; takes seconds per MB."""
    whole = html[:_MOST_CHARS].encode("utf-8", "replace").decode()
    with warnings.catch_warnings(action="ignore"):  # it warns about pages that look like a file name
        soup = BeautifulSoup(whole, "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    for part in soup.find_all(_MACHINERY):
        part.decompose()
    _make_links_whole(soup, url)
    text = _markdown(_main_part(soup))
    return Readable(title[:500], text, len(html) > _MOST_CHARS)


def _main_part(soup: BeautifulSoup) -> Tag:
    whole: Tag = soup.body or soup
    all_chars = len(whole.get_text())
    for selector in _MAIN:
        found = soup.select(selector)
        if len(found) == 1 and len(found[0].get_text()) >= _LEAST_SHARE * all_chars > 0:
            return found[0]
    around = [part for part in whole.select(",".join(_AROUND)) if not part.find_parent("article")]
    rest_chars = all_chars - sum(len(part.get_text()) for part in around)
    if rest_chars > 0:  # a page with nothing but navigation is shown completely
        for part in around:
            if not part.decomposed:
                part.decompose()
    return whole


def _make_links_whole(soup: BeautifulSoup, url: str) -> None:
    for name, attribute in (("a", "href"), ("img", "src")):
        for tag in soup.find_all(name):
            target = str(tag.get(attribute) or "")
            if target.startswith(("data:", "javascript:")) or not target:
                del tag[attribute]
                continue
            try:
                tag[attribute] = urljoin(url, target)
            except ValueError:
                del tag[attribute]


def _markdown(part: Tag) -> str:
    try:
        text = MarkdownConverter(heading_style="ATX", bullets="-").convert_soup(part)
    except RecursionError:  # nested a thousand levels deep: no structure worth keeping
        text = part.get_text("\n")
    return _GAPS.sub("\n\n", _BLANK.sub("\n", text)).strip()


def main() -> None:
    """``python -m agentenv.api.web.readable URL``: one page from stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    html = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.stdout.write(json.dumps(asdict(readable(html, sys.argv[1]))))


if __name__ == "__main__":
    main()
