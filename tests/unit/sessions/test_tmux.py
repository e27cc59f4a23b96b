"""tmux's control mode, what is typed to it, differences of screens, and recordings: all pure."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidArgumentsError
from agentenv.sessions.asciicast import MAX_UNTAKEN_BYTES, Recorder, recordings
from agentenv.sessions.keys import key_bytes
from agentenv.sessions.tmux_control import (
    CHUNK_CHARS,
    MAX_BLOCK_BYTES,
    MAX_BLOCK_LINES,
    Answer,
    ControlParser,
    Noticed,
    Printed,
    difference,
    pressing,
    quoted,
    trimmed,
    typing,
    unescaped,
)

SAID = (
    b"%begin 17 260 0\n%end 17 260 0\n%session-changed $0 tt\n"
    b"%output %0 a\\033[1m\\134\\015\\012%end 17 261 1\n"
    b"%begin 17 261 1\n%output %0 not output\n%end 17 260 1\nline\n%end 17 261 1\n"
    b"%extended-output %1 5 : \xc3\xbc : \\000\n"
    b"%begin 17 262 1\nno such thing\n%error 17 262 1\n%exit\n"
)
EVENTS = [
    Answer(ok=True, ours=False, lines=()),
    Noticed("session-changed", "$0 tt"),
    Printed("%0", b"a\\033[1m\\134\\015\\012%end 17 261 1"),
    Answer(ok=True, ours=True, lines=("%output %0 not output", "%end 17 260 1", "line")),
    Printed("%1", b"\xc3\xbc : \\000"),
    Answer(ok=False, ours=True, lines=("no such thing",)),
    Noticed("exit", ""),
]


def test_events_wherever_the_reads_fall() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        parser, found, rest = ControlParser(), [], SAID
        while rest:
            count = chosen.randint(1, len(rest))
            found += parser.feed(rest[:count])
            rest = rest[count:]
        assert found == EVENTS
    printed = [event.data for event in EVENTS if isinstance(event, Printed)]
    assert printed == [b"a\x1b[1m\\\r\n%end 17 261 1", b"\xc3\xbc : \0"]


def test_no_bytes_break_the_parser() -> None:
    chosen = random.Random(2)
    parser = ControlParser()
    for _ in range(2_000):
        parser.feed(bytes(chosen.choice(b"%begin end\\01 \n\xff\0outp") for _ in range(chosen.randint(0, 60))))


def test_a_line_without_end_is_dropped_and_the_next_is_not() -> None:
    parser = ControlParser()
    for _ in range(80):
        assert parser.feed(b"%output %0 " + b"x" * 100_000) == []
    assert parser.feed(b"\n%exit\n") == [Noticed("exit", "")]


def test_a_long_line_that_comes_byte_by_byte_is_not_copied_each_time() -> None:
    parser = ControlParser()
    parser.feed(b"%exit " + b"x" * 3_000_000)
    began_s = time.process_time()
    for _ in range(20_000):
        assert parser.feed(b"y") == []
    assert time.process_time() - began_s < 2
    (event,) = parser.feed(b"\n")
    assert isinstance(event, Noticed)
    assert len(event.rest) == 3_020_000


def test_what_a_slot_forges_makes_nothing() -> None:
    parser = ControlParser()
    assert parser.feed(b"%\n%unknown x\n%pauses %0\nno\n%begin " + b"1" * 200 + b"\n%exit\n") == [Noticed("exit", "")]
    assert parser.held_bytes == 0


def test_escapes() -> None:
    assert unescaped(b"\\033[0m\\\\ \\12 \\134n") == b"\x1b[0m\\\\ \\12 \\n"


def test_typing_any_text() -> None:
    text = "it's;\n\tx" + "é" * 2_500 + "\r\n"
    commands = list(typing("%0", text))
    assert commands[0] == "send-keys -t %0 -l -- 'it'\\''s;'"
    assert commands[1] == "send-keys -t %0 -H 0d 09"
    assert [command.count("é") for command in commands[2:5]] == [CHUNK_CHARS - 1, CHUNK_CHARS, 501]
    assert commands[-1] == "send-keys -t %0 -H 0d"
    assert not any("\n" in command for command in commands)
    assert list(typing("%0", "")) == []


@pytest.mark.parametrize(
    ("name", "tmux"),
    [("Enter", "Enter"), ("^c", "C-c"), ("Ctrl-x", "C-x"), ("Backspace", "BSpace"), ("Alt-b", "M-b"), ("F5", "F5")],
)
def test_names_of_keys(name: str, tmux: str) -> None:
    assert list(pressing("%0", name)) == [f"send-keys -t %0 -- {quoted(tmux)}"]


@pytest.mark.parametrize("text", ["y", "i", "G", ":wq", "ls", "ls -la /tmp", "C-style", "é", "F", "x'; kill-server; '"])
def test_what_names_no_key_is_typed(text: str) -> None:
    assert list(pressing("%0", text)) == [f"send-keys -t %0 -l -- {quoted(text)}"]
    assert key_bytes(text) == text.encode()


@pytest.mark.parametrize("name", ["F13", "C-Enter", "S-Up", "Ctrl-F5", "C-é"])
def test_a_key_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentsError, match="unknown key"):
        list(pressing("%0", name))
    with pytest.raises(InvalidArgumentsError, match="unknown key"):
        key_bytes(name)


def test_no_key_can_smuggle_a_command() -> None:
    assert list(pressing("%0", "Enter\nkill-server")) == list(typing("%0", "Enter\nkill-server"))
    assert list(pressing("%0", "C-a ; kill-server")) == ["send-keys -t %0 -l -- 'C-a ; kill-server'"]


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], ["a"], ["a"]),
        (["a", "$"], ["a", "$ ls", "f", "$"], ["$ ls", "f", "$"]),
        (["a", "b"], ["a", "b"], []),
        (["a", "b", ""], ["a", "b", "c"], ["c"]),
        (["x"] * 5, ["x"] * 5, []),
        (["a", "b"], ["y", "z"], ["y", "z"]),
        (["1", "2", "3"], ["3", "4"], ["4"]),
        (["$"], [], []),
    ],
)
def test_what_is_new(before: list[str], now: list[str], new: list[str]) -> None:
    assert difference(before, now) == new


def naive_end(known: list[str], now: list[str]) -> int | None:
    for at in range(len(now), 0, -1):
        length = min(at, len(known))
        if now[at - length : at] == known[len(known) - length :]:
            return at
    return None


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), st.lists(st.sampled_from("ab"), max_size=12))
def test_what_is_new_is_what_comparing_every_place_finds(before: list[str], now: list[str]) -> None:
    ends = (naive_end(known, now) for known in (before, before[:-1]) if known)
    at = next((end for end in ends if end is not None), 0)
    assert difference(before, now) == now[at:]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["b", *["a"] * 50_000], ["c", *["a"] * 50_000]),
        (["b"] * 25_000 + ["a"] * 25_000, (["a"] * 24_999 + ["c"]) * 2),
        (["a", *[""] * 100_000], ["a", "b", *[""] * 100_000]),
    ],
)
def test_equal_lines_of_a_whole_history_are_compared_in_linear_time(before: list[str], now: list[str]) -> None:
    began_s = time.process_time()
    trimmed(difference(before, now))
    assert time.process_time() - began_s < 1


def test_a_screen_without_its_empty_end() -> None:
    assert trimmed(["a", "", "b", "", "  "]) == "a\n\nb\n"
    assert trimmed([""]) == ""


def test_a_recording_taken_in_pieces_is_one_that_plays() -> None:
    recorder = Recorder(columns=80, rows=24, began_unix_s=1_700_000_000.5, now_s=10.0, title="main")
    recorder.output("a€".encode()[:3], 10.5)
    first = recorder.take(10.6)
    recorder.output("€".encode()[2:], 10.75)
    recorder.resized(100, 30, 11.0)
    content = [{"session": {"session": "main"}, "recording": piece} for piece in (first, recorder.take(11.0))]
    cast = recordings([None, {"recording": ""}, *content])["main"]
    header, *events = [json.loads(line) for line in cast.splitlines()]
    assert header == {"version": 2, "width": 80, "height": 24, "timestamp": 1_700_000_000, "title": "main"}
    assert events == [[0.5, "o", "a"], [0.75, "o", "€"], [1.0, "r", "100x30"]]


def test_a_session_that_was_started_again_has_a_recording_of_its_own() -> None:
    pieces = ['{"version": 2}\n', '[1, "o", "a"]\n', '{"version": 2}\n']
    found = recordings({"session": {"session": "m"}, "recording": piece} for piece in pieces)
    assert found == {"m": pieces[0] + pieces[1], "m-2": pieces[2]}


def test_what_nobody_takes_is_bounded_and_said() -> None:
    recorder = Recorder(columns=80, rows=24, began_unix_s=0, now_s=0.0, title="")
    for _ in range(50):
        recorder.output(b"x" * 100_000, 1.0)
    cast = recorder.take(2.0)
    assert len(cast) < MAX_UNTAKEN_BYTES + 200_000
    assert json.loads(cast.splitlines()[-1])[1:] == ["m", "3900000 bytes of output are not recorded"]
    recorder.output(b"on", 3.0)
    assert json.loads(recorder.take(3.0)) == [3.0, "o", "on"]


def test_of_an_answer_that_is_too_long_the_end_is_kept_and_the_rest_counted() -> None:
    parser = ControlParser()
    parser.feed(b"%begin 1 2 1\n")
    lines = [b"%07d" % number + b"x" * 993 for number in range(20_000)]
    for line in lines:
        assert parser.feed(line + b"\n") == []
        assert parser.held_bytes <= MAX_BLOCK_BYTES
    (answer,) = parser.feed(b"%end 1 2 1\n")
    assert isinstance(answer, Answer)
    assert answer.lines == tuple(line.decode() for line in lines[-len(answer.lines) :])
    assert 1_000 < len(answer.lines) < 20_000
    assert answer.dropped_bytes == (20_000 - len(answer.lines)) * 1_001
    assert parser.held_bytes == 0


def test_empty_lines_take_memory_too() -> None:
    parser = ControlParser()
    parser.feed(b"%begin 1 2 1\n")
    for _ in range(40):
        parser.feed(b"\n" * 10_000)
        assert parser.held_bytes <= MAX_BLOCK_BYTES
    (answer,) = parser.feed(b"%end 1 2 1\n")
    assert isinstance(answer, Answer)
    assert len(answer.lines) + answer.dropped_bytes == 400_000
    assert len(answer.lines) == MAX_BLOCK_LINES
    assert answer.dropped_bytes > 0


def test_an_answer_whose_lines_were_shed_still_ends() -> None:
    parser = ControlParser()
    parser.feed(b"%begin 1 2 1\nshed\n%end 1 2")
    parser.shed()
    assert parser.feed(b" 1\n") == [Answer(ok=True, ours=True, lines=(), dropped_bytes=5)]
