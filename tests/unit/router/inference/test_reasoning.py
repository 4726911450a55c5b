"""Where the reasoning of gpt-oss lies, whose content has a header of its own."""

from __future__ import annotations

import pytest

from baton.grammar import Grammar, GrammarKind
from baton.reasoning import ReasoningSpan, Run
from baton.sampling_params import SamplingParams
from router.dialects.dialect import HARMONY_REASONING, THINK, dialect_for
from router.inference.reasoning import answer_part, reasoning_span

WORDS = {
    **{"<|channel|>": 1, "analysis": 2, "<|message|>": 3, "<|end|>": 4, "<|start|>": 5},
    **{"assistant": 6, "final": 7},
}
END = (4,)
TO_CONTENT = (4, 5, 6, 1, 7, 3)
GRAMMAR = Grammar(GrammarKind.REGEX, "a")


def marker_ids(text: str) -> Run:
    found = []
    while text:
        word = next(word for word in WORDS if text.startswith(word))
        found.append(WORDS[word])
        text = text.removeprefix(word)
    return tuple(found)


@pytest.mark.parametrize(("to_content", "end"), [(True, TO_CONTENT), (False, END)])
@pytest.mark.parametrize(("budget", "grammar"), [(5, None), (None, GRAMMAR), (5, GRAMMAR)])
def test_a_header_before_the_content_belongs_to_the_end(
    to_content: bool, end: Run, budget: int | None, grammar: Grammar | None
) -> None:
    """Unless a call may come in place of content: it has another header."""
    sampling = SamplingParams(max_tokens=9, grammar=grammar)
    found = reasoning_span(
        HARMONY_REASONING, "start", budget, sampling, marker_ids, "x", to_content=to_content
    )
    assert found == ReasoningSpan((end,), (1, 2, 3), budget, end)


def test_a_call_ends_the_reasoning_of_some_models() -> None:
    """A budget must not force the reasoning's end into a call; the call's first line counts."""
    form = dialect_for("qwen3_coder", "think", None, lambda _: False).reasoning
    assert form is not None
    ids = {"<think>": (1,), "</think>": (2,), "<tool_call>": (3,)}
    found = reasoning_span(form, "start", 5, SamplingParams(max_tokens=9), ids.get, "x")
    assert found == ReasoningSpan(((2,), (3,)), (1,), 5, (2,))


def test_where_a_prompt_ends() -> None:
    header = "<|start|>assistant"
    assert answer_part(HARMONY_REASONING, "answer", "", f"Hi<|end|>{header}") == "start"
    assert answer_part(HARMONY_REASONING, "closed", "", "Hi<|end|>") == "start"
    assert answer_part(THINK, "answer", "", "assistant\n<think>\n\n</think>\n\n") == "content"
    assert answer_part(THINK, "closed", "", "<think>\n</think>") == "start"
    assert answer_part(THINK, "answer", "", "assistant\n<think>\n") == "reasoning"
    assert answer_part(THINK, "open", "<think>Hm", "<think>Hm") == "reasoning"
    assert answer_part(THINK, "open", "Hm", "Hm") == "content"
    assert answer_part(None, "open", "<think>Hm", "<think>Hm") == "content"
    assert answer_part(None, "answer", "", "assistant\n") == "start"
