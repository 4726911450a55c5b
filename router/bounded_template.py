"""A jinja sandbox in which templates end: their steps, their time and what they write are bounded.

jinja's own sandbox keeps a template from Python's insides, and lets it fill the memory or run for
ever. Here every loop's turn, call, operator and filter takes of a budget, which ends with
``TemplateExhausted``; so every single operation must be short, which is checked before it is done:
nothing is repeated, joined, padded or written beyond the budget's characters. What chat templates
do not need and what would need a check of its own is absent.

A budget is bound to a rendering by a context variable: threads render at the same time.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
import markupsafe

MOST_STEPS = 4_000_000
"""Of one rendering: loops' turns, calls, operators, filters. A long conversation takes some 50 a
message."""
MOST_S = 5.0
"""Seconds of one rendering."""
MOST_NUMBER = 1_000_000
"""The largest number as an argument: widths and counts make memory of it."""
MOST_BITS = 16_384
"""Of a whole number that an operator makes."""
_LEAST_CHARACTERS = 1 << 20
_TIMED_STEPS = 256
_ITEM = 8
"""What an item of a list weighs, in characters."""
_MOST_INDENT = 64
_ABSENT_FILTERS = frozenset(
    {"center", "filesizeformat", "format", "pprint", "random"}
    | {"striptags", "urlize", "wordwrap", "xmlattr"}
)
_ABSENT_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "from_bytes", "ljust", "maketrans"}
    | {"rjust", "to_bytes", "translate", "zfill"}
)
_ABSENT_GLOBALS = ("lipsum",)
_WIDE = re.compile(r"\d{5,}")
_PLAIN = (str, int, float, bool, type(None))


class TemplateExhausted(jinja2.TemplateError):
    """The template has taken more than it may."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, characters: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``characters``: of all texts that it makes on its way."""
        self.most_characters = max(characters, _LEAST_CHARACTERS)
        self._characters = self.most_characters
        self._steps = MOST_STEPS
        self._clock = clock
        self._ends_at = clock() + MOST_S

    def step(self) -> None:
        """One more operation."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateExhausted(f"it takes more than {MOST_STEPS} steps")
        if self._steps % _TIMED_STEPS == 0 and self._clock() > self._ends_at:
            raise TemplateExhausted(f"it takes longer than {MOST_S:.0f} s")

    def write(self, characters: int) -> None:
        """So many more characters."""
        self._characters -= characters
        if self._characters < 0:
            raise TemplateExhausted("it writes too much")

    def check(self, characters: int) -> None:
        """Whether so many would be too many, before they are made."""
        if characters > self._characters:
            raise TemplateExhausted("it writes too much")


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def budgeted(characters: int) -> Iterator[Budget]:
    """Within it, templates of this thread take of one budget."""
    budget = Budget(characters)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def _left() -> Budget:
    budget = _budget.get()
    if budget is None:
        raise TemplateExhausted("it is rendered without a budget")
    return budget


def weight(value: Any, most: int) -> int:
    """What a value takes when it is written, in characters, about.

    Raises TemplateExhausted for more than ``most``: lists may hold one another many times over.
    """
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            stack += one.keys()
            stack += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            stack += one
        elif isinstance(one, jinja2.utils.Namespace):
            raise TemplateExhausted("a namespace is no value")
        total += _ITEM
        if total + _ITEM * len(stack) > most:
            raise TemplateExhausted("it makes too large a value")
    return total


def _depth(value: Any) -> int:
    """How deep lists lie in one another; of what ``weight`` has passed."""
    depth, level = 0, [value]
    while level:
        depth += 1
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                deeper += one.values()
            elif isinstance(one, list | tuple):
                deeper += one
        level = deeper
    return depth


class _Marks(jinja2.visitor.NodeTransformer):
    """Has loops, macros, joins and literals tell the environment what they do."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 - jinja's names
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _asked("joined", list(node.nodes), node.lineno)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _asked("weighed", [node], node.lineno) if node.items else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _asked("weighed", [node], node.lineno) if node.items else node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        loads = node.ctx == "load" and node.items
        return _asked("weighed", [node], node.lineno) if loads else node


