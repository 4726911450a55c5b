"""Prompt lookup: what followed the last time the sequence ended as it ends now.

The longest suffix that occurs earlier in the prompt or the output is continued as it was there
("Inference with Reference", Yang et al., 2023; prompt lookup decoding, Saxena, 2023). That costs no
model: it pays where text is copied, as in edits, quotes, answers from passages, and loops.
"""

from __future__ import annotations

from engine.speculation.drafter import Draft

_LONGEST = 15
"""Tokens of a suffix that are compared: a longer match says nothing new."""
_CANDIDATES = 8
"""Earlier occurrences of the last two tokens that are compared, the latest first."""


class NgramDrafter:
    """Implements ``engine.speculation.drafter.Drafter``; the evidence is the length of the match
    in tokens."""

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
