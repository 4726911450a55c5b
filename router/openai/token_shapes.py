"""Scored tokens in the shapes of the OpenAI endpoints.

A token is bytes, and maybe half a character. Chat answers have the bytes beside a text in which
U+FFFD stands for what is no character; completions have one string, ``bytes:\\xe2\\x80`` for such
a token, as OpenAI's have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from baton.logprobs import TokenLogprobs
from router.core.request import ScoredToken
from router.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinity: OpenAI's stand-in for the logarithm of nothing."""


class TokenShapes:
    """Writes the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, scored: Iterable[ScoredToken]) -> list[dict[str, Any]]:
        """``logprobs.content``. A token that ends the answer is no part of it."""
        return [self._chat_token(token) for token in scored if not token.hidden]

    def completion(
        self, scored: Iterable[ScoredToken], after: int = 0, top: int = 0
    ) -> dict[str, list[Any]]:
        """``logprobs`` of a completion, its text behind ``after`` characters of its prompt.

        A token that ends the answer has an entry too: whoever counts generated tokens finds it.
        """
        found = _Columns()
        for token in scored:
            found.add(
                self.text(token.token_id),
                finite(token.logprobs.logprob),
                self._tops(token.token_id, token.logprobs, top),
                after + token.offset,
            )
        return found.as_dict()

    def completion_prompt(
        self,
        token_ids: Sequence[int],
        offsets: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        top: int,
    ) -> dict[str, list[Any]]:
        """The same of a prompt; its first token has nothing before it, and so no probability."""
        found = _Columns()
        for place, (token_id, offset) in enumerate(zip(token_ids, offsets, strict=True)):
            scored = logprobs[place - 1] if 0 < place <= len(logprobs) else None
            found.add(
                self.text(token_id),
                None if scored is None else finite(scored.logprob),
                None if scored is None else self._tops(token_id, scored, top),
                offset,
            )
        return found.as_dict()

    def prompt_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
    ) -> list[dict[str, Any] | None]:
        """vLLM's field of that name: by token id. The rank is known of the likeliest alone."""
        shapes: list[dict[str, Any] | None] = [None]
        for token_id, scored in zip(token_ids[1:], logprobs, strict=True):
            ranks = {token: rank for rank, (token, _) in enumerate(scored.top, 1)}
            pairs = dict([*scored.top[:top], (token_id, scored.logprob)])
            shapes.append(
                {
                    str(token): {
                        "logprob": finite(logprob),
                        "rank": ranks.get(token),
                        "decoded_token": self._readable(token),
                    }
                    for token, logprob in pairs.items()
                }
            )
        return shapes

    def text(self, token_id: int) -> str:
        """A token as completions have it."""
        spelling = self._tokenizer.spelling(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def _readable(self, token_id: int) -> str:
        return self._tokenizer.spelling(token_id).decode(errors="replace")

    def _chat_token(self, token: ScoredToken) -> dict[str, Any]:
        top = [self._entry(*pair) for pair in token.logprobs.top]
        return self._entry(token.token_id, token.logprobs.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelling = self._tokenizer.spelling(token_id)
        return {
            "token": spelling.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(spelling),
        }

    def _tops(self, token_id: int, scored: TokenLogprobs, top: int) -> dict[str, float]:
        """The likeliest, and the token that stands there, which may be another one."""
        pairs = [*scored.top[:top], (token_id, scored.logprob)]
        return {self.text(token): finite(logprob) for token, logprob in pairs}


class _Columns:
    """The four lists of a completion's ``logprobs``."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

    def add(self, *values: Any) -> None:
        for column, value in zip(self._lists.values(), values, strict=True):
            column.append(value)

    def as_dict(self) -> dict[str, list[Any]]:
        return self._lists


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
