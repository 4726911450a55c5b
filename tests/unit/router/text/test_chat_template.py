"""Chat templates that would fill the memory or run forever, what others do, and lost processes."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from baton.errors import BatonError, ConfigError, DeadlineExceeded, InvalidRequest
from baton.sandbox import sandbox
from router.text import chat_template
from router.text.chat_template import MAX_SOURCE_CHARACTERS, SHORT_CHARACTERS, ChatTemplate
from router.text.template_program import chat_environment

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LIMIT = 50_000
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WAIT_S = 60


def rendered(source: str, messages: list[dict[str, Any]] = MESSAGES, **more: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, LIMIT, more=more).result(WAIT_S)


def children() -> list[psutil.Process]:
    """The sandboxed processes that render templates; each has the prepared one as its parent."""

    def is_template(child: psutil.Process) -> bool:
        try:
            return child.ppid() != os.getpid() and "sandbox/child.py" in " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            # It has ended since it was listed.
            return False

    return list(filter(is_template, psutil.Process().children(recursive=True)))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


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
    "an indentation by text": "{{ ('a\n' * 9999) | indent('a' * 99999) }}",
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
    "comparisons": "{% set a = 'a' * 10**6 %}{% set b = 'a' * 500000 ~ 'b' %}"
    "{% for i in range(99999) %}{% if b in a %}{% endif %}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{% set x = range(99999) | sort | list %}{% endfor %}",
    "rounding": "{% for i in range(99999) %}{{ 1 | round(10**6, 'ceil') }}{% endfor %}",
    "deep lists": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "brackets": "{{ " + "(" * 90 + "'a' * 10**8" + ")" * 90 + " * 10**8 }}",
    "what is constant": "{{ 'a' | center(10**10) }}",
    "a bomb for one message": "{% if messages[0].content == 'Hi' %}{{ 9 ** (9 ** 9) }}{% endif %}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_contained(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)
    monkeypatch.setattr(chat_template, "MAX_MEMORY_BYTES", 256 << 20)
    # The parser may reach the limit of recursion, where no finalizer of garbage can run.
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((InvalidRequest, ConfigError)) as caught:
        rendered(source)
    # The most that this process has ever had, in KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
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
def test_what_templates_do(source: str, text: str) -> None:
    variables = {"messages": MESSAGES, "bos_token": "<s>"}
    assert chat_environment().from_string(source).render(variables) == text


@pytest.mark.parametrize("source", USUAL)
def test_hugging_face_renders_the_same(source: str) -> None:
    chats = pytest.importorskip("transformers.utils.chat_template_utils")
    (theirs,), _ = chats.render_jinja_template([MESSAGES], chat_template=source, bos_token="<s>")
    assert rendered(source) == theirs


def test_any_text_arrives_as_it_is() -> None:
    texts = ["\n\r\u2028\x00\x1c", "日本 😀", "half a pair \ud83d", "x" * 40_000]
    for text in texts:
        assert rendered("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_long_refusal_of_a_template_is_cut() -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages: no: aaa") as caught:
        rendered("{{ raise_exception('no: ' + 'a' * 10**6) }}")
    assert len(caught.value.message) < 1100
    with pytest.raises(InvalidRequest, match=r"fails on these messages \(TypeError\)"):
        rendered("{{ 1 + 'a' }}{{ messages }}")


def test_a_rendering_out_of_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.1)
    with pytest.raises(InvalidRequest, match=r"more than 0\.1 s of CPU time for these messages"):
        rendered(SLOW)


def test_a_template_process_serves_after_a_refusal_and_is_replaced_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)
    source = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        "{% if messages[0].content == 'slow' %}" + SLOW + "{% endif %}{{ messages[0].content }}"
    )
    template = ChatTemplate(source, {})

    def ask(text: str) -> str:
        return template.render([{"role": "user", "content": text}], LIMIT).result(WAIT_S)

    before = children()
    assert ask("a") == "a"
    (first,) = set(children()) - set(before)
    with pytest.raises(InvalidRequest):
        ask("no")
    assert ask("b") == "b"
    assert first in children()
    with pytest.raises(InvalidRequest, match="needs more than"):
        ask("slow")
    assert first not in children()
    assert ask("c") == "c"


def test_a_killed_template_process_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    before = set(children())
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == "Hi"
    (first,) = set(children()) - before
    first.kill()
    until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == "Hi"
    (second,) = set(children()) - before
    second.suspend()
    late = template.render(MESSAGES, LIMIT)
    second.kill()
    assert late.result(WAIT_S) == "Hi"


def test_a_template_process_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    before = set(children())
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == "Hi"
    (first,) = set(children()) - before
    first.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "MAX_WAIT_S", 0.1)
        with pytest.raises(DeadlineExceeded, match="overloaded"):
            template.render(MESSAGES, LIMIT).result(WAIT_S)
    assert first not in children()
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == "Hi"


def test_short_conversations_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1.0)
    template = ChatTemplate("{% if messages[0].content | length > 9 %}" + SLOW + "{% endif %}", {})
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == ""
    long = template.render([{"role": "user", "content": "a" * SHORT_CHARACTERS}], LIMIT)
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == ""
    assert not long.done()
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        long.result(WAIT_S)


def test_processes_end_with_their_template() -> None:
    template = ChatTemplate("x", {})
    before = set(children())
    assert template.render(MESSAGES, LIMIT).result(WAIT_S) == "x"
    (child,) = set(children()) - before
    del template
    until(lambda: not child.is_running())


@pytest.mark.parametrize("source", ["x", SLOW], ids=["idle", "at work"])
def test_processes_end_with_the_router(source: str) -> None:
    script = (
        "import time; from router.text import chat_template\n"
        "from router.text.chat_template import ChatTemplate\n"
        "chat_template.MAX_CPU_S = 1.0\n"
        f"template = ChatTemplate({source!r}, {{}}); template._process.start().result()\n"
        "later = template.render([], 9); print('ready', flush=True); time.sleep(600)"
    )
    router = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with router:
        assert router.stdout is not None
        assert router.stdout.readline() == b"ready\n"
        found = psutil.Process(router.pid).children(recursive=True)
        assert len(found) == 2
        os.kill(router.pid, signal.SIGKILL)
        until(lambda: all(not one.is_running() or one.status() == "zombie" for one in found))


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BatonError, match="cannot be started"):
        rendered("x")


async def test_a_template_that_does_not_compile_fails_the_start() -> None:
    deep = "{% for i in x %}" * 50 + "{% endfor %}" * 50
    for source in (deep, "{{ 'a' | no_such_filter }}"):
        template = ChatTemplate(source, {})
        with pytest.raises(ConfigError, match="does not compile"):
            await template.start()
        with pytest.raises(ConfigError, match="does not compile"):
            template.render(MESSAGES, LIMIT).result(WAIT_S)
    for source in ("{% if", "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(ConfigError, match="does not compile"):
            ChatTemplate(source, {})
    with pytest.raises(ConfigError, match="more than"):
        ChatTemplate("a" * (MAX_SOURCE_CHARACTERS + 1), {})


async def test_the_template_for_tools_is_compiled_at_the_start_too() -> None:
    template = ChatTemplate("x", {}, tool_use="{{ 'a' | no_such_filter }}")
    with pytest.raises(ConfigError, match="no_such_filter"):
        await template.start()
