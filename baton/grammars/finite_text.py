"""Whether a grammar has a text that ends: without one, an answer goes on until its last token.

A rule whose every text contains another text of it, such as an object that requires an object of
its own kind, has none. The rules that have one are the least fixed point of conditions. Each
holds once enough of the conditions in it hold. What no condition models holds, so nothing
that has a text is refused. Time is linear in the text's length, with a bound on the schemas that
are combined. Plain Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

ENDLESS = "no text matches it: a part of it requires another such part, without end"
"""The reason that clients get."""
_MAX_COMBINED = 100_000
"""Maximum number of schemas that are combined with others. Beyond it, a schema counts as one that
has a text."""
_ALTERNATIVES = ("anyOf", "oneOf")


class _Conditions:
    """Conditions by number. Number 0 always holds."""

    def __init__(self) -> None:
        self._missing: list[int] = [0]
        self._users: list[list[int]] = [[]]

    def new(self) -> int:
        """Add a condition that never holds, unless ``let`` says when."""
        self._missing.append(1)
        self._users.append([])
        return len(self._missing) - 1

    def let(self, condition: int, parts: Sequence[int], needed: int) -> int:
        """Let a condition hold once ``needed`` of its parts do. Return it."""
        self._missing[condition] = needed
        for part in parts:
            self._users[part].append(condition)
        return condition

    def all_of(self, parts: Sequence[int]) -> int:
        """Return a condition that holds once all parts do."""
        return self.let(self.new(), parts, len(parts)) if parts else 0

    def any_of(self, parts: Sequence[int]) -> int:
        """Return a condition that holds once one part does."""
        return self.let(self.new(), parts, 1)

    def holds(self, condition: int) -> bool:
        """Find what holds, and return whether ``condition`` does."""
        missing = list(self._missing)
        pending = [one for one, count in enumerate(missing) if count <= 0]
        for one in pending:
            for user in self._users[one]:
                missing[user] -= 1
                if missing[user] == 0:
                    pending.append(user)
        return missing[condition] <= 0


# JSON schemas


def schema_ends(schema: Any) -> bool:
    """Return whether a finite JSON text may match a schema, whose objects have been closed: see
    ``baton.grammars.json_schema``."""
    return _Schemas(schema).end()


class _Schemas:
    """The conditions of one schema and of those in it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._conditions = _Conditions()
        self._known: dict[int, int] = {}
        self._pending: list[tuple[int, Any]] = []
        self._combined = 0

    def end(self) -> bool:
        root = self._of(self._root)
        while self._pending:
            condition, schema = self._pending.pop()
            parts = self._parts(schema)
            self._conditions.let(condition, parts, len(parts))
        return self._conditions.holds(root)

    def _of(self, schema: Any) -> int:
        """Return the condition of a schema."""
        if schema is False:
            return self._conditions.new()
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = condition = self._conditions.new()
            self._pending.append((condition, schema))
        return self._known[id(schema)]

    def _parts(self, schema: Mapping[str, Any]) -> list[int]:
        """Return conditions that all hold if a text matches a schema."""
        together = self._together(schema)
        if together is None:
            return []
        parts = [
            self._conditions.any_of([self._of(one) for one in some])
            for one in together
            for name in _ALTERNATIVES
            if isinstance(some := one.get(name), list) and some
        ]
        if any("enum" in one or "const" in one for one in together):
            return parts
        types = _types(together)
        if types == {"object"}:
            parts += self._of_object(together)
        elif types == {"array"}:
            parts += self._of_array(together)
        elif types == {"object", "array"}:
            either = (self._of_object(together), self._of_array(together))
            parts.append(self._conditions.any_of([self._conditions.all_of(one) for one in either]))
        return parts

    def _together(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        """Return the schemas that a value of ``schema`` matches at once: its own, those of its
        ``allOf`` and those that they refer to. None: there are none, or too many."""
        found: dict[int, Mapping[str, Any]] = {}
        pending: list[Any] = [schema]
        while pending:
            one = pending.pop()
            if not self._may_combine(1):
                return None
            if not isinstance(one, dict) or id(one) in found:
                continue
            found[id(one)] = one
            if isinstance(reference := one.get("$ref"), str):
                pending.append(_target(self._root, reference))
            if isinstance(both := one.get("allOf"), list):
                pending += both
        return list(found.values())

    def _may_combine(self, count: int) -> bool:
        self._combined += count
        return self._combined <= _MAX_COMBINED

    def _of_object(self, together: Sequence[Mapping[str, Any]]) -> list[int]:
        names = {
            name
            for one in together
            if isinstance(required := one.get("required"), list)
            for name in required
            if isinstance(name, str)
        }
        if not self._may_combine(len(names) * (len(together) - 1)):
            return []
        parts = [self._of_member(one, name) for name in names for one in together]
        for one in together:
            fewest = one.get("minProperties", 0)
            if isinstance(fewest, int) and fewest > 0 and "patternProperties" not in one:
                listed = one.get("properties")
                members = list(listed.values()) if isinstance(listed, dict) else []
                further = self._of(one.get("additionalProperties", True))
                some = [self._of(member) for member in members]
                repeated = min(fewest, len(members) + 1)
                some += [further] * repeated
                parts.append(self._conditions.let(self._conditions.new(), some, repeated))
        return [part for part in parts if part]

    def _of_member(self, schema: Mapping[str, Any], name: str) -> int:
        listed = schema.get("properties")
        if isinstance(listed, dict) and name in listed:
            return self._of(listed[name])
        if "patternProperties" in schema:
            return 0
        return self._of(schema.get("additionalProperties", True))

    def _of_array(self, together: Sequence[Mapping[str, Any]]) -> list[int]:
        fewest = [one["minItems"] for one in together if isinstance(one.get("minItems"), int)]
        count = max(fewest, default=0)
        parts = []
        for one in together:
            first, rest = one.get("prefixItems"), one.get("items", True)
            if isinstance(rest, list):
                first, rest = rest, one.get("additionalItems", True)
            first = first if isinstance(first, list) else []
            parts += [self._of(item) for item in first[:count]]
            if count > len(first):
                parts.append(self._of(rest))
            if "contains" in one and one.get("minContains", 1) != 0:
                parts.append(self._of(one["contains"]))
        return [part for part in parts if part]


def _types(together: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the types that all of some schemas allow; empty if there are no such, or if any."""
    allowed = [
        {given} if isinstance(given, str) else {one for one in given if isinstance(one, str)}
        for one in together
        if isinstance(given := one.get("type"), str | list)
    ]
    return set.intersection(*allowed) if allowed else set()


def _target(root: Any, reference: str) -> Any:
    """Return the schema of a reference within ``root``; None for other references."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if reference == "#" or reference.startswith("#/") else None


# Lark

_HEAD = re.compile(
    r"[ \t]*[?!]?(?P<name>[A-Za-z_][\w-]*)"
    r"(?:\[[^\]\n]*\]|\{[^}\n]*\})?(?:\.-?\d+)?[ \t]*:(?!:)"
)
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^>\n]*>)'
    r"|(?P<json>%json\b)|(?P<other>%regex\b)|(?P<directive>%[a-z]+)"
    r"|(?P<count>\{\s*(?P<fewest>\d*)\s*(?:,\s*\d*\s*)?\}|~\s*(?P<times>\d+)(?:\s*\.\.\s*\d+)?)"
    r"|(?P<alias>->[ \t]*\w+)|(?P<name>[A-Za-z_][\w-]*)|(?P<mark>[|()\[\]?*+,.&!~])"
)


