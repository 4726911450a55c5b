"""Makes requests and the content of their prompts. Pure, and reproducible by the seed."""

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
"""A prompt as text, or as token ids."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a run, and the time at which it is due."""

    number: int
    due_s: float
    """Time at which the request is due, in seconds after the run's beginning. It is 0 in a closed
    loop, where a request is sent when an earlier one has ended."""
    prompt: Prompt
    input_tokens: int
    """Number of the prompt's tokens: exact for token ids, otherwise approximate."""
    output_tokens: int
    """Maximum number of tokens of the answer. If the answer ignores the end of sequence, it has
    exactly this number."""


Form = Literal["text", "tokens"]

_WORDS = VOCABULARY.split()
_LOWEST_ID, _HIGHEST_ID = 300, 2000
_KEPT_BLOCKS = 4096
CHARACTERS_PER_TOKEN = 4
"""Approximate number of characters per token of English text; the server reports the exact number
of tokens."""


class PromptMaker:
    """Makes prompts of given lengths out of blocks of random content."""

    def __init__(self, form: Form, *seed: int) -> None:
        """Each seed gives different blocks, so that prompts of two seeds never share a prefix."""
        self._form = form
        self._seed = seed
        self._block = lru_cache(_KEPT_BLOCKS)(self._make_block)

    def fresh(self, number: int, tokens: int) -> Prompt:
        """Return a prompt of ``tokens`` tokens for the request of this number. No other prompt
        shares a prefix with it."""
        return self._join([self._drawn(tokens, 0, number)])

    def of_blocks(
        self, number: int, tokens: int, hashes: Sequence[int], block_tokens: int
    ) -> Prompt:
        """Return a prompt that begins with the blocks of these hashes. The rest of its tokens is
        unique.
        """
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
    """A prompt that was read from a file."""

    text: str
    output_tokens: int | None = None
    """Maximum tokens of the prompt's answer; None if the file does not give it."""

    @property
    def input_tokens(self) -> int:
        """Return the approximate number of tokens of the prompt."""
        return max(1, len(self.text) // CHARACTERS_PER_TOKEN)


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
    """Read the prompts of a file, or of all ``.jsonl`` files of a folder: one JSON object per line.

    A prompt's text is the object's ``prompt``, the first of its ``turns``, or the first of its
    ``messages`` that is a user's. ``output_tokens`` bounds the answer. Raises ConfigError, which
    names the invalid line.
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
        raise ConfigError(f"cannot read the prompts {path}: {error}") from error
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
