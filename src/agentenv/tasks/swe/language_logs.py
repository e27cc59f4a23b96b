"""The status of each test in what test runners of other languages than Python print, as SWE-bench reads it. Pure.

The names and the rules are those of ``swebench`` 5.0.2 (``harness/log_parsers``), which SWE-bench Multilingual,
Multimodal and datasets after their form use; ``tests/golden/swe_answers.json`` has what that package reads.
Every reader takes time in proportion to its log: a policy's code can print what it likes.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from agentenv.tasks.swe.records import TestLog

Named = tuple[str, str] | None
"""A test's name and its status; None: the line has none."""
_MARKS: Final = {"✓": "PASSED", "✔": "PASSED", "✕": "FAILED", "×": "FAILED", "✘": "FAILED", "✖": "FAILED",
                 "○": "SKIPPED", "↓": "SKIPPED", "↩": "SKIPPED"}  # fmt: skip
_WORDS: Final = {
    **dict.fromkeys(("PASS", "pass", "ok", "OK", "passed", "PASSED", "SUCCESS", "."), "PASSED"),
    **dict.fromkeys(("FAIL", "err", "not ok", "FAILED", "failed", "ERR", "FAILURE", "E", "F"), "FAILED"),
    **dict.fromkeys(("SKIP", "skip", "ignore", "O"), "SKIPPED"),
}
"""What runners print for a status."""
_MILLISECONDS: Final = re.compile(r"\s\(\d+\s*m?s\)$")
_VITEST_END: Final = re.compile(r"\s(?:\d+\s*m?s?|\[skipped\])$")
_REDIS: Final = re.compile(r"\[(ok|err|skip|ignore)\]:\s(.+)")
_REDIS_FILE: Final = re.compile(r"(?<!\s)\s+in\s+\S+$")
_GOOGLE: Final = re.compile(r"\[\s*(OK|FAILED)\s*\]\s")
_OPENING: Final = re.compile(r"\s\(")
_CUCUMBER: Final = re.compile(r" (\.+)(F?)")
_UNIT: Final = re.compile(r":\s+(\.|[EFO]\b)")
_ANT: Final = re.compile(r"\[junit\]\s+\[(PASS|FAIL|ERR)\]\s+(.*)")
_TAP: Final = re.compile(r"(ok|not ok) \d+ (.+)")
_CARBON_TIMES: Final = tuple(re.compile(rf"\s\([\d.]+{unit}\)") for unit in ("ms", r"\ss", "s"))
_GROMMET_TIME: Final = re.compile(r"\s\([\d.]+\s?m?s\)$")
_NUMBERED: Final = re.compile(r"\d+\)\s(.*)")
_CHROME: Final = re.compile(r"Chrome\s[\d.]+[^\S\r\n]\(")
_CLOSING: Final = re.compile(r"\)[^\S\r\n]")
_ON_LINUX: Final = re.compile(r"\s\(Linux\sx86_64\)\s")
_BPMN_BROWSERS: Final = tuple(
    map(
        re.compile,
        (
            r"2KPhantomJS\s[\d.]+\s\(Linux\s(?:[\d.]+|x86_64)\)\s",
            r"Chrome\sHeadless\s",
            r"HeadlessChrome\s[\d.]+\s\(Linux\s[\d.]+\)\s",
        ),
    )
)
_CHROME_HEADLESS: Final = re.compile(r"Chrome\sHeadless\s[\d.]+\s\(Linux\s\S+\)\s")
_CHROME_ON_LINUX: Final = re.compile(r"Chrome\s[\d.]+\s\(Linux\s\S+\)\s")
_NUMBERED_TEST: Final = re.compile(r"^\s{2}\d+\)", re.MULTILINE)
_ESLINT_TEST: Final = re.compile(r"\s{2}\d+\)")


def _go(line: str) -> Named:
    word, _, rest = line.removeprefix("--- ").partition(": ")
    end = rest.rfind(" (", 1, -2)
    named = line.startswith("--- ") and word in ("PASS", "FAIL", "SKIP") and line.endswith(")") and end > 0
    return (rest[:end], _WORDS[word]) if named else None


def _cargo(line: str) -> Named:
    words = line.split()
    if len(words) == 4 and (words[0], words[2]) == ("test", "...") and words[3] in ("ok", "FAILED"):
        return words[1], _WORDS[words[3]]
    return None


def _minitest(line: str) -> Named:
    result = max(line.rfind(mark) for mark in ".FE")
    end = line.rfind(". ", 0, max(line.rfind("=", 0, max(result, 0)), 0))
    return (line[:end], _WORDS[line[result]]) if end > 0 else None


def _cucumber(line: str) -> Named:
    found = [match for match in _CUCUMBER.finditer(line) if match[2] or len(match[1]) > 1]
    return (line[: found[-1].start()], "FAILED" if found[-1][2] else "PASSED") if found else None


