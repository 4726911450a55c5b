"""How tools are written into prompts for every chat template, and which format is used."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.config.cluster import Config
from baton.config_fields import ConfigFields
from baton.errors import InvalidRequest
from baton.host.background import INLINE
from router.conversation.fit import fitted, parsed
from router.conversation.template_form import TemplateForm
from router.conversation.turns import calls_turn, is_about_tools, result_turn
from router.dialects.families import FORMATS, format_for
from router.dialects.tools import Tool, ToolUse
from router.inference.prompt import TEXTS_AT_ONCE, PromptEncoder
from router.inference.sampling_input import SamplingInput
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_files import load_chat_template
from tests.support.router.front_fakes import TEMPLATE, tiny_backend, tiny_tokenizer

WAIT_S = 20.0
BEYOND = "<|beyond|>"
TOOL = Tool("look_up", "Finds a word.", {"type": "object", "properties": {}})
TAKES_ALL = TemplateForm()
USE = ToolUse((TOOL,), frozenset({"look_up"}))
KNOWS = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m['role'] == 'tool' %}={{ m.tool_call_id }}{% endif %}|{% endfor %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Which word?"},
    dict(calls_turn("", [("call_1", "look_up", {"word": "é"})])),
    dict(result_turn("call_1", "found")),
]


def test_a_template_that_knows_everything() -> None:
    template = ChatTemplate(KNOWS, {})
    assert (template.knows_tools, template.knows_calls, template.knows_results) == (True,) * 3
    turns = fitted(TALK, USE, template, FORMATS["hermes"], TAKES_ALL)
    assert turns == TALK
    assert template.render(turns, 1000, [TOOL.as_template_value()]).result() == (
        'look_up\nuser: Which word?|assistant: look_up{"word": "é"}|tool: found=call_1|'
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_template_that_knows_nothing(name: str) -> None:
    template = ChatTemplate(TEMPLATE, {})
    form = FORMATS[name]
    known = (template.knows_tools, template.knows_calls, template.knows_results)
    assert known == (False, False, False)
    system, user, assistant, result = fitted(TALK, USE, template, form, TAKES_ALL)
    assert system["role"] == "system"
    assert json.dumps(TOOL.as_template_value()) in system["content"].splitlines()
    assert user == TALK[0]
    assert assistant == {"role": "assistant", "content": form.written([("look_up", {"word": "é"})])}
    assert result == {"role": "user", "content": form.result("found")}
    assert "\nfound\n" in result["content"]
    assert "look_up" in template.render([system, user, assistant, result], 10_000).result()


def test_instructions_follow_the_system_message() -> None:
    turns = [{"role": "system", "content": "Be brief."}, TALK[0]]
    system, _ = fitted(turns, USE, ChatTemplate(TEMPLATE, {}), FORMATS["hermes"], TAKES_ALL)
    assert system["content"].startswith("Be brief.\n\n")
    assert turns[0]["content"] == "Be brief."


def test_content_next_to_calls_stays() -> None:
    turn = calls_turn("I look.", [("1", "look_up", "{}")])
    (fit,) = fitted([turn], None, ChatTemplate(TEMPLATE, {}), FORMATS["hermes"], TAKES_ALL)
    assert fit["content"].startswith("I look.\n<tool_call>")


@pytest.mark.parametrize(
    ("given", "value"),
    [("", {}), ('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("no", "no"), ("[" * 5000, "[" * 5000)],
)
async def test_arguments_of_earlier_calls(given: str, value: object) -> None:
    plain = {"role": "user", "content": "Hi"}
    unchanged, turn = await parsed([plain, calls_turn("", [("1", "f", given)])], TAKES_ALL)
    (call,) = turn["tool_calls"]
    assert (unchanged, call["function"]["arguments"]) == (plain, value)


async def test_arguments_of_too_many_values() -> None:
    arguments = '{"a": [' + "0," * 200_000 + "0]}"
    with pytest.raises(InvalidRequest, match="at most 131072 values") as found:
        await parsed([calls_turn("", [("1", "f", arguments)])], TAKES_ALL)
    assert found.value.param == "messages[0].tool_calls"


def test_messages_about_tools_are_recognized() -> None:
    assert [is_about_tools(turn) for turn in TALK] == [False, True, True]


@pytest.mark.parametrize(
    ("source", "special", "name"),
    [
        (TEMPLATE, set(), "hermes"),
        (KNOWS, {"<|python_tag|>"}, "llama3"),
        (TEMPLATE, {"<|python_tag|>"}, "hermes"),
        (KNOWS + "<tool_call>", {"<|python_tag|>"}, "hermes"),
        (KNOWS + "[TOOL_CALLS]", {"[TOOL_CALLS]"}, "mistral"),
        (KNOWS + "[TOOL_CALLS][ARGS]", {"[TOOL_CALLS]"}, "mistral_args"),
        (TEMPLATE + "SmolLM", set(), "smollm"),
        (TEMPLATE.replace("<|im_start|>", "<start_of_turn>"), set(), "gemma"),
        (KNOWS, {"<|python_start|>", "<|python_tag|>"}, "llama4"),
        (KNOWS + '{"name": n, "parameters": {}}', {"<|python_start|>"}, "llama4_json"),
        (KNOWS + "<tool_call>\\n<function=", set(), "qwen3_coder"),
        (KNOWS + "<tool_call>{{ x }}<arg_key>", set(), "glm45"),
        (KNOWS + "<minimax:tool_call>", set(), "minimax_m2"),
        (KNOWS + "{{ '<' ~ 'minimax:tool_call' ~ '>' }}", set(), "minimax_m2"),
        (KNOWS + "<|tool_calls_section_begin|><|tool_call_begin|>", set(), "kimi_k2"),
        (KNOWS + "<｜tool▁calls▁begin｜>```json", set(), "deepseek_v3"),
        (KNOWS + "<｜tool▁calls▁begin｜>", set(), "deepseek_v31"),
        (KNOWS + "<|start|>assistant<|channel|>final<|message|>", set(), "harmony"),
    ],
)
def test_the_format_is_found(source: str, special: set[str], name: str) -> None:
    form = format_for("auto", ChatTemplate(source, {}), special.__contains__)
    assert form.name == name


def test_the_format_is_given() -> None:
    assert format_for("mistral", None, lambda _: False).name == "mistral"
    assert format_for("auto", None, lambda _: False).name == "hermes"


def test_smollm3_calls_its_tools_otherwise() -> None:
    template = ChatTemplate("{% if xml_tools %}{{ xml_tools | length }}{% endif %}", {})
    assert template.knows_tools
    assert template.render(TALK, 100, [TOOL.as_template_value()]).result() == "1"


def test_tools_select_the_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": KNOWS}]
    settings = ConfigFields(tmp_path, {"chat_template": templates})
    template = load_chat_template(tmp_path, settings, {})
    assert template is not None
    assert not template.knows_tools
    assert template.for_tools.knows_tools
    assert format_for("auto", template, {"<|python_tag|>"}.__contains__).name == "llama3"


async def test_long_texts_of_a_tenant_leave_others_a_turn() -> None:
    tokenizer = tiny_tokenizer()
    release = threading.Event()
    begun: list[str] = []
    encode = tokenizer.encode

    def slow(text: str, **options: Any) -> tuple[int, ...]:
        begun.append(text[0])
        if text[0] == "a":
            assert release.wait(WAIT_S)
        return encode(text, **options)

    tokenizer.encode = slow  # type: ignore[method-assign]
    encoder = PromptEncoder(tokenizer, FORMATS["hermes"], Config(), lambda: 100_000)
    long = "a" * (INLINE + 1)
    tasks = [
        asyncio.create_task(encoder.prompt_ids("one", [long], SamplingInput(), "prompt"))
        for _ in range(3 * TEXTS_AT_ONCE)
    ]
    try:
        async with asyncio.timeout(WAIT_S):
            # Another tenant's long text is done while all of the first one's are in progress.
            other = "b" * (INLINE + 1)
            assert await encoder.prompt_ids("two", [other], SamplingInput(), "prompt")
        assert begun.count("a") <= TEXTS_AT_ONCE - 1
        assert not any(task.done() for task in tasks)
    finally:
        release.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # DeepSeek's templates join the arguments, which must be text.
        ("{{ '<' + c['function']['arguments'] + '>' }}", '<{"word": "é"}>'),
        ("{{ '<' ~ c.function.arguments ~ '>' }}", '<{"word": "é"}>'),
        # Those of others take them for values.
        ("{{ '<' + c.function.arguments | tojson + '>' }}", '<{"word": "é"}>'),
        ("{% for k, v in c.function.arguments.items() %}<{{ k ~ v }}>{% endfor %}", "<wordé>"),
    ],
)
async def test_arguments_as_a_template_takes_them(written: str, expected: str) -> None:
    source = f"{{% for m in messages %}}{{% for c in m.tool_calls %}}{written}{{% endfor %}}"
    tokenizer = tiny_tokenizer(template=source + "{% endfor %}tool")
    encoder = PromptEncoder(tokenizer, FORMATS["hermes"], Config(), lambda: 4096)
    turn = calls_turn("", [("1", "look_up", '{"word": "é"}')])
    assert tokenizer.decode(await encoder.chat_ids("t", [turn])) == f"{expected}tool"


@pytest.mark.parametrize("text", [f"a {BEYOND} b", BEYOND, f"{'a ' * 40}{BEYOND}"])
async def test_no_text_reaches_a_plan_with_a_token_beyond_the_embeddings(text: str) -> None:
    """Whatever field it comes from."""
    backend = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    rows = backend.get_vocab_size(with_added_tokens=True)
    backend.add_special_tokens([BEYOND])
    tokenizer = Tokenizer(backend, vocab_size=rows, chat_template=ChatTemplate(KNOWS, {}))
    encoder = PromptEncoder(tokenizer, FORMATS["hermes"], Config(), lambda: 4096)
    turns = [{"role": "user", "content": text}]
    calls = {
        "prompt": encoder.prompt_ids("t", ["good", text], SamplingInput(), "prompt"),
        "input": encoder.prompt_ids("t", [text], SamplingInput(), "input"),
        "messages": encoder.chat_ids("t", turns),
        "bad_words[1]": encoder.banned_runs("t", ["good", text]),
    }
    for param, call in calls.items():
        with pytest.raises(InvalidRequest, match="has no embedding") as caught:
            await call
        assert caught.value.param == param
        assert BEYOND in caught.value.message
    assert await encoder.prompt_ids("t", ["good"], SamplingInput(), "prompt")
    # Tokens that are cut off do not matter.
    end = SamplingInput(truncate=3)
    assert await encoder.prompt_ids("t", [f"{text} the capital of France"], end, "prompt")
