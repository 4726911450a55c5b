r"""Scored tokens in the formats of the OpenAI endpoints.

A token consists of bytes, and may be a part of a character. Chat answers give the bytes, next to a
text with U+FFFD for incomplete characters. Completions give one string, ``bytes:\\xe2\\x80`` for
such a token, as OpenAI's do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from baton.logprobs import TokenLogprobs
from router.core.request import ScoredToken
from router.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot express."""


class TokenShapes:
    """Formats scored tokens of one tokenizer as log probabilities of the OpenAI endpoints."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, scored: Iterable[ScoredToken]) -> Iterator[dict[str, Any]]:
        """Return the entries of ``logprobs.content`` in a chat answer, without one for the token
        that ends the answer."""
        return (self._chat_token(token) for token in scored if not token.hidden)

    def completion(
        self, scored: Iterable[ScoredToken], after: int = 0, top: int = 0
    ) -> dict[str, Iterator[Any]]:
        """Return the columns of ``logprobs`` in a completion. ``after`` is the number of characters
        of the shown prompt before the completion's text.

        ``scored`` is read once per column. The token that ends the answer has an entry too, so that
        there is one for each generated token.
        """
        return {
            "tokens": (self.text(token.token_id) for token in scored),
            "token_logprobs": (finite(token.logprobs.logprob) for token in scored),
            "top_logprobs": (self._tops(token.token_id, token.logprobs, top) for token in scored),
            "text_offset": (after + token.offset for token in scored),
        }

    def completion_prompt(
        self,
        token_ids: Sequence[int],
        offsets: Iterable[int],
        logprobs: Sequence[TokenLogprobs],
        top: int,
    ) -> dict[str, Iterator[Any]]:
        """Return the columns of ``logprobs`` for an echoed prompt. Its first token has no context,
        and so no probability."""

        def scored() -> Iterator[TokenLogprobs | None]:
            return chain([None], logprobs, repeat(None))

        # There may be no log probabilities, so the ids set the length of the columns.
        return {
            "tokens": map(self.text, token_ids),
            "token_logprobs": (
                None if one is None else finite(one.logprob)
                for _, one in zip(token_ids, scored(), strict=False)
            ),
            "top_logprobs": (
                None if one is None else self._tops(token_id, one, top)
                for token_id, one in zip(token_ids, scored(), strict=False)
            ),
            "text_offset": iter(offsets),
        }

    def prompt_logprobs(
        self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs], top: int
    ) -> Iterator[dict[str, Any] | None]:
        """Return the entries of vLLM's field ``prompt_logprobs``: one per prompt token, each by
        token id. Only the top tokens have a rank."""
        yield None
        for token_id, scored in zip(token_ids[1:], logprobs, strict=True):
            likeliest = tuple(scored.top)
            ranks = {token: rank for rank, (token, _) in enumerate(likeliest, 1)}
            pairs = dict([*likeliest[:top], (token_id, scored.logprob)])
            yield {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": ranks.get(token),
                    "decoded_token": self._readable(token),
                }
                for token, logprob in pairs.items()
            }

    def text(self, token_id: int) -> str:
        """Return the text of a token in the format of completions."""
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
        """Return the log probabilities of the top tokens and of the actual token, which may not be
        one of them, by the tokens' texts."""
        pairs = [*scored.top[:top], (token_id, scored.logprob)]
        return {self.text(token): finite(logprob) for token, logprob in pairs}


def finite(logprob: float) -> float:
    """Clip a log probability to a number that JSON can express."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
