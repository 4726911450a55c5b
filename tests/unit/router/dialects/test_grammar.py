"""The grammar of an answer that must call tools, as the library reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.grammar import Grammar, GrammarKind
from router.dialects.formats import FORMATS
from router.dialects.grammar import calls_grammar, free_grammar
from router.dialects.tools import Tool, ToolUse
from tests.support.router.front_fakes import EOS, tiny_backend
from tests.support.router.parsed import parse

llguidance = pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("weather", None, CITY, strict=True),
    Tool("nothing", None, {"type": "object", "properties": {}}),
)
USE = ToolUse(TOOLS, frozenset({"weather", "nothing"}), required=True)
CALLS: list[tuple[str, Any]] = [("weather", {"city": 'Köln "x"', "days": 2}), ("nothing", {})]


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole of ``text`` is an answer."""
    assert grammar.kind is GrammarKind.LARK
    backend = tiny_backend()
    tokenizer = llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))
    compiled = llguidance.grammar_from("lark", grammar.text)
    assert not llguidance.LLMatcher.validate_grammar(compiled, tokenizer)
    matcher = llguidance.LLMatcher(tokenizer, compiled)
    ids = backend.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(ids)
    return bool(taken == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_as_the_format_writes_them(name: str) -> None:
    form = FORMATS[name]
    grammar = calls_grammar(form, USE, {})
    for calls in (CALLS[:1], CALLS[1:], CALLS, [*CALLS, *CALLS]):
        text = form.written(calls)
        assert accepts(grammar, text)
        parsed = parse(form.parser(USE.names), text)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nothing_else(name: str) -> None:
    form = FORMATS[name]
    grammar = calls_grammar(form, USE, {})
    wrong: list[list[tuple[str, Any]]] = [
        [("weather", {"town": "x"})],
        [("weather", {})],
        [("weather", {"city": "x", "days": "2"})],
        [("other", {})],
    ]
    for calls in wrong:
        assert not accepts(grammar, form.written(calls))
    assert not accepts(grammar, "The weather is fine.")
    assert not accepts(grammar, form.written(CALLS) + " ")


def test_one_call_alone() -> None:
    form = FORMATS["hermes"]
    grammar = calls_grammar(form, ToolUse(TOOLS, frozenset({"weather"}), True, single=True), {})
    assert accepts(grammar, form.written(CALLS[:1]))
    assert not accepts(grammar, form.written([CALLS[0], CALLS[0]]))
    assert not accepts(grammar, form.written(CALLS[1:]))


def test_markers_that_are_tokens() -> None:
    # Any special token will do for the proof.
    backend = tiny_backend()
    number = backend.token_to_id("<|im_start|>")
    assert number is not None
    form = FORMATS["mistral"]
    grammar = calls_grammar(form, USE, {"[TOOL_CALLS]": number})
    text = form.written(CALLS)
    assert accepts(grammar, text.replace("[TOOL_CALLS]", "<|im_start|>"))
    assert not accepts(grammar, text)


def test_names_and_arguments_between_markers_that_are_tokens() -> None:
    backend = tiny_backend()
    begin, end = backend.token_to_id("<|im_start|>"), backend.token_to_id(EOS)
    assert begin is not None
    assert end is not None
    form = FORMATS["mistral_args"]
    grammar = calls_grammar(form, USE, {"[TOOL_CALLS]": begin, "[ARGS]": end})
    assert grammar.text.count(f"<[{end}]>") == len(TOOLS)
    text = form.written(CALLS)
    # The stand-in for the second one ends an answer: the library takes it nowhere else.
    plain = calls_grammar(form, USE, {"[TOOL_CALLS]": begin})
    assert accepts(plain, text.replace("[TOOL_CALLS]", "<|im_start|>"))
    assert not accepts(plain, text)


def test_schemas_beyond_the_library() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    loose = ToolUse((Tool("f", None, schema),), frozenset({"f"}), True)
    form = FORMATS["hermes"]
    assert accepts(calls_grammar(form, loose, {}), form.written([("f", {"a": "b"})]))
    strict = ToolUse((Tool("f", None, schema, strict=True),), frozenset({"f"}), True)
    compiled = llguidance.grammar_from("lark", calls_grammar(form, strict, {}).text)
    tokenizer = llguidance.LLTokenizer(tiny_backend().to_str())
    assert "odd" in llguidance.LLMatcher.validate_grammar(compiled, tokenizer)


def test_references_within_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/whole"}},
        "$defs": {"whole": {"type": "integer"}},
        "required": ["a"],
    }
    use = ToolUse((Tool("f", None, schema),), frozenset({"f"}), True)
    form = FORMATS["llama3"]
    assert accepts(calls_grammar(form, use, {}), form.written([("f", {"a": 5})]))
    assert not accepts(calls_grammar(form, use, {}), form.written([("f", {"a": "x"})]))


MARKED = sorted(name for name, form in FORMATS.items() if not form.markers.bare)


@pytest.mark.parametrize("name", MARKED)
def test_free_answers(name: str) -> None:
    form = FORMATS[name]
    grammar = free_grammar(form, USE, {})
    assert grammar is not None
    written = form.written(CALLS)
    for text in ("", "Hello.", "a <tool_ [TOOL b", written, f"Hm.\n{written}", f"{written}\nSo."):
        assert accepts(grammar, text), text
        parsed = parse(form.parser(USE.names), text)
        assert bool(parsed.calls) == (written in text)
    wrong = form.written([("weather", {"town": "x"})])
    for text in (form.markers.opening, f"{form.markers.opening} no", wrong, f"x {wrong}"):
        assert not accepts(grammar, text), text


def test_free_answers_with_one_call() -> None:
    use = ToolUse(TOOLS, USE.names, single=True)
    for name in MARKED:
        form = FORMATS[name]
        grammar = free_grammar(form, use, {})
        assert grammar is not None
        assert accepts(grammar, form.written(CALLS[:1]))
        assert not accepts(grammar, form.written(CALLS))


def test_free_answers_behind_a_token() -> None:
    backend = tiny_backend()
    number = backend.token_to_id("<|im_start|>")
    assert number is not None
    form = FORMATS["mistral"]
    grammar = free_grammar(form, USE, {"[TOOL_CALLS]": number})
    assert grammar is not None
    for text in ("Hello [TOOL_CALLS]", form.written(CALLS), f"Hm. {form.written(CALLS)}"):
        token = text.replace("[TOOL_CALLS][", "<|im_start|>[")
        assert accepts(grammar, token)
    assert not accepts(grammar, "Hm. <|im_start|>no")


def test_no_list_is_no_call() -> None:
    grammar = free_grammar(FORMATS["smollm"], USE, {})
    assert grammar is not None
    assert accepts(grammar, "<tool_call>[]</tool_call>")


def test_calls_without_a_marker_cannot_be_bound() -> None:
    assert free_grammar(FORMATS["llama3"], USE, {}) is None
