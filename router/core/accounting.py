"""Records each request, however it ends: in metrics, in a trace span, and among recent requests."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.trace import SpanKind
from prometheus_client import Histogram

from baton.autoscaling.traffic import TrafficMeter
from baton.errors import BatonError, HandoffError, Overloaded, Unavailable, WorkerFailed
from baton.request import Principal
from baton.telemetry.genai_metrics import GenAiMetrics, ServedRequest
from baton.telemetry.logs import current_request_id
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import (
    PROVIDER,
    Attribute,
    begin_span,
    client_trace,
    context_of,
    fail_span,
    trace_id_of,
    wall_ns,
)
from router.core.recent_requests import RecentRequest, RecentRequests
from router.core.request import GenerationRequest, OutputDelta
from router.core.request_history import EndedRequest, RequestHistory
from router.core.timeline import Timeline

UNKNOWN_CLASS = "unknown"
_MAX_CONVERSATION = 256
"""Maximum number of characters of a conversation's name in a span; clients choose the name."""
_COUNTED_TOKENS = 16
"""Number of a request's tokens that are added to a metric at once."""


class Outcome(enum.StrEnum):
    """How a request ended; the values are metric labels."""

    OK = "ok"
    ERROR = "error"
    SHED = "shed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Slo:
    """The maximum latencies of a good request, in seconds."""

    ttft_s: float
    tpot_s: float


class RequestStats:
    """The statistics that a router process keeps of its requests. Owned by its event loop."""

    def __init__(self, metrics: RouterMetrics, genai: GenAiMetrics | None = None) -> None:
        """``genai`` gets each request that ends, too."""
        self.genai = genai
        self.metrics = metrics
        """The exported metrics. They may be sums over several router processes."""
        self.traffic = TrafficMeter()
        """Traffic counts of this router process, for the autoscaler."""
        self.recent = RecentRequests()
        """Recent requests of this router process, for what-if questions."""
        self.history = RequestHistory()
        """The last requests of this router process, for questions about one of them."""


def outcome_of(error: BatonError, *, begun: bool) -> Outcome:
    """Return the outcome of a request that ended with ``error``. It is ``shed`` if the request was
    rejected for load before it began."""
    refused = isinstance(error, Overloaded | Unavailable)
    broke = isinstance(error, HandoffError | WorkerFailed)
    return Outcome.SHED if refused and not broke and not begun else Outcome.ERROR


def count_refusal(
    metrics: RouterMetrics, error: BatonError | None, principal: Principal | None = None
) -> None:
    """Count a request that ended before its class was known. ``error`` is None if the client
    disconnected; ``principal`` is None if the caller was not known either."""
    outcome = Outcome.ABORTED if error is None else outcome_of(error, begun=False)
    code = error.code or "" if error is not None else ""
    metrics.requests.labels(UNKNOWN_CLASS, outcome, code).inc()
    if principal is not None:
        metrics.tenants.of(principal.tenant, principal.key_id).ended(outcome, code)


def _operation(request: GenerationRequest) -> str:
    if request.embeds:
        return "embeddings"
    return "chat" if request.chat else "text_completion"


def _asked(request: GenerationRequest, operation: str, context_class: str) -> dict[str, Attribute]:
    sampling = request.sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "baton.context_class": context_class,
        "baton.tenant": request.principal.tenant,
    }
    if operation != "embeddings":
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": request.choices,
        }
    if request.session:
        attributes["gen_ai.conversation.id"] = request.session[:_MAX_CONVERSATION]
    if request_id := current_request_id():
        attributes["baton.request_id"] = request_id
    return attributes


