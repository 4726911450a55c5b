"""What grammars accept, and which of them are refused, through the library itself."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
import tokenizers

from baton.errors import InvalidGrammar, Unavailable
from baton.grammar import Grammar, GrammarKind
from baton.grammars import grammar_library
from baton.grammars.compiled_grammars import grammars_of
from baton.grammars.grammar_library import MAX_GRAMMAR_BYTES
from tests.support.baton.grammar_tools import (
    accepts,
    end_id,
    regex,
    schema,
    small_grammars,
    small_tokenizer,
    vocab_size,
)

PERSON = schema(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
)
KINDS = [
    {"type": "object", "properties": {"kind": {"const": kind}, name: {"type": "integer"}}}
    for kind, name in (("a", "x"), ("b", "y"))
]
UNION = schema(json.dumps({"oneOf": KINDS}))
"""A discriminated union. Nothing requires ``kind``, so the library cannot prove that no value
matches both schemas."""
COMPILE_S = 20.0
"""A generous bound on a machine that does other work; a second is what was seen."""


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


@pytest.mark.parametrize(
    ("grammar", "text", "fits"),
    [
        (Grammar(GrammarKind.JSON_OBJECT, ""), "{}", True),
        (Grammar(GrammarKind.JSON_OBJECT, ""), '{"a": [1, {"b": null}], "é": "日本"}', True),
        (Grammar(GrammarKind.JSON_OBJECT, ""), "[]", False),
        (PERSON, '{"name":"Ada","age":36}', True),
        (PERSON, '{"name": "Ada", "age": 36}', True),
        (PERSON, '{\n  "name": "Ada",\n  "age": 36\n}', True),
        (PERSON, '{"name": "Ada"}', False),
        (PERSON, '{"name": "Ada", "age": "36"}', False),
        (PERSON, '{"name": "Ada", "age": 36, "more": 1}', False),
        (PERSON, '{"name": "Ada", "age": 3', False),
        (PERSON, '{"name":     "Ada", "age": 36}', False),
        (UNION, '{"kind": "a", "x": 1}', True),
        (UNION, '{"kind": "b", "y": 1}', True),
        (UNION, '{"kind": "b", "x": 1}', False),
        (regex(r"[0-9]{3}-x+"), "123-xx", True),
        (regex(r"[0-9]{3}-x+"), "123-", False),
        (regex(r"[0-9]{3}-x+"), "a123-x", False),
        (regex("^ab$"), "ab", True),
        (choice("yes", "no"), "yes", True),
        (choice("yes", "no"), "maybe", False),
        (choice('q"\\\n', "é😀", "", "a.*"), 'q"\\\n', True),
        (choice('q"\\\n', "é😀", "", "a.*"), "é😀", True),
        (choice('q"\\\n', "é😀", "", "a.*"), "", True),
        (choice('q"\\\n', "é😀", "", "a.*"), "abc", False),
        (lark('start: "a" start "b" | "c"'), "aacbb", True),
        (lark('start: "a" start "b" | "c"'), "aacb", False),
        (lark('root ::= "a" rest\nrest ::= [0-9]+ | "x"'), "a12", True),
        (lark('root ::= "a" rest\nrest ::= [0-9]+ | "x"'), "12", False),
    ],
)
def test_what_may_be_said(grammar: Grammar, text: str, fits: bool) -> None:
    assert accepts(grammar, text) is fits


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema('{"a'), "EOF"),
        (schema("5"), "object schema"),
        (schema('{"type": "strin"}'), "Invalid type"),
        (schema('{"not": {}}'), "Unimplemented"),
        (schema('{"enum": []}'), "Unsatisfiable"),
        (schema('{"$ref": "#"}'), "no text matches it"),
        (schema('{"$ref": "http://example.com/x.json"}'), "not present"),
        (schema('{"type": "string", "pattern": "("}'), "unclosed group"),
        (schema('{"properties": {"a": ' * 300 + "{}" + "}}" * 300), "recursion limit"),
        (regex("["), "unclosed character class"),
        (regex("a(?=b)"), "look-ahead"),
        (regex("\ud800"), "surrogates"),
        (lark("start: foo"), "unknown name"),
        (lark("start: ("), "Expected token"),
        (lark('rule: "a"'), "no rule `start`"),
        (lark(" \n" * 4000), "no rule `start`"),
        (lark(" \n" * 60000), "GBNF is limited"),
        (lark("root ::= " + "(" * 4000), "no rule `start`"),
        (regex("a" * (MAX_GRAMMAR_BYTES + 1)), "the limit is"),
        (regex("é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "the limit is"),
    ],
)
def test_refusals_say_why(grammar: Grammar, why: str) -> None:
    with pytest.raises(InvalidGrammar) as raised:
        small_grammars().matcher(grammar)
    assert why in raised.value.message
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 320


def bombs() -> dict[str, Grammar]:
    """What would take for ever, or all memory, without bounds."""
    twice: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    both: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    last = {"d40": {"type": "object"}}
    alternatives = {
        "allOf": [
            {"anyOf": [{"properties": {f"p{n}_{m}": {"type": "string"}}} for m in range(8)]}
            for n in range(12)
        ]
    }
    schemas: dict[str, Any] = {
        "a chain of alternatives": {"$ref": "#/$defs/d0", "$defs": twice | last},
        "a chain of conjunctions": {"$ref": "#/$defs/d0", "$defs": both | last},
        "alternatives multiplied": alternatives,
        "many optional properties": {"properties": {f"p{n}": {} for n in range(1500)}},
        "many values": {"enum": [f"the value of number {n}" for n in range(4000)]},
        "a long string": {"type": "string", "minLength": 10**6},
        "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "a repeated pattern": {"type": "string", "pattern": "^(([a-z]{1,99}){1,99}){1,99}$"},
    }
    return {name: schema(json.dumps(value)) for name, value in schemas.items()} | {
        "repeats of repeats": regex("((a{1,1000}){1,1000}){1,1000}"),
        "a large automaton": regex("(a|b)*a(a|b){800}"),
        "overlapping repeats": regex(r"(\w{1,500}\s?){1,500}"),
        "an ambiguous rule": lark('start: start start | "b" | ""'),
        "many rules": lark(
            "start: r0\n" + "\n".join(f'r{n}: "y" r{(n * 7 + 1) % 2000} | "z"' for n in range(2000))
        ),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_compiled_or_refused_in_bounded_time(name: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(InvalidGrammar):
        assert not small_grammars().matcher(bombs()[name]).is_error()
    assert time.monotonic() - began < COMPILE_S


def test_a_model_without_an_end_has_no_grammars() -> None:
    grammars = grammars_of(small_tokenizer().to_str, vocab_size(), [])
    with pytest.raises(InvalidGrammar, match="no end-of-sequence token"):
        grammars.matcher(regex("a"))


def test_a_tokenizer_that_the_library_cannot_read() -> None:
    grammars = grammars_of(lambda: "{}", vocab_size(), [end_id()])
    with pytest.raises(InvalidGrammar, match="does not support grammars"):
        grammars.matcher(regex("a"))


def test_a_library_that_gets_no_memory_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = grammars_of(small_tokenizer().to_str, vocab_size(), [end_id()])

    def load(*_: object) -> None:
        raise ImportError("_lib.abi3.so: failed to map segment from shared object")

    with monkeypatch.context() as patch:
        patch.setattr(grammar_library, "GrammarCompiler", load)
        with pytest.raises(Unavailable, match="failed to map segment"):
            grammars.matcher(choice("yes", "no"))
    assert not grammars.matcher(choice("yes", "no")).is_error()


def test_tokens_that_the_model_has_no_embedding_for_are_left_out() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.add_special_tokens(["<|beyond|>"])
    assert tokenizer.token_to_id("<|beyond|>") == vocab_size()
    grammars = grammars_of(tokenizer.to_str, vocab_size(), [end_id()])
    assert not grammars.matcher(choice("yes", "no")).is_error()
