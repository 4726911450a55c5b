"""What a drafter's own model takes to draft, learned from the drafts themselves.

A draft of k tokens is k steps of a small model, one after another, of all sequences that draft.
Plain Python: seconds in, seconds out. Owned by the engine thread.
"""

from __future__ import annotations

_RATE = 0.15
"""What a new draft counts for beside those before it."""
_MOST = 2.0
"""One that took more than this many times what was expected was held up: it counts so."""
_STEP_SHARE = 0.1
"""What a step of the drafter is taken to cost until one was seen: this part of the model's."""
_TOKENS_A_STEP = 8
"""So many tokens of a backlog are taken to cost what a step does, until some were seen: a step of
few tokens is bound by memory."""


class DraftingTime:
    """See the module's text."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._token: float | None = None

    def observe(self, sequences: int, steps: int, seconds: float) -> None:
        """``steps`` steps of so many sequences, without a backlog, took so long."""
        found = seconds / steps
        key = _rounded(sequences)
        self._steps[key] = _towards(self._steps.get(key), found)

    def observe_tokens(self, tokens: int, seconds: float) -> None:
        """Taking in so many tokens, of a prompt or a backlog, took so long."""
        self._token = _towards(self._token, seconds / tokens)

    def step(self, sequences: int, model_step: float) -> float:
        """Seconds of one step of so many; ``model_step`` are those of one of the model."""
        if not self._steps:
            return _STEP_SHARE * model_step
        key = min(self._steps, key=lambda known: abs(known - _rounded(sequences)))
        return self._steps[key]

    def backlog(self, tokens: int, model_step: float) -> float:
        """Seconds of taking in so many tokens."""
        token = self._token
        if token is None:
            token = self.step(1, model_step) / _TOKENS_A_STEP
        return tokens * token


def _towards(known: float | None, found: float) -> float:
    if known is None:
        return found
    return known + _RATE * (min(found, _MOST * known) - known)


def _rounded(count: int) -> int:
    """To a power of two, upwards."""
    return 1 << (count - 1).bit_length()
