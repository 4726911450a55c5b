"""Drafters that look at tokens alone: what they are, and prompt lookup.

A drafter guesses the next tokens of a sequence, so that one step can check several of them. A draft
changes no answer: each of its tokens is kept only while it is the very token that the model draws
there. The engine thread alone asks a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and how much speaks for them."""

    token_ids: list[int]
    evidence: int
    """Of its first token, 1 or more, in the drafter's own measure; each token behind it has one
    more, since those before it were right when it counts."""


class Drafter(Protocol):
    """One for an engine; it may keep state for each sequence."""

    @property
    def name(self) -> str:
        """As the configuration and the metrics call it."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """At most ``most`` tokens, which is positive, behind ``token_ids``, or None.

        ``token_ids`` is the whole sequence, prompt and output; what was there at the last call is
        there unchanged.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; one that is not known is ignored."""


_LONGEST = 15
"""Tokens of a suffix that are compared: a longer match says nothing new."""
_CANDIDATES = 8
"""Earlier occurrences of the last two tokens that are compared, the latest first."""


class NgramDrafter:
    """Prompt lookup: what followed the last time the sequence ended as it ends now.

    The longest suffix that occurs earlier in the prompt or the output is continued as it was there
    ("Inference with Reference", Yang et al., 2023; prompt lookup decoding, Saxena, 2023). That
    costs no model: it pays where text is copied, as in edits, quotes, answers from passages, and
    loops. The evidence is the length of the match in tokens.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``. The cost is that of the tokens since the last call."""
        index = self._indexes.get(sequence_id)
        if index is None:
            index = self._indexes[sequence_id] = _Index()
        index.extend(token_ids)
        end, length = index.longest_match(token_ids)
        if not length:
            return None
        return Draft(_continued(token_ids, end, most), length)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)


class _Index:
    """Where the tokens and the pairs of tokens of a sequence last ended, but for its last token.

    About 250 bytes a token.
    """

    __slots__ = ("_earlier", "_last_pair", "_last_token")

    def __init__(self) -> None:
        self._last_token: dict[int, int] = {}
        self._last_pair: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []
        """For each position where the pair that ends there ended before; -1: nowhere."""

    def extend(self, token_ids: list[int]) -> None:
        """Take in all tokens but the last one."""
        last_token, last_pair, earlier = self._last_token, self._last_pair, self._earlier
        for position in range(len(earlier), len(token_ids) - 1):
            token = token_ids[position]
            last_token[token] = position
            if position:
                pair = token_ids[position - 1], token
                earlier.append(last_pair.get(pair, -1))
                last_pair[pair] = position
            else:
                earlier.append(-1)

    def longest_match(self, token_ids: list[int]) -> tuple[int, int]:
        """Where the longest match of the suffix ends, the latest of equals; its length, or 0."""
        last = len(token_ids) - 1
        if last < 1:
            return 0, 0
        position = self._last_pair.get((token_ids[last - 1], token_ids[last]), -1)
        if position < 0:
            position = self._last_token.get(token_ids[last], -1)
            return position, int(position >= 0)
        best, longest = position, 0
        for _ in range(_CANDIDATES):
            length = _match_length(token_ids, position, last)
            if length > longest:
                best, longest = position, length
            position = self._earlier[position]
            if position < 0 or longest == _LONGEST:
                break
        return best, longest


def _match_length(token_ids: list[int], end: int, last: int) -> int:
    """How many tokens up to ``end`` are those up to ``last``; the last two are known to be."""
    most = min(_LONGEST, end + 1)
    length = 2
    while length < most and token_ids[end - length] == token_ids[last - length]:
        length += 1
    return length


def _continued(token_ids: list[int], end: int, count: int) -> list[int]:
    """``count`` tokens as they follow ``end``; those behind the last one are of the draft itself.

    So a repeated passage goes on being repeated, however short it is.
    """
    draft = token_ids[end + 1 : end + 1 + count]
    period = len(token_ids) - 1 - end
    while len(draft) < count:
        draft.append(draft[len(draft) - period])
    return draft