def _ruby_unit(line: str) -> Named:
    found = list(_UNIT.finditer(line))
    for begin in (6, 0) if line.startswith("test: ") else (0,):
        if found and found[-1].start() > begin:
            return line[begin : found[-1].start()], _WORDS[found[-1][1]]
    return None


def _rspec(line: str) -> Named:
    end, word = max((line.rfind(f" - {word}"), word) for word in ("passed", "failed"))
    return (line[:end], _WORDS[word]) if end > 0 else None


def _redis(line: str) -> Named:
    if not (found := _REDIS.match(line)):
        return None
    name = found[2][:1] + _MILLISECONDS.sub("", found[2][1:])
    return _REDIS_FILE.sub("", name) if found[1] == "err" else name, _WORDS[found[1]]


def _jq(line: str) -> Named:
    named = line.startswith(("PASS:", "FAIL:")) and line[5:6].isspace() and len(line) > 6
    return (line[6:], _WORDS[line[:4]]) if named else None


def _micropython(line: str) -> Named:
    words = line.split(None, 1)
    return (words[1], _WORDS[words[0]]) if len(words) > 1 and words[0] in ("pass", "FAIL", "skip") else None


def _google(line: str) -> Named:
    opened = [match.start() for match in _OPENING.finditer(line, 0, len(line) - 1)] if line.endswith(")") else []
    for found in reversed(list(_GOOGLE.finditer(line)) if opened else []):
        if opened[-1] >= found.end():
            return line[found.end() : opened[-1]], _WORDS[found[1]]
    return None


def _ant(line: str) -> Named:
    found = _ANT.match(line)
    return (found[2], _WORDS[found[1]]) if found else None


def _jest(line: str) -> Named:
    if line[:1] not in ("✓", "✕", "○") or not line[1:2].isspace() or len(line) < 3:
        return None
    return (line[2:3] + _MILLISECONDS.sub("", line[3:])).strip(), _MARKS[line[0]]


def _jest_json(line: str) -> Named:
    named = line.startswith(("[PASSED]", "[FAILED]")) and line[8:9].isspace() and len(line) > 9
    return (line[9:], line[1:7]) if named else None


def _vitest(line: str) -> Named:
    if line[:1] not in ("✓", "×", "↓") or not line[1:2].isspace() or len(line) < 3:
        return None
    return line[2:3] + _VITEST_END.sub("", line[3:]), _MARKS[line[0]]


def _tap(line: str) -> Named:
    found = _TAP.match(line)
    return (found[2], _WORDS[found[1]]) if found else None


def _carbon(line: str) -> Named:
    if not line.startswith(("PASS", "FAIL")) or not line[4:5].isspace():
        return None
    times = ([time.start() for time in pattern.finditer(line, 5)] for pattern in _CARBON_TIMES)
    end = next((starts[-1] for starts in times if starts), len(line))
    return line[5:end], _WORDS[line[:4]]


def _marked(line: str) -> Named:
    found = _NUMBERED.match(line)
    return (found[1].strip(), "FAILED") if found else None


def _phpunit(text: str) -> Iterator[tuple[str, str]]:
    suite = None
    for line in text.split("\n"):
        end = line.rfind(" (", 0, -2) if line.endswith(")") else -1
        if end > 1 and (line[0].isalnum() or line[0] == "_"):
            suite = line[:end]
        elif (bare := line.lstrip())[:1] in ("✔", "✘", "↩") and bare:
            yield f"{suite} > {bare[1:].lstrip()}", _MARKS[bare[0]]


def _doctest(text: str) -> Iterator[tuple[str, str]]:
    """doctest's own XML (``-s -r=xml``): a part of a test passes when all that is expected in it holds. What is
    malformed names no test."""
    begin = text.find("<doctest")
    end = text.find("</doctest>", begin)
    if not 0 <= begin < end:
        return
    good: list[bool] = []
    case = None
    source = io.StringIO(text[begin : end + len("</doctest>")])  # begins with the root: it declares no entities
    try:
        for event, element in ET.iterparse(source, ("start", "end")):  # noqa: S314
            if element.tag == "TestCase":
                case = element.get("name") if event == "start" else case
            elif element.tag == "SubCase" and event == "start":
                good.append(True)
            elif element.tag == "SubCase":
                passed = good.pop()
                good[-1:] = [good[-1] and passed] if good else []
                yield f"{case} > {element.get('name')}", "PASSED" if passed else "FAILED"
            elif element.tag == "Expression" and event == "end" and good:
                good[-1] = good[-1] and element.get("success") == "true"
    except ET.ParseError:
        return


