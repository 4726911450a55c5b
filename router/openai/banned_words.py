"""Words that must not be generated, as runs of tokens that must not be drawn."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import InvalidRequest
from router.text.tokenizer import Tokenizer

MAX_WORDS = 128


def banned_runs(tokenizer: Tokenizer, words: Iterable[str] | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of these words, as they are at a text's start and behind a space.

    A word that the model spells with other tokens is not among them. Raises InvalidRequest.
    """
    words = list(words or ())
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"bad_words has at most {MAX_WORDS} words", param="bad_words")
    runs: set[tuple[int, ...]] = set()
    for place, word in enumerate(words):
        bare = word.strip()
        if not bare:
            raise InvalidRequest(f"bad_words[{place}] must not be empty", param="bad_words")
        for text in (bare, f" {bare}"):
            runs.add(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return tuple(sorted(runs))
