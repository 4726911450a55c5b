"""What is found out about chat templates, and how conversations are written for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.conversation.fit import fitted, parsed
from router.conversation.template_form import TemplateForm, form_of
from router.conversation.turns import Turn, calls_turn, result_turn, text_turn
from router.dialects.families import FORMATS
from router.dialects.tools import Tool, ToolUse
from router.text.chat_template import ChatTemplate

LINE = "{{ m.role }}: {{ m.content }}|"
PLAIN = "{% for m in messages %}" + LINE + "{% endfor %}"
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + LINE + "{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    + LINE
    + "{% endfor %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}" + LINE + "{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}|"
    "{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} BODY>{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}|{% endfor %}"
)
ITEMS = CALLS.replace(
    "BODY", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
)
JSON = CALLS.replace("BODY", "{{ c.function.arguments | tojson }}")
TEXT = CALLS.replace("BODY", "{{ c.function.arguments }}")
ONE = JSON.replace(
    "{% for c in m.tool_calls",
    "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% for c in m.tool_calls",
)
NINE = JSON.replace(
    "<{{ c.function.name }}",
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}<{{ c.function.name }}",
)
TOOL = Tool("f", None, {"type": "object", "properties": {}})
SAID = text_turn("user", "Hi"), text_turn("assistant", "Yo"), text_turn("user", "Go")


async def rendered(source: str, *turns: Turn, tools: ToolUse | None = None) -> str:
    template = ChatTemplate(source, {})
    form = await form_of(template)
    fit = fitted(await parsed(turns, form), tools, template, FORMATS["hermes"], form)
    return template.render(fit, 10_000).result()


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (PLAIN, TemplateForm(takes_other_roles=True)),
        ("{{ raise_exception('never') }}", TemplateForm()),
        (
            GEMMA,
            TemplateForm(
                takes_system=False,
                takes_late_system=False,
                takes_repeats=False,
                takes_answer_first=False,
            ),
        ),
        (FIRST, TemplateForm(takes_late_system=False, takes_other_roles=True)),
        (
            SILENT,
            TemplateForm(takes_system=False, takes_late_system=False, takes_other_roles=True),
        ),
        (PARTS, TemplateForm(takes_text=False, takes_other_roles=True)),
        (ITEMS, TemplateForm(takes_other_roles=True, takes_text_arguments=False)),
        (JSON, TemplateForm(takes_other_roles=True)),
        (TEXT, TemplateForm(takes_other_roles=True, takes_object_arguments=False)),
        (ONE, TemplateForm(takes_other_roles=True, takes_several_calls=False)),
        (NINE, TemplateForm(takes_other_roles=True, takes_long_ids=False)),
    ],
)
async def test_what_a_template_takes_is_found_out(source: str, form: TemplateForm) -> None:
    assert await form_of(ChatTemplate(source, {})) == form


async def test_a_refused_system_message_stands_before_the_first_message_of_the_user() -> None:
    talk = text_turn("system", "Be brief."), *SAID
    for source in (GEMMA, SILENT):
        assert await rendered(source, *talk) == "user: Be brief.\n\nHi|assistant: Yo|user: Go|"
    assert await rendered(FIRST, *talk) == "system: Be brief.|user: Hi|assistant: Yo|user: Go|"


async def test_tools_of_a_template_that_refuses_a_system_message_are_in_the_prompt() -> None:
    use = ToolUse((TOOL,), frozenset({"f"}))
    text = await rendered(GEMMA, text_turn("user", "Hi"), tools=use)
    assert text.startswith("user: ")
    assert json.dumps(TOOL.as_template_value()) in text
    assert text.endswith("\n\nHi|")


async def test_a_system_message_among_others_becomes_the_users() -> None:
    talk = *SAID[:2], text_turn("system", "Be brief."), SAID[2]
    assert await rendered(PLAIN, *talk) == "user: Hi|assistant: Yo|system: Be brief.|user: Go|"
    assert await rendered(FIRST, *talk) == "user: Hi|assistant: Yo|user: Be brief.|user: Go|"
    assert await rendered(GEMMA, *talk) == "user: Hi|assistant: Yo|user: Be brief.\n\nGo|"


async def test_system_messages_at_the_beginning_are_one_where_the_template_takes_one() -> None:
    talk = text_turn("system", "A"), text_turn("system", "B"), SAID[0]
    assert await rendered(FIRST, *talk) == "system: A\n\nB|user: Hi|"


async def test_an_answer_may_come_first() -> None:
    assert await rendered(GEMMA, SAID[1], SAID[2]) == "user: |assistant: Yo|user: Go|"


async def test_content_is_a_list_where_the_template_takes_one() -> None:
    assert await rendered(PARTS, *SAID) == "user: Hi|assistant: Yo|user: Go|"


@pytest.mark.parametrize(
    ("given", "items", "whole"),
    [
        ('{"a": 1}', "a=1", '{"a": 1}'),
        ("", "", "{}"),
        ("null", "", "{}"),
        ('{"a": ', 'arguments={"a": ', '"{\\"a\\": "'),
        ("[1]", "arguments=[1]", '"[1]"'),
        ('"x"', 'arguments="x"', '"\\"x\\""'),
    ],
)
async def test_arguments_that_are_no_object(given: str, items: str, whole: str) -> None:
    talk = SAID[0], calls_turn("", [("1", "f", given)]), result_turn("1", "no")
    assert f"<f {items}>" in await rendered(ITEMS, *talk)
    assert f"<f {whole}>" in await rendered(JSON, *talk)
    assert f"<f {given or '{}'}>" in await rendered(TEXT, *talk)


async def test_each_call_has_a_message_where_the_template_takes_one() -> None:
    calls = calls_turn("I look.", [("1", "f", "{}"), ("2", "g", "{}")])
    talk = SAID[0], calls, result_turn("2", "b"), result_turn("1", "a"), SAID[2]
    assert await rendered(ONE, *talk) == (
        "user: Hi|assistant: I look.<f {}>|tool: a=1|assistant: <g {}>|tool: b=2|user: Go|"
    )


async def test_ids_have_nine_characters_where_the_template_takes_these() -> None:
    talk = SAID[0], calls_turn("", [("call_1", "f", "{}")]), result_turn("call_1", "a")
    text = await rendered(NINE, *talk)
    given = text.partition("=")[2].rstrip("|")
    assert len(given) == 9
    assert given.isalnum()
    nine: list[Any] = [SAID[0], calls_turn("", [("abcdefghi", "f", "{}")])]
    assert (await rendered(NINE, *nine, result_turn("abcdefghi", "a"))).endswith("=abcdefghi|")
