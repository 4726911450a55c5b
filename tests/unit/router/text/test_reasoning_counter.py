"""Tokens of reasoning are counted by where their text begins."""

from __future__ import annotations

import random

import pytest

from router.core.request import AnswerPart, ReasoningMarkers
from router.text.reasoning_counter import ReasoningCounter, reasoning_counter

THINK = ReasoningMarkers("<think>", ("</think>",))
CASES: list[tuple[AnswerPart, list[str], int]] = [
    ("start", ["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "Yes"], 4),
    ("start", ["\n", "<think>", "Hm", "</think>", "Yes"], 1),
    ("start", ["Yes", "<think>", "Hm", "</think>"], 0),
    ("start", ["<think>", "</think>", "Yes"], 0),
    ("start", ["<", "th", "ink", ">", "Hm", " </", "think", ">", "Yes"], 2),
    ("start", ["<", "thing"], 0),
    ("start", ["<think>", "a", "<", "/", "thin"], 4),
    ("start", ["<think>", "a", "<", "/", "b", "</think>"], 4),
    ("start", [" ", "\n"], 0),
    ("reasoning", ["Hm", ".", "</think>", "Yes"], 2),
    ("reasoning", ["\n", "<think>", "Hm", "</think>"], 1),
    ("reasoning", ["<", "b"], 2),
    ("reasoning", ["<"], 1),
    ("reasoning", [], 0),
    # A character of three tokens, which come with the text of the last.
    ("reasoning", ["", "", "日", "</think>", "", "語"], 3),
    # One that the marker cuts short comes with the marker's text.
    ("reasoning", ["", "", "\ufffd</think>", "Yes"], 2),
]


@pytest.mark.parametrize(("begins_in", "tokens", "count"), CASES)
def test_tokens_between_the_markers_count(
    begins_in: AnswerPart, tokens: list[str], count: int
) -> None:
    counter = ReasoningCounter(THINK, begins_in)
    for token in tokens:
        counter.take(token)
    counter.finish()
    assert counter.count == count


def test_what_is_certain_is_counted_at_once() -> None:
    counter = ReasoningCounter(THINK, "reasoning")
    found = []
    for token in ("a", "b <", "c", "</", "d"):
        counter.take(token)
        found.append(counter.count)
    assert found == [1, 2, 3, 3, 5]


def test_a_call_may_end_the_reasoning() -> None:
    counter = ReasoningCounter(ReasoningMarkers("<think>", ("</think>", "<call>")), "reasoning")
    for token in ("a", "<call>", "b", "</think>"):
        counter.take(token)
    counter.finish()
    assert counter.count == 1


def test_reasoning_may_come_again() -> None:
    markers = ReasoningMarkers("<c>analysis<m>", ("<end>",), repeat=True)
    counter = ReasoningCounter(markers, "start")
    first = ["<c>", "analysis", "<m>", "a", "b", "<end>", "<s>", "assistant"]
    for token in (*first, *first, "<c>", "final", "<m>", "Yes"):
        counter.take(token)
    counter.finish()
    assert counter.count == 4


def test_an_answer_without_reasoning_has_no_counter() -> None:
    assert reasoning_counter(None, "start") is None
    assert reasoning_counter(THINK, "content") is None
    assert reasoning_counter(THINK, "start") is not None


def test_however_a_text_is_cut_single_characters_count_alike() -> None:
    """Of tokens of one character each, as many count as the reasoning has characters."""
    text = "<think>" + "a<b</c" * 20 + "</think>Yes"
    counter = ReasoningCounter(THINK, "start")
    for character in text:
        counter.take(character)
    counter.finish()
    assert counter.count == 120
    chance = random.Random(1)
    for _ in range(20):
        cuts = sorted(chance.sample(range(7, 127), 9))
        parts = [text[:7]] + [
            text[begin:end] for begin, end in zip([7, *cuts], [*cuts, 127], strict=True)
        ]
        counter = ReasoningCounter(THINK, "start")
        for part in (*(part for part in parts if part), "</think>", "Yes"):
            counter.take(part)
        assert counter.count == len([part for part in parts[1:] if part])
