"""Calls as models of each family write them, made without our parsers: JSON by Python's own writer, the other formats
by the layouts of their chat templates. Nothing is escaped but what these escape."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jinja2 import Environment

JSON_FAMILIES = ("hermes", "qwen", "longcat", "mistral", "llama3_json", "deepseek_v3", "deepseek_v3_1", "kimi_k2")
BARE_FAMILIES = ("qwen3_coder", "glm45", "glm47")
"""Whose values are not quoted."""
END = {
    "hermes": "<|im_end|>", "qwen": "<|im_end|>", "longcat": "</longcat_s>", "mistral": "</s>",
    "llama3_json": "<|eom_id|>", "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_v3_1": "<｜end▁of▁sentence｜>",
    "kimi_k2": "<|im_end|>", "qwen3_coder": "<|im_end|>", "glm45": "<|observation|>", "glm47": "<|observation|>",
}  # fmt: skip

MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>", "<scratch_pad>", "</scratch_pad>"),
    "qwen": ("<tool_call>", "</tool_call>", "<tool_response>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "llama3_json": ("<|python_tag|>", "; ", '{"name": "f", "parameters": {}}'),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "```", "```json", "\n```",
    ),
    "deepseek_v3_1": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "functions.f:0",
    ),
    "qwen3_coder": (
        "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=s>", "<parameter=",
        "<parameter>", "</parameter>", "</parameter>\n", "\n</parameter>\n</function>", "</function>\n</tool_call>",
        "</parameter>\n<parameter=t>\n", "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</arg_value>\n",
        "</arg_value>\n</tool_call>", "</arg_value>\n<arg_key>", "</arg_key>\n<arg_value>",
    ),
    "glm47": (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\\n",
        "</arg_value></tool_call>", "</arg_value><arg_key>", "</arg_key><arg_value>",
    ),
}  # fmt: skip
COMMON = (
    "<think>", "</think>", "}", '"}}', '"', "\\", "{", "[", "]", ", ", ": ", "null", "\n", "\r\n", "  ", "\t", "\x00",
    "\xa0", "\u2028", "ü🙂", "\\u0022", "\\n", "&lt;", "/", *END.values(),
)  # fmt: skip

OFFICIAL = {
    "qwen3_coder": """\
{%- for call in calls %}
    {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
    {%- for key, value in call.arguments.items() %}
        {{- '<parameter=' + key + '>\\n' }}
        {%- if value is mapping or (value is sequence and value is not string) %}
            {{- json(value) }}
        {%- else %}
            {{- value | string }}
        {%- endif %}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
    "glm45": """\
{% for call in calls %}
{{ '\\n<tool_call>' + call.name }}
{% for key, value in call.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else json(value) }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}""",
    "glm47": """\
{%- for call in calls -%}
<tool_call>{{ call.name }}
    {%- for key, value in call.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else json(value) }}</arg_value>
    {%- endfor -%}
</tool_call>
{%- endfor %}""",
}
"""Layouts of the models' own templates (Qwen 3.5's, GLM 4.5's, GLM 4.7's)."""

_ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
_TEMPLATES = {family: _ENVIRONMENT.from_string(text) for family, text in OFFICIAL.items()}

Calls = Sequence[tuple[str, dict[str, Any]]]
Layout = Literal["escaped", "plain", "spread"]
"""How JSON is written: with ``\\u`` escapes, without, and over several lines."""


def raw_text(family: str, calls: Calls, layout: Layout = "plain") -> str:
    """The calls as the model writes them, without an end-of-turn mark."""

    def as_json(value: Any) -> str:
        return json.dumps(value, ensure_ascii=layout == "escaped", indent=2 if layout == "spread" else None)

    if family in OFFICIAL:
        given = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return _TEMPLATES[family].render(calls=given, json=as_json)
    return _JSON[family](calls, as_json)


def _tagged(tag: str, joint: str) -> Callable[[Calls, Callable[[Any], str]], str]:
    return lambda calls, as_json: joint.join(
        f"<{tag}>\n{as_json({'name': name, 'arguments': arguments})}\n</{tag}>" for name, arguments in calls
    )


_JSON: dict[str, Callable[[Calls, Callable[[Any], str]], str]] = {
    "hermes": _tagged("tool_call", "\n"),
    "qwen": _tagged("tool_call", "\n"),
    "longcat": _tagged("longcat_tool_call", ""),
    "mistral": lambda calls, as_json: (
        "[TOOL_CALLS] " + as_json([{"name": name, "arguments": arguments} for name, arguments in calls])
    ),
    "llama3_json": lambda calls, as_json: "; ".join(
        as_json({"name": name, "parameters": arguments}) for name, arguments in calls
    ),
    "deepseek_v3": lambda calls, as_json: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": lambda calls, as_json: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls, as_json: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json(arguments)}"
            "<|tool_call_end|>"
            for number, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
}
