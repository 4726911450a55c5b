"""Reasoning is split from content and calls, however the answer is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.request import AnswerPart
from router.dialects.dialect import REASONING_FORMATS, Dialect, dialect_for, reasoning_for
from router.dialects.families import FORMATS
from router.dialects.pieces import Content, Piece, Reasoning, joined
from router.dialects.reasoning import ReasoningFormat
from router.dialects.tools import Tool, ToolUse
from router.text.chat_template import ChatTemplate
from tests.support.router.front_fakes import TEMPLATE
from tests.support.router.parsed import Call, Parsed, parse

USE = ToolUse((Tool("add", None, {"type": "object"}),), frozenset({"add"}))
THINK = Dialect(FORMATS["hermes"], REASONING_FORMATS["think"])
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
CASES: list[tuple[AnswerPart, str, Parsed]] = [
    ("start", "<think>\nHm.\n</think>\n\nYes.", Parsed("Yes.", (), "Hm.")),
    ("start", "\n<think>Hm.</think>Yes. ", Parsed("Yes. ", (), "Hm.")),
    ("start", "<think>\n\n</think>\n\nYes.", Parsed("Yes.")),
    ("start", "Yes.", Parsed("Yes.")),
    ("start", " <thin", Parsed(" <thin")),
    ("start", "Yes. <think>no</think>", Parsed("Yes. <think>no</think>")),
    ("start", "<think>cut sho", Parsed("", (), "cut sho")),
    ("start", "<think>a </thin", Parsed("", (), "a </thin")),
    ("start", "<think>a < b <</think> c</think>", Parsed("c</think>", (), "a < b <")),
    ("start", f"<think>Hm.</think>\n{CALL}", Parsed("", (Call("add", '{"x": 1}'),), "Hm.")),
    ("reasoning", "Hm.\n</think>\n\nYes.", Parsed("Yes.", (), "Hm.")),
    ("reasoning", "<think>\nHm.</think>Yes.", Parsed("Yes.", (), "Hm.")),
    ("reasoning", "cut short", Parsed("", (), "cut short")),
    ("reasoning", "", Parsed("")),
    ("content", "<think>a</think>", Parsed("<think>a</think>")),
]


@pytest.mark.parametrize(("begins_in", "text", "expected"), CASES)
def test_reasoning_is_split_off(begins_in: AnswerPart, text: str, expected: Parsed) -> None:
    assert parse(THINK.parser(USE, begins_in), text) == expected
    assert parse_parts(list(text), begins_in) == parse_parts([text], begins_in)
    for place in range(len(text)):
        assert parse_parts([text[:place], text[place:]], begins_in) == parse_parts(
            [text], begins_in
        )


def parse_parts(parts: list[str], begins_in: AnswerPart) -> list[Piece]:
    parser = THINK.parser(USE, begins_in)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined([*pieces, *parser.finish()])


def test_reasoning_is_given_as_it_comes() -> None:
    parser = THINK.parser(None)
    assert parser.feed("<think>\nOne") == [Reasoning("One")]
    assert parser.feed(" two\n</th") == [Reasoning(" two")]
    assert parser.feed("ink>\n") == []
    assert parser.feed("Yes") == [Content("Yes")]
    assert parser.finish() == []


def test_calls_stay_in_the_content_of_a_request_without_tools() -> None:
    parsed = parse(THINK.parser(None), f"<think>a</think>{CALL}")
    assert parsed == Parsed(CALL, (), "a")


def test_a_call_ends_the_reasoning_of_some_models() -> None:
    form = ReasoningFormat("x", "<think>", "</think>", calls_end_it=("<tool_call>",))
    parsed = parse(Dialect(FORMATS["hermes"], form).parser(USE), f"<think>Hm.\n{CALL}")
    assert parsed == Parsed("", (Call("add", '{"x": 1}'),), "Hm.")


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<thi", "</", "\n", " ", "text", "<", "é😀", "<tool_call>", CALL]
)


@given(
    fragments=st.lists(FRAGMENTS, max_size=10),
    begins_in=st.sampled_from(["start", "reasoning", "content"]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_cuts_lose_nothing(
    fragments: list[str], begins_in: AnswerPart, data: st.DataObject
) -> None:
    text = "".join(fragments)
    cut = data.draw(st.integers(0, len(text)))
    whole = parse_parts([text], begins_in)
    assert parse_parts([text[:cut], text[cut:]], begins_in) == whole
    assert parse_parts(list(text), begins_in) == whole
    kept = "".join(piece.text for piece in whole if isinstance(piece, Content | Reasoning))
    assert kept.count("text") == text.count("text")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nSay <think><|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_templates_open_the_reasoning(prompt: str, is_open: bool) -> None:
    assert REASONING_FORMATS["think"].is_opened_by(prompt) is is_open


def test_messages_that_are_continued() -> None:
    form = REASONING_FORMATS["think"]
    assert form.is_open_in("<think>one two")
    assert not form.is_open_in("<think>one</think>two")
    assert not form.is_open_in("two")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TEMPLATE, None),
        (TEMPLATE + "<think>", "think"),
        (TEMPLATE + "{{ content.split('</think>')[-1] }}", "think"),
        (TEMPLATE + "[THINK]", "mistral"),
    ],
)
def test_the_format_is_found(source: str, name: str | None) -> None:
    found = reasoning_for("auto", ChatTemplate(source, {}))
    assert (found.name if found else None) == name


def test_the_format_is_given() -> None:
    template = ChatTemplate(TEMPLATE + "<think>", {})
    assert dialect_for("auto", "none", template, lambda _: False).reasoning is None
    found = dialect_for("hermes", "mistral", template, lambda _: False)
    assert found.reasoning is REASONING_FORMATS["mistral"]
    assert found.texts == ("<tool_call>", "</tool_call>", "[THINK]", "[/THINK]")
    assert dialect_for("auto", "auto", None, lambda _: False).reasoning is None
