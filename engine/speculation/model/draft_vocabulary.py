"""Whether two models speak of the same tokens: only then can one guess for the other."""

from __future__ import annotations

import json
from pathlib import Path

from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig


def check_vocabulary(
    folder: Path, config: ModelConfig, draft_folder: Path, draft_config: ModelConfig
) -> None:
    """Raises ConfigError, which names both folders, where a token id means another text.

    The ids decide: how texts are cut into tokens, and what templates there are, is the model's
    affair alone.
    """
    sizes = config.vocab_size, draft_config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{draft_folder} cannot draft for {folder}: it has {sizes[1]} token ids, and the model"
            f" has {sizes[0]}; take a draft_model with the same tokenizer"
        )
    known, drafted = _tokens(folder), _tokens(draft_folder)
    if known == drafted:
        return
    other = next(id_ for id_ in sorted(known | drafted) if known.get(id_) != drafted.get(id_))
    raise ConfigError(
        f"{draft_folder} cannot draft for {folder}: token {other} is {drafted.get(other)!r}, and"
        f" the model has {known.get(other)!r}; take a draft_model with the same tokenizer"
    )


def _tokens(folder: Path) -> dict[int, str]:
    """The texts of a tokenizer.json's tokens by their ids. Raises ConfigError."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        # A unigram model has a list of texts and scores.
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((t[0], n) for n, t in enumerate(vocab))
        )
        found = {int(id_): str(text) for text, id_ in pairs}
        added = content.get("added_tokens") or []
        return found | {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
