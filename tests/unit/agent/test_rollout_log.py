from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import jsonlines
import pytest

from agentenv.agent.datasets import load_items
from agentenv.agent.jsonable import clean_text, item_id, item_record, jsonable
from agentenv.agent.rollout_log import GroupsFile, RolloutLog, append_record
from agentenv.agent.sequences import placeholder_tokens, scored_group
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.errors import ConfigError
from agentenv.testing import build_tokenizer


def transcript(score: float | None = 1.0, **more: Any) -> Transcript:
    return Transcript(trajectory="t", item_id="i", began_unix_s=1.0, score=score, **more)


def record(text: str = "x") -> GroupRecord:
    messages = [{"role": "user", "content": text}]
    return GroupRecord(
        group="g", item_id="i", group_size=1, outcome="complete", trajectories=[transcript(messages=messages)]
    )


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rollouts.jsonl"
    texts = [chr(97 + n) * 300_000 for n in range(6)]
    threads = [threading.Thread(target=append_record, args=(path, record(text))) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = [GroupRecord.model_validate_json(line) for line in path.read_text().splitlines()]
    assert sorted(group.trajectories[0].messages[0]["content"] for group in read) == texts


def test_what_cannot_be_written_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    append_record(path, record())
    before = path.read_bytes()
    import os

    real = os.write

    def full_after_some(file: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(file, data[: len(data) - 50])

    monkeypatch.setattr("agentenv.agent.rollout_log.os.write", full_after_some)
    with pytest.raises(OSError, match="No space"):
        append_record(path, record())
    assert path.read_bytes() == before


@pytest.mark.parametrize("finished", [0, 1, 2])
@pytest.mark.parametrize("left_bytes", [1, 100, 64 * 1024, 300_000])
def test_the_line_of_a_killed_writer_is_removed(tmp_path: Path, finished: int, left_bytes: int) -> None:
    path = tmp_path / "rollouts.jsonl"
    for _ in range(finished):
        append_record(path, record("finished"))
    with path.open("ab") as file:
        file.write((b'{"' + b"x" * left_bytes)[:left_bytes])
    append_record(path, record("later"))
    groups = [GroupRecord.model_validate_json(line) for line in path.read_text().splitlines()]
    texts = [group.trajectories[0].messages[0]["content"] for group in groups]
    assert texts == ["finished"] * finished + ["later"]


def test_a_whole_last_line_without_its_line_feed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    append_record(path, record("x" * 100_000))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))  # as a script or an editor leaves it
    append_record(path, record("later"))
    groups = [GroupRecord.model_validate_json(line) for line in path.read_text().splitlines()]
    assert [len(group.trajectories[0].messages[0]["content"]) for group in groups] == [100_000, 5]


@pytest.mark.parametrize("text", ["notes", "{}\nnotes", '"text"', "17"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="does not end with a line of JSON"):
        append_record(path, record())
    assert path.read_text() == text


GROUPS: list[dict[str, Any]] = [
    {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.1 + 0.2, -1e-320, float("nan")], "messages": None},
    {"messages": [[{"role": "user", "content": 'häy 🙂 \u2028 \x00 </script> \\ "'}]], "scores": [True, 2**70]},
    {"x" * 70_000: ["y" * 300_000]},
]


def test_groups_are_written_as_by_the_writer_they_replace(tmp_path: Path) -> None:
    ours = GroupsFile(str(tmp_path / "ours.jsonl"), pytest.fail)
    with jsonlines.open(tmp_path / "theirs.jsonl", "w") as theirs:
        for group in GROUPS:
            ours.write(group)
            theirs.write(group)
    ours.close()
    assert (tmp_path / "ours.jsonl").read_bytes() == (tmp_path / "theirs.jsonl").read_bytes()


def test_a_group_that_cannot_be_written_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    lost: list[str] = []
    path = tmp_path / "groups.jsonl"
    file = GroupsFile(str(path), lost.append)
    file.write({"a": 1})
    for odd in ({"a": object()}, {"a": "\ud800"}):
        file.write(odd)
    file.write({"a": 2})
    GroupsFile("/dev/full", lost.append).write({"a": 1})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    assert [why.partition(":")[0] for why in lost] == ["TypeError", "UnicodeEncodeError", "No space left on device"]


