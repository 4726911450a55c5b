"""Answers in the forms that public sources show. Each case names its source.

vllm: the tests of vLLM, below tests/; sglang: test/srt/test_function_call_parser.py of SGLang;
llama.cpp: tests/test-chat.cpp, and the chat templates in models/templates; harmony: docs/format.md
and tests/test_harmony.py of openai/harmony; mistral-common: what that library, version 1.13.1,
encodes. Names and values are our own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from router.core.request import AnswerPart
from router.dialects.dialect import Dialect, dialect_for
from router.dialects.pieces import Piece, joined
from router.dialects.tools import Tool, ToolUse
from tests.support.router.parsed import gathered

TOOLS = (
    Tool(
        "weather",
        None,
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "state": {"type": "string"},
                "days": {"type": "integer"},
                "area": {"type": "object"},
                "level": {"type": "float"},
                "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool("clock", None, {"type": "object", "properties": {}}),
)
USE = ToolUse(TOOLS, frozenset(tool.name for tool in TOOLS))
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
Calls = list[tuple[str, Any]]
PARIS: Calls = [("weather", {"city": "Paris"})]
CLOCK: Calls = [("clock", {})]


@dataclass(frozen=True)
class Case:
    source: str
    format: str
    text: str
    content: str = ""
    calls: Calls | None = None
    reasoning: str = ""
    begins_in: AnswerPart = "start"


BEGINNINGS: tuple[tuple[str, AnswerPart], ...] = (("", "reasoning"), ("<think>", "start"))


def rows(form: str, prefix: str, *given: tuple[Any, ...]) -> list[Case]:
    """Cases of one format: each the end of its source, and the other fields from the text on."""
    return [Case(f"{prefix}{source}", form, *rest) for source, *rest in given]


CASES = [
    # Hermes, Qwen 2.5 and 3: white space around the object, calls that follow each other directly,
    # arguments as text, and an answer without its last tag.
    Case(
        "llama.cpp Qwen-Qwen3-0.6B.jinja",
        "hermes",
        '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n'
        "</tool_call>",
        "I look.",
        PARIS + CLOCK,
        "Hm.",
    ),
    Case(
        "vllm tool_parsers/test_hermes_tool_parser.py: stream_interval",
        "hermes",
        'Sure.<tool_call>{"name": "clock", "arguments": {}}</tool_call><tool_call>{"name": "clock",'
        '"arguments":\n{}}</tool_call>',
        "Sure.",
        CLOCK + CLOCK,
    ),
    Case(
        "vllm tool_parsers/test_hermes_tool_parser.py: until_eos",
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}',
        calls=PARIS,
    ),
    Case(
        "vllm tool_parsers/test_hermes_tool_parser.py: serialized_arguments",
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        calls=PARIS,
    ),
    # SmolLM2: a list over several lines.
    Case(
        "the template of smollm2 in ollama's library",
        "smollm",
        '<tool_call>[\n{"name": "weather", "arguments": {"city": "Paris"}},\n'
        '{"name": "clock", "arguments": {}}\n]</tool_call>',
        calls=PARIS + CLOCK,
    ),
    # Qwen 3 Coder.
    Case(
        "vllm tool_parsers/test_qwen3coder_tool_parser.py: parallel_tools, with_content",
        "qwen3_coder",
        "Sure!<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        '<parameter=area>\n{"width": 10, \n "height": 20}\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Sure!",
        [("weather", {"city": "Paris", "area": {"width": 10, "height": 20}}), *CLOCK],
    ),
    Case(
        "vllm tool_parsers/test_qwen3coder_tool_parser.py: fallback_no_tags",
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        calls=PARIS,
    ),
    Case(
        "vllm tool_parsers/test_qwen3coder_tool_parser.py: missing_closing_parameter_tag",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n"
        "<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>",
        calls=[("weather", {"city": "Paris", "days": 2, "state": "TX"})],
    ),
    Case(
        "vllm tool_parsers/test_qwen3coder_tool_parser.py: type_conversion, anyof",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=level>\n3.14\n</parameter>\n<parameter=either>"
        "\nsome text\n</parameter>\n</function>\n</tool_call>",
        calls=[("weather", {"level": 3.14, "either": "some text"})],
    ),
    Case(
        "sglang: edge_case_special_chars_in_value",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis->TX\n</parameter>\n</function>\n"
        "</tool_call>",
        calls=[("weather", {"city": "Paris->TX"})],
    ),
    *(
        Case(
            "vllm reasoning/test_qwen3_reasoning_parser.py: TOOL_CALL_NO_THINK_END",
            "qwen3_coder",
            f"{before}I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            PARIS,
            "I look.",
            begins_in,
        )
        for before, begins_in in BEGINNINGS
    ),
    # DeepSeek V3 and R1: a line between two calls, or none, and one behind the block of code.
    *(
        Case(
            source,
            "deepseek_v3",
            f"Let me see.{OPEN}{CALL}function{SEP}weather\n```json\n"
            f'{{"city": "Paris"}}\n```{line}{END}{between}{CALL}function{SEP}clock\n```json\n{{}}\n'
            f"```{line}{END}{CLOSE}",
            "Let me see.",
            PARIS + CLOCK,
        )
        for source, between, line in (
            ("vllm tool_parsers/test_deepseekv3_tool_parser.py", "", ""),
            ("sglang: multiple_tool_calls_with_multi_token_chunk", "\n", ""),
            ("llama.cpp llama-cpp-deepseek-r1.jinja", "\n", "\n"),
        )
    ),
    Case(
        "llama.cpp deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja: the prompt ends with <think>",
        "deepseek_v3",
        f"Hm.\n</think>\n\n{OPEN}{CALL}function{SEP}clock\n```json\n{{}}\n```{END}{CLOSE}",
        "",
        CLOCK,
        "Hm.",
        "reasoning",
    ),
    # DeepSeek V3.1: text before and behind, and blocks without a call.
    Case(
        "vllm tool_parsers/test_deepseekv31_tool_parser.py: multiple_tools",
        "deepseek_v31",
        f'before{OPEN}{CALL}weather{SEP}{{"city":"Paris"}}{END}{CALL}clock{SEP}{{}}{END}{CLOSE}'
        " behind",
        "before behind",
        PARIS + CLOCK,
    ),
    *(
        Case(
            "vllm tool_parsers/test_deepseekv31_tool_parser.py: unparsable_block",
            "deepseek_v31",
            text,
            text,
        )
        for text in (f"Let me see.{OPEN}weather", f'{OPEN}weather{SEP}{{"x":1}}{CLOSE}')
    ),
    # Mistral up to version 7: with a space, with ids, with arguments first.
    *rows(
        "mistral",
        "",
        (
            "vllm tool_parsers/test_mistral_tool_parser.py: argument_before_name",
            '[TOOL_CALLS] [{"arguments":{"city": "Paris"}, "name": "weather"}]',
            "",
            PARIS,
        ),
        (
            "vllm tool_parsers/test_mistral_tool_parser.py: single_tool_add",
            '[TOOL_CALLS]  [ {"name":"weather" , "arguments" : {"city": "Paris"} } ]',
            "",
            PARIS,
        ),
        (
            "vllm tool_parsers/test_mistral_tool_parser.py: trailing_data_after_json",
            'Hello[TOOL_CALLS] [{"name": "weather", "arguments":{"city": "Paris"}}]\nmore',
            "Hello\nmore",
            PARIS,
        ),
        (
            "mistral-common: versions 3 and 7, SentencePiece",
            'I look.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": '
            '"a1B2c3d4e"}, {"name": "clock", "arguments": {}, "id": "a1B2c3d4f"}]',
            "I look.",
            PARIS + CLOCK,
        ),
        (
            "mistral-common: versions 3 and 7, Tekken",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": '
            '"a1B2c3d4e"}, {"name": "clock", "arguments": {}, "id": "a1B2c3d4f"}]',
            "",
            PARIS + CLOCK,
        ),
    ),
    # Mistral from version 11 on: without a marker before the arguments, with one, and with an id.
    *rows(
        "mistral_args",
        "",
        (
            "vllm tool_parsers/test_mistral_tool_parser.py: multiple_tool_calls, complex",
            'hi{hi[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]clock{}',
            "hi{hi",
            PARIS + CLOCK,
        ),
        (
            "mistral-common: version 13",
            'I look.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}',
            "I look.",
            PARIS + CLOCK,
        ),
        (
            "mistral-common: version 11",
            '[TOOL_CALLS]weather[CALL_ID]a1B2c3d4e[ARGS]{"city": "Paris"}[TOOL_CALLS]clock'
            "[CALL_ID]a1B2c3d4f[ARGS]{}",
            "",
            PARIS + CLOCK,
        ),
    ),
    # Magistral.
    *rows(
        "mistral_args",
        "vllm reasoning/test_mistral_reasoning_parser.py: ",
        ("REASONING_WITH_THINK", "[THINK]Hm.[/THINK]Yes.", "Yes.", None, "Hm."),
        ("NEW_LINE", "\n[THINK]Hm.[/THINK]\nYes.", "Yes.", None, "Hm."),
        ("MULTIPLE_LINES_WITH_THINK", "[THINK]A\nB[/THINK]C\nD", "C\nD", None, "A\nB"),
        ("THINK_NO_END", "[THINK]Hm.", "", None, "Hm."),
        ("SIMPLE_REASONING", "Hm.[/THINK]Yes.", "Yes.", None, "Hm.", "reasoning"),
    ),
    # Llama 3: text before and behind, other separators, the token again, the type of the call.
    *(
        case
        for form in ("llama3", "llama4_json")
        for case in rows(
            form,
            "vllm tool_parsers/test_llama3_json_tool_parser.py: ",
            (
                "simple",
                'I look: {"name": "weather", "parameters": {"city": "Paris"}} More?',
                "I look: More?",
                PARIS,
            ),
            (
                "multiple_json_with_surrounding_text",
                'I look: {"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}'
                " Well?",
                "I look: Well?",
                CLOCK + CLOCK,
            ),
            (
                "multiple_json_with_whitespace",
                '{"name": "clock", "parameters": {}} ; {"name": "clock", "parameters": {}} ; '
                '{"name": "clock", "arguments": {}}',
                "",
                CLOCK * 3,
            ),
            (
                "streaming_parallel_separators",
                '{"name": "clock", "parameters": {}}\n{"name": "clock", "parameters": {}}',
                "",
                CLOCK + CLOCK,
            ),
            (
                "json_fragment_in_trailing_text",
                '{"name": "clock", "parameters": {}} I gave {"query": "test"}',
                ' I gave {"query": "test"}',
                CLOCK,
            ),
            ("missing_name_key", '{"parameters": {}}', '{"parameters": {}}'),
            ("missing_parameters", 'So {"name": "clock"}', 'So {"name": "clock"}'),
        )
    ),
    Case(
        "sglang: multiple_json_with_separator_customized",
        "llama3",
        '<|python_tag|>{"name": "clock", "parameters": {}}<|python_tag|>{"name": "weather", '
        '"parameters": {"city": "Paris"}}',
        calls=CLOCK + PARIS,
    ),
    Case(
        "llama.cpp tests/test-chat.cpp: Llama 3.1",
        "llama3",
        'So: {"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
        "So:",
        PARIS,
    ),
    # Llama 4.
    *rows(
        "llama4",
        "vllm tool_parsers/test_llama4_pythonic_tool_parser.py: ",
        (
            "parallel_calls",
            "<|python_start|>[weather(city='Paris',days=2),clock()]",
            "",
            [("weather", {"city": "Paris", "days": 2}), *CLOCK],
        ),
        ("python_tag", "<|python_start|>[weather(city='Paris')]<|python_end|>", "", PARIS),
        (
            "ESCAPED_STRING",
            r"[weather(city='Martha\'s Vineyard', state='\"cool\"')]",
            "",
            [("weather", {"city": "Martha's Vineyard", "state": '"cool"'})],
        ),
        (
            "MORE_TYPES",
            "[weather(city='LA', area={'x': 'CA', 'y': ['a', 'b']}, either=None, open=True)]",
            "",
            [
                (
                    "weather",
                    {
                        "city": "LA",
                        "area": {"x": "CA", "y": ["a", "b"]},
                        "either": None,
                        "open": True,
                    },
                )
            ],
        ),
    ),
    Case(
        "sglang: detect_and_parse_with_python_start_and_end_token",
        "llama4",
        "I look. <|python_start|>[weather(city='Paris')]<|python_end|> So.",
        "I look. So.",
        PARIS,
    ),
    # Calls follow each other directly in what the template writes.
    Case(
        "vllm examples/tool_chat_template_llama4_json.jinja",
        "llama4_json",
        '{"name": "weather", "parameters": {"city": "Paris"}}{"name": "clock", "parameters": {}}',
        calls=PARIS + CLOCK,
    ),
    # Gemma 3.
    Case(
        "vllm examples/tool_chat_template_gemma3_pythonic.jinja",
        "gemma",
        '[weather(city="Paris", area={"x": true}), clock()]',
        calls=[("weather", {"city": "Paris", "area": {"x": True}}), *CLOCK],
    ),
    Case(
        "ai.google.dev/gemma/docs/meme-generator",
        "gemma",
        '```tool_code\nweather(city="Paris")\n```',
        calls=PARIS,
    ),
    # GLM 4.5.
    Case(
        "sglang: TestGlm4MoeDetector multiple_tool_calls",
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
        "<tool_call>clock\n</tool_call>",
        calls=PARIS + CLOCK,
    ),
    Case(
        "llama.cpp GLM-4.6.jinja",
        "glm45",
        "\n<think>Hm.</think>\nI look.\n<tool_call>clock\n</tool_call>",
        "I look.",
        CLOCK,
        "Hm.",
    ),
    # gpt-oss.
    *rows(
        "harmony",
        "",
        (
            "harmony docs/format.md: preambles",
            f"{ANALYSIS}<|channel|>commentary<|message|>**Plan**<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
            "**Plan**",
            PARIS,
            "Hm.",
        ),
        (
            "harmony tests/test_harmony.py: constrain_marker_adjacent",
            ' to=functions.weather<|channel|>commentary<|constrain|>json<|message|>{"city": '
            '"Paris"}<|call|>',
            "",
            PARIS,
        ),
        (
            "llama.cpp openai-gpt-oss-120b.jinja",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
            "",
            PARIS,
        ),
        (
            "llama.cpp: tool call with recipient in channel header",
            '<|channel|>analysis to=functions.weather<|message|>{"city": "Paris"}',
            "",
            PARIS,
        ),
        (
            "llama.cpp: a header to the assistant before the reasoning",
            "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            None,
            "Hm.",
        ),
        *(
            (
                "vllm tool_parsers/test_openai_tool_parser.py: no_args",
                f"{ANALYSIS}<|channel|>commentary to=functions.clock <|constrain|>json"
                f"<|message|>{end}",
                "",
                CLOCK,
                "Hm.",
            )
            for end in ("", "\n", "<|call|>", "\n<|call|>")
        ),
        (
            "vllm tool_parsers/test_openai_tool_parser.py: multiple_tools",
            " to=functions.clock<|channel|>commentary json<|message|><|call|><|start|>assistant"
            ' to=functions.weather<|channel|>commentary json<|message|>{"city":"Paris"}<|call|>'
            "<|start|>assistant<|channel|>final<|message|>Done.",
            "Done.",
            CLOCK + PARIS,
        ),
        (
            "harmony tests/test_harmony.py: simple_tool_call",
            f"{ANALYSIS}<|channel|>analysis to=functions.weather code<|message|>"
            '{"city": "Paris"}<|call|>',
            "",
            PARIS,
            "Hm.",
        ),
        # Headers that have broken: no message behind them is lost.
        (
            "vllm issue 58384",
            "<|channel|>comment<|message|>text<|end|><|start|>assistant<|channel|>final"
            "<|message|>Yes.",
            "<|channel|>comment<|message|>text\n\nYes.",
        ),
        (
            "llama.cpp issue 27720",
            "<|channel|>??<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.",
            "<|channel|>??",
            None,
            "Hm.",
        ),
        (
            "vllm parser/test_harmony.py: malformed_msgs",
            f'{ANALYSIS}<|channel|>final {{"answer": "hi"}}<|return|>',
            '<|start|>assistant<|channel|>final {"answer": "hi"}',
            None,
            "Hm.",
        ),
    ),
]


def dialect(name: Any) -> Dialect:
    reasoning: Any = {"mistral_args": "mistral", "harmony": "harmony"}.get(name, "think")
    return dialect_for(name, reasoning, None, lambda _: False)


def pieces_of(case: Case, parts: list[str]) -> list[Piece]:
    parser = dialect(case.format).parser(USE, case.begins_in)
    found = [piece for part in parts for piece in parser.feed(part)]
    return joined([*found, *parser.finish()])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.source}")
def test_published_answers(case: Case) -> None:
    whole = pieces_of(case, [case.text])
    parsed = gathered(whole)
    assert parsed.reasoning == case.reasoning
    assert parsed.content == case.content
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert calls == (case.calls or [])
    assert pieces_of(case, list(case.text)) == whole
    for place in range(1, len(case.text)):
        assert pieces_of(case, [case.text[:place], case.text[place:]]) == whole


def test_a_value_may_hold_the_beginning_of_another_call() -> None:
    """It ends before an argument that the function has, and that has not come yet."""
    value = "a\n<parameter=other>\n<parameter=city>\nb"
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    (call,) = gathered(pieces_of(Case("", "qwen3_coder", text), [text])).calls
    assert json.loads(call.arguments) == {"city": value}


def test_a_tag_in_the_reasoning_is_no_call() -> None:
    text = "<think>It wants <tool_call> tags.</think>Yes."
    parsed = gathered(pieces_of(Case("", "qwen3_coder", text), [text]))
    assert (parsed.reasoning, parsed.content) == ("It wants <tool_call> tags.", "Yes.")