class RequestRecorder:
    """Records one request once its class is known: metrics, and a span from its receipt.

    Latencies are observed for requests that end well; tokens count for all. With several choices,
    latencies are those of the first: its tokens arrive like those of a single choice. The span is
    the parent of all other spans of the request. Its attributes follow OpenTelemetry's semantic
    conventions for generative AI, if these define one. ``now`` and ``received_at`` are of
    ``time.monotonic``. Owned by the router's event loop.
    """

    def __init__(
        self,
        stats: RequestStats,
        slo: Slo,
        request: GenerationRequest,
        context_class: str,
        received_at: float,
        *,
        call_id: str = "",
    ) -> None:
        """``call_id``: the id of the HTTP or gRPC call; empty if it has none."""
        self._operation = operation = _operation(request)
        asked = client_trace(request.trace)
        self._span = begin_span(
            f"{operation} {request.model}",
            asked,
            kind=SpanKind.SERVER,
            began_at=received_at,
            attributes=_asked(request, operation, context_class),
        )
        self.trace = context_of(self._span, asked)
        """Trace context for child spans of the request."""
        self.trace_id = trace_id_of(self._span)
        """Id of the trace; empty if the request is not traced."""
        # In a histogram, one trace is the example of its bucket.
        self._exemplar = {"trace_id": self.trace_id} if self.trace_id else None
        self._metrics = stats.metrics
        self._genai = stats.genai
        self._slo = slo
        self._recent = stats.recent
        self._history = stats.history
        self._request = request
        self._call_id = call_id
        self.timeline = Timeline()
        """The timeline that the request must have while it runs."""
        self.timeline.received_at = received_at
        self._unexplained: set[str] = {"first", "second"}
        """The first tokens whose parts are not in the metrics yet."""
        self._received_at = received_at
        self._first_at = self._last_at = 0.0
        self._tokens = 0
        """Output tokens of the request's first choice so far."""
        self.output_tokens = 0
        """Output tokens of all choices of the request so far."""
        self.prompt_tokens = len(request.prompt_ids)
        self.cached_tokens = 0
        """Number of the request's prompt tokens that were found in a cache."""
        self.context_class = context_class
        self._worker = self._fingerprint = ""
        """The decode worker of the latest choice that ended, and the fingerprint of the workers
        that answer; empty before they are known."""
        self._batch_size = 0.0
        """Mean batch size in the latest decode steps of the request's worker."""
        self._uncounted = 0
        """Output tokens that are not in the metrics yet."""
        self._ttft_s: float | None = None
        self._tpot_s: float | None = None
        self._is_good = False
        self._reasons: list[str] = []
        self._ended = False
        self._summary: dict[str, object] = {}
        self._series = stats.metrics.of_class(context_class)
        self._series.prompt_tokens.inc(self.prompt_tokens)
        caller = request.principal
        self._of_caller = stats.metrics.tenants.of(caller.tenant, caller.key_id)
        self._of_caller.prompt.inc(self.prompt_tokens)
        self._traffic = stats.traffic
        self._traffic.came(context_class, self.prompt_tokens, request.sampling.max_tokens)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def worker(self) -> str:
        """Slot of the decode worker that ended the answer; empty unless the answer ended well."""
        return self._worker

    def delta(self, delta: OutputDelta, now: float) -> None:
        """Record a delta that arrived at ``now``. The time between two tokens of the same delta
        counts as zero."""
        if delta.token_ids and not self.output_tokens and self.trace_id:
            self._span.add_event("first token", timestamp=wall_ns(now))
        self.output_tokens += len(delta.token_ids)
        self._worker = delta.decode_worker or self._worker
        self._fingerprint = delta.fingerprint
        self._batch_size = delta.batch_size or self._batch_size
        if delta.finish_reason is not None:
            self._reasons.append(delta.finish_reason.value)
        if delta.cached_prompt_tokens:
            self.cached_tokens += delta.cached_prompt_tokens
            self._series.cached_prompt_tokens.inc(delta.cached_prompt_tokens)
            self._of_caller.cached_prompt.inc(delta.cached_prompt_tokens)
        for _ in delta.token_ids if delta.choice == 0 else ():
            self._token(now)
        self._uncounted += len(delta.token_ids)
        if self._uncounted >= _COUNTED_TOKENS:
            self._count()

    def _count(self) -> None:
        self._series.generated_tokens.inc(self._uncounted)
        self._of_caller.generated.inc(self._uncounted)
        self._uncounted = 0

    def succeed(self, now: float) -> None:
        """Record that the request ended well, with its last token at ``now``."""
        if self._ended:
            return
        self._series.request_latency.observe(now - self._received_at)
        self._summary["e2el_ms"] = round((now - self._received_at) * 1e3, 1)
        tpot = 0.0
        if self._tokens > 1:
            self._tpot_s = tpot = (now - self._first_at) / (self._tokens - 1)
            self._series.time_per_output_token.observe(tpot)
            if tpot > 0:
                self._series.output_tokens_per_second.observe(1 / tpot)
                self._summary["tokens_per_s"] = round(1 / tpot, 1)
            self._summary["tpot_ms"] = round(tpot * 1e3, 1)
            self._traffic.counts.judge_answer(tpot, self._slo.tpot_s)
        self._traffic.ended(self.context_class, self._tokens)
        if self._tokens:
            self._ttft_s = self._first_at - self._received_at
            self._judge(self._ttft_s, tpot)
        self._end(Outcome.OK, "", now=now)

    def fail(self, error: BatonError) -> None:
        """Record that the request ended with an error."""
        self._end(outcome_of(error, begun=self._tokens > 0), error.code or "", error)

    def abort(self) -> None:
        """Record that the client disconnected, or the server is stopping."""
        self._end(Outcome.ABORTED, "")

    def summary(self) -> dict[str, object]:
        """Return the request's measurements as plain values for the log. Times are in milliseconds,
        and omitted if not known."""
        return {
            "class": self.context_class,
            "trace_id": self.trace_id,
            "cached_prompt_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "fingerprint": self._fingerprint,
            "batch_size": round(self._batch_size, 1) or None,
            **self._summary,
        }

    def _token(self, now: float) -> None:
        timeline = self.timeline
        if self._tokens == 0:
            self._first_at = timeline.first_at = now
            ttft = now - self._received_at
            self._series.time_to_first_token.observe(ttft, self._exemplar)
            self._summary["ttft_ms"] = round(ttft * 1e3, 1)
            self._traffic.counts.judge_first_token(ttft, self._slo.ttft_s)
        else:
            if self._tokens == 1:
                timeline.second_at = now
            self._series.inter_token_latency.observe(now - self._last_at)
        self._last_at = now
        self._tokens += 1
        if self._unexplained:
            self._explain(self._tokens)

    def _explain(self, tokens: float) -> None:
        """Observe the parts of the time to the first and to the second token, once each, as soon as
        workers have reported their durations.

        Tokens may arrive before the durations do, but hardly two of them. ``tokens``: number of
        tokens so far; infinite at the end."""
        timeline, series = self.timeline, self._series
        if "first" in self._unexplained and (timeline.is_first_told or tokens > 1):
            self._unexplained.remove("first")
            _observe(series.ttft_parts, timeline.ttft_parts())
        if "second" in self._unexplained and (timeline.is_second_told or tokens > 2):
            parts = timeline.second_token_parts()
            if parts or tokens > 2:
                self._unexplained.remove("second")
            _observe(series.second_token_parts, parts)

    def _judge(self, ttft: float, tpot: float) -> None:
        late, slow = ttft > self._slo.ttft_s, tpot > self._slo.tpot_s
        if late:
            self._series.ttft_violations.inc()
        if slow:
            self._series.tpot_violations.inc()
        self._is_good = not (late or slow)
        if self._is_good:
            self._series.goodput_requests.inc()

    def _end(
        self,
        outcome: Outcome,
        code: str,
        error: BatonError | None = None,
        now: float | None = None,
    ) -> None:
        if self._ended:
            return
        self._ended = True
        self._count()
        self._explain(math.inf)
        # A rejected or failed answer has no length of its own.
        has_length = outcome in (Outcome.OK, Outcome.ABORTED) and self._tokens
        is_judged = outcome in (Outcome.SHED, Outcome.ERROR) or self._ttft_s is not None
        self._recent.add(
            RecentRequest(
                self._received_at,
                self.prompt_tokens,
                self._tokens if has_length else None,
                self.cached_tokens,
                self._ttft_s,
                self._tpot_s,
                self._is_good if is_judged else None,
            )
        )
        self._history.add(self._ended_request(outcome, code))
        self._summary |= {"outcome": str(outcome), "code": code}
        self._end_span(outcome, error)
        self._traffic.counts.shed += outcome is Outcome.SHED
        self._metrics.requests.labels(self.context_class, outcome, code).inc()
        self._of_caller.ended(outcome, code)
        if self._genai is not None:
            self._genai.record(self._served_request(outcome, code, now))

    def _served_request(self, outcome: Outcome, code: str, now: float | None) -> ServedRequest:
        ended_well = outcome is Outcome.OK
        return ServedRequest(
            self._operation,
            self._request.model,
            duration_s=(time.monotonic() if now is None else now) - self._received_at,
            input_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            first_token_s=self._ttft_s,
            per_token_s=self._tpot_s,
            error="" if ended_well else code or str(outcome),
        )

    def _ended_request(self, outcome: Outcome, code: str) -> EndedRequest:
        request = self._request
        return EndedRequest(
            request_id=request.request_id,
            call_id=self._call_id,
            trace_id=self.trace_id,
            tenant=request.principal.tenant,
            key_id=request.principal.key_id,
            context_class=self.context_class,
            outcome=str(outcome),
            code=code,
            ended_at=time.time(),
            took_s=time.monotonic() - self._received_at,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            choices=request.choices,
            slo_ttft_s=self._slo.ttft_s,
            timeline=self.timeline,
        )

    def _end_span(self, outcome: Outcome, error: BatonError | None) -> None:
        if not self.trace_id:
            return
        self._span.set_attributes(
            {
                "baton.outcome": str(outcome),
                "baton.cached_prompt_tokens": self.cached_tokens,
                "gen_ai.usage.output_tokens": self.output_tokens,
                "gen_ai.response.finish_reasons": self._reasons,
            }
        )
        if outcome is not Outcome.OK:
            fail_span(self._span, error)
        self._span.end()


def _observe(series: Mapping[str, Histogram], parts: Mapping[str, float]) -> None:
    for name, seconds in parts.items():
        series[name].observe(seconds)
