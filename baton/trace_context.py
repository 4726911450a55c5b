"""What ties the spans of one request together across processes: W3C Trace Context, as it came."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STATE = 512
"""Characters of a tracestate that are passed on, as the W3C's recommendation asks at least; a
longer one is dropped."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers of W3C Trace Context (level 1); empty ones: nobody traces.

    They are a client's own words until ``baton.telemetry.tracing`` has read them.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Those that say something."""
        both = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in both.items() if value}


NO_TRACE = TraceContext()
