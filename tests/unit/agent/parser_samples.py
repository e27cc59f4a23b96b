"""Messages as models of each family write them: two calls after some text, with unicode, nesting and quotes."""

from __future__ import annotations

from typing import Any

from agentenv.agent.parsers import parser_named
from agentenv.tools.catalog import ToolCatalog

TOOLS = ToolCatalog.builtin().openai_tools()

COMMAND = 'echo "ü 🙂 \\"x\\"" && ls'
NESTED = {"path": "a/b.json", "content": '{"k": [1, {"z": null}]}\nzweite Zeile — 漢字'}

_BASH = r'{"command": "echo \"ü 🙂 \\\"x\\\"\" && ls"}'
_WRITE = r'{"path": "a/b.json", "content": "{\"k\": [1, {\"z\": null}]}\nzweite Zeile — 漢字"}'
_LINES = NESTED["content"]

HERMES = f"""I look around.
<tool_call>
{{"name": "bash", "arguments": {_BASH}}}
</tool_call>
<tool_call>
{{"name": "write_file", "arguments": {_WRITE}}}
</tool_call><|im_end|>"""

SAMPLES: dict[str, str] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "longcat": (
        f'I look around.\n<longcat_tool_call>\n{{"name": "bash", "arguments": {_BASH}}}\n</longcat_tool_call>'
        f'<longcat_tool_call>\n{{"name": "write_file", "arguments": {_WRITE}}}\n</longcat_tool_call></longcat_s>'
    ),
    "mistral": (
        f'I look around.[TOOL_CALLS] [{{"name": "bash", "arguments": {_BASH}, "id": "aB3dE6gH9"}}, '
        f'{{"name": "write_file", "arguments": {_WRITE}}}]</s>'
    ),
    "llama3_json": (
        f'I look around.<|python_tag|>{{"name": "bash", "parameters": {_BASH}}}; '
        f'{{"name": "write_file", "parameters": {_WRITE}}}<|eom_id|>'
    ),
    "qwen3_coder": f"""I look around.

<tool_call>
<function=bash>
<parameter=command>
{COMMAND}
</parameter>
</function>
</tool_call>
<tool_call>
<function=write_file>
<parameter=path>
a/b.json
</parameter>
<parameter=content>
{_LINES}
</parameter>
</function>
</tool_call><|im_end|>""",
    "deepseek_v3": f"""I look around.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash
```json
{_BASH}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file
```json
{_WRITE}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>""",
    "deepseek_v3_1": (
        f"I look around.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{_BASH}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{_WRITE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜>"
    ),
    "kimi_k2": (
        "I look around.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f"<|tool_call_argument_begin|>{_BASH}<|tool_call_end|><|tool_call_begin|>functions.write_file:1"
        f"<|tool_call_argument_begin|>{_WRITE}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    ),
    "glm45": f"""I look around.
<tool_call>bash
<arg_key>command</arg_key>
<arg_value>{COMMAND}</arg_value>
</tool_call>
<tool_call>write_file
<arg_key>path</arg_key>
<arg_value>a/b.json</arg_value>
<arg_key>content</arg_key>
<arg_value>{_LINES}</arg_value>
</tool_call><|observation|>""",
    "glm47": (
        f"I look around.<tool_call>bash<arg_key>command</arg_key><arg_value>{COMMAND}</arg_value></tool_call>"
        "<tool_call>write_file<arg_key>path</arg_key><arg_value>a/b.json</arg_value>"
        f"<arg_key>content</arg_key><arg_value>{_LINES}</arg_value></tool_call><|observation|>"
    ),
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def calls(parser: str, text: str, tools: Any = TOOLS) -> list[tuple[str, Any]]:
    parsed = parser_named(parser).parse(text, tools)
    assert not parsed.problem
    return [(call.name, call.arguments) for call in parsed.calls]


def problem(parser: str, text: str) -> str:
    """What is wrong with a text of which nothing may run and all must be kept."""
    parsed = parser_named(parser).parse(text, TOOLS)
    assert parsed.calls == ()
    assert parsed.content == text
    assert parsed.problem
    return parsed.problem
