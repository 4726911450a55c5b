"""From a sequence's tokens to what the client is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.request import FinishReason
from router.detokenizer import Detokenizer
from router.generation import OutputDelta
from router.stop_scanner import StopScanner


class OutputAssembler:
    """The output of one request: detokenised, cut at stop strings, counted.

    ``hidden_ids`` are tokens that count but whose text is not shown: the ids that end this
    request's sequence. Stop strings are looked for behind the first ``min_tokens`` tokens, as the
    engine lets stop tokens be drawn behind them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        hidden_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop)
        self._hidden = frozenset(hidden_ids)
        self._unscanned = min_tokens
        self._finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was found: the worker's sequence is to be aborted."""
        return self._scanner.found

    @property
    def finished(self) -> bool:
        """The delta with the finish reason was given."""
        return self._finished

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        cached_prompt_tokens: int = 0,
    ) -> OutputDelta | None:
        """Take the next tokens; None when there is nothing to tell.

        Tokens behind the one that completed a stop string, and all that comes after the finish
        reason, are dropped.
        """
        if self._finished or not (token_ids or finish_reason or cached_prompt_tokens):
            return None
        counted, shown = self._take(token_ids)
        if finish_reason is not None and not self.stopped:
            shown.append(self._scanner.feed(self._detokenizer.flush()))
            shown.append(self._scanner.rest())
        if self.stopped:
            finish_reason = FinishReason.STOP
        self._finished = finish_reason is not None
        return OutputDelta("".join(shown), tuple(counted), finish_reason, cached_prompt_tokens)

    def _take(self, token_ids: Sequence[int]) -> tuple[list[int], list[str]]:
        counted: list[int] = []
        shown: list[str] = []
        for token_id in token_ids:
            counted.append(token_id)
            text = "" if token_id in self._hidden else self._detokenizer.step(token_id)
            if self._unscanned > 0:
                self._unscanned -= 1
                shown.append(text)
            else:
                shown.append(self._scanner.feed(text))
            if self.stopped:
                break
        return counted, shown
