"""The grammar of an answer that must call tools, as the library reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.grammar import Grammar, GrammarKind
from router.dialects.families import FORMATS
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
BY_NAME = {tool.name: tool for tool in TOOLS}
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
    grammar = form.calls_grammar(USE, {})
    several = [CALLS, [*CALLS, *CALLS]] if form.between is not None else []
    for calls in (CALLS[:1], CALLS[1:], *several):
        # The token that ends a call of gpt-oss ends the answer, too: no grammar has it.
        text = form.written(calls).removesuffix("<|call|>")
        assert accepts(grammar, text)
        parsed = parse(form.parser(BY_NAME), text)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nothing_else(name: str) -> None:
    form = FORMATS[name]
    grammar = form.calls_grammar(USE, {})
    wrong: list[list[tuple[str, Any]]] = [
        [("weather", {"town": "x"})],
        [("weather", {})],
        [("weather", {"city": "x", "days": "two"})],
        [("other", {})],
    ]
    for calls in wrong:
        assert not accepts(grammar, form.written(calls).removesuffix("<|call|>"))
    assert not accepts(grammar, "The weather is fine.")
    assert not accepts(grammar, form.written(CALLS) + " ")


def test_one_call_alone() -> None:
    form = FORMATS["hermes"]
    grammar = form.calls_grammar(ToolUse(TOOLS, frozenset({"weather"}), True, single=True), {})
    assert accepts(grammar, form.written(CALLS[:1]))
    assert not accepts(grammar, form.written([CALLS[0], CALLS[0]]))
    assert not accepts(grammar, form.written(CALLS[1:]))


def test_markers_that_are_tokens() -> None:
    # Any special token will do for the proof.
    backend = tiny_backend()
    number = backend.token_to_id("<|im_start|>")
    assert number is not None
    form = FORMATS["mistral"]
    grammar = form.calls_grammar(USE, {"[TOOL_CALLS]": number})
    text = form.written(CALLS)
    assert accepts(grammar, text.replace("[TOOL_CALLS]", "<|im_start|>"))
    assert not accepts(grammar, text)


def test_names_and_arguments_between_markers_that_are_tokens() -> None:
    backend = tiny_backend()
    begin, end = backend.token_to_id("<|im_start|>"), backend.token_to_id(EOS)
    assert begin is not None
    assert end is not None
    form = FORMATS["mistral_args"]
    grammar = form.calls_grammar(USE, {"[TOOL_CALLS]": begin, "[ARGS]": end})
    assert grammar.text.count(f"<[{end}]>") == len(TOOLS)
    text = form.written(CALLS)
    # The stand-in for the second one ends an answer: the library takes it nowhere else.
    plain = form.calls_grammar(USE, {"[TOOL_CALLS]": begin})
    assert accepts(plain, text.replace("[TOOL_CALLS]", "<|im_start|>"))
    assert not accepts(plain, text)


def test_schemas_beyond_the_library() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    loose = ToolUse((Tool("f", None, schema),), frozenset({"f"}), True)
    form = FORMATS["hermes"]
    assert accepts(form.calls_grammar(loose, {}), form.written([("f", {"a": "b"})]))
    strict = ToolUse((Tool("f", None, schema, strict=True),), frozenset({"f"}), True)
    compiled = llguidance.grammar_from("lark", form.calls_grammar(strict, {}).text)
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
    assert accepts(form.calls_grammar(use, {}), form.written([("f", {"a": 5})]))
    assert not accepts(form.calls_grammar(use, {}), form.written([("f", {"a": "x"})]))


MARKED = sorted(name for name, form in FORMATS.items() if form.free_grammar(USE, {}) is not None)


@pytest.mark.parametrize("name", MARKED)
def test_free_answers(name: str) -> None:
    form = FORMATS[name]
    grammar = form.free_grammar(USE, {})
    assert grammar is not None
    written = form.written(CALLS)
    for text in ("", "Hello.", "a <tool_ [TOOL b", written, f"Hm.\n{written}", f"{written}\nSo."):
        assert accepts(grammar, text), text
        parsed = parse(form.parser(BY_NAME), text)
        assert bool(parsed.calls) == (written in text)
    wrong = form.written([("weather", {"town": "x"})])
    opening = form.before.rstrip("[\n")
    for text in (opening, f"{opening} no", wrong, f"x {wrong}"):
        assert not accepts(grammar, text), text


def test_free_answers_with_one_call() -> None:
    use = ToolUse(TOOLS, USE.names, single=True)
    for name in MARKED:
        form = FORMATS[name]
        grammar = form.free_grammar(use, {})
        assert grammar is not None
        assert accepts(grammar, form.written(CALLS[:1]))
        assert not accepts(grammar, form.written(CALLS))


def test_free_answers_behind_a_token() -> None:
    backend = tiny_backend()
    number = backend.token_to_id("<|im_start|>")
    assert number is not None
    form = FORMATS["mistral"]
    grammar = form.free_grammar(USE, {"[TOOL_CALLS]": number})
    assert grammar is not None
    for text in ("Hello [TOOL_CALLS]", form.written(CALLS), f"Hm. {form.written(CALLS)}"):
        token = text.replace("[TOOL_CALLS][", "<|im_start|>[")
        assert accepts(grammar, token)
    assert not accepts(grammar, "Hm. <|im_start|>no")


def test_no_list_is_no_call() -> None:
    grammar = FORMATS["smollm"].free_grammar(USE, {})
    assert grammar is not None
    assert accepts(grammar, "<tool_call>[]</tool_call>")


def test_calls_without_a_marker_cannot_be_bound() -> None:
    assert FORMATS["llama3"].free_grammar(USE, {}) is None


TYPED = Tool(
    "f",
    None,
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "pick": {"type": "string", "enum": ["a b", "c"]},
            "flag": {"type": "boolean"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/one"}},
            "more": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "$defs": {"one": {"type": "integer"}},
    },
)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "llama4", "gemma"])
def test_values_that_are_written_plain(name: str) -> None:
    form = FORMATS[name]
    grammar = form.calls_grammar(ToolUse((TYPED,), frozenset({"f"}), True), {})
    values = {"text": "a < b </p\nc", "pick": "a b", "flag": True, "list": [1, 2], "more": None}
    for keys in ([], ["pick"], ["flag", "more"], ["text", "list"], list(values)):
        given = {key: values[key] for key in keys}
        text = form.written([("f", given)])
        assert accepts(grammar, text), text
        (call,) = parse(form.parser({"f": TYPED}), text).calls
        assert json.loads(call.arguments) == given
    for wrong in ({"pick": "d"}, {"flag": "maybe"}, {"list": ["x"]}, {"more": "x"}):
        assert not accepts(grammar, form.written([("f", wrong)])), wrong


@pytest.mark.parametrize("name", ["qwen3_coder", "llama4"])
def test_strict_schemas_that_cannot_be_kept_are_refused(name: str) -> None:
    schema = {"type": "object", "properties": {}, "minProperties": 1}
    use = ToolUse((Tool("f", None, schema, strict=True),), frozenset({"f"}), True)
    with pytest.raises(InvalidRequest, match=r"function f is strict.*not support minProperties"):
        FORMATS[name].calls_grammar(use, {})


def test_strict_strings_between_tags() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    use = ToolUse((Tool("f", None, schema, strict=True),), frozenset({"f"}), True)
    with pytest.raises(InvalidRequest, match="not support maxLength"):
        FORMATS["glm45"].calls_grammar(use, {})
    assert accepts(FORMATS["llama4"].calls_grammar(use, {}), '[f(a="abc")]')
    assert not accepts(FORMATS["llama4"].calls_grammar(use, {}), '[f(a="abcd")]')


def test_a_string_ends_at_a_tag_that_is_a_token() -> None:
    backend = tiny_backend()
    number = backend.token_to_id("<|im_start|>")
    assert number is not None
    form = FORMATS["glm45"]
    use = ToolUse((TYPED,), frozenset({"f"}), True)
    grammar = form.calls_grammar(use, {"</arg_value>": number})
    text = form.written([("f", {"text": "a </arg_value> b"})])
    head, _, tail = text.rpartition("</arg_value>")
    assert accepts(grammar, f"{head}<|im_start|>{tail}")
    assert not accepts(grammar, text)


def test_a_call_of_gpt_oss_may_follow_its_reasoning() -> None:
    form = FORMATS["harmony"]
    grammar = form.calls_grammar(USE, {})
    text = form.written(CALLS[:1]).removesuffix("<|call|>")
    assert accepts(grammar, f"<|start|>assistant{text}")
    assert form.free_grammar(USE, {}) is None


@pytest.mark.parametrize("properties", [None, [], {"a": None, "b": True}])
@pytest.mark.parametrize("name", ["qwen3_coder", "llama4"])
def test_odd_schemas(name: str, properties: Any) -> None:
    schema = {"type": "object", "properties": properties, "required": 5}
    use = ToolUse((Tool("f", None, schema),), frozenset({"f"}), True)
    form = FORMATS[name]
    assert accepts(form.calls_grammar(use, {}), form.written([("f", {})]))
    (call,) = parse(form.parser({"f": use.tools[0]}), form.written([("f", {"a": 1})])).calls
    assert call.name == "f"
