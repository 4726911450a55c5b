"""Chats while long prompts arrive: the load, and the figures of a run."""

from __future__ import annotations

from array import array

from rich.console import Console

from loadtest.generator.results.request_record import RequestRecord
from loadtest.research.peers.long_prompts import (
    CHAT_TOKENS,
    DOCUMENT_ANSWER,
    ChatsAndDocuments,
    Figures,
    Load,
    figures_of,
    show,
)

LOAD = Load(chat_rate=2.0, document_every_s=5.0, document_tokens=900, seconds=20.0)


def _record(number: int, start: float, gaps: list[float], outcome: str = "ok") -> RequestRecord:
    times = array("d", [start + 0.5])
    for gap in gaps:
        times.append(times[-1] + gap)
    return RequestRecord(
        number,
        due_s=start,
        sent_s=start,
        ended_s=times[-1],
        outcome=outcome,  # type: ignore[arg-type]
        output_tokens=len(times),
        token_times_s=times,
    )


def test_documents_come_at_even_intervals_among_the_same_chats() -> None:
    with_documents, without = LOAD.times(), Load(2.0, 5.0, 0, 20.0).times()
    assert [time for time, document in with_documents if document] == [2.5, 7.5, 12.5, 17.5]
    assert tuple(one for one in with_documents if not one[1]) == without
    assert list(with_documents) == sorted(with_documents)


def test_requests_have_the_lengths_of_their_kind_and_other_text_in_each_run() -> None:
    due = LOAD.times()
    first, other = ChatsAndDocuments(LOAD, 1), ChatsAndDocuments(LOAD, 2)
    for number, (time, document) in enumerate(due):
        request = first.request(number, time)
        expected = (900, DOCUMENT_ANSWER) if document else (CHAT_TOKENS, CHAT_TOKENS)
        assert (request.input_tokens, request.output_tokens) == expected
        assert len(request.prompt) == expected[0]
        assert request.prompt != other.request(number, time).prompt


def test_the_figures_are_of_all_gaps_of_whole_chats() -> None:
    due = LOAD.times()
    document = next(number for number, one in enumerate(due) if one[1])
    chats = [number for number, one in enumerate(due) if not one[1]][:3]
    records = [
        _record(chats[0], 1.0, [0.01] * 98),
        _record(chats[1], 2.0, [0.01, 0.5]),
        _record(chats[2], 3.0, [9.0], outcome="error"),
        _record(document, 4.0, [7.0]),
    ]
    figures = figures_of("baton", LOAD, 0, records, ())
    assert (figures.chats, figures.documents, figures.failed) == (2, 1, 1)
    assert (figures.itl_p50_ms, figures.itl_max_ms) == (10.0, 500.0)
    assert 10.0 < figures.itl_p99_ms < 500.0
    assert figures.tpot_p99_ms > 200.0
    assert figures.document_ttft_p50_ms == 500.0


def test_the_table_has_medians_and_names_what_failed() -> None:
    def one(server: str, repetition: int, p99: float, failed: int) -> Figures:
        return Figures(server, 900, repetition, 9, 3, failed, 9.0, p99, p99, p99, 50.0, 800.0, ())

    console = Console(width=160, record=True, force_terminal=False)
    show([one("baton", 0, 20.0, 0), one("baton", 1, 30.0, 2), one("vllm", 0, 700.0, 0)], console)
    text = console.export_text()
    assert "25 · 50 · 800 (2 failed)" in text
    assert "700 · 50 · 800" in text
