"""What each format's parser makes of an answer, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dialects.families import FORMATS
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, joined
from router.dialects.tools import Tool
from tests.support.router.parsed import Call, Parsed, parse

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "x": {}}}
TOOLS = {name: Tool(name, None, SCHEMA) for name in ("look_up", "add-2")}
CASES: list[tuple[str, str, Parsed]] = [
    # Plain text stays as it is.
    *((name, " plain text \n", Parsed(" plain text \n", ())) for name in FORMATS),
    *((name, "", Parsed("", ())) for name in FORMATS),
    *(
        (name, "a < b, [TOOL_ and <tool_cal", Parsed("a < b, [TOOL_ and <tool_cal", ()))
        for name in FORMATS
    ),
    # One call.
    (
        "hermes",
        '<tool_call>\n{"name": "look_up", "arguments": {"w": "a}b\\"</tool_call>"}}\n</tool_call>',
        Parsed("", (Call("look_up", '{"w": "a}b\\"</tool_call>"}'),)),
    ),
    (
        "hermes",
        'I will look.\n<tool_call>{"name":"look_up","arguments":{}}</tool_call> \n',
        Parsed("I will look.", (Call("look_up", "{}"),)),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": [1, -2.5e3, null]}, "id": 7, "name": "add-2"}</tool_call>',
        Parsed("", (Call("add-2", '{"x": [1, -2.5e3, null]}'),)),
    ),
    # A call that stops without its closing marker.
    ("hermes", '<tool_call>{"name":"add-2"}', Parsed("", (Call("add-2", "{}"),))),
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":{"x": 1',
        Parsed("", (Call("add-2", '{"x": 1'),)),
    ),
    # Arguments as text, or null.
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":"{\\"x\\": 1}"}</tool_call>',
        Parsed("", (Call("add-2", '{"x": 1}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"arguments":null,"name":"add-2"}</tool_call>',
        Parsed("", (Call("add-2", "{}"),)),
    ),
    # Several.
    (
        "hermes",
        '<tool_call>\n{"name":"add-2","arguments":{"x":1}}\n</tool_call>\n<tool_call>\n'
        '{"name":"look_up","arguments":{"word":"y"}}\n</tool_call>',
        Parsed("", (Call("add-2", '{"x":1}'), Call("look_up", '{"word":"y"}'))),
    ),
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":{}}\n{"name":"look_up","arguments":{}}</tool_call>so',
        Parsed("so", (Call("add-2", "{}"), Call("look_up", "{}"))),
    ),
    (
        "hermes",
        '<tool_call>{"name":"add-2"}<tool_call>{"name":"look_up"}</tool_call>',
        Parsed("", (Call("add-2", "{}"), Call("look_up", "{}"))),
    ),
    # What is no call is content.
    ("hermes", "<tool_call>no</tool_call>", Parsed("<tool_call>no</tool_call>", ())),
    ("hermes", "<tool_call>", Parsed("<tool_call>", ())),
    (
        "hermes",
        '<tool_call>{"name":"unknown","arguments":{}}</tool_call>',
        Parsed('<tool_call>{"name":"unknown","arguments":{}}</tool_call>', ()),
    ),
    (
        "hermes",
        '<tool_call>{"name":"look_up","arguments":[1]}</tool_call>',
        Parsed('<tool_call>{"name":"look_up","arguments":[1]}</tool_call>', ()),
    ),
    (
        "hermes",
        '<tool_call>{"name":"look_up", "argu',
        Parsed('<tool_call>{"name":"look_up", "argu', ()),
    ),
    (
        "hermes",
        '<tool_call>x<tool_call>{"name":"add-2"}</tool_call>',
        Parsed("<tool_call>x", (Call("add-2", "{}"),)),
    ),
    # A brace too many is not lost, and spoils nothing.
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":{}}}</tool_call>',
        Parsed("}", (Call("add-2", "{}"),)),
    ),
    # Arguments that break stay with their call.
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":{"x": 1,}}</tool_call>then',
        Parsed("then", (Call("add-2", '{"x": 1,}}'),)),
    ),
    # An unknown key makes it content.
    (
        "hermes",
        '<tool_call>{"name":"add-2","why":"so","arguments":{}}</tool_call>',
        Parsed('<tool_call>{"name":"add-2","why":"so","arguments":{}}</tool_call>'),
    ),
    (
        "hermes",
        '<tool_call>{"name":"add-2","arguments":{},"why":"so"}</tool_call>',
        Parsed(',"why":"so"}', (Call("add-2", "{}"),)),
    ),
    (
        "smollm",
        '<tool_call>[{"name": "add-2", "arguments": {"x": 1}}, {"name": "look_up"}]</tool_call>',
        Parsed("", (Call("add-2", '{"x": 1}'), Call("look_up", "{}"))),
    ),
    ("smollm", "<tool_call>[]</tool_call>", Parsed("", ())),
    (
        "smollm",
        '<tool_call>[{"name": "add-2"}, no]</tool_call>',
        Parsed(", no]", (Call("add-2", "{}"),)),
    ),
    ("smollm", "<tool_call>[1]</tool_call>", Parsed("<tool_call>[1]</tool_call>", ())),
    (
        "llama3",
        ' {"name": "look_up", "parameters": {"word": "x"}}',
        Parsed("", (Call("look_up", '{"word": "x"}'),)),
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "add-2", "parameters": {}}; {"name": "look_up", "parameters": {}}',
        Parsed("", (Call("add-2", "{}"), Call("look_up", "{}"))),
    ),
    (
        "llama3",
        'Well.\n<|python_tag|>{"name": "add-2", "arguments": {}}',
        Parsed("Well.", (Call("add-2", "{}"),)),
    ),
    ("llama3", '{"name": "look_up"}', Parsed('{"name": "look_up"}', ())),
    ("llama3", '{"answer": 42} ', Parsed('{"answer": 42} ', ())),
    (
        "llama3",
        'Say {"name": "other", "parameters": {}}',
        Parsed('Say {"name": "other", "parameters": {}}', ()),
    ),
    ("llama3", "<|python_tag|>print(1)", Parsed("<|python_tag|>print(1)", ())),
    (
        "llama3",
        '{"name": "add-2", "parameters": {}} and so',
        Parsed(" and so", (Call("add-2", "{}"),)),
    ),
    (
        "llama3",
        '{"name": "add-2", "parameters": {"x" 1}}',
        Parsed("", (Call("add-2", '{"x" 1}}'),)),
    ),
    (
        "mistral",
        'So: [TOOL_CALLS] [{"name": "add-2", "arguments": {"x": 1}}, {"name": "look_up"}]',
        Parsed("So:", (Call("add-2", '{"x": 1}'), Call("look_up", "{}"))),
    ),
    ("mistral", "[TOOL_CALLS] no", Parsed("[TOOL_CALLS] no", ())),
    *(
        case
        for name in ("mistral", "mistral_args")
        for case in (
            (
                name,
                'So: [TOOL_CALLS]add-2[ARGS]{"x": 1}[TOOL_CALLS]look_up[ARGS]{}',
                Parsed("So:", (Call("add-2", '{"x": 1}'), Call("look_up", "{}"))),
            ),
            (
                name,
                '[TOOL_CALLS]add-2[CALL_ID]a1B2c3d4e[ARGS] {"x": "}"}\n',
                Parsed("", (Call("add-2", '{"x": "}"}'),)),
            ),
            (name, '[TOOL_CALLS]add-2{"x": 1} so', Parsed(" so", (Call("add-2", '{"x": 1}'),))),
            (
                name,
                '[TOOL_CALLS]other[ARGS]{"x": 1}',
                Parsed('[TOOL_CALLS]other[ARGS]{"x": 1}', ()),
            ),
            (name, "[TOOL_CALLS]add-2[ARGS]", Parsed("[TOOL_CALLS]add-2[ARGS]", ())),
            (name, "[TOOL_CALLS]add-2[ARGS]x{}", Parsed("[TOOL_CALLS]add-2[ARGS]x{}", ())),
            (name, "[TOOL_CALLS]add-2[ARGS][1]", Parsed("[TOOL_CALLS]add-2[ARGS][1]", ())),
            (name, '[TOOL_CALLS]add-2[ARGS]{"x": 1', Parsed("", (Call("add-2", '{"x": 1'),))),
            (name, "[TOOL_CALLS]add-2[ARGS]{x}", Parsed("", (Call("add-2", "{x}"),))),
        )
    ),
    (
        "mistral_args",
        '[TOOL_CALLS][{"name": "add-2", "arguments": {"x": 1}}]',
        Parsed("", (Call("add-2", '{"x": 1}'),)),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_answers_are_parsed(name: str, text: str, expected: Parsed) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_answers_are_parsed_character_by_character(name: str, text: str, expected: Parsed) -> None:
    del expected
    whole = FORMATS[name].parser(TOOLS)
    assert in_parts(name, list(text)) == joined([*whole.feed(text), *whole.finish()])


def in_parts(name: str, parts: Sequence[str]) -> list[object]:
    parser = FORMATS[name].parser(TOOLS)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return list(joined([*pieces, *parser.finish()]))


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]a1",
        "add-2",
        "look_up[ARGS]{",
        "[",
        "]",
        ", ",
        "; ",
        "\n",
        " ",
        "{",
        "}",
        '{"name": "add-2"',
        '{"name": "look_up", "arguments": {"x": ',
        ', "parameters": {',
        '"a": "b"',
        '"\\u00e9\\n"',
        "1",
        "-0.5e9",
        "null",
        '{"name": "add-2", "arguments": {"x": [1, {"y": "}"}]}}',
        '{"arguments": {"x": 1}, "name": "look_up"}',
        "<tool",
        "text",
        "é😀",
    ]
)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_cuts_make_no_difference(name: str, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert in_parts(name, parts) == in_parts(name, [text])
    assert in_parts(name, list(text)) == in_parts(name, [text])


@given(name=st.sampled_from(sorted(FORMATS)), fragments=st.lists(FRAGMENTS, max_size=14))
@settings(max_examples=300, deadline=None)
def test_no_text_is_lost(name: str, fragments: list[str]) -> None:
    """Text without calls comes back whole; with calls every letter that is no frame does."""
    text = "".join(fragments)
    parsed = parse(FORMATS[name].parser(TOOLS), text)
    if not parsed.calls and "[]" not in "".join(text.split()):
        assert parsed.content == text
    kept = parsed.content + "".join(call.arguments for call in parsed.calls)
    assert kept.count("text") == text.count("text")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(TOOLS)),
            st.fixed_dictionaries(
                {"word": st.text(), "x": JSON.filter(lambda value: not isinstance(value, str))}
            ),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=200, deadline=None)
def test_what_a_format_writes_it_reads(name: str, calls: list[tuple[str, object]]) -> None:
    form = FORMATS[name]
    parsed = parse(form.parser(TOOLS), form.written(calls))
    assert parsed.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


def test_arguments_come_as_they_are_written() -> None:
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.feed("Hm.\n<tool") == [Content("Hm.")]
    assert parser.feed('_call>\n{"name": "look_up", "arguments": ') == []
    assert parser.feed('{"word": "Pa') == [CallStart("look_up"), Arguments('{"word": "Pa')]
    assert parser.feed('ris"') == [Arguments('ris"')]
    assert parser.feed("}}\n</tool") == [Arguments("}"), CallEnd()]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


def test_half_a_surrogate_is_no_argument() -> None:
    text = '<tool_call>{"name": "add-2", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>'
    parsed = parse(FORMATS["hermes"].parser(TOOLS), text)
    assert not parsed.calls
    assert parsed.content == text


@pytest.mark.parametrize("opening", ['{"a":', "["])
def test_depth_is_bounded(opening: str) -> None:
    text = '<tool_call>{"name": "add-2", "arguments": {"x": ' + opening * 5000
    (call,) = parse(FORMATS["hermes"].parser(TOOLS), text).calls
    assert call.arguments.endswith(opening * 1000)