def _asked(method: str, arguments: list[Any], line: int) -> jinja2.nodes.Call:
    name = jinja2.nodes.EnvironmentAttribute(method, lineno=line)
    return jinja2.nodes.Call(name, arguments, [], None, None, lineno=line)


def _turn(node: jinja2.nodes.For | jinja2.nodes.Macro) -> jinja2.nodes.ExprStmt:
    """A step, and the text that stands in the body."""
    size = sum(len(text.data) for text in node.find_all(jinja2.nodes.TemplateData))
    asked = _asked("turn", [jinja2.nodes.Const(size, lineno=node.lineno)], node.lineno)
    return jinja2.nodes.ExprStmt(asked, lineno=node.lineno)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Its templates render within ``budgeted`` alone."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self.text, **options)
        for name in _ABSENT_GLOBALS:
            self.globals.pop(name, None)
        self.filters = {
            name: _bounded(name, made)
            for name, made in self.filters.items()
            if name not in _ABSENT_FILTERS
        }
        self._own = (self.joined, self.weighed, self.turn)

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        """One more, or another."""
        self.filters[name] = _bounded(name, made)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        found = super()._parse(source, name, filename)
        marked: jinja2.nodes.Template = _Marks().visit(found)
        return marked

    # What templates are made to call

    def turn(self, characters: int) -> None:
        """A loop's or macro's body begins, with so much text in it."""
        budget = _left()
        budget.step()
        budget.write(characters)

    def joined(self, *values: Any) -> str:
        """The operator ``~``."""
        return "".join(self.text(value) for value in values)

    def weighed(self, value: Any) -> Any:
        """A list, tuple or dictionary that the template has made."""
        budget = _left()
        budget.step()
        weight(value, budget.most_characters)
        return value

    def text(self, value: Any) -> Any:
        """What is written of a value."""
        budget = _left()
        if not isinstance(value, _PLAIN) and not isinstance(value, jinja2.Undefined):
            weight(value, budget.most_characters)
        written = value if isinstance(value, str) else str(value)
        budget.write(len(written))
        return written

    # What the sandbox asks

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it."""
        return attr not in _ABSENT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes by here."""
        if obj in self._own:
            return obj(*args)
        budget = _left()
        budget.step()
        _check_numbers((*args, *kwargs.values()))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            args = _check_method(budget, owner, name, args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, with bounded widths."""
        made = super().wrap_str_format(value)
        if made is None:
            return None
        pattern = str(value.__self__)
        made_format = made

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _WIDE.search(pattern) or re.search(r"\{[^}]*\{", pattern.replace("{{", "")):
                raise TemplateExhausted("its format is too wide")
            budget = _left()
            most = max(
                (weight(one, budget.most_characters) for one in (*args, *kwargs.values())),
                default=0,
            )
            budget.check(len(pattern) * 10_000 if "{" in pattern and ":" in pattern else 0)
            budget.check(pattern.count("{") * most)
            return made_format(*args, **kwargs)

        return bounded

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """An operator between two values."""
        budget = _left()
        budget.step()
        if operator == "+" and type(left) is str and type(right) is str:
            # What nearly all of them are.
            budget.write(len(left) + len(right))
            return left + right
        match operator:
            case "*":
                _check_product(budget, left, right)
            case "**":
                _check_power(left, right)
            case "+":
                most = budget.most_characters
                budget.check(sum(weight(one, most) for one in (left, right) if _sized(one)))
            case "%":
                _check_percent(budget, left, right)
        return _checked(super().call_binop(context, operator, left, right))


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple | Mapping)


def _checked(value: Any) -> Any:
    """What an operation has made, which is never too large to be made."""
    if isinstance(value, str):
        _left().write(len(value))
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise TemplateExhausted("its numbers are too large")
    elif isinstance(value, list | tuple | Mapping):
        weight(value, _left().most_characters)
    return value


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise TemplateExhausted(f"it asks for more than {MOST_NUMBER} of something")


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for one, times in ((left, right), (right, left)):
        if _sized(one) and isinstance(times, int):
            budget.check(weight(one, budget.most_characters) * max(0, times))
    both = isinstance(left, int) and isinstance(right, int)
    if both and left.bit_length() + right.bit_length() > MOST_BITS:
        raise TemplateExhausted("its numbers are too large")


def _check_power(base: Any, exponent: Any) -> None:
    both = isinstance(base, int) and isinstance(exponent, int)
    if both and base.bit_length() * abs(exponent) > MOST_BITS:
        raise TemplateExhausted("its numbers are too large")


def _check_percent(budget: Budget, pattern: Any, values: Any) -> None:
    if not isinstance(pattern, str):
        return
    if _WIDE.search(pattern) or "*" in pattern:
        raise TemplateExhausted("its format is too wide")
    each = weight(values, budget.most_characters) if _sized(values) else 0
    budget.check(pattern.count("%") * (each + 10_000))


def _check_method(
    budget: Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Of a string. Gives the arguments, which are looked through once."""
    match name, args:
        case "replace", (str(old), str(new), *_):
            budget.check(len(owner) + owner.count(old) * len(new))
        case "join", (values,):
            listed = list(values)
            budget.check(sum(weight(one, budget.most_characters) for one in listed))
            budget.check(len(owner) * len(listed))
            return (listed,)
        case (("split" | "rsplit" | "splitlines"), _):
            by = next((one for one in (*args, *kwargs.values()) if isinstance(one, str)), "")
            budget.check(_ITEM * (owner.count(by) if by else len(owner) // 2))
    return args


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes of the budget."""

    @functools.wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _left()
        budget.step()
        passed = 1 if hasattr(made, "jinja_pass_arg") else 0
        values = [*args[passed:], *kwargs.values()]
        _check_numbers(values[1:])
        checked = _check_filter(budget, name, values, kwargs)
        if checked is not None:
            args = (*args[:passed], checked, *args[passed + 1 :])
        return _checked(made(*args, **kwargs))

    return bounded


def _check_filter(budget: Budget, name: str, values: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gives the value that is filtered where it had to be looked through; else None."""
    most = budget.most_characters
    value, rest = (values[0], values[1:]) if values else ("", [])
    match name:
        case "join":
            listed = list(value)
            budget.check(sum(weight(one, most) for one in listed))
            budget.check(sum(weight(one, most) for one in rest if _sized(one)) * len(listed))
            return listed
        case "replace":
            text = str(value) if isinstance(value, _PLAIN) else ""
            old, new = (str(one) if isinstance(one, _PLAIN) else "" for one in (*rest, "", "")[:2])
            budget.check(len(text) + text.count(old) * len(new))
        case "indent":
            width = next((len(one) for one in rest if isinstance(one, str)), 0)
            width = max([width, *(one for one in rest if type(one) is int)])
            budget.check((str(value).count("\n") + 1) * (width + 4))
        case "tojson":
            if any(_is_wide(one) for one in rest):
                raise TemplateExhausted(f"it indents by more than {_MOST_INDENT}")
            size = weight(value, most)
            if rest:
                # An indentation stands before every item, as often as it lies deep.
                budget.check(size * _MOST_INDENT * _depth(value) // _ITEM)
        case "sum":
            if any(_sized(one) and not isinstance(one, str) for one in rest) or (
                "start" in kwargs and not isinstance(kwargs["start"], int | float)
            ):
                raise TemplateExhausted("it adds up what are no numbers")
        case "string" | "escape" | "e" | "forceescape" | "safe" | "upper" | "lower" | "title":
            if not isinstance(value, jinja2.Undefined | markupsafe.Markup):
                weight(value, most)
    return None


def _is_wide(value: Any) -> bool:
    wide_text = isinstance(value, str) and len(value) > _MOST_INDENT
    return wide_text or (isinstance(value, int) and value > _MOST_INDENT)
