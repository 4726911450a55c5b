"""A tiny model of random weights that reasons."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models import EOS, make_tiny_model

OPEN, CLOSE = 300, 301
"""The tokens of the markers."""
NEVER_CLOSE = {str(CLOSE): -100, str(EOS): -100}
"""A logit bias with which the reasoning lasts as long as its budget."""


def reasoning_model(folder: Path, template: str, context: int = 1024) -> Path:
    """The tiny model with markers of reasoning among its tokens, and with a chat template."""
    make_tiny_model(folder, context=context)
    file = folder / "tokenizer.json"
    layout = json.loads(file.read_text())
    vocab = layout["model"]["vocab"]
    for number, text in ((OPEN, "<think>"), (CLOSE, "</think>")):
        del vocab[f"<extra_{number}>"]
        vocab[text] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        layout["added_tokens"].append({"id": number, "content": text, "normalized": False, **flags})
    layout["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(layout))
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
