"""Prompts that continue what the model wrote, with the templates of very different families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.models.chat_template import ChatRenderer
from agentenv.agent.parsers import parser_named
from agentenv.agent.settings import opening
from agentenv.errors import ConfigError
from agentenv.testing.tokenizer import CHAT_TEMPLATE
from agentenv.tools.catalog import ToolCatalog
from tests.unit.agent.chat_templates import CHATML_THINKING, FIXED, MISTRAL, NO_CONVERSATION, PLAIN
from tests.unit.env.managed_stubs import tokenizer_of

TOOLS = ToolCatalog.builtin().subset(["bash"]).openai_tools()
START = opening("be good", "do it")


def renderer(directory: Path, template: str, parser: str = "hermes", **options: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(directory, chat_template=template), parser_named(parser), options)


def called(call_id: str, content: str = "") -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": "ls"})}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_a_template_that_changes_what_was_said_is_asked_only_for_what_follows(tmp_path: Path) -> None:
    chat = renderer(tmp_path, CHATML_THINKING)
    assert (chat.takes_system, chat.shows_tools, chat.calls_as) == (True, True, "text")
    written = '<think>hm</think>\n<tool_call>\n{"name":"bash","arguments":{"command":"ls"}}\n</tool_call><|im_end|>'
    added = chat.continuation([*START, called("a"), result("a", "file")], 2, TOOLS, written)
    assert added == "\n<|im_start|>user\n<tool_response>\nfile\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    cut = chat.continuation([*START, {"role": "assistant", "content": "x"}, result("a", "f")], 2, TOOLS, "<think>cut")
    assert cut is not None
    assert cut.startswith("<|im_end|>\n<|im_start|>user"), "an end the model did not write is added"


def test_a_turn_in_the_middle_of_a_long_conversation_is_continued_too(tmp_path: Path) -> None:
    chat = renderer(tmp_path, CHATML_THINKING)
    history = [*START, called("a"), result("a", "one"), called("b"), result("b", "two"), result("c", "three")]
    added = chat.continuation(history, 4, TOOLS, "anything<|im_end|>")
    assert added is not None
    assert added.count("<tool_response>") == 2
    assert "one" not in added


def test_a_template_may_open_the_reasoning_itself(tmp_path: Path) -> None:
    chat = renderer(tmp_path, CHATML_THINKING, thinking=True)
    prompt = chat.whole(START, TOOLS, {})
    assert chat.reasoning_open(prompt)
    assert not renderer(tmp_path, CHATML_THINKING).reasoning_open(prompt.removesuffix("<think>\n"))


def test_a_template_that_wants_calls_as_objects_gets_them(tmp_path: Path) -> None:
    chat = renderer(tmp_path, MISTRAL, "mistral")
    assert (chat.calls_as, chat.shows_tools) == ("objects", True)
    first, second = "c00000000", "c00001000"
    history = [*START, called(first), result(first, "one"), called(second), result(second, "two")]
    added = chat.continuation(history, 4, TOOLS, '[TOOL_CALLS] [{"name": "bash"}]</s>')
    assert added == '[TOOL_RESULTS] {"content": "two", "call_id": "c00001000"}[/TOOL_RESULTS]'
    cut = chat.continuation(history, 4, TOOLS, '[TOOL_CALLS] [{"name": "bash"}]')
    assert cut == "</s>" + added
    assert "[AVAILABLE_TOOLS]" in chat.whole(START, TOOLS, {})
    answered = [*START, {"role": "assistant", "content": "[TOOL_CALLS] oops"}, {"role": "user", "content": "error: no"}]
    assert chat.continuation(answered, 2, TOOLS, "[TOOL_CALLS] oops</s>") is not None


def test_a_template_that_knows_neither_system_nor_tools_is_helped(tmp_path: Path) -> None:
    chat = renderer(tmp_path, PLAIN, "glm47")
    assert (chat.takes_system, chat.shows_tools, chat.calls_as) == (False, False, "text, results from the user")
    prompt = chat.whole(START, TOOLS, {})
    assert prompt.startswith("<start>user\nbe good\n\nYou have these tools")
    assert '"name": "bash"' in prompt
    assert parser_named("glm47").example() in prompt
    assert prompt.endswith("do it<stop>\n<start>assistant\n")
    added = chat.continuation([*START, called("a"), result("a", "file")], 2, TOOLS, "x<stop>")
    assert added is not None
    assert added.endswith("<start>user\n<tool_response>\nfile\n</tool_response><stop>\n<start>assistant\n")


def test_a_template_that_drops_the_system_message_is_helped_as_well(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("messages -%}", "messages if message.role != 'system' -%}")
    chat = renderer(tmp_path, template)
    assert not chat.takes_system
    assert "be good" in chat.whole(START, TOOLS, {})


def test_an_empty_system_prompt_leaves_only_the_tools(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("{%- if tools -%}", "{%- if false -%}")
    prompt = renderer(tmp_path, template).whole(opening("", "do it"), TOOLS, {})
    assert prompt.startswith("<|start|>system\nYou have these tools")


def test_the_model_s_own_words_are_kept_when_all_is_rendered_anew(tmp_path: Path) -> None:
    chat = renderer(tmp_path, CHAT_TEMPLATE)
    history = [*START, called("a", "so"), result("a", "file")]
    assert "MY OWN WORDS" in chat.whole(history, TOOLS, {2: "MY OWN WORDS"})
    rebuilt = chat.whole(history, TOOLS, {})
    assert 'so\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>' in rebuilt


@pytest.mark.parametrize(
    ("template", "said"), [(NO_CONVERSATION, "cannot render"), (FIXED, "does not render tool results")]
)
def test_a_template_that_cannot_hold_tools_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        renderer(tmp_path, template)
    assert caught.value.field == "tokenizer_name"


def test_a_template_failing_on_a_conversation_is_named(tmp_path: Path) -> None:
    chat = renderer(tmp_path, MISTRAL, "mistral")
    user = {"role": "user", "content": "again"}
    assert chat.continuation([*START, user, called("short")], 3, TOOLS, "") is None
    with pytest.raises(ConfigError, match="roles must alternate"):
        chat.whole([*START, user], TOOLS, {})
