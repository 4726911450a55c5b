"""Which grammars have a text that ends."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind
from baton.grammars.finite_text import lark_ends, schema_ends
from tests.support.baton.grammar_tools import accepts, schema, small_grammars


def node(**members: Any) -> dict[str, Any]:
    """An object that requires all of its members."""
    fields = {"type": "object", "properties": members, "required": list(members)}
    return {**fields, "additionalProperties": False}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def named(root: Any, **rules: Any) -> dict[str, Any]:
    return {**root, "$defs": rules}


NULL = {"type": "null"}
ENDLESS: dict[str, Any] = {
    "an object of its own kind": named(ref("N"), N=node(n=ref("N"))),
    "the root": node(n={"$ref": "#"}),
    "two that require each other": named(ref("A"), A=node(b=ref("B")), B=node(a=ref("A"))),
    "a list of one": named(ref("N"), N={"type": "array", "items": ref("N"), "minItems": 1}),
    "a list's first item": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "what a list contains": {"type": "array", "contains": {"$ref": "#"}},
    "a part of allOf": named(ref("N"), N={"allOf": [{"type": "object"}, node(n=ref("N"))]}),
    "required beside properties": named(
        ref("N"),
        N={
            "allOf": [
                {"type": "object", "properties": {"n": ref("N")}},
                {"required": ["n"]},
            ]
        },
    ),
    "all of anyOf": named(ref("N"), N={"anyOf": [node(a=ref("N")), node(b=ref("N"))]}),
    "all of oneOf": named({"oneOf": [ref("N"), ref("N")]}, N=node(a=ref("N"))),
    "a further property": {
        "type": "object",
        "additionalProperties": {"$ref": "#"},
        "minProperties": 1,
    },
    "one of two lists or objects": named(
        ref("N"),
        N={
            "type": ["object", "array"],
            "properties": {"n": ref("N")},
            "required": ["n"],
            "items": ref("N"),
            "minItems": 1,
        },
    ),
    "a member of an object that ends": node(name=NULL, child=named(node(n={"$ref": "#"}))),
    "an escaped name": {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": node(n={"$ref": "#"})}},
}
FINITE: dict[str, Any] = {
    "an optional member": {"type": "object", "properties": {"n": {"$ref": "#"}}},
    "a member that may be null": named(ref("N"), N=node(n={"anyOf": [ref("N"), NULL]})),
    "a list that may be empty": named(
        ref("N"), N=node(children={"type": "array", "items": ref("N")})
    ),
    "a type that may be null": named(
        ref("N"),
        N={"type": ["object", "null"], "properties": {"n": ref("N")}, "required": ["n"]},
    ),
    "a value of a list": {
        "enum": [{"n": 1}],
        "properties": {"n": {"$ref": "#"}},
        "required": ["n"],
    },
    "a reference to nothing": {"type": "object", "properties": {"n": {"$ref": "#/x"}}},
    "no type": {"properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    "an empty schema": {},
    "true": True,
}


@pytest.mark.parametrize("given", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_that_no_finite_text_matches_is_refused(given: Any) -> None:
    assert not schema_ends(given)
    with pytest.raises(InvalidGrammar, match="no text matches it"):
        small_grammars().matcher(schema(json.dumps(given)))


@pytest.mark.parametrize("given", FINITE.values(), ids=FINITE)
def test_a_schema_that_a_finite_text_matches_is_taken(given: Any) -> None:
    assert schema_ends(given)


LARK_ENDLESS = {
    "itself": 'start: "a" start',
    "two": 'start: a\na: "x" b\nb: "y" a | a "z"',
    "one or more": "start: a\na: (a)+",
    "both of a group": "start: a\na: (b | a) a\nb: /x/ a",
    "a schema": f"start: %json {json.dumps(node(n={'$ref': '#'}))}",
    "a rule over lines": 'start: a\n// a comment: with a colon\na: "x"\n   a\n  | "y" a',
}
LARK_FINITE = {
    "a choice": 'start: "a" start | "b"',
    "nothing": 'start: "a" start |',
    "optional": 'start: "a" start?',
    "brackets": 'start: "a" [start]',
    "none or more": 'start: "a" (start)*',
    "none to three": 'start: "a" start{0,3}',
    "a terminal": "start: A\nA: /x/ | B\nB: /(a|b)/",
    "attributes": 'start: a\na[lazy]: /(?s:.*)x/\nb[max_tokens=5]: "a" b',
    "an unused rule": 'start: "a"\nb: b',
    "a directive": '%llguidance {"no_forcing": false}\nstart: "a"\n%ignore /\\s+/',
    "a colon in a text": 'start: "b: b" | c\nc: "x"',
}


@pytest.mark.parametrize("text", LARK_ENDLESS.values(), ids=LARK_ENDLESS)
def test_a_rule_that_requires_itself_is_refused(text: str) -> None:
    assert not lark_ends(text)
    with pytest.raises(InvalidGrammar, match="no text matches it"):
        small_grammars().matcher(Grammar(GrammarKind.LARK, text))


@pytest.mark.parametrize("text", LARK_FINITE.values(), ids=LARK_FINITE)
def test_a_grammar_with_a_finite_text_is_taken(text: str) -> None:
    assert lark_ends(text)
    small_grammars().matcher(Grammar(GrammarKind.LARK, text))


def test_a_name_of_no_rule_has_the_error_of_the_library() -> None:
    assert lark_ends("start: foo")
    with pytest.raises(InvalidGrammar, match="unknown name"):
        small_grammars().matcher(Grammar(GrammarKind.LARK, "start: foo"))


def test_gbnf_is_checked_too() -> None:
    assert accepts(Grammar(GrammarKind.LARK, 'root ::= "a" root | "b"'), "ab")
    with pytest.raises(InvalidGrammar, match="no text matches it"):
        small_grammars().matcher(Grammar(GrammarKind.LARK, 'root ::= "a" root'))


def test_a_structure_without_end_is_refused() -> None:
    structure = {"begin": "<f>", "schema": node(n={"$ref": "#"}), "end": "</f>"}
    tag = json.dumps({"structures": [structure], "triggers": ["<f>"]})
    with pytest.raises(InvalidGrammar, match="no text matches it"):
        small_grammars().matcher(Grammar(GrammarKind.STRUCTURAL_TAG, tag))


def test_large_grammars_are_decided() -> None:
    chain = {f"N{place}": node(n=ref(f"N{place + 1}")) for place in range(2000)}
    assert schema_ends(named(ref("N0"), **chain, N2000=NULL))
    assert not schema_ends(named(ref("N0"), **chain, N2000=ref("N0")))
    nested = {f"N{place}": {"allOf": [ref(f"N{place + 1}")]} for place in range(2000)}
    assert schema_ends(named(ref("N0"), **nested, N2000=NULL))
    rules = "".join(f"r{place}: r{place + 1}\n" for place in range(8000))
    assert lark_ends(f'start: r0\n{rules}r8000: "x"')
    assert not lark_ends(f"start: r0\n{rules}r8000: r0")
    assert lark_ends("start: " + "(" * 60_000)


@pytest.mark.parametrize("seed", range(40))
def test_random_rules_are_decided_as_by_writing_their_texts(seed: int) -> None:
    """A rule has a text if it has one among those that its own rules wrote in the rounds before."""
    dice = random.Random(seed)
    names = [f"r{place}" for place in range(6)]
    rules = {
        name: [
            [dice.choice([*names, '"x"']) for _ in range(dice.randint(1, 3))]
            for _ in range(dice.randint(1, 2))
        ]
        for name in names
    }
    written: set[str] = {'"x"'}
    for _ in names:
        written |= {
            name for name, some in rules.items() if any(written >= set(one) for one in some)
        }
    lines = (f"{name}: " + " | ".join(map(" ".join, some)) for name, some in rules.items())
    assert lark_ends("start: r0\n" + "\n".join(lines)) == ("r0" in written)
