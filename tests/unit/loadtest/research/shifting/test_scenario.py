"""The shifting traffic: what is sent is what is simulated, in phases of one rate."""

from __future__ import annotations

from loadtest.research.shifting.scenario import LONG_ANSWERS, LONG_PROMPTS, ShiftingTraffic

TRAFFIC = ShiftingTraffic(8.0, 40.0, seed=3)


def test_requests_are_of_their_phases_kind() -> None:
    requests = list(TRAFFIC.planned())
    assert [request.number for request in requests] == list(range(len(requests)))
    assert [request.due_s for request in requests] == sorted(one.due_s for one in requests)
    assert len(requests) / TRAFFIC.seconds / TRAFFIC.rate - 1 < 0.2
    phases = TRAFFIC.phases()
    assert [phase.kind for phase in phases] == [
        LONG_PROMPTS.name,
        LONG_ANSWERS.name,
        LONG_PROMPTS.name,
    ]
    for request in requests:
        phase = [one for one in phases if one.begins_s <= request.due_s][-1]
        assert request.input_tokens == len(request.prompt)
        assert (request.input_tokens > 500) == (phase.kind == LONG_PROMPTS.name)
        assert (request.output_tokens > 50) == (phase.kind == LONG_ANSWERS.name)


def test_another_run_has_other_prompts_of_the_same_lengths_and_no_phase_those_of_another() -> None:
    first, second = list(TRAFFIC.planned()), list(TRAFFIC.planned(1))
    assert [(r.due_s, r.input_tokens, r.output_tokens) for r in first] == [
        (r.due_s, r.input_tokens, r.output_tokens) for r in second
    ]
    begins = [request.prompt[:8] for request in (*first, *second)]
    assert len(set(begins)) == len(begins)


def test_the_simulator_gets_the_same() -> None:
    planned, traced = list(TRAFFIC.planned()), TRAFFIC.traced()
    assert [(r.due_s, r.input_tokens, r.output_tokens) for r in planned] == [
        (r.arrival_s, r.input_tokens, r.output_tokens) for r in traced
    ]
