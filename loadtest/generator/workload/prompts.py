"""Requests to send, and what their prompts are made of. Pure, and the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from baton.errors import ConfigError
from loadtest.common.workload import VOCABULARY

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What is sent, and when."""

    number: int
    due_s: float
    """Seconds after the run's beginning. In a closed loop requests go as others end, and this is
    0."""
    prompt: Prompt
    input_tokens: int
    """Of the prompt: exact where it is token ids, otherwise about."""
    output_tokens: int
    """Most tokens of the answer; the very number where the end of sequence is ignored."""


Form = Literal["text", "tokens"]

_WORDS = VOCABULARY.split()
_LOWEST_ID, _HIGHEST_ID = 300, 2000
_KEPT_BLOCKS = 4096
CHARACTERS_PER_TOKEN = 4
"""Of English text, about; the server tells the number itself."""


class PromptMaker:
    """Makes prompts of given lengths out of blocks."""

    def __init__(self, form: Form, *seed: int) -> None:
        """Another seed, other blocks: none of the prompts begins as one of another seed does."""
        self._form = form
        self._seed = seed
        self._block = lru_cache(_KEPT_BLOCKS)(self._make_block)

    def fresh(self, number: int, tokens: int) -> Prompt:
        """The prompt of request ``number``, which begins as no other one."""
        return self._join([self._drawn(tokens, 0, number)])

    def of_blocks(
        self, number: int, tokens: int, hashes: Sequence[int], block_tokens: int
    ) -> Prompt:
        """A prompt whose blocks are those numbers; what is behind them is its own."""
        parts = [self._block(one, block_tokens) for one in hashes]
        held = len(parts) * block_tokens
        if held < tokens:
            parts.append(self._drawn(tokens - held, 0, number))
        return self._join(parts, tokens)

    def _make_block(self, one: int, tokens: int) -> tuple[int, ...]:
        return self._drawn(tokens, 1, one)

    def _drawn(self, tokens: int, kind: int, one: int) -> tuple[int, ...]:
        generator = np.random.default_rng((*self._seed, kind, one))
        bounds = (0, len(_WORDS)) if self._form == "text" else (_LOWEST_ID, _HIGHEST_ID)
        return tuple(generator.integers(*bounds, tokens).tolist())

    def _join(self, parts: Sequence[tuple[int, ...]], tokens: int | None = None) -> Prompt:
        ids = parts[0] if len(parts) == 1 else tuple(one for part in parts for one in part)
        ids = ids[:tokens]
        return " ".join([_WORDS[one] for one in ids]) if self._form == "text" else ids


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt of a file."""

    text: str
    output_tokens: int | None = None
    """Most tokens of its answer, where the file says so."""

    @property
    def input_tokens(self) -> int:
        """About."""
        return max(1, len(self.text) // CHARACTERS_PER_TOKEN)


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
    """Those of a file, or of all ``.jsonl`` files of a folder: a JSON object a line.

    Its text is its ``prompt``, the first of its ``turns``, or the first of its ``messages`` that is
    a user's; ``output_tokens`` bounds its answer. Raises ConfigError with the line at fault.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [prompt for file in files for prompt in _read_file(file)]
    if not found:
        raise ConfigError(f"{path} has no prompts")
    return tuple(found)


def _read_file(path: Path) -> list[FilePrompt]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_prompt(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ConfigError(
                    f"{path}, line {number}: no object with prompt, turns or messages"
                ) from None
    return found


def _prompt(row: dict[str, object]) -> FilePrompt:
    text = row.get("prompt")
    if text is None and "turns" in row:
        text = row["turns"][0]  # type: ignore[index]
    elif text is None:
        messages: list[dict[str, str]] = row["messages"]  # type: ignore[assignment]
        text = next((one["content"] for one in messages if one["role"] == "user"), None)
    tokens = row.get("output_tokens")
    if not isinstance(text, str) or not text or not isinstance(tokens, int | None):
        raise ValueError("no text")
    return FilePrompt(text, tokens)
