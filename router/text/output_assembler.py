"""From a sequence's tokens to what the client is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from router.core.request import OutputDelta, ScoredToken
from router.text.detokenizer import Detokenizer
from router.text.stop_scanner import StopScanner


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
        *,
        include_stop: bool = False,
    ) -> None:
        """``include_stop``: a stop string that is found is shown."""
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop, include=include_stop)
        self._hidden = frozenset(hidden_ids)
        self._unscanned = min_tokens
        self._finished = False
        self._scores = False
        """Whether log probabilities come with the tokens, from the first on."""
        self._read = 0
        """Characters that tokens have brought."""
        self._shown = 0
        self._unshown: list[ScoredToken] = []
        """Scored tokens whose text is not shown yet, not even in part."""

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
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> OutputDelta | None:
        """Take the next tokens; None when there is nothing to tell.

        ``logprobs`` are those of the tokens, or none. Tokens behind the one that completed a stop
        string, and all that comes after the finish reason, are dropped.
        """
        if self._finished or not (token_ids or finish_reason or cached_prompt_tokens):
            return None
        self._scores = self._scores or bool(logprobs)
        counted, shown = self._take(token_ids, logprobs)
        if finish_reason is not None and not self.stopped:
            shown.append(self._scanner.feed(self._detokenizer.flush()))
            shown.append(self._scanner.rest())
        if self.stopped:
            finish_reason = FinishReason.STOP
        self._finished = finish_reason is not None
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
        """Those whose text has begun to be shown; at an end that cuts no text all of them.

        A token with half a character comes with the one that completes it.
        """
        all_of_them = self._finished and not self.stopped
        count = len(self._unshown)
        if not all_of_them:
            beyond = (n for n, token in enumerate(self._unshown) if token.offset >= self._shown)
            count = next(beyond, count)
        newly, self._unshown = self._unshown[:count], self._unshown[count:]
        return tuple(newly)
