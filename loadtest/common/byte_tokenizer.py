"""Writes a tokenizer with one token per byte of text, for models with random weights or without
any.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_BEGIN, _END = "<|begin|>", "<|end|>"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write the tokenizer's files to a model's folder; ``vocabulary`` is the number of tokens.

    The last two tokens begin and end a text. The chat template adds nothing to the messages.
    """
    _tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": _END, "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _tokenizer(size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for number in range(len(vocabulary), size - 2):
        vocabulary[f"<extra_{number}>"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_BEGIN, _END])
    return tokenizer
