"""A tokenizer without the network: byte-level BPE and a chat template. Without merges every byte is a token, several
times as many as a real tokenizer has; merges can be learned from texts.

For tests and demonstrations, as its name says: no model was trained with it.
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


def build_tokenizer(
    directory: Path | str,
    *,
    chat_template: str = CHAT_TEMPLATE,
    special: Sequence[str] = (),
    merges_from: Sequence[str] = (),
    vocabulary_size: int = 4096,
) -> Path:
    """Write the tokenizer's files to ``directory`` (created if missing) and return it. ``special`` are further
    special tokens, for a ``chat_template`` of another family. ``merges_from``: texts from which at most
    ``vocabulary_size`` tokens are learned; then a text has more than one tokenization, as with real tokenizers.

    ``AutoTokenizer.from_pretrained(directory)`` loads it; decoding what it encoded gives the text back.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    named = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *special)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges_from))
    tokenizer.decoder = decoders.ByteLevel()
    if merges_from:
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size, special_tokens=named, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(merges_from, trainer)
    tokenizer.add_special_tokens(named)
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
