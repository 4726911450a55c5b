"""What becomes of the parts of a message's content."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest, UnsupportedParameter
from router.conversation.content import split_thoughts, text_of

DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([], ""),
        (["x", {"text": "y"}], "x\ny"),
        ([{"type": one, "text": "x"} for one in ("text", "input_text", "output_text")], "x\nx\nx"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "a_new_name", "text": "x"}], "x"),
        ([DOCUMENT], "T\nwords"),
        ([{"type": "document", "source": {"type": "content", "content": ["a"]}}], "a"),
        ([{"type": "search_result", "title": "T", "source": "S", "content": ["a"]}], "T\nS\na"),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}], "y"),
    ],
)
def test_what_is_text_is_read(content: Any, text: str) -> None:
    assert text_of(content, "content") == text


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "input_audio", "input_audio": {}},
        {"type": "document", "source": {"type": "base64", "data": "x"}},
        {"type": "search_result", "content": [IMAGE]},
    ],
)
def test_what_cannot_be_seen_is_refused_now_and_left_out_later(part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match=r"content\[0\]"):
        text_of([part], "content")
    assert "not shown" in text_of([part], "content", current=False)


@pytest.mark.parametrize("content", [5, {}, [5], [{}], [{"type": "text"}], [{"type": []}]])
@pytest.mark.parametrize("current", [True, False])
def test_what_is_malformed_is_refused(content: Any, current: bool) -> None:
    with pytest.raises(InvalidRequest):
        text_of(content, "content", current=current)


def test_reasoning_among_the_parts_is_split_off() -> None:
    thought, said = {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}
    assert split_thoughts([thought, said]) == ([said], [thought])
    assert split_thoughts("x") == ("x", [])
