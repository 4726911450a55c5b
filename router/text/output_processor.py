"""Converts a sequence's tokens to the text that its client receives.

Detokenizers yield whole characters, one token at a time. The output processor cuts their text at
stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from router.core.request import OutputDelta, ScoredToken
from router.text.reasoning_counter import ReasoningCounter

REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
"""Maximum number of tokens that are held back for an incomplete character, which has at most four
bytes."""


class Detokenizer(Protocol):
    """Converts the tokens of one answer to text, one token at a time."""

    def step(self, token_id: int) -> str:
        """Add a token. Return the characters that the token completes; "" if it completes none."""

    def flush(self) -> str:
        """Return the text that is left at the end of the answer: U+FFFD for bytes that form no
        character."""


class ByteDetokenizer:
    """Detokenizes byte-level vocabularies: tokens are bytes, and text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Callable[[int], bytes], texts: dict[int, str]) -> None:
        """Create a detokenizer. ``texts`` holds the text of tokens that are whole characters. All
        detokenizers of a vocabulary share it, and add to it."""
        self._token_bytes = token_bytes
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """Whether all characters so far are complete."""

    def step(self, token_id: int) -> str:
        if self._is_between and (text := self._texts.get(token_id)) is not None:
            return text
        was_between = self._is_between
        text = self._decoder.decode(self._token_bytes(token_id))
        self._is_between = not self._decoder.getstate()[0]
        if was_between and self._is_between:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        self._is_between = True
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes other vocabularies: decodes a window of tokens, and yields its new text.

    The window begins with the last shown tokens, because a decoder may treat the first token of a
    text differently: some drop a leading space. ``context`` is the prompt's end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_special: Callable[[int], bool],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._is_special = is_special
        self._shown = [token for token in context if not is_special(token)]
        self._shown_text = decode(self._shown)
        if self._shown_text.endswith(REPLACEMENT):
            self._shown, self._shown_text = [], ""
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        if self._is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return ""
        # A token without text stays pending: it may still change how the next one is decoded.
        if text:
            self._advance()
        return text

    def flush(self) -> str:
        if not self._pending:
            return ""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        text = self._decode(self._shown + self._pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._decode(self._pending)

    def _advance(self) -> None:
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)


class MarkerDetokenizer:
    """Adds the text of some special tokens to the detokenized text: markers that a parser looks
    for. The tokens are given by id."""

    def __init__(self, plain: Detokenizer, texts: Mapping[int, str]) -> None:
        self._plain = plain
        self._texts = texts

    def step(self, token_id: int) -> str:
        marker = self._texts.get(token_id)
        return self._plain.step(token_id) if marker is None else self._plain.flush() + marker

    def flush(self) -> str:
        return self._plain.flush()


