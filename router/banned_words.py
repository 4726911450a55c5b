"""Words that must not be generated, as tokens that must not be drawn."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import InvalidRequest
from router.tokenizer import Tokenizer

MOST_WORDS = 128


def banned_tokens(tokenizer: Tokenizer, words: Iterable[str] | None) -> tuple[int, ...]:
    """The tokens of these words, as they are at a text's start and behind a space.

    Raises InvalidRequest for a word that is more than one token: to forbid its tokens would forbid
    other words.
    """
    words = list(words or ())
    if len(words) > MOST_WORDS:
        raise InvalidRequest(f"bad_words has at most {MOST_WORDS} words", param="bad_words")
    banned: set[int] = set()
    for place, word in enumerate(words):
        bare = word.strip()
        for text in (bare, f" {bare}"):
            tokens = tokenizer.encode(text, add_special_tokens=False) if bare else ()
            if len(tokens) != 1:
                raise InvalidRequest(
                    f"bad_words[{place}] is not one token of this model's vocabulary: only such"
                    " words can be forbidden",
                    param="bad_words",
                )
            banned.update(tokens)
    return tuple(sorted(banned))