def _maven(text: str) -> Iterator[tuple[str, str]]:
    """Maven names no test that passed: each is run by itself, and the shell prints its command (``set -x``). Results
    and commands are paired in their order."""
    waiting: deque[str] = deque()
    early: list[str] = []
    for line in map(str.strip, text.split("\n")):
        asked = [rest.split(None, 1)[0] for rest in line.split("-Dtest=")[1:] if rest and not rest[0].isspace()]
        waiting += asked[-1:]
        for word in ("SUCCESS", "FAILURE"):
            if line.endswith(f"BUILD {word}"):
                if waiting:
                    yield waiting.popleft(), _WORDS[word]
                else:
                    early.append(word)
    yield from ((name, _WORDS[word]) for name, word in zip(waiting, early, strict=False))


def _gradle(text: str) -> Iterator[tuple[str, str]]:
    """Lines ``CLASS > TEST PASSED``; where another process printed in between, the status is on a later line."""
    waiting = None
    for line in map(str.strip, text.split("\n")):
        word = line[-6:]
        words = line.split()
        if word in ("PASSED", "FAILED") and line[-7:-6].isspace() and len(line) > 8 and line[0] != ">":
            yield line[:-7], word
            waiting = None
        elif len(words) == 3 and words[1] == ">" and line[0] != ">":
            waiting = line
        elif waiting and line in ("PASSED", "FAILED"):
            yield waiting, line
            waiting = None


def _karma(text: str) -> Iterator[tuple[str, str]]:
    """Tests below the names of their suites, by their indentation, until the summary."""
    began, indent, suites = False, -1, list[str]()
    for line in text.split("\n"):
        if line.startswith("SUMMARY:"):
            return
        bare = line.lstrip()
        if "Starting browser" in line:
            began = True
        elif began and bare[:1] in ("✔", "✖") and bare[1:2].isspace():
            yield " > ".join([*suites, bare[2:]]), _MARKS[bare[0]]
        elif began and (width := len(line) - len(bare) - 1) > 0:
            if width > indent:
                suites.append(bare)
            elif width < indent and suites:
                suites.pop()
            indent = width


def _grommet(text: str) -> Iterator[tuple[str, str]]:
    for word in ("FAIL", "PASS"):
        for name in re.findall(rf"^{word}\s(.*)", text, re.MULTILINE):
            yield _GROMMET_TIME.sub("", name.strip()), _WORDS[word]


def _highlight(text: str) -> Iterator[tuple[str, str]]:
    """mocha's tree without its summary, of which only the innermost suite is part of a name."""
    suite: list[str] = []
    for line in re.split(r"\n[ \t]*\d+ passing", text, maxsplit=1)[0].split("\n"):
        bare = line.strip()
        if bare[:1] in ("✓", "✔") and bare:
            yield ".".join([*suite, _untimed(bare[1:])]), "PASSED"
        elif re.match(r"\d+\)", bare):
            yield ".".join([*suite, _untimed(line.split(")", 1)[1])]), "FAILED"
        elif line.startswith("  "):
            suite = [bare]


def _untimed(name: str) -> str:
    return re.sub(r"\(\d+ms\)", "", name).strip()


def _calypso(text: str) -> Iterator[tuple[str, str]]:
    """Jest's tree behind each of its commands, until its summary or the first failure that is explained."""
    suites: list[tuple[str, int]] = []
    for run in text.split(" ./node_modules/.bin/jest ")[1:]:
        for line in run.split("\n"):
            bare = line.strip()
            if line.startswith(("Test Suites", "  ● ")):
                break
            if bare[:1] in ("✓", "✕"):
                if line[0].isspace() and bare[1:2].isspace():
                    name = re.sub(r"\(\d+ms\)$", "", line.lstrip()[2:])
                    yield " - ".join([" - ".join(each for each, _ in suites), name]).strip(), _MARKS[bare[0]]
            elif indent := len(line) - len(line.lstrip()):
                while suites and suites[-1][1] >= indent:
                    suites.pop()
                suites.append((bare, indent))