class StopStrings:
    """Passes text up to the first complete stop string.

    Text that may be the beginning of a stop string is held back. The output does not depend on how
    the text is split into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Create a filter for the stop strings ``stop``. ``include``: whether the stop string that
        is found is part of the passed text."""
        self._include = include
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.match = ""
        """The stop string that was found; "" until then."""

    @property
    def found(self) -> bool:
        return bool(self.match)

    def feed(self, text: str) -> str:
        """Add the next text of the answer. Return the text that the client may now receive."""
        if not self._stop or self.found:
            return "" if self.found else text
        text = self._held + text
        place = self._first_match(text)
        if place is not None:
            begin, end = place
            self.match, self._held = text[begin:end], ""
            return text[: end if self._include else begin]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def rest(self) -> str:
        """Return the text that the filter still holds back when the answer ends."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Find the stop string that ends first in ``text``, the longest of several. Return where it
        begins and ends; None if there is none."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, begin = min(matches)
        return begin, end

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class OutputProcessor:
    """Detokenizes one sequence, cuts the text at stop strings, and counts the tokens."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        hidden_ids: Collection[int] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        reasoning: ReasoningCounter | None = None,
    ) -> None:
        """Create a processor of one sequence.

        ``hidden_ids`` are tokens that end the sequence: they count, but their text is not shown.
        ``min_tokens`` is the number of tokens before which no stop string ends the text; the engine
        treats stop tokens in the same way. ``include_stop`` is true if the text includes the stop
        string. ``reasoning`` counts the tokens of reasoning; None: there are none.
        """
        self._reasoning = reasoning
        self._is_plain = not stop and reasoning is None
        """Whether text is neither searched for stop strings nor counted as reasoning."""
        self._detokenizer = detokenizer
        self._scanner = StopStrings(stop, include=include_stop)
        self._hidden = frozenset(hidden_ids)
        self._unscanned = min_tokens
        self._finished = False
        self._scores = False
        """Whether tokens come with log probabilities; set by the first ones."""
        self._read = 0
        """Number of characters in the text of all tokens so far."""
        self._shown = 0
        self._unshown: list[ScoredToken] = []
        """Scored tokens whose text is not shown yet."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the worker's sequence must then be aborted."""
        return self._scanner.found

    @property
    def finished(self) -> bool:
        """Whether ``push`` has returned the delta with the finish reason."""
        return self._finished

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        cached_prompt_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> OutputDelta | None:
        """Add the next tokens of the sequence. Return the new text and counts, or None if there is
        nothing to report.

        ``logprobs`` has one entry per token, or none. Tokens after the one that completes a stop
        string, and tokens after the finish reason, are dropped.
        """
        if self._finished or not (token_ids or finish_reason or cached_prompt_tokens):
            return None
        if self._is_plain and finish_reason is None and not (logprobs or self._scores):
            text = ""
            for token_id in token_ids:
                if token_id not in self._hidden:
                    text += self._detokenizer.step(token_id)
            return OutputDelta(text, tuple(token_ids), None, cached_prompt_tokens)
        self._scores = self._scores or bool(logprobs)
        reasoning = self._reasoning
        reasoned = 0 if reasoning is None else reasoning.count
        counted, shown = self._take(token_ids, logprobs)
        if finish_reason is not None and not self.stopped:
            shown.append(self._scanner.feed(self._detokenizer.flush()))
            shown.append(self._scanner.rest())
        if self.stopped:
            finish_reason = FinishReason.STOP
        self._finished = finish_reason is not None
        if reasoning is not None:
            if self._finished:
                reasoning.finish()
            reasoned = reasoning.count - reasoned
        text = "".join(shown)
        scored: tuple[ScoredToken, ...] = ()
        if self._scores:
            self._shown += len(text)
            scored = self._newly_shown() if self._unshown else ()
        return OutputDelta(
            text,
            tuple(counted),
            finish_reason,
            cached_prompt_tokens,
            reasoning_tokens=reasoned,
            scored=scored,
            stop_string=self._scanner.match,
        )

    def _take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[list[int], list[str]]:
        counted: list[int] = []
        shown: list[str] = []
        for place, token_id in enumerate(token_ids):
            counted.append(token_id)
            hidden = token_id in self._hidden
            text = "" if hidden else self._detokenizer.step(token_id)
            if self._reasoning is not None and not hidden:
                self._reasoning.take(text)
            if logprobs:
                scored = ScoredToken(token_id, logprobs[place], self._read, hidden)
                self._unshown.append(scored)
                self._read += len(text)
            if self._unscanned > 0:
                self._unscanned -= 1
                shown.append(text)
            else:
                shown.append(self._scanner.feed(text))
            if self.stopped:
                break
        return counted, shown

    def _newly_shown(self) -> tuple[ScoredToken, ...]:
        """Return the scored tokens whose text the client has now begun to receive. If the sequence
        has ended and no text was cut, return all tokens that are left.

        A token with a part of a character is returned with the token that completes the character.
        """
        all_of_them = self._finished and not self.stopped
        count = len(self._unshown)
        if not all_of_them:
            beyond = (n for n, token in enumerate(self._unshown) if token.offset >= self._shown)
            count = next(beyond, count)
        newly, self._unshown = self._unshown[:count], self._unshown[count:]
        return tuple(newly)
