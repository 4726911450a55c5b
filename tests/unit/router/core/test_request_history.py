"""Ended requests are found by every id that an operator may have."""

from __future__ import annotations

from router.core.request_history import MAX_FOUND, EndedRequest, RequestHistory
from router.core.timeline import Timeline


def record(request_id: str, call_id: str = "") -> EndedRequest:
    return EndedRequest(
        request_id=request_id,
        call_id=call_id,
        trace_id="",
        tenant="acme",
        key_id="key",
        context_class="short",
        outcome="ok",
        code="",
        ended_at=1.0,
        took_s=2.0,
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=4,
        choices=1,
        slo_ttft_s=2.0,
        timeline=Timeline(),
    )


def test_a_request_is_found_by_its_answer_and_by_its_call() -> None:
    history = RequestHistory()
    one, other = record("cmpl-a", "mine"), record("cmpl-b", "mine")
    history.add(one)
    history.add(other)
    assert history.find("cmpl-a") == [one]
    assert history.find("mine") == [other, one], "a retry has the same id"
    assert history.find("cmpl") == history.find("") == []


def test_every_prompt_of_an_answer_is_found_by_the_answers_id() -> None:
    history = RequestHistory()
    prompts = [record("cmpl-a-0"), record("cmpl-a-1"), record("cmpl-a-b")]
    for prompt in prompts:
        history.add(prompt)
    assert history.find("cmpl-a") == [prompts[1], prompts[0]]
    assert history.find("cmpl-a-0") == [prompts[0]]


def test_the_oldest_records_go_first() -> None:
    history = RequestHistory(max_records=2)
    for name in ("a", "b", "c"):
        history.add(record(name))
    assert [bool(history.find(name)) for name in ("a", "b", "c")] == [False, True, True]


def test_a_lookup_is_bounded() -> None:
    history = RequestHistory()
    for number in range(MAX_FOUND + 1):
        history.add(record(f"cmpl-{number}", "same"))
    assert len(history.find("same")) == MAX_FOUND
