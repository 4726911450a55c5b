"""Reads the text of a message's content, in the forms of all APIs and of other servers.

What a text model cannot see is refused in the current turn. In earlier turns, a few words stand for
it, so that the conversation goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter

TEXTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "compaction": "content",
}
"""Types of parts that are text, and the field that has the text."""
_THOUGHTS = frozenset({"thinking", "reasoning", "reasoning_text", "redacted_thinking"})
"""Types of parts that are an assistant's reasoning."""
_SILENT = frozenset({"redacted_thinking", "tool_reference", "fallback", "container_upload"})
"""Types of parts that say nothing to the model."""


def text_of(content: Any, where: str, *, current: bool = True) -> str:
    """Return the text of a message's content: text, a list of parts, or nothing.

    ``where`` is its path, for errors. ``current`` is whether the model answers it now. Raises
    InvalidRequest if it is malformed, UnsupportedParameter for what the model cannot see now.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    texts = (
        part_text(part, f"{where}[{place}]", current=current) for place, part in enumerate(content)
    )
    return "\n".join(text for text in texts if text is not None)


def split_thoughts(content: Any) -> tuple[Any, list[Any]]:
    """Split an assistant's content into what it said, and the parts that are its reasoning."""
    if not isinstance(content, list):
        return content, []
    thoughts = [part for part in content if _kind(part) in _THOUGHTS]
    return [part for part in content if _kind(part) not in _THOUGHTS], thoughts


def part_text(part: Any, where: str, *, current: bool) -> str | None:
    """Return the text of a part of content; None if it says nothing. Raises as ``text_of``."""
    if isinstance(part, str):
        return part
    kind = _kind(part)
    if kind is None:
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    if kind in _SILENT:
        return None
    if kind in ("document", "search_result"):
        read = _document if kind == "document" else _search_result
        return read(part, where, current=current)
    if kind in TEXTS or isinstance(part.get("text"), str):
        return string(part, TEXTS.get(kind, "text"), where)
    if current:
        raise UnsupportedParameter(
            f"{where}: the model reads only text, not a part of type '{kind[:64]}'", param=where
        )
    return f"[{kind[:64]}: not shown]"


def string(value: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string ``name`` of an object. Raises InvalidRequest."""
    found = value.get(name)
    if not isinstance(found, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return found


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None and isinstance(part, dict) and isinstance(part.get("text"), str):
        return "text"
    return kind if isinstance(kind, str) else None


def _document(part: Mapping[str, Any], where: str, *, current: bool) -> str:
    """Return the text of a document in Anthropic's form, if it is one of text."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    title = [one for name in ("title", "context") if isinstance(one := part.get(name), str) and one]
    if isinstance(source, dict) and kind == "text":
        return "\n".join([*title, string(source, "data", f"{where}.source")])
    if isinstance(source, dict) and kind == "content":
        inner = text_of(source.get("content"), f"{where}.source.content", current=current)
        return "\n".join([*title, inner])
    if current:
        raise UnsupportedParameter(
            f"{where}: only documents of text can be read", param=f"{where}.source"
        )
    return "\n".join([*title, "[document: not shown]"])


def _search_result(part: Mapping[str, Any], where: str, *, current: bool) -> str:
    head = [one for name in ("title", "source") if isinstance(one := part.get(name), str) and one]
    text = text_of(part.get("content"), f"{where}.content", current=current)
    return "\n".join([*head, text])
