"""What was said and recorded, in files: one for each piece of work, so that it can be taken up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from loadtest.research.training.self_talk import Conversation


def save_conversations(conversations: Sequence[Conversation], path: Path) -> None:
    """All of them after one another in one file."""
    save_file(
        {
            "token_ids": torch.cat([each.token_ids for each in conversations]),
            "hidden": torch.cat([each.hidden for each in conversations]),
            "lengths": torch.tensor([len(each.token_ids) for each in conversations]),
            "answers": torch.tensor([each.answer for each in conversations]),
        },
        path,
    )


def load_conversations(folder: Path) -> list[Conversation]:
    """Those of all files of a folder, in their order. Raises ConfigError where there are none."""
    found = [each for path in sorted(folder.glob("*.safetensors")) for each in _of(path)]
    if not found:
        raise ConfigError(f"{folder} has no conversations")
    return found


def _of(path: Path) -> Iterator[Conversation]:
    try:
        parts = load_file(path)
        tokens, hidden = parts["token_ids"], parts["hidden"]
        lengths, answers = parts["lengths"].tolist(), parts["answers"].tolist()
    except (OSError, SafetensorError, LookupError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    start = 0
    for length, answer in zip(lengths, answers, strict=True):
        end = start + length
        yield Conversation(tokens[start:end], hidden[start:end], answer)
        start = end