class _Unmodeled(Exception):
    """A grammar has a part that is not modeled here."""


def lark_ends(text: str) -> bool:
    """Return whether a finite text may match a grammar in llguidance's dialect of Lark."""
    try:
        return _Rules(text).end()
    except _Unmodeled:
        return True


class _Rules:
    """The conditions of a grammar's rules."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._conditions = _Conditions()
        self._rules: dict[str, int] = {}
        self._defined: set[str] = set()
        self._groups: list[tuple[list[int], list[int]]] = []
        """Of each group that is open, its finished alternatives and the parts of the last one."""

    def end(self) -> bool:
        place, size = 0, len(self._text)
        rule = ""
        while place < size:
            at_line = place == 0 or self._text[place - 1] == "\n"
            if at_line and not self._is_open and (head := _HEAD.match(self._text, place)):
                self._close(rule)
                rule, self._groups = head["name"], [([], [])]
                place = head.end()
            else:
                place = self._token(place)
        self._close(rule)
        for name in self._rules.keys() - self._defined:
            # The library refuses it by name.
            self._conditions.let(self._rules[name], [], 0)
        return self._conditions.holds(self._rules.get("start", 0))

    @property
    def _is_open(self) -> bool:
        """Whether a group in parentheses is open."""
        return len(self._groups) > 1

    def _rule(self, name: str) -> int:
        """Return the condition of a rule. That of a terminal holds: none refers to itself."""
        if name.lstrip("_")[:1].isupper():
            return 0
        if name not in self._rules:
            self._rules[name] = self._conditions.new()
        return self._rules[name]

    def _close(self, rule: str) -> None:
        """End a rule's alternatives."""
        if not rule:
            return
        if self._is_open:
            raise _Unmodeled
        self._defined.add(rule)
        condition, ((finished, last),) = self._rule(rule), self._groups
        if condition:
            self._conditions.let(condition, [*finished, self._conditions.all_of(last)], 1)

    def _token(self, place: int) -> int:
        """Read one token, and return the place behind it."""
        token = _TOKEN.match(self._text, place)
        if token is None:
            raise _Unmodeled
        end = token.end()
        # Only the start of a line may be a head, so space ends with the line.
        if token["space"] is not None:
            line = self._text.find("\n", place, end)
            return end if line < 0 else line + 1
        if not self._groups:
            return self._outside(token)
        if token["json"] is not None or token["other"] is not None:
            value, end = self._value(end)
            self._add(0 if token["other"] or schema_ends(value) else self._conditions.new())
        elif token["count"] is not None:
            if int(token["fewest"] or token["times"] or 0) == 0:
                self._drop()
        elif token["name"] is not None:
            if self._text.startswith("::", end):
                raise _Unmodeled
            self._add(self._rule(token["name"]))
        elif token["text"] is not None:
            self._add(0)
        elif token["directive"] is not None:
            return self._outside(token)
        elif token["mark"] is not None:
            self._mark(token["mark"])
        return end

    def _outside(self, token: re.Match[str]) -> int:
        """Read a directive, up to the end of its line."""
        if token["directive"] not in {"%ignore", "%import", "%declare", "%llguidance"}:
            raise _Unmodeled
        end = self._text.find("\n", token.end())
        return len(self._text) if end < 0 else end + 1

    def _value(self, place: int) -> tuple[Any, int]:
        """Read a JSON object, and return it and the place behind it."""
        begin = self._text.find("{", place)
        try:
            return json.JSONDecoder().raw_decode(self._text, begin)
        except (ValueError, RecursionError):
            raise _Unmodeled from None

    def _add(self, part: int) -> None:
        self._groups[-1][1].append(part)

    def _drop(self) -> None:
        """Make the last part optional: a text without it exists."""
        if self._groups[-1][1]:
            self._groups[-1][1][-1] = 0

    def _mark(self, mark: str) -> None:
        finished, last = self._groups[-1]
        match mark:
            case "|":
                finished.append(self._conditions.all_of(last))
                self._groups[-1] = (finished, [])
            case "(" | "[":
                self._groups.append(([], []))
            case ")" | "]" if self._is_open:
                self._groups.pop()
                whole = self._conditions.any_of([*finished, self._conditions.all_of(last)])
                self._add(whole if mark == ")" else 0)
            case "?" | "*":
                self._drop()
            case ")" | "]":
                raise _Unmodeled
