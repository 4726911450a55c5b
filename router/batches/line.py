"""A line of a batch's input file: one request, as JSON. Plain Python."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pydantic_core

from router.batches.storage.batch import Fault

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""The endpoints that a line may call."""
MAX_LINES = 50_000
"""Maximum number of lines in a file, as at OpenAI."""
MAX_NUMBER = 8 * MAX_LINES
"""Maximum number of a line, with blank lines. It bounds the table of lines with a result."""
MAX_LINE_VALUES = 131_072
"""Maximum number of JSON values in a line: parsing more would hold the interpreter lock for long.
"""
MAX_FAULTS = 50
"""Maximum number of faults of a file that are reported."""
_MAX_NAME_CHARACTERS = 512
_SHOWN_CHARACTERS = 128
_MARKS = (b",", b"[", b"{")
_STRINGS_AND_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[,\[{]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """One request line of a batch's input file."""

    number: int
    """Number of the line in the file, from 1; blank lines count too."""
    custom_id: str
    """The client's name for the request, unique in the file."""
    url: str
    """Path of the endpoint that the line calls, one of ``ENDPOINTS``."""
    body: dict[str, Any]


class BadLine(Exception):
    """Raised because a line is not a valid request."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def read_line(number: int, raw: bytes, max_bytes: int) -> Line:
    """Parse one request line of at most ``max_bytes``, with the limits for the body of an HTTP
    request. Raises BadLine."""
    if len(raw) > max_bytes:
        raise _bad(number, "line_too_large", f"the line is larger than {max_bytes} bytes")
    if _has_too_many_values(raw):
        text = f"the line holds more than {MAX_LINE_VALUES} values"
        raise _bad(number, "line_too_large", text)
    try:
        value = pydantic_core.from_json(raw.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError:
        raise _bad(number, "invalid_json_line", "the line is not valid JSON") from None
    if not isinstance(value, dict):
        raise _bad(number, "invalid_json_line", "the line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_NAME_CHARACTERS:
        text = f"custom_id must be a string of 1 to {_MAX_NAME_CHARACTERS} characters"
        raise _bad(number, "invalid_custom_id", text, "custom_id")
    if value.get("method") != "POST":
        raise _bad(number, "invalid_method", "method must be POST", "method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise _bad(number, "invalid_url", f"url must be one of {', '.join(ENDPOINTS)}", "url")
    if not isinstance(body, dict):
        raise _bad(number, "invalid_body", "body must be a JSON object", "body")
    if body.get("stream"):
        raise _bad(number, "invalid_body", "stream is not possible in a batch", "body.stream")
    return Line(number, custom_id, url, body)


def _has_too_many_values(raw: bytes) -> bool:
    """Return whether a request line has too many commas and brackets outside its strings."""
    if sum(map(raw.count, _MARKS)) <= MAX_LINE_VALUES:
        return False
    marks = (found[0] in _MARKS for found in _STRINGS_AND_MARKS.finditer(raw))
    return sum(marks) > MAX_LINE_VALUES


def read_lines(raws: Iterable[bytes], max_bytes: int, first: int = 1) -> Iterator[Line]:
    """Yield the lines that are not blank; ``first`` is the first line's number. Raises BadLine."""
    for number, raw in enumerate(raws, first):
        if raw.strip():
            yield read_line(number, raw, max_bytes)


def find_faults(
    raws: Iterable[bytes], max_bytes: int, endpoint: str = "", model: str = ""
) -> tuple[int, list[Fault]]:
    """Check a whole file. Return its number of lines, and up to ``MAX_FAULTS`` faults.

    If given, all lines must call ``endpoint`` and name ``model``.
    """
    faults: list[Fault] = []
    names: dict[str, int] = {}
    count = 0
    for number, raw in enumerate(raws, 1):
        if number > MAX_NUMBER:
            text = f"a file has at most {MAX_NUMBER} lines, blank ones included"
            faults.append(Fault("too_many_lines", text))
            break
        if not raw.strip():
            continue
        count += 1
        if count > MAX_LINES:
            faults.append(Fault("too_many_lines", f"a file has at most {MAX_LINES} lines"))
            break
        try:
            line = read_line(number, raw, max_bytes)
            _check_target(line, endpoint, model)
            _check_name(line, names)
        except BadLine as bad:
            faults.append(bad.fault)
            if len(faults) == MAX_FAULTS:
                break
    if not count and not faults:
        faults.append(Fault("empty_file", "the file has no lines"))
    return count, faults


def _check_target(line: Line, endpoint: str, model: str) -> None:
    if endpoint and line.url != endpoint:
        raise _bad(line.number, "mismatched_endpoint", f"url must be {endpoint}", "url")
    asked = line.body.get("model")
    if model and asked != model:
        shown = asked[:_SHOWN_CHARACTERS] if isinstance(asked, str) else "none"
        text = f"the model '{shown}' does not exist; {model} is served"
        raise _bad(line.number, "model_not_found", text, "body.model")


def _check_name(line: Line, names: dict[str, int]) -> None:
    known = names.setdefault(line.custom_id, line.number)
    if known != line.number:
        text = f"custom_id is already used in line {known}"
        raise _bad(line.number, "duplicate_custom_id", text, "custom_id")


def _bad(number: int, code: str, message: str, param: str | None = None) -> BadLine:
    return BadLine(Fault(code, message, number, param))
