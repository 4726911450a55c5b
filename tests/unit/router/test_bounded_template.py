"""Chat templates that would fill the memory or run for ever, and those that are as they should."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from baton.errors import ConfigError, InvalidRequest
from router import bounded_template
from router.bounded_template import Budget, TemplateExhausted, budgeted, weight
from router.chat_template import MOST_SOURCE, ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LIMIT = 50_000


def rendered(source: str, messages: list[dict[str, Any]] = MESSAGES, **more: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, LIMIT, more=more)


BOMBS = {
    "a product": "{{ 'a' * 10**9 }}",
    "a product of a list": "{% set x = [1] * 10**9 %}",
    "a product of products": "{% set x = ['a' * 9999] * 9999 %}{{ x }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "powers": "{% set x = 9 %}" + "{% set x = x ** 99 %}" * 9,
    "products": "{% set ns = namespace(x=9) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a sum": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "a sum without a loop": "{% set x = 'a' * 9999 %}" + "{% set x = x + x %}" * 40 + "{{ x }}",
    "a join": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "blocks": "{% set x = 'aaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "text in loops": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}"
    + "text " * 999
    + "{% endfor %}{% endfor %}{% endset %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops of filters": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set x = j | abs %}{% endfor %}{% endfor %}",
    "a range": "{% for i in range(10**12) %}{% endfor %}",
    "calls": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "calls of calls": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}"
    "{% endfor %}",
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "dictionaries": "{% set ns = namespace(x={}) %}{% for i in range(99) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "namespaces": "{% set a = namespace() %}{% set a.a = a %}{{ a }}",
    "a format": "{{ '%999999999d' % 1 }}",
    "a format by a star": "{{ '%*d' % (999999999, 1) }}",
    "a new format": "{{ '{:>999999999}'.format(1) }}",
    "a nested format": "{{ '{:>{w}}'.format(1, w='999999999') }}",
    "many formats": "{{ ('{:>9999}' * 99999).format(*([1] * 99999)) }}",
    "the same format": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "a filter's padding": "{{ 'a' | center(10**9) }}",
    "zeros": "{{ 'a'.zfill(10**9) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(99999) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "an indentation": "{{ ('\n' * 99999) | indent(99999) }}",
    "an indentation by text": "{{ ('\n' * 9999) | indent('a' * 99999) }}",
    "JSON": "{{ messages | tojson(indent=10**9) }}",
    "a replacement": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "a replacement of nothing": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "a method's join": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "a filter's join": "{{ range(99999) | join('a' * 99999) }}",
    "a join of one text": "{% set t = 'a' * 99999 %}{{ ([t] * 9999) | join }}",
    "batches": "{{ range(99999) | batch(10**9, 'x') | list }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "Latin": "{{ lipsum(n=10**6) }}",
    "a sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "split": "{% for i in range(999) %}{% set x = ('a ' * 500000).split() %}{% endfor %}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "MOST_STEPS", 20_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((InvalidRequest, ConfigError)) as caught:
        rendered(source)
    # The most that this process has ever had, in KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert len(caught.value.message) < 300


USUAL = {
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] | trim }}{% endfor %}": (
        "<|user|>Hi<|assistant|>Hello"
    ),
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}": "2",
    "{% set first, rest = messages[0], messages[1:] %}{{ first.content }}{{ rest | length }}": (
        "Hi1"
    ),
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }}{{ loop.last }}{% endfor %}": "2False12True",
    "{{ {'a': [1, none, 'ü']} | tojson }}": '{"a": [1, null, "ü"]}',
    "{{ [1, [2]] | tojson(indent=2) }}": "[\n  1,\n  [\n    2\n  ]\n]",
    "{{ '%s-%d' % ('a', 7) }}{{ '{}:{:>3}'.format('b', 5) }}": "a-7b:  5",
    "{{ 'a b'.split(' ') | join('+') }}{{ 'x'.join(['1', '2']) }}": "a+b1x2",
    "{{ 'a</think>b'.split('</think>')[-1].lstrip('\n').replace('b', 'cc') }}": "cc",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}": (
        "Hi"
    ),
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f('b') }}": "[a][b]",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ -3 + 1 }}{{ 'a' * 3 }}": "3310243.0-2aaa",
    "{% set x %}in {{ bos_token }}{% endset %}{{ x | upper }}{{ 'l\nm' | indent(2) }}": (
        "IN <S>l\n  m"
    ),
    "{{ undefined_name }}{{ none }}{{ true }}{{ [1, 'a'] }}{{ (1,) }}": "NoneTrue[1, 'a'](1,)",
    "{% for m in messages recursive %}{{ m.role[0] }}{% endfor %}": "ua",
    "{{ dict(a=1, b=2) | dictsort | list }}{{ [3, 1] | sort }}{{ [1, 2] | sum }}": (
        "[('a', 1), ('b', 2)][1, 3]3"
    ),
    "{% generation %}x{% endgeneration %}{% for i in range(5) %}{% if i == 2 %}{% break %}"
    "{% endif %}{{ i }}{% endfor %}": "x01",
}


@pytest.mark.parametrize(("source", "text"), USUAL.items())
def test_what_templates_do_is_as_it_was(source: str, text: str) -> None:
    assert rendered(source) == text


def test_a_long_conversation_fits() -> None:
    messages = [{"role": "user", "content": "word " * 2}] * 5000
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|u|>' + m.content | trim }}"
        "{% elif m.role == 'tool' %}" + "text " * 400 + "{% endif %}{% endfor %}"
    )
    assert len(ChatTemplate(source, {}).render(messages, 1 << 20)) == 5000 * 14


def test_time_is_bounded_too() -> None:
    times = iter([0.0, *[bounded_template.MOST_S + 1] * 9])
    budget = Budget(0, lambda: next(times))
    for _ in range(255):
        budget.step()
    with pytest.raises(TemplateExhausted, match="longer"):
        budget.step()


def test_one_that_does_not_compile_is_told() -> None:
    deep = "{% for i in x %}" * 50 + "{% endfor %}" * 50
    for source in (deep, "{{ 'a' | pprint }}", "{% if", "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(ConfigError, match="does not compile"):
            ChatTemplate(source, {})
    with pytest.raises(ConfigError, match="more than"):
        ChatTemplate("a" * (MOST_SOURCE + 1), {})


def test_a_template_does_not_render_without_a_budget() -> None:
    template = ChatTemplate("{% for m in messages %}{% endfor %}", {})
    with pytest.raises(TemplateExhausted, match="budget"):
        template._template.render(messages=MESSAGES)


def test_budgets_do_not_meet() -> None:
    began = time.monotonic()
    with budgeted(10) as outer:
        with budgeted(10) as inner:
            inner.write(inner.most_characters)
        outer.write(5)
    assert time.monotonic() - began < 60


def test_weights() -> None:
    assert weight("abc", 10) == 3
    assert weight(["abc", {"k": "v"}], 100) < 100
    with pytest.raises(TemplateExhausted):
        weight(["a" * 101], 100)