def test_an_empty_file_of_groups_is_removed_and_no_other(tmp_path: Path) -> None:
    for text in ("", "{}\n"):
        (tmp_path / "groups.jsonl").write_text(text)
        file = GroupsFile(str(tmp_path / "groups.jsonl"), pytest.fail)
        file.close()
        file.close()
        assert (tmp_path / "groups.jsonl").exists() == bool(text)


def test_lone_surrogates_do_not_break_a_record(tmp_path: Path) -> None:
    append_record(tmp_path / "r", record("bad \ud800 text"))
    read = GroupRecord.model_validate_json((tmp_path / "r").read_text())
    assert read.trajectories[0].messages[0]["content"] == "bad \\ud800 text"


async def test_no_path_writes_nothing(tmp_path: Path) -> None:
    assert await RolloutLog(None).add("g", {"id": 1}, 1, [transcript()]) == ""
    log = RolloutLog(str(tmp_path / "r"))
    await asyncio.gather(*(log.add(f"g{n}", {"id": n}, 2, [transcript(), transcript(None)]) for n in range(5)))
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "r").read_text().splitlines()]
    assert outcomes == ["partial"] * 5


def test_anything_becomes_json() -> None:
    value = {"a": {1, 2}, 3: (Path("x"), float("nan")), "b": [b"y", None, True], "c": "\udfff"}
    json.loads(json.dumps(jsonable(value), allow_nan=False))
    assert clean_text("é\ud800") == "é\\ud800"
    assert jsonable({1: "a", "1": "b"}) == {"1": "a", "1 (str)": "b"}
    assert jsonable({"1": "b", 1: "a"}) == {"1": "b", "1 (int)": "a"}
    assert item_id({"path": "caf\udce9"}) != item_id({"path": "caf\udcea"})
    assert item_record("text") == {"item": "text"}


def test_an_item_s_id_is_its_own_or_its_content_s() -> None:
    assert item_id({"task_id": 7, "x": 1}) == "7"
    assert item_id({"x": 1}) == item_id({"x": 1}) != item_id({"x": 2})
    assert item_id("abc") == item_id("abc")
    assert item_id({"id": ""}) != ""


def test_placeholder_tokens_are_never_trainable(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(build_tokenizer(tmp_path)))
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "user", "content": "häy 🙂"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "out"},
    ]
    group = scored_group(tokenizer, [transcript(0.5, messages=messages), transcript(None), transcript(0.0)])
    assert group["scores"] == [0.5, 0.0]
    assert group["group_overrides"] == {"group_size": 2, "trainable": False}
    assert [set(mask) for mask in group["masks"]] == [{-100}, {-100}]
    assert all(override["set_advantage_to_zero"] for override in group["overrides"])
    text = tokenizer.decode(group["tokens"][0])
    assert "häy 🙂" in text
    assert '"command": "ls"' in text
    assert tokenizer.decode(tokenizer.encode("exact é\n text")) == "exact é\n text"


def test_a_tokenizer_without_a_template_gives_one_placeholder() -> None:
    class Bare:
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            raise ValueError("no chat template")

    assert placeholder_tokens(Bare(), [{"role": "user", "content": "x"}]) == [0]


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    item = {"text": "one\u2028two\u0085three"}
    (tmp_path / "items.jsonl").write_text(json.dumps(item, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_items(str(tmp_path / "items.jsonl"), "train") == [item]


def test_items_come_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert load_items(str(path), "train") == [{"a": 1}, {"a": 2}]
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_items(str(path), "train")
    path.write_text("{oops\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load_items(str(path), "train")
    path.write_text("")
    with pytest.raises(ConfigError, match="no items"):
        load_items(str(path), "train")
    with pytest.raises(ConfigError, match="dataset_name: is not set"):
        load_items(None, "train")
