"""A tokenizer without the network: byte-level BPE with no merges, every byte a token, and a chat template.

For tests and demonstrations, as its name says; token counts are several times those of a real tokenizer, and no
model was trained with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

NAME = "agentenv-test-bytes"
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")

CHAT_TEMPLATE = """\
{%- if tools -%}
<|start|>tools
{%- for tool in tools %}
{{ tool['function'] | tojson }}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
<|start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message.get('tool_calls') or [] -%}
<call>{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}</call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' }}{%- endif -%}"""


def build_tokenizer(directory: Path | str, *, chat_template: str = CHAT_TEMPLATE, special: Sequence[str] = ()) -> Path:
    """Write the tokenizer's files to ``directory`` (created if missing) and return it. ``special`` are further
    special tokens, for a ``chat_template`` of another family.

    ``AutoTokenizer.from_pretrained(directory)`` loads it; decoding what it encoded gives the text back.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *special)])
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "name_or_path": NAME,
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    return target
