"""Structural tags: what they let an answer be, and what is wrong with bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.openai.structural_tag import MAX_MARKER_CHARACTERS, MAX_STRUCTURES, structural_tag
from tests.support.baton.grammar_tools import accepts

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=time>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"},
        {"begin": "[[", "schema": {"type": "integer"}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("no tag at all, 1 < 2 and <b>", True),
        ('<f=weather>{"city": "Ada"}</f>', True),
        ('so: <f=weather>{"city": "Ada"}</f> and <f=time>{}</f>.', True),
        ('[[36]] then <f=weather>{"city":"x"}</f>', True),
        ('<f=weather>{"city": "Ada"', False),
        ('<f=weather>{"city": "Ada", "more": 1}</f>', False),
        ('<f=weather>{"age": 36}</f>', False),
        ("<f=name>{}</f>", False),
        ("[[x]]", False),
        ("text <f=", False),
    ],
)
def test_behind_a_trigger_comes_one_of_its_structures(text: str, fits: bool) -> None:
    grammar = structural_tag(TAGS, "tag")
    assert grammar is not None
    assert accepts(grammar, text) is fits


BAD: list[tuple[Any, str]] = [
    (5, "tag"),
    ("{", "tag"),
    ("[" * 100_000, "tag"),
    ({}, "tag.structures"),
    ({"format": {"type": "triggered_tags"}}, "tag.format"),
    ({"structures": [], "triggers": ["<"]}, "tag.structures"),
    ({"structures": [{}] * (MAX_STRUCTURES + 1), "triggers": ["<"]}, "tag.structures"),
    ({"structures": [{"begin": "<"}], "triggers": []}, "tag.triggers"),
    ({"structures": [{"begin": "<"}], "triggers": [""]}, "tag.triggers[0]"),
    ({"structures": [{"begin": "<"}], "triggers": [5]}, "tag.triggers[0]"),
    ({"structures": [5], "triggers": ["<"]}, "tag.structures[0]"),
    ({"structures": [{}], "triggers": ["<"]}, "tag.structures[0].begin"),
    ({"structures": [{"begin": "a"}], "triggers": ["<"]}, "tag.structures[0].begin"),
    ({"structures": [{"begin": "<", "end": 5}], "triggers": ["<"]}, "tag.structures[0].end"),
    ({"structures": [{"begin": "<", "schema": 5}], "triggers": ["<"]}, "tag.structures[0].schema"),
    (
        {"structures": [{"begin": "<" * (MAX_MARKER_CHARACTERS + 1)}], "triggers": ["<"]},
        "tag.structures[0].begin",
    ),
]


@pytest.mark.parametrize(("given", "param"), BAD)
def test_bad_tags_are_named(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        structural_tag(given, "tag")
    assert raised.value.param == param


def test_none_is_no_tag() -> None:
    assert structural_tag(None, "tag") is None
