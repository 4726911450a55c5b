"""Each request is counted once, with the times that it took."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton import errors
from baton.autoscaling.traffic import FIRST_ANSWER_TOKENS
from baton.request import FinishReason, Principal
from baton.sampling_params import SamplingParams
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import prefill_pb2
from router.core.accounting import (
    Outcome,
    RequestRecorder,
    RequestStats,
    Slo,
    count_refusal,
    outcome_of,
)
from router.core.request import GenerationRequest, OutputDelta
from router.core.timeline import AttemptRecord


def delta(tokens: int, cached: int = 0) -> OutputDelta:
    return OutputDelta("x", (1,) * tokens, FinishReason.STOP, cached)


def recorder_of(stats: RequestStats, prompt_tokens: int) -> RequestRecorder:
    sampling = SamplingParams(max_tokens=FIRST_ANSWER_TOKENS)
    request = GenerationRequest("r", (1,) * prompt_tokens, sampling, Principal(), 60.0)
    return RequestRecorder(stats, Slo(1.0, 0.5), request, "short", 100.0)


def make() -> tuple[RouterMetrics, RequestRecorder]:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    return stats.metrics, recorder_of(stats, 10)


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", {"class": "short", **labels})


def test_times_and_tokens() -> None:
    metrics, recorder = make()
    recorder.delta(delta(1, 4), 100.5)
    recorder.delta(delta(3), 101.1)
    recorder.succeed(101.1)
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    gaps = value(metrics, "inter_token_latency_seconds_sum")
    assert gaps is not None
    assert abs(gaps - 0.6) < 1e-9
    tpot = value(metrics, "time_per_output_token_seconds_sum")
    assert tpot is not None
    assert abs(tpot - 0.2) < 1e-9
    assert value(metrics, "request_latency_seconds_count") == 1
    assert value(metrics, "prompt_tokens_total") == 10
    assert value(metrics, "cached_prompt_tokens_total") == 4
    assert value(metrics, "generated_tokens_total") == 4
    assert value(metrics, "goodput_requests_total") == 1
    assert value(metrics, "requests_total", outcome="ok", code="") == 1


def parts(metrics: RouterMetrics, token: str, part: str) -> tuple[float | None, float | None]:
    name = f"{token}_part_seconds"
    return value(metrics, f"{name}_count", part=part), value(metrics, f"{name}_sum", part=part)


def placed(recorder: RequestRecorder) -> AttemptRecord:
    attempt = AttemptRecord(0, 100.2, "prefill-0", "decode-0", "test")
    recorder.timeline.begin(attempt)
    return attempt


def test_parts_are_observed_once_the_worker_has_reported() -> None:
    metrics, recorder = make()
    attempt = placed(recorder)
    recorder.timeline.told(attempt, prefill_pb2.PrefillResponse(queue_ms=100, steps_ms=150))
    recorder.delta(delta(1), 100.5)
    assert parts(metrics, "ttft", "compute") == (1, 0.15)
    assert parts(metrics, "ttft", "other") == pytest.approx((1, 0.05))
    attempt.handed_off(prefill_pb2.HandoffCommitted(transfer_ms=40))
    assert parts(metrics, "second_token", "transfer") == (0, 0)
    recorder.delta(delta(1), 100.6)
    assert parts(metrics, "second_token", "transfer") == (1, 0.04)
    assert parts(metrics, "second_token", "first_decode") == pytest.approx((1, 0.06))
    recorder.delta(delta(1), 100.7)
    recorder.succeed(100.7)
    assert parts(metrics, "ttft", "compute")[0] == 1
    assert parts(metrics, "second_token", "transfer")[0] == 1


def test_parts_that_are_reported_late_are_observed_with_the_next_token() -> None:
    metrics, recorder = make()
    attempt = placed(recorder)
    recorder.delta(delta(1), 100.5)
    assert parts(metrics, "ttft", "compute") == (0, 0)
    recorder.timeline.told(attempt, prefill_pb2.PrefillResponse(steps_ms=150))
    recorder.delta(delta(1), 100.6)
    assert parts(metrics, "ttft", "compute") == (1, 0.15)
    assert parts(metrics, "second_token", "first_decode") == (0, 0)
    recorder.abort()
    assert parts(metrics, "second_token", "first_decode") == pytest.approx((1, 0.1))


def test_whatever_is_not_reported_is_observed_at_the_end() -> None:
    metrics, recorder = make()
    placed(recorder)
    recorder.delta(delta(1), 100.5)
    recorder.fail(errors.WorkerFailed("x"))
    assert parts(metrics, "ttft", "router") == pytest.approx((1, 0.2))
    assert parts(metrics, "ttft", "other") == pytest.approx((1, 0.3))
    assert parts(metrics, "second_token", "first_decode") == (0, 0), "there was no second token"


def test_a_request_without_a_token_has_no_parts_but_a_record() -> None:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    recorder = recorder_of(stats, 10)
    recorder.fail(errors.Overloaded("full"))
    assert parts(stats.metrics, "ttft", "router") == (0, 0)
    (record,) = stats.history.find("r")
    assert (record.outcome, record.code, record.prompt_tokens) == ("shed", "overloaded", 10)


def test_the_autoscalers_counts() -> None:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    recorder = recorder_of(stats, 10)
    recorder.delta(delta(1), 101.5)
    recorder.delta(delta(2), 102.0)
    recorder.succeed(102.0)
    refused = recorder_of(stats, 30)
    refused.fail(errors.Overloaded("full"))
    refused.fail(errors.Overloaded("full"))
    traffic = stats.traffic.counts
    assert (traffic.requests, traffic.input_tokens) == (2, 40)
    assert traffic.expected_tokens == 256 + 3, "the second is expected to be as the first was"
    assert traffic.shed == 1
    assert (traffic.first_tokens, traffic.late_first_tokens) == (1, 1)
    assert (traffic.answers, traffic.tight_answers, traffic.slow_answers) == (1, 0, 0)


def test_slow_requests_are_no_goodput() -> None:
    for first, last in ((101.5, 101.6), (100.5, 103.0)):
        metrics, recorder = make()
        recorder.delta(delta(1), first)
        recorder.delta(delta(1), last)
        recorder.succeed(last)
        assert value(metrics, "goodput_requests_total") == 0


@pytest.mark.parametrize(
    ("first", "last", "missed"),
    [
        (100.5, 100.9, []),
        (101.5, 101.6, ["ttft"]),
        (100.5, 103.0, ["tpot"]),
        (101.5, 103.0, ["ttft", "tpot"]),
    ],
)
def test_what_a_request_missed(first: float, last: float, missed: list[str]) -> None:
    metrics, recorder = make()
    recorder.delta(delta(1), first)
    recorder.delta(delta(1), last)
    recorder.succeed(last)
    for slo in ("ttft", "tpot"):
        assert value(metrics, "slo_violations_total", slo=slo) == (slo in missed)
    assert value(metrics, "goodput_requests_total") == (not missed)


def test_what_failed_is_counted_by_its_outcome_alone() -> None:
    metrics, recorder = make()
    recorder.delta(delta(1), 109.0)
    recorder.fail(errors.WorkerFailed("x"))
    assert value(metrics, "slo_violations_total", slo="ttft") == 0
    assert value(metrics, "goodput_requests_total") == 0


def test_the_first_end_counts() -> None:
    metrics, recorder = make()
    recorder.delta(delta(1), 100.1)
    recorder.succeed(100.2)
    recorder.succeed(100.2)
    recorder.abort()
    recorder.fail(errors.BatonError("x"))
    totals = [
        sample.value
        for family in metrics.requests.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    assert totals == [1]


def test_what_is_shed() -> None:
    assert outcome_of(errors.NoRoom("x"), begun=False) is Outcome.SHED
    assert outcome_of(errors.Unavailable("x"), begun=False) is Outcome.SHED
    assert outcome_of(errors.Overloaded("x"), begun=True) is Outcome.ERROR
    assert outcome_of(errors.WorkerFailed("x"), begun=False) is Outcome.ERROR
    assert outcome_of(errors.HandoffError("x"), begun=False) is Outcome.ERROR
    assert outcome_of(errors.InvalidRequest("x"), begun=False) is Outcome.ERROR


def test_refusals_have_no_class() -> None:
    metrics, _ = make()
    count_refusal(metrics, errors.InvalidRequest("x"))
    count_refusal(metrics, None)
    labels = {"class": "unknown", "outcome": "error", "code": "invalid_value"}
    assert metrics.registry.get_sample_value("baton_requests_total", labels) == 1
    labels = {"class": "unknown", "outcome": "aborted", "code": ""}
    assert metrics.registry.get_sample_value("baton_requests_total", labels) == 1


def test_recent_requests_have_their_times() -> None:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    good, late, failed, gone = (recorder_of(stats, 10) for _ in range(4))
    good.delta(delta(1, 4), 100.5)
    good.delta(delta(3), 101.1)
    good.succeed(101.1)
    late.delta(delta(1), 102.0)
    late.succeed(102.0)
    failed.delta(delta(1), 100.5)
    failed.fail(errors.WorkerFailed("x"))
    gone.abort()
    found = stats.recent.since(100.0)
    assert [one.is_good for one in found] == [True, False, False, None]
    assert [one.ttft_s for one in found] == [0.5, 2.0, None, None]
    assert [one.tpot_s for one in found] == [pytest.approx(0.2), None, None, None]


def test_a_request_without_tokens_is_not_judged() -> None:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    recorder_of(stats, 10).succeed(100.5)
    assert stats.recent.since(0.0)[0].is_good is None


def test_requests_and_tokens_by_tenant() -> None:
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    recorder_of(stats, 10).fail(errors.Overloaded("full"))
    answered = recorder_of(stats, 30)
    answered.delta(delta(3), 100.5)
    answered.succeed(100.5)
    answered.succeed(100.5)
    read = stats.metrics.registry.get_sample_value
    caller = {"tenant": "default", "key": ""}

    def requests(outcome: str, code: str) -> float | None:
        labels = caller | {"outcome": outcome, "code": code}
        return read("baton_tenant_requests_total", labels)

    def tokens(kind: str) -> float | None:
        return read("baton_tenant_tokens_total", caller | {"kind": kind})

    assert (requests("shed", "overloaded"), requests("ok", "")) == (1, 1)
    assert (tokens("prompt"), tokens("cached_prompt"), tokens("generated")) == (40, 0, 3)
