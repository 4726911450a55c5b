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
    request's sequence.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        hidden_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop)
        self._hidden = frozenset(hidden_ids)
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
            if token_id not in self._hidden:
                shown.append(self._scanner.feed(self._detokenizer.step(token_id)))
            if self.stopped:
                break
        return counted, shown
