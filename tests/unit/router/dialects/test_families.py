"""Answers of each family of models, in the forms that their chat templates and makers document.

Each answer is parsed whole, split at every place, and mutated: no text gets lost.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from router.core.request import AnswerPart
from router.dialects.dialect import Dialect, dialect_for
from router.dialects.families import FORMATS
from router.dialects.output import ParsedOutput
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, Piece, Reasoning, joined
from router.dialects.tools import Tool, ToolUse
from router.text.chat_template import ChatTemplate
from tests.support.router.front_fakes import TEMPLATE

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"type": ["string", "null"]},
        "exact": {"type": "boolean"},
        "area": {"$ref": "#/$defs/area"},
    },
    "$defs": {"area": {"type": "object"}},
}
TOOLS = (
    Tool("get_weather", None, WEATHER),
    Tool("get_time", None, {"type": "object", "properties": {}}),
)
USE = ToolUse(TOOLS, frozenset(tool.name for tool in TOOLS))
Calls = list[tuple[str, Any]]
PARIS: Calls = [("get_weather", {"city": "Paris"})]
BOTH: Calls = [("get_weather", {"city": "Paris", "days": 2}), ("get_time", {})]
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

# Format, answer, reasoning, content, calls.
ANSWERS: list[tuple[str, str, str, str, Calls]] = [
    # Qwen 3: reasoning, then calls as Hermes writes them.
    (
        "hermes",
        '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "get_time", '
        '"arguments": {}}\n</tool_call>',
        "I look.",
        "",
        BOTH,
    ),
    # Qwen 3 Coder.
    (
        "qwen3_coder",
        "I will look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "",
        "I will look.",
        BOTH,
    ),
    (
        "qwen3_coder",
        '<function=get_weather>\n<parameter=city>\nline 1\n  "line" 2\n\n</parameter>\n'
        "<parameter=tags>\n['a', \"b\"]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=unit>\nnull\n</parameter>\n<parameter=area>\n{"x": [1, 2.5]}\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        "",
        [
            (
                "get_weather",
                {
                    "city": 'line 1\n  "line" 2\n',
                    "tags": ["a", "b"],
                    "exact": True,
                    "unit": None,
                    "area": {"x": [1, 2.5]},
                },
            )
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>12</parameter><parameter=unit>12"
        "</parameter><parameter=days>two</parameter><parameter=other>3</parameter></function>"
        "</tool_call>",
        "",
        "",
        [("get_weather", {"city": "12", "unit": "12", "days": "two", "other": "3"})],
    ),
    # DeepSeek R1 and V3 (0324).
    (
        "deepseek_v3",
        f"<think>\nHm.\n</think>\n\n{OPEN}{CALL}function{SEP}get_weather\n```json\n"
        f'{{"city": "Paris", "days": 2}}\n```{END}\n{CALL}function{SEP}get_time\n```json\n{{}}\n'
        f"```{END}{CLOSE}",
        "Hm.",
        "",
        BOTH,
    ),
    # DeepSeek V3.1.
    (
        "deepseek_v31",
        f'Let me see.{OPEN}{CALL}get_weather{SEP}{{"city": "Paris", "days": 2}}{END}'
        f"{CALL}get_time{SEP}{{}}{END}{CLOSE}",
        "",
        "Let me see.",
        BOTH,
    ),
    # GLM 4.5.
    (
        "glm45",
        "<think>I want it.</think>\nI will look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>get_time\n</tool_call>",
        "I want it.",
        "I will look.",
        BOTH,
    ),
    ("glm45", "<tool_call>get_time</tool_call>", "", "", [("get_time", {})]),
    # Kimi K2: white space around markers, and a call within the reasoning.
    (
        "kimi_k2",
        f"I look. {KIMI} <|tool_call_begin|>\nfunctions.get_weather:0 <|tool_call_argument_begin|>"
        f' {{"city": "Paris", "days": 2}} <|tool_call_end|> <|tool_call_begin|>'
        f"functions.get_time:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI_END}",
        "",
        "I look.",
        BOTH,
    ),
    (
        "kimi_k2",
        f"<think>I look.{KIMI}<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>"
        f"{{}}<|tool_call_end|>{KIMI_END}",
        "I look.",
        "",
        [("get_time", {})],
    ),
    # MiniMax M2, also with attributes of its own making.
    (
        "minimax_m2",
        '<think>So.</think>\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "So.",
        "",
        BOTH,
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather" description="Look it up">'
        '<parameter name="city" type="string">Paris</parameter></invoke></minimax:tool_call>',
        "",
        "",
        PARIS,
    ),
    # Mistral up to tokenizer version 7, and from version 11 on.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_time", "arguments": {}}]',
        "",
        "",
        BOTH,
    ),
    (
        "mistral_args",
        '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        "[TOOL_CALLS]get_time[CALL_ID]a1B2c3d4e[ARGS]{}",
        "Hm.",
        "I look.",
        BOTH,
    ),
    # Llama 3 and 4.
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("llama4", '[get_weather(city="Paris", days=2), get_time()]', "", "", BOTH),
    (
        "llama4",
        "I look. <|python_start|>[get_weather(city='Pa\\'ris', tags=[\"a, b\", 'c)'], exact=True, "
        "unit=None, area={'x': [-1.5, (2,)]})]<|python_end|>",
        "",
        "I look.",
        [
            (
                "get_weather",
                {
                    "city": "Pa'ris",
                    "tags": ["a, b", "c)"],
                    "exact": True,
                    "unit": None,
                    "area": {"x": [-1.5, [2]]},
                },
            )
        ],
    ),
    (
        "llama4_json",
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|python_end|>',
        "",
        "",
        PARIS,
    ),
    # Gemma 3.
    ("gemma", '[get_weather(city="Paris", days=2), get_time()]', "", "", BOTH),
    (
        "gemma",
        'Sure.\n```tool_code\nget_weather(city="Paris", days=2)\nget_time()\n```',
        "",
        "Sure.",
        BOTH,
    ),
    # SmolLM 2 and 3.
    (
        "smollm",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>',
        "",
        "",
        PARIS,
    ),
    (
        "smollm",
        '<think>\nA.\n</think>\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        "A.",
        "",
        [("get_time", {})],
    ),
    # gpt-oss.
    (
        "harmony",
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I must look.",
        "",
        PARIS,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris", "days": 2}<|end|><|start|>assistant<|channel|>commentary '
        "to=functions.get_time <|constrain|>json<|message|>{}",
        "One.\n\nTwo.",
        "I look.",
        BOTH,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 4.<|return|>",
        "Easy.",
        "It is 4.",
        [],
    ),
    ("harmony", '{"plain": "JSON"}', "", '{"plain": "JSON"}', []),
    # What is no call of an offered tool is content.
    *(
        (name, text, "", text, [])
        for name, text in (
            ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
            ("qwen3_coder", "<tool_call>\n<function=get_weather"),
            ("glm45", "<tool_call>other\n<arg_key>a</arg_key>\n</tool_call>"),
            ("deepseek_v31", f"{OPEN}{CALL}other{SEP}{{}}{END}"),
            ("deepseek_v31", f"{OPEN}{CALL}get_time{SEP}[]{END}"),
            ("kimi_k2", f"{KIMI}<|tool_call_begin|>functions.other:0"),
            ("minimax_m2", '<minimax:tool_call>\n<invoke name="other">\n</invoke>'),
            ("llama4", "[see](http://x) and [1, 2]"),
            ("llama4", "[]"),
            ("llama4", "[get_weather(city=Paris)]"),
            ("llama4", '[get_weather("Paris")]'),
            ("gemma", "```tool_code\nprint(1)\n"),
            ("gemma", "```python\nget_time()\n```"),
            (
                "harmony",
                "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}",
            ),
            ("harmony", "<|channel|>commentary to=functions.get_time<|message|>no"),
            ("harmony", "<|start|>user"),
        )
    ),
]


def dialect(name: Any) -> Dialect:
    reasoning: Any = {"mistral_args": "mistral", "harmony": "harmony"}.get(name, "think")
    return dialect_for(name, reasoning, None, lambda _: False)


def pieces_of(name: str, parts: list[str]) -> list[Piece]:
    parser = dialect(name).parser(USE)
    found = [piece for part in parts for piece in parser.feed(part)]
    return joined([*found, *parser.finish()])


def texts_of(pieces: list[Piece], kind: type[Content | Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.text)
    return calls


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), ANSWERS)
def test_answers_are_parsed(
    name: str, text: str, reasoning: str, content: str, calls: Calls
) -> None:
    pieces = pieces_of(name, [text])
    assert texts_of(pieces, Reasoning) == reasoning
    assert texts_of(pieces, Content) == content
    assert [(called, json.loads(given)) for called, given in calls_of(pieces)] == calls
    ends = sum(isinstance(piece, CallEnd) for piece in pieces)
    assert len(calls) - ends == (name == "harmony" and text.endswith("{}") and bool(calls))


@pytest.mark.parametrize(("name", "text"), [answer[:2] for answer in ANSWERS])
def test_streamed_answers_are_the_same(name: str, text: str) -> None:
    whole = pieces_of(name, [text])
    assert pieces_of(name, list(text)) == whole
    for place in range(1, len(text)):
        assert pieces_of(name, [text[:place], text[place:]]) == whole
    draw = random.Random(len(text))
    for _ in range(20):
        places = sorted(draw.sample(range(len(text) + 1), min(6, len(text))))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        assert pieces_of(name, parts) == whole


def test_an_end_that_is_missing_is_found_in_any_parts() -> None:
    (text,) = [one[1] for one in ANSWERS if one[0] == "qwen3_coder" and "get_time" in one[1]][:1]
    text = text.replace("</function>\n", "", 1)
    whole = pieces_of("qwen3_coder", [text])
    for place in range(1, len(text)):
        assert pieces_of("qwen3_coder", [text[:place], text[place:]]) == whole


SENTINEL = "Q7Z"


@given(
    # Attributes that a model adds to tags are not kept.
    answer=st.sampled_from([one for one in ANSWERS if "description=" not in one[1]]),
    changes=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "delete", "double"]),
            st.integers(0, 1000),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_mutated_answers_lose_no_text(
    answer: tuple[str, str, str, str, Calls],
    changes: list[tuple[str, int, int]],
    data: st.DataObject,
) -> None:
    name, text = answer[:2]
    for change, at, length in changes:
        place = at % (len(text) + 1)
        if change == "insert":
            text = text[:place] + SENTINEL + text[place:]
        elif change == "delete":
            text = text[:place] + text[place + length :]
        else:
            text = text[: place + length] + text[place:]
    whole = pieces_of(name, [text])
    cut = data.draw(st.integers(0, len(text)))
    assert pieces_of(name, [text[:cut], text[cut:]]) == whole
    assert pieces_of(name, list(text)) == whole
    kept = "".join(
        piece.id if isinstance(piece, CallStart) else piece.text
        for piece in whole
        if not isinstance(piece, CallEnd)
    )
    assert kept.count(SENTINEL) == text.count(SENTINEL), text


def test_strings_come_as_they_are_written() -> None:
    parser = dialect("qwen3_coder").parser(USE)
    assert parser.feed("<tool_call>\n<function=get_weather>\n") == [CallStart("get_weather")]
    assert parser.feed("<parameter=city>\nPar") == [Arguments('{"city": "Par')]
    assert parser.feed('is "x"\n</para') == [Arguments('is \\"x\\"')]
    assert parser.feed("meter>\n<parameter=days>\n1") == [Arguments('"')]
    assert parser.feed("2\n</parameter>\n") == [Arguments(', "days": 12')]
    assert parser.feed("</function>") == [Arguments("}"), CallEnd()]
    assert parser.feed("\n</tool_call>") == parser.finish() == []


def test_a_call_cut_short_keeps_its_text() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    assert calls_of(pieces_of("qwen3_coder", [text])) == [("get_weather", '{"city": "Par')]
    text += "is\n</parameter>\n<parameter=days>\n1"
    found = calls_of(pieces_of("qwen3_coder", [text]))
    assert found == [("get_weather", '{"city": "Paris"\n1')]


def test_broken_parameters_stay_with_their_call() -> None:
    text = "<tool_call><function=get_weather>\nno<parameter=x></function></tool_call>then"
    pieces = pieces_of("qwen3_coder", [text])
    assert calls_of(pieces) == [("get_weather", "no<parameter=x>")]
    assert texts_of(pieces, Content) == "then"


def test_a_broken_call_does_not_swallow_the_next_one() -> None:
    text = f'{OPEN}{CALL}get_weather{SEP}{{"city": }}{END}{CALL}get_time{SEP}{{}}{END}{CLOSE}'
    found = calls_of(pieces_of("deepseek_v31", [text]))
    assert found == [("get_weather", '{"city": }'), ("get_time", "{}")]


def test_ids_that_the_model_writes() -> None:
    text = "<|tool_call_begin|>functions.get_time:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert pieces_of("kimi_k2", [KIMI + text])[0] == CallStart("get_time", "functions.get_time:3")
    text = "[TOOL_CALLS]get_time[CALL_ID]a1B2c3d4e[ARGS]{}"
    assert pieces_of("mistral", [text])[0] == CallStart("get_time", "a1B2c3d4e")


def test_one_call_alone() -> None:
    text = '[get_weather(city="Paris"), get_time()] so'
    output = ParsedOutput(dialect("llama4"), replace(USE, single=True))
    pieces = output.feed(text, last=True)
    assert [call.name for call in output.calls] == ["get_weather"]
    assert output.content == " so"
    assert sum(isinstance(piece, CallEnd) for piece in pieces) == 1


def test_an_answer_is_gathered() -> None:
    output = ParsedOutput(dialect("kimi_k2"), USE, "reasoning")
    text = f"I look.</think>Hm.{KIMI}<|tool_call_begin|>functions.get_time:7{{}}"
    for character in text:
        output.feed(character, last=False)
    output.feed("", last=True)
    assert (output.reasoning, output.content) == ("I look.", "Hm.")
    (call,) = output.calls
    assert (call.id, call.name, call.arguments) == ("functions.get_time:7", "get_time", "{}")


@pytest.mark.parametrize(
    ("begins_in", "reasoning", "content"), [("reasoning", "a", "b"), ("content", "", "a\n\nb")]
)
def test_messages_of_gpt_oss_that_are_continued(
    begins_in: AnswerPart, reasoning: str, content: str
) -> None:
    output = ParsedOutput(dialect("harmony"), None, begins_in)
    output.feed("a<|end|><|start|>assistant<|channel|>final<|message|>b", last=True)
    assert (output.reasoning, output.content) == (reasoning, content)


def test_reasoning_of_gpt_oss_may_stay_in_the_content() -> None:
    found = dialect_for("harmony", "none", None, lambda _: False)
    output = ParsedOutput(found, USE)
    output.feed("<|channel|>analysis<|message|>Hm.<|end|>", last=True)
    assert (output.reasoning, output.content) == ("", "Hm.")


def test_harmony_is_the_format_of_calls_and_reasoning() -> None:
    source = TEMPLATE + "<|channel|>analysis<|message|>"
    found = dialect_for("auto", "auto", ChatTemplate(source, {}), lambda _: False)
    assert found.tools is FORMATS["harmony"]
    assert found.reasoning is not None
    assert found.reasoning.name == "harmony"
    assert "<|channel|>" in found.answer_texts
    assert dialect_for("auto", "harmony", None, lambda _: False) == found
    pairs: list[tuple[Any, Any]] = [("hermes", "harmony"), ("harmony", "think")]
    for calls, reasoning in pairs:
        with pytest.raises(ConfigError, match="harmony must be set for both"):
            dialect_for(calls, reasoning, None, lambda _: False)
