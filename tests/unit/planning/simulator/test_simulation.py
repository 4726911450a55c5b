"""Whole simulations: every request ends once, and leaping changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.choices import LocalPrefill
from baton.errors import ConfigError
from planning.common.traces import TracedRequest
from planning.simulator.results import SimulationResult
from planning.simulator.simulation import simulate
from tests.support.loadtest.clusters import TRACE_BLOCK, config, profile, shape, traces

LOCAL: tuple[LocalPrefill, ...] = ("never", "auto", "always")


def run(
    requests: list[TracedRequest],
    prefill: int = 1,
    decode: int = 2,
    local: LocalPrefill = "never",
    **options: float | bool,
) -> SimulationResult:
    worker = profile(
        kv_tokens=int(options.get("kv_tokens", 4096)), is_cpu=bool(options.get("is_cpu", False))
    )
    asked = config(
        local,
        deadline_s=float(options.get("deadline_s", 300.0)),
        shed_after_s=float(options.get("shed_after_s", 0.0)),
    )
    return simulate(
        requests,
        shape(prefill, decode, worker, hosts=int(options.get("hosts", 0))),
        asked,
        routers=int(options.get("routers", 1)),
        trace_block=TRACE_BLOCK,
        leaps=bool(options.get("leaps", True)),
    )


def assert_consistent(result: SimulationResult, asked: list[TracedRequest]) -> None:
    """Every request has ended once, with all its tokens in order or with an error."""
    assert [one.number for one in result.requests] == list(range(len(asked)))
    for one, traced in zip(result.requests, asked, strict=True):
        assert one.ended_s >= one.arrival_s == traced.arrival_s
        assert len(one.token_times_s) == one.output_tokens <= traced.output_tokens
        assert (np.diff(one.token_times_s) > 0).all()
        if one.ok:
            assert one.output_tokens == traced.output_tokens
            assert one.first_token_s == pytest.approx(one.token_times_s[0], abs=1e-9)
            assert one.ended_s == pytest.approx(one.token_times_s[-1], abs=1e-9)
    for worker in result.workers:
        assert worker.work.busy_s <= result.span_s + 1e-9, "steps of a worker overlap"


def assert_equal(one: SimulationResult, other: SimulationResult) -> None:
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert (mine.code, mine.prefill, mine.decode) == (
            theirs.code,
            theirs.prefill,
            theirs.decode,
        )
        assert mine.cached_tokens == theirs.cached_tokens
        assert mine.preemptions == theirs.preemptions
        assert mine.ended_s == pytest.approx(theirs.ended_s, abs=1e-9)
        assert mine.token_times_s == pytest.approx(theirs.token_times_s, abs=1e-9)
    for worker, twin in zip(one.workers, other.workers, strict=True):
        assert worker.work.steps == twin.work.steps
        assert worker.work.decoded_tokens == twin.work.decoded_tokens
        assert worker.work.busy_s == pytest.approx(twin.work.busy_s, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    traces(),
    st.integers(0, 2),
    st.integers(1, 2),
    st.sampled_from(LOCAL),
    st.sampled_from((1024, 4096)),
    st.booleans(),
    st.sampled_from((0.7, 300.0)),
    st.integers(0, 2),
)
def test_a_leap_is_as_good_as_single_steps(
    requests: list[TracedRequest],
    prefill: int,
    decode: int,
    local: LocalPrefill,
    kv_tokens: int,
    is_cpu: bool,
    deadline_s: float,
    hosts: int,
) -> None:
    def simulated(*, leaps: bool) -> SimulationResult:
        return run(
            requests,
            prefill,
            decode,
            local,
            kv_tokens=kv_tokens,
            is_cpu=is_cpu,
            deadline_s=deadline_s,
            leaps=leaps,
            hosts=hosts,
        )

    leapt = simulated(leaps=True)
    assert_consistent(leapt, requests)
    assert_equal(leapt, simulated(leaps=False))


@settings(max_examples=10, deadline=None)
@given(traces(), st.sampled_from(LOCAL))
def test_a_rejected_request_is_rejected_either_way(
    requests: list[TracedRequest], local: LocalPrefill
) -> None:
    leapt = run(requests, 2, 1, local, shed_after_s=0.1)
    assert_consistent(leapt, requests)
    assert_equal(leapt, run(requests, 2, 1, local, shed_after_s=0.1, leaps=False))


@settings(max_examples=10, deadline=None)
@given(traces(), st.sampled_from(LOCAL), st.integers(2, 3))
def test_several_routers_serve_every_request(
    requests: list[TracedRequest], local: LocalPrefill, routers: int
) -> None:
    leapt = run(requests, 2, 2, local, routers=routers)
    assert_consistent(leapt, requests)
    assert_equal(leapt, run(requests, 2, 2, local, routers=routers, leaps=False))


def test_routers_see_each_others_requests_in_snapshots_only() -> None:
    def decode_workers(gap_s: float, routers: int) -> set[str]:
        requests = [TracedRequest(0.0, 64, 200), TracedRequest(gap_s, 64, 200)]
        return {one.decode for one in run(requests, 1, 2, routers=routers).requests}

    assert len(decode_workers(0.0, routers=1)) == 2
    at_once = [decode_workers(0.0, routers=2) for _ in range(1)]
    assert len(at_once[0]) == 1, "both routers see two idle workers, and list them alike here"
    assert len(decode_workers(0.5, routers=2)) == 2


def test_routers_do_not_all_prefer_the_same_idle_workers() -> None:
    requests = [TracedRequest(0.0, 64, 20) for _ in range(12)]
    result = run(requests, 12, 12, routers=12)
    assert len({one.prefill for one in result.requests}) > 4


def test_leaps_are_few_events_for_many_steps() -> None:
    """Long answers alone: the scheduler sees some of their steps, and the log has them all."""
    requests = [TracedRequest(0.1 * n, 64, 1500) for n in range(4)]
    result = run(requests, 1, 1)
    assert_consistent(result, requests)
    decode = result.workers[1].work
    assert decode.decoded_tokens == 4 * 1499
    assert decode.steps > 1500


def test_the_configurations_bound_holds_for_every_request() -> None:
    requests = [TracedRequest(0.1 * n, prompt, 5) for n, prompt in enumerate((95, 99, 600))]
    asked = config().model_copy(update={"max_model_len": 100})
    found = simulate(requests, shape(1, 1), asked)
    assert [one.ok for one in found.requests] == [True, False, False]
    assert all(one.ok for one in simulate(requests, shape(1, 1), config()).requests)


def test_equal_seeds_give_equal_results() -> None:
    requests = [TracedRequest(0.05 * n, 40 + 7 * n, 5 + n) for n in range(12)]
    asked = config().model_copy(update={"policy": "power_of_two"})
    one, same = (simulate(requests, shape(2, 3), asked, seed=4) for _ in range(2))
    assert_equal(one, same)
    seeds = {
        tuple(r.decode for r in simulate(requests, shape(2, 3), asked, seed=n).requests)
        for n in range(8)
    }
    assert len(seeds) > 1


def test_a_lone_request_takes_what_the_costs_say() -> None:
    """100 tokens: line, room, one chunk, the wire, and nine steps behind it."""
    worker = profile()
    result = run([TracedRequest(0.0, 100, 10)], 1, 1)
    (one,) = result.requests
    chunk_s = (3.137 + 0.1713 * 100 + 0.0000213 * 100 * 50) / 1e3
    assert one.ttft_s == pytest.approx(4 * worker.call_s + chunk_s, abs=1e-9)
    # Two blocks of 64 tokens... of 32 where the trace's blocks are taken; here it has none.
    wire_s = 128 * worker.kv_token_bytes / worker.wire_bytes_per_s
    begins_s = 3 * worker.call_s + chunk_s + wire_s + worker.handoff_s
    steps_s = sum(5.119 + 0.2917 + 0.0013177 * (101 + n) for n in range(9)) / 1e3
    assert one.e2el_s == pytest.approx(begins_s + steps_s + worker.call_s, abs=1e-9)


def test_a_shared_prefix_is_computed_once() -> None:
    requests = [TracedRequest(2.0 * n, 320, 4, tuple(range(10))) for n in range(3)]
    result = run(requests, 1, 1)
    assert [one.cached_tokens for one in result.requests] == [0, 288, 288]
    assert result.requests[1].ttft_s < result.requests[0].ttft_s / 2


def test_prompts_without_hashes_share_nothing() -> None:
    result = run([TracedRequest(2.0 * n, 320, 4) for n in range(3)], 1, 1)
    assert [one.cached_tokens for one in result.requests] == [0, 0, 0]


def test_long_prompts_stretch_the_gaps_of_colocated_workers() -> None:
    """Interference: a decode pool of its own knows no prompts."""
    chats = [TracedRequest(0.011 * n, 16, 120) for n in range(4)]
    documents = [TracedRequest(0.2 + 0.1 * n, 1500, 2) for n in range(4)]
    requests = sorted(chats + documents, key=lambda request: request.arrival_s)
    slow = dataclasses.replace(shape(0, 2), paces_chunks=False)
    together = simulate(requests, slow, config())
    apart = simulate(requests, shape(1, 1), config())
    # Behind the handoff, which is the first gap.
    worst = [
        max(one.itl_s[1:].max() for one in result.requests if one.input_tokens == 16)
        for result in (together, apart)
    ]
    assert worst[0] > 3 * worst[1]


def test_chunks_are_paced_by_the_slo_for_tokens() -> None:
    chats = [TracedRequest(0.0, 16, 100)]
    documents = [TracedRequest(0.2, 1500, 2)]
    paced = simulate(chats + documents, shape(0, 1), config())
    # 30 ms, and what a chunk of at least 16 tokens takes.
    assert paced.requests[0].itl_s.max() < 0.036


def test_blocks_that_run_out_preempt_and_every_answer_ends() -> None:
    """Sixteen sequences of up to 300 tokens in room for a thousand."""
    requests = [TracedRequest(0.01 * n, 40, 250) for n in range(16)]
    result = run(requests, 1, 2, kv_tokens=1024)
    assert_consistent(result, requests)
    assert all(one.ok for one in result.requests)
    assert sum(one.preemptions for one in result.requests) > 0


def test_what_never_fits_fails_at_once() -> None:
    result = run([TracedRequest(0.0, 5000, 4), TracedRequest(0.1, 50, 4)], 1, 1)
    assert [one.code for one in result.requests] == ["context_length_exceeded", ""]


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    requests = [TracedRequest(0.001 * n, 500, 400) for n in range(12)]
    result = run(requests, 1, 1, deadline_s=1.0)
    assert_consistent(result, requests)
    sent = [one for one in result.requests if one.output_tokens]
    assert len(sent) > 2
    assert {one.code for one in sent} == {"deadline_exceeded"}
    assert all(one.e2el_s == pytest.approx(1.0, abs=0.05) for one in sent)
    # The others were notified before.
    assert all(not one.ok and one.e2el_s <= 1.05 for one in result.requests)


def test_blocks_must_divide_the_traces() -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        simulate(
            [TracedRequest(0.0, 64, 1, (1, 2))],
            shape(1, 1),
            config(),
            trace_block=32,
            block_tokens=24,
        )


def test_finer_blocks_find_as_much() -> None:
    requests = [TracedRequest(2.0 * n, 320, 4, tuple(range(10))) for n in range(2)]
    fine = simulate(requests, shape(1, 1), config(), trace_block=32, block_tokens=16)
    assert fine.requests[1].cached_tokens == 304


def test_prompts_stay_off_workers_that_share_a_decode_workers_cores() -> None:
    requests = [TracedRequest(0.05 * n, 300, 20) for n in range(40)]
    worker = dataclasses.replace(profile(is_cpu=True), shares_cores=True)

    def prompts(hosts: int) -> list[int]:
        cluster = shape(2, 1, worker, hosts=hosts)
        result = simulate(requests, cluster, config("auto"), trace_block=TRACE_BLOCK)
        return [one.work.prompt_tokens for one in result.workers]

    assert all(prompts(hosts=0)[:2]), "each worker has cores of its own"
    assert prompts(hosts=1) == [0, 0, 12_000]
    assert prompts(hosts=2)[0] == 0
    assert prompts(hosts=2)[1] > 0