def _chart(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        if line.endswith("FAILED") and (browser := _CHROME.search(line)):
            closing = _CLOSING.search(line, browser.end() + 1, len(line) - len("FAILED"))
            if closing:
                yield line[closing.end() : -len("FAILED")], "FAILED"


def _bpmn(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n")[:-1]:  # the last is not complete
        for browser in _BPMN_BROWSERS if line.endswith("FAILED") else ():
            if found := browser.search(line):
                ends = list(_ON_LINUX.finditer(line, found.end())) if found[0].startswith("Chrome") else [found]
                if ends:
                    yield line[ends[-1].end() : -len("FAILED")], "FAILED"


def _openlayers(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n")[:-1]:
        for browser, end in ((_CHROME_HEADLESS, " FAILED"), (_CHROME_ON_LINUX, "FAILED")):
            if line.endswith(end) and (found := browser.search(line)) and found.end() <= len(line) - len(end):
                yield _squeezed(line[found.end() : -len(end)]), "FAILED"
    at = 0
    while (number := _NUMBERED_TEST.search(text, at)) and (at := text.find("Error:", number.end())) >= 0:
        yield _squeezed(text[number.end() : at]), "FAILED"
    for found in re.finditer(r"^case\s(.*):\smismatch", text, re.MULTILINE):
        yield _squeezed(found[1]), "FAILED"


def _eslint(text: str) -> Iterator[tuple[str, str]]:
    """A failed test is between its number and the line of its error."""
    at = 0
    while number := _ESLINT_TEST.search(text, at):
        begin = at = number.end()
        while (error := text.find("Error", at)) >= 0:
            line = text.rfind("\n", begin, error) + 1 or begin
            at = text.rfind("Error", error, max(text.find("\n", error), 0) or len(text)) + len("Error")
            blank = re.compile(r"\s").search(text, begin, at - len("Error"))
            end = len(text[begin:line].rstrip()) + begin if line > begin else blank.start() if blank else -1
            if end >= begin:
                yield _squeezed(text[begin:end]), "FAILED"
                break
        else:
            return


def _squeezed(name: str) -> str:
    return " ".join(name.split())


def _by_line(named: Callable[[str], Named], *, strip: bool = True) -> Callable[[str], dict[str, str]]:
    def read(text: str) -> dict[str, str]:
        lines = (line.strip() if strip else line for line in text.split("\n"))
        return dict(found for line in lines if (found := named(line)))

    return read


def _by_text(named: Callable[[str], Iterator[tuple[str, str]]]) -> Callable[[str], dict[str, str]]:
    return lambda text: dict(named(text))


READERS: Final[Mapping[TestLog, Callable[[str], dict[str, str]]]] = {
    "swebench-gotest": _by_line(_go),
    "swebench-cargo": _by_line(_cargo),
    "swebench-minitest": _by_line(_minitest),
    "swebench-cucumber": _by_line(_cucumber),
    "swebench-ruby-unit": _by_line(_ruby_unit),
    "swebench-rspec": _by_line(_rspec),
    "swebench-phpunit": _by_text(_phpunit),
    "swebench-redis": _by_line(_redis),
    "swebench-jq": _by_line(_jq),
    "swebench-doctest": _by_text(_doctest),
    "swebench-micropython": _by_line(_micropython),
    "swebench-googletest": _by_line(_google),
    "swebench-maven": _by_text(_maven),
    "swebench-ant": _by_line(_ant),
    "swebench-gradle": _by_text(_gradle),
    "swebench-jest": _by_line(_jest),
    "swebench-jest-json": _by_line(_jest_json),
    "swebench-vitest": _by_line(_vitest),
    "swebench-karma": _by_text(_karma),
    "swebench-tap": _by_line(_tap),
    "swebench-carbon": _by_line(_carbon, strip=False),
    "swebench-grommet": _by_text(_grommet),
    "swebench-highlightjs": _by_text(_highlight),
    "swebench-calypso": _by_text(_calypso),
    "swebench-chart-js": _by_text(_chart),
    "swebench-bpmn-js": _by_text(_bpmn),
    "swebench-openlayers": _by_text(_openlayers),
    "swebench-eslint": _by_text(_eslint),
    "swebench-marked": _by_line(_marked, strip=False),
}
SAYS: Final[Mapping[TestLog, str]] = {
    "swebench-gotest": "--- PASS: {} (0.00s)",
    "swebench-cargo": "test {} ... ok",
    "swebench-minitest": "{}. = 0.01 s = .",
    "swebench-cucumber": "{} ....",
    "swebench-ruby-unit": "{}: .",
    "swebench-rspec": "{} - passed",
    "swebench-redis": "[ok]: {}",
    "swebench-jq": "PASS: {}",
    "swebench-micropython": "pass {}",
    "swebench-googletest": "[ OK ] {} (0 ms)",
    "swebench-maven": "+ mvn test -Dtest={}\nBUILD SUCCESS",
    "swebench-ant": "[junit] [PASS] {}",
    "swebench-gradle": "{} PASSED",
    "swebench-jest": "✓ {}",
    "swebench-jest-json": "[PASSED] {}",
    "swebench-vitest": "✓ {}",
    "swebench-tap": "ok 1 {}",
    "swebench-carbon": "PASS {}",
    "swebench-grommet": "PASS {}",
    "swebench-chart-js": "Chrome 1.0 (Linux) {}FAILED\n",
    "swebench-bpmn-js": "HeadlessChrome 1.0 (Linux 1.0) {}FAILED\n",
    "swebench-openlayers": "case {}: mismatch",
    "swebench-eslint": "  1) {}\nError",
    "swebench-marked": "1) {}",
}
"""What a runner prints of one test that passes; of those that name failures only, of one that fails. The trees of the
other runners need more than a test's name."""
