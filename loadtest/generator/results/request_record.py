"""What came of one request, by the client's clock.

The words are the field's (docs/reference/glossary.md's list is the same): TTFT is from the
send to the first
token, ITL each gap between tokens, E2EL from the send to the last token, and
TPOT = (E2EL - TTFT) / (output tokens - 1). The send is the INTENDED one: where the client was late,
or the server let it wait to be sent, that time counts, so that a server which stalls cannot hide
those requests that would have come meanwhile (coordinated omission). Pure.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import Literal

from planning.common.slo import Slo

Outcome = Literal["ok", "error", "shed", "aborted"]
"""As in ``baton_requests_total``. shed: the server refused it for its load (429, 503). aborted: the
client gave it up at its time-out. error: everything else that is no whole answer."""


def _no_times() -> array[float]:
    return array("d")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds since the run's beginning."""

    number: int
    due_s: float
    """When it was to be sent."""
    sent_s: float
    """When it was sent."""
    ended_s: float
    """When its answer, or its failure, was complete."""
    outcome: Outcome
    code: str = ""
    """Why it is not ok: an HTTP status, an error's code, or what the client saw."""
    input_tokens: int = 0
    """As the server counted them; as planned, where it does not say."""
    output_tokens: int = 0
    """As the server counted them; otherwise, messages with tokens."""
    cached_tokens: int = 0
    """Of the prompt, found in a cache."""
    token_times_s: array[float] = field(default_factory=_no_times)
    """When each message with tokens came: several tokens may share one."""

    @property
    def lag_s(self) -> float:
        """How late the client was."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Of a request that has tokens."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        """Of a request that has tokens."""
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Of a request that has tokens; 0 of a single one."""
        if self.output_tokens < 2:
            return 0.0
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Each gap between messages with tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]

    def met(self, slo: Slo) -> bool:
        """Whether it ended well, and within every bound."""
        return (
            self.outcome == "ok"
            and self.ttft_s <= slo.ttft_s
            and self.tpot_s <= slo.tpot_s
            and self.e2el_s <= slo.e2el_s
        )
