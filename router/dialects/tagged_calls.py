"""Calls whose arguments are parameters between tags: Qwen 3 Coder, GLM 4.5, MiniMax M2.

    <function=look_up>
    <parameter=word>
    x
    </parameter>
    </function>

A value is written without quotes. The tool's schema gives its type: a string stays as it is, any
other value is JSON. Readers emit strings as they arrive, and other values once they are complete.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.calls import NAME, CallReader, HeadReader
from router.dialects.json_calls import dump
from router.dialects.json_scanner import WHITE
from router.dialects.pieces import first_marker, possible_start
from router.dialects.python_calls import json_of_text
from router.dialects.rules import (
    check_kept,
    json_value,
    literal,
    pattern,
    properties_of,
    required_of,
    resolved,
    types_of,
)
from router.dialects.tools import Tool

_MAX_KEY_CHARACTERS = 256
_KEY = re.compile(r"[^<>\n]*")
_ATTRIBUTES = r'(?:\s+\w+="[^"<>]*")*\s*'
_NAMED_KEY = re.compile(rf'\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^"]*?)){_ATTRIBUTES}')
"""A parameter's name, with or without quotes. Some models add attributes."""
_KEPT_OF_STRINGS = frozenset(
    {"type", "enum", "const", "title", "description", "default", "examples"}
)


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The form of tool calls that consist of a name and parameters between tags."""

    before_name: str
    behind_name: str
    """Tag after the name; empty: the name ends with the first parameter."""
    before_key: str
    behind_key: tuple[str, ...]
    """Tags between a parameter's name and its value."""
    behind_value: str
    behind: str
    """The tag that ends the tool call, with the white space around it."""
    newlines: bool = False
    """Whether the value of a parameter stands on lines of its own."""

    @property
    def end(self) -> str:
        """The tag that ends the tool call."""
        return self.behind.strip()

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a tool call whose arguments are malformed. See ``CallForm``."""
        return (self.end,)

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the format; some may be special tokens. See ``CallForm``."""
        found = (self.before_key, *self.behind_key, self.behind_value, self.end)
        return tuple(text for text in found if re.fullmatch('<[^="]+>', text))

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one tool call. ``tools`` are those that may be called, by name. See
        ``CallForm``."""
        return _TaggedReader(self, self._head(), tools)

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it. See ``CallForm``."""
        values = arguments.items() if isinstance(arguments, dict) else ()
        parameters = (
            self._key(key) + (value if isinstance(value, str) else dump(value)) + self._value_end
            for key, value in values
        )
        return f"{self._opened(name)}{''.join(parameters)}{self.behind}"

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. See ``CallForm``."""
        properties = properties_of(tool)
        required = required_of(tool)
        check_kept(tool, tool.parameters)
        names, rules = list[str](), list[str]()
        for place, (key, schema) in enumerate(properties.items()):
            name = f"{rule}_{place}"
            names.append(name if key in required else f"{name}?")
            rules += self._parameter(name, key, schema, tool, special)
        opened, behind = literal(self._opened(tool.name), special), literal(self.behind, special)
        return [f"{rule}: {opened} {' '.join(names)} {behind}", *rules]

    def _parameter(
        self, rule: str, key: str, schema: Any, tool: Tool, special: Mapping[str, int]
    ) -> list[str]:
        head, end = literal(self._key(key), special), literal(self._value_end, special)
        if types_of(schema, tool.parameters) != {"string"}:
            part = json_value(schema if isinstance(schema, dict) else {}, tool)
            return [f"{rule}: {head} {rule}_value {end}", f"{rule}_value: {part}"]
        schema = resolved(schema, tool.parameters)
        check_kept(tool, schema, _KEPT_OF_STRINGS)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices:
            texts = " | ".join(dump(choice) for choice in choices)
            return [f"{rule}: {head} ({texts}) {end}"]
        if end.startswith("<["):
            return [f"{rule}: {head} {rule.upper()}? {end}", f"{rule.upper()}: /(?s:.+)/"]
        # A lazy text ends at the first end of a value.
        return [
            f'{rule}: {head} {rule}_value "\\n"',
            f"{rule}_value[lazy]: /(?s:.*){pattern(self.behind_value)}/",
        ]

    def _opened(self, name: str) -> str:
        return f"{self.before_name}{name}{self.behind_name}\n"

    def _key(self, key: str) -> str:
        between = "\n".join(self.behind_key)
        return f"{self.before_key}{key}{between}" + ("\n" if self.newlines else "")

    @property
    def _value_end(self) -> str:
        return ("\n" if self.newlines else "") + self.behind_value + "\n"

    def _head(self) -> re.Pattern[str]:
        if not self.behind_name:
            ends = "|".join(map(re.escape, (self.before_key, self.end)))
            return re.compile(rf"\s*{NAME}\s*(?={ends})")
        # Some models quote the name, or add attributes.
        before = re.escape(self.before_name.rstrip('"'))
        return re.compile(rf'\s*{before}\s*"?{NAME}"?{_ATTRIBUTES}>')


class _At(enum.Enum):
    BODY = enum.auto()
    KEY = enum.auto()
    BETWEEN = enum.auto()
    VALUE = enum.auto()


class _TaggedReader(HeadReader):
    """Reads a tool call written with tags. Between its parameters, anything but white space breaks
    the call."""

    def __init__(self, form: TaggedCalls, head: re.Pattern[str], tools: Mapping[str, Tool]) -> None:
        super().__init__(head, tools)
        self._form = form
        self._at = _At.BODY
        self._held = ""
        """Text since the latest tag that was not emitted as a piece yet."""
        self._key = ""
        self._head_text = ""
        """Text of the current parameter's name and of the tags around the name, as the model wrote
        them."""
        self._tags = 0
        """Number of tags that were read between the current parameter's name and its value."""
        self._parameters = 0
        self._schema: Mapping[str, Any] = {}
        self._known: Mapping[str, Any] = {}
        """The schemas of the tool's arguments, by name."""
        self._seen: set[str] = set()
        """Names of the parameters that the tool call has so far."""
        self._ends: tuple[str, ...] = ()
        """Markers that end the current parameter's value."""
        self._types: frozenset[str] = frozenset()
        self._is_text = False
        self._is_open = False
        """Whether the current value is a string that has been emitted in part."""

    def _begin(self, tool: Tool) -> None:
        self._schema, self._known = tool.parameters, properties_of(tool)

    def _take_arguments(self, text: str) -> int:
        self._held += text
        steps = {
            _At.BODY: self._body,
            _At.KEY: self._read_key,
            _At.BETWEEN: self._between,
            _At.VALUE: self._value,
        }
        while self._held and not (self.complete or self.broken) and steps[self._at]():
            pass
        if not (self.complete or self.broken):
            return len(text)
        # What was held from before ``text`` goes back to the parser, too: with the text that
        # follows it may be a marker.
        held, self._held = self._held, ""
        before = max(0, len(held) - len(text))
        self.raw = held[:before]
        return len(text) - len(held) + before

    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back. See ``CallReader``."""
        held, self._held = self._held, ""
        if self._at is _At.VALUE and self._is_text:
            self._text(held)
        elif held:
            self._give(held)

    def _body(self) -> bool:
        """Read the text after the head or a value: a parameter, or the end."""
        self._held = self._held.lstrip(WHITE)
        before = self._form.before_key.rstrip('"')
        if self._held.startswith(self._form.end):
            self._held = self._held[len(self._form.end) :]
            self._give("}" if self._parameters else "{}")
            self.complete = True
        elif self._held.startswith(before):
            self._held = self._held[len(before) :]
            self._at = _At.KEY
        elif any(tag.startswith(self._held) for tag in (before, self._form.end)):
            return False
        else:
            self.broken = True
        return True

    def _read_key(self) -> bool:
        found = _KEY.match(self._held)
        key = found[0] if found else ""
        rest, end = self._held[len(key) :], self._form.behind_key[0].lstrip('"')
        named = _NAMED_KEY.fullmatch(key)
        wrong = rest and (named is None or not (rest.startswith(end) or end.startswith(rest)))
        if wrong or len(key) > _MAX_KEY_CHARACTERS:
            self._give(self._form.before_key.rstrip('"'))
            self.broken = True
        elif rest.startswith(end):
            self._head_text = self._form.before_key.rstrip('"') + key + end
            self._key = (named["quoted"] or named["plain"] or "") if named else ""
            self._held = rest[len(end) :]
            self._at, self._tags = _At.BETWEEN, 1
            return True
        return False

    def _between(self) -> bool:
        tags = self._form.behind_key[self._tags :]
        if not tags:
            self._types = frozenset({"string"})
            if self._key in self._known:
                self._types = types_of(self._known[self._key], self._schema)
            self._is_text = self._types == {"string"}
            self._is_open, self._at = False, _At.VALUE
            self._seen.add(self._key)
            self._ends = (self._form.behind_value, *self._next_parameters())
            return True
        self._held = self._held.lstrip(WHITE)
        if self._held.startswith(tags[0]):
            self._held, self._tags = self._held[len(tags[0]) :], self._tags + 1
            return True
        if not tags[0].startswith(self._held):
            self._give(self._head_text)
            self.broken = True
        return False

    def _next_parameters(self) -> Iterable[str]:
        """Return the texts that begin other parameters. They end a value that lacks its closing
        tag."""
        if not self._form.newlines:
            return ()
        behind = self._form.behind_key[0]
        others = (key for key in self._known if key not in self._seen)
        return (f"\n{self._form.before_key}{key}{behind}" for key in others)

    def _value(self) -> bool:
        place, end = first_marker(self._held, self._ends)
        if end:
            dropped = len(end) if end == self._form.behind_value else 0
            value, self._held = self._held[:place], self._held[place + dropped :]
            self._end_value(value)
            self._at = _At.BODY
            return True
        if self._is_text:
            keep = possible_start(self._held, self._ends)
            shown = len(self._held) - keep
            # A last newline may belong to the tag after it, and a first one to the tag before it.
            if self._form.newlines and self._held[:shown].endswith("\n"):
                shown -= 1
            if shown:
                self._text(self._held[:shown])
                self._held = self._held[shown:]
        return False

    def _text(self, text: str) -> None:
        """Emit a part of a string value, as JSON."""
        if not self._is_open:
            self._is_open = True
            self._open_value('"')
            if self._form.newlines:
                text = text.removeprefix("\n")
        self._give(dump(text)[1:-1])

    def _end_value(self, value: str) -> None:
        if self._form.newlines:
            value = value.removesuffix("\n") if len(value) > 1 or self._is_open else value
        if self._is_text:
            self._text(value)
            self._give('"')
            return
        self._open_value(json_of_text(value.strip(WHITE), self._types))

    def _open_value(self, text: str) -> None:
        self._give(f"{', ' if self._parameters else '{'}{dump(self._key)}: {text}")
        self._parameters += 1
