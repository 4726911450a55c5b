"""The lines of an input file."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batches import line as lines
from router.batches.line import MAX_LINE_VALUES, BadLine, find_faults, read_line

MOST = 10_000
CHAT = "/v1/chat/completions"


def text(**changes: Any) -> bytes:
    value = {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT,
        "body": {"model": "tiny", "messages": []},
        **changes,
    }
    return json.dumps({k: v for k, v in value.items() if v is not None}).encode()


def test_a_good_line() -> None:
    line = read_line(7, text(), MOST)
    assert (line.number, line.custom_id, line.url) == (7, "a", CHAT)
    assert line.body == {"model": "tiny", "messages": []}
    assert read_line(7, b"\xef\xbb\xbf" + text(), MOST) == line, "PowerShell writes such a mark"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b'{"custom_id": NaN}', "invalid_json_line"),
        (b"[" * 5000, "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (text(custom_id=None), "invalid_custom_id"),
        (text(custom_id=""), "invalid_custom_id"),
        (text(custom_id=1), "invalid_custom_id"),
        (text(custom_id="x" * 513), "invalid_custom_id"),
        (text(method="GET"), "invalid_method"),
        (text(url="/v1/models"), "invalid_url"),
        (text(url=None), "invalid_url"),
        (text(body=[]), "invalid_body"),
        (text(body={"stream": True}), "invalid_body"),
        (text(body={"x": "y" * MOST}), "line_too_large"),
    ],
)
def test_bad_lines_are_named(raw: bytes, code: str) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(3, raw, MOST)
    assert (caught.value.fault.code, caught.value.fault.line) == (code, 3)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_a_fault(raw: bytes) -> None:
    with contextlib.suppress(BadLine):
        assert read_line(1, raw, MOST).url in lines.ENDPOINTS


def test_a_file_may_have_blank_lines() -> None:
    assert find_faults([text(), b"\n", text(custom_id="b") + b"\n"], MOST) == (2, [])


def test_a_file_without_lines_is_at_fault() -> None:
    count, faults = find_faults([b"\n", b"  \n"], MOST)
    assert (count, [fault.code for fault in faults]) == (0, ["empty_file"])


def test_faults_of_all_lines_are_reported() -> None:
    raws = [text(), text(), b"{", text(custom_id="c", url="/v1/completions")]
    count, faults = find_faults(raws, MOST, CHAT, "tiny")
    assert count == 4
    assert [(fault.line, fault.code) for fault in faults] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "mismatched_endpoint"),
    ]


def test_the_model_must_be_served() -> None:
    _, faults = find_faults([text()], MOST, CHAT, "other")
    assert [fault.code for fault in faults] == ["model_not_found"]


def test_faults_and_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(find_faults([b"{"] * 1000, MOST)[1]) == lines.MAX_FAULTS
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    raws = [text(custom_id=str(number)) for number in range(3)]
    assert [fault.code for fault in find_faults(raws, MOST)[1]] == ["too_many_lines"]
    assert find_faults(raws[:2], MOST)[1] == []
    # Redis keeps a bit for each number of a line.
    monkeypatch.setattr(lines, "MAX_NUMBER", 4)
    assert find_faults([b"\n", b"\n", b"\n", raws[0]], MOST)[1] == []
    (fault,) = find_faults([b"\n"] * 4 + raws[:1], MOST)[1]
    assert (fault.code, fault.message) == (
        "too_many_lines",
        "a file has at most 4 lines, blank ones included",
    )


def test_a_line_of_too_many_values() -> None:
    body = {"model": "tiny", "prompt": [0] * (MAX_LINE_VALUES + 1)}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with pytest.raises(BadLine, match=f"more than {MAX_LINE_VALUES} values"):
        read_line(1, json.dumps(line).encode(), 1 << 22)


def test_a_line_whose_text_has_many_marks() -> None:
    body = {"model": "tiny", "prompt": '",[{\\' * MAX_LINE_VALUES}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    assert read_line(1, json.dumps(line).encode(), 1 << 22).body == body
