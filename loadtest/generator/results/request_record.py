"""Defines the result of one request, by the client's clock.

The terms are the field's, as in docs/reference/glossary.md. TTFT is from the send to the first
token, ITL is each gap between tokens, E2EL is from the send to the last token, and TPOT = (E2EL -
TTFT) / (output tokens - 1). The send is the INTENDED one. If the client is late, or the server
delays the send, that time counts. So a server that stalls cannot hide the requests that would have
arrived in the meantime (coordinated omission). Pure.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import Literal

from planning.common.slo import Slo

Outcome = Literal["ok", "error", "shed", "aborted"]
"""Possible outcomes of a request, as in ``baton_requests_total``. shed: the server rejected it
because of load (429, 503). aborted: the client's timeout ended it. error: every other incomplete
answer."""


def _no_times() -> array[float]:
    return array("d")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Record of one request: its times, in seconds since the run's beginning, and its tokens."""

    number: int
    due_s: float
    """Time at which the request was scheduled to be sent."""
    sent_s: float
    """Time at which the request was sent."""
    ended_s: float
    """Time at which the request's answer, or its failure, was complete."""
    outcome: Outcome
    code: str = ""
    """Reason of a failure: an HTTP status, an error's code, or the client's observation."""
    input_tokens: int = 0
    """Number of prompt tokens that the server reports. If it reports none, the planned number."""
    output_tokens: int = 0
    """Number of output tokens that the server reports. If it reports none, the number of tokens or
    messages that the client received."""
    cached_tokens: int = 0
    """Number of prompt tokens that the server had cached."""
    token_times_s: array[float] = field(default_factory=_no_times)
    """Arrival time of each message that has tokens. Several tokens may share one message."""

    @property
    def lag_s(self) -> float:
        """Return the delay of the client: the time from the scheduled send to the actual one."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Return the TTFT in seconds. The request must have received a token."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        """Return the E2EL (until the last token) in seconds. The request must have received a
        token."""
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Return the TPOT in seconds, or 0 for a single token. The request must have received a
        token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Return the ITL in seconds: the gap between each two consecutive messages that carry
        tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]

    def met(self, slo: Slo) -> bool:
        """Return whether the request succeeded, and met every SLO."""
        return (
            self.outcome == "ok"
            and self.ttft_s <= slo.ttft_s
            and self.tpot_s <= slo.tpot_s
            and self.e2el_s <= slo.e2el_s
        )
