"""Chat templates in the manner of model families, cut down to what matters: who refuses or changes what."""

from __future__ import annotations

CHATML_THINKING = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% if thinking %}{{- '<think>\\n' }}{% endif %}
{%- endif %}"""
"""As Qwen 3: reasoning of earlier turns is dropped, calls are written the template's way."""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if not (message.role == 'tool' or message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + system + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' }}{{ message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""
"""As Mistral 7B v0.3: calls must be objects, ids have nine characters, roles alternate."""

PLAIN = """\
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif %}
{{- '<start>' + message.role + '\\n' + message.content | trim + '<stop>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start>assistant\\n' }}{% endif %}"""
"""As Gemma: no system message, no tools, no results of tools."""

NO_CONVERSATION = "{{ raise_exception('a base model') }}"
FIXED = "always the same text{{ messages[0].content }}"
