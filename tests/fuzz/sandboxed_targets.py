"""The entrances whose texts go to a sandboxed process: templates, grammars, a model's folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_NASTY: tuple[Any, ...] = (
    *(0, -1, 1, 7, 2**20, 10**8, 2**31 - 1, 2**32 - 2, 2**32, 2**63, 10**30),
    *(1.5, 1e308, True, False, None, "", "x", "a" * 99, "(a*)*$", "\\p{L}+", "(a|a?){99}"),
    *([], {}, [0], ["x", 1], {"a": 0}, {"String": "a"}, {"Regex": "(a*)*b"}, [[[[]]]]),
)
"""Values that replace parts of a valid file."""
_ATOMS = (
    *("/.*w0.*/", "/.*w1.*/", "/.*w2.*/", "/[a-z]+/", "/(a|b)*a(a|b){9}/", "/.{0,99}x/"),
    *("/(?s:.*)/", '"ab"', '"\u65e5"', "B", "/[^a]*/", "/a?a?a?a?aaaa/", "/(.*a){7}/"),
)
_JOINTS = (" & ", " & ~", " | ", " ", " & ", "* & ", "+ | ", "? & ~", "{2,7} & ", " & (", ") & ")
_FOLLOWED = 24
"""Number of tokens of a text that follows a grammar."""


def _chat_template() -> Callable[[bytes], None]:
    from baton.errors import ConfigError, InvalidRequest
    from router.text.chat_template import ChatTemplate

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    def one(data: bytes) -> None:
        with suppress(ConfigError, InvalidRequest):
            template = ChatTemplate(data.decode(errors="replace"), {"eos_token": "</s>"})
            text = template.render(messages, 10_000, tools).result()
            assert len(text) <= 10_000

    return one


def _chat_template_seeds() -> list[bytes]:
    texts = [
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m.content | trim }}{% endfor %}",
        "{% macro f(x) %}{{ x * 3 }}{{ f(x) }}{% endmacro %}{{ f('a') }}",
        "{% set ns = namespace(a=[]) %}{% for i in range(9) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% endfor %}{{ ns.a }}{{ ns.a | tojson }}",
        "{% set x = 'a' %}{% for i in range(99) %}{% set x = x ~ x %}{% endfor %}{{ x }}",
        "{{ '%9d' % 1 }}{{ '{:>9}'.format(1) }}{{ 'a'.center(9) }}{{ 2 ** 9 }}{{ 'a' * 9 }}",
        "{{ [1, 2] | join('x') }}{{ 'a' | indent(9) | replace('', 'b') | wordwrap(9) }}",
        "{% for i in range(9) recursive %}{{ loop([i]) }}{% endfor %}"
        "{{ tools | tojson(indent=9) }}",
        "{% generation %}{{ lipsum(9) }}{% endgeneration %}{{ dict(a=1) | dictsort | list }}",
    ]
    return [text.encode() for text in texts]


def _grammar() -> Callable[[bytes], None]:
    from baton.grammar import Grammar, GrammarKind

    follow = _follower()
    kinds = [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK]
    kinds += [GrammarKind.CHOICE, GrammarKind.STRUCTURAL_TAG]

    def one(data: bytes) -> None:
        if data:
            text = data[1:].decode(errors="replace")
            follow(Grammar(kinds[data[0] % len(kinds)], text), data[-1])

    return one


def _follower() -> Callable[[Any, int], None]:
    """Do with a grammar what a worker does: prove it, compile it, and follow a text."""
    from baton.errors import DeadlineExceeded, InvalidGrammar
    from baton.grammars.compiled_grammars import grammars_of
    from tests.support.router.front_fakes import EOS, tiny_backend

    backend = tiny_backend()
    size = backend.get_vocab_size()
    grammars = grammars_of(backend.to_str, size, [backend.token_to_id(EOS) or 0])

    def follow(grammar: Any, choice: int) -> None:
        # A busy machine may not give a child its CPU time before the wait ends.
        with suppress(InvalidGrammar, DeadlineExceeded):
            matcher: Any = grammars.matcher(grammar)
            for place in range(_FOLLOWED):
                mask = matcher.compute_bitmask()
                allowed = [t for t in range(size) if mask[t >> 3] >> (t & 7) & 1]
                if matcher.is_error() or not allowed:
                    return
                if not matcher.consume_token(allowed[(choice + place) % len(allowed)]):
                    return

    return follow


def _grammar_seeds() -> list[bytes]:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "minProperties": 1}
    kinds = [{"properties": {"kind": {"const": kind}}} for kind in "ab"]
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<"]}
    texts = (
        (0, json.dumps(schema)),
        (0, '{"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}'),
        (0, '{"type": "string", "pattern": "^a{3,9}$", "maxLength": 9}'),
        (0, json.dumps({"oneOf": kinds})),
        (0, json.dumps({"allOf": [{"type": "string", "pattern": f"w{n}"} for n in range(3)]})),
        (1, "(a{1,9}){1,9}b|[^c]*"),
        (2, 'start: a+\na: "x" | /y{2}/ | start'),
        (2, 'root ::= "a" | [b-c]*'),
        (3, '["yes", "no"]'),
        (4, json.dumps(tag)),
    )
    return [bytes([kind]) + text.encode() for kind, text in texts]


def lark_of(data: bytes) -> str:
    """Return a grammar of one terminal, joined from regular expressions as the bytes choose."""
    parts = [_ATOMS[data[0] % len(_ATOMS)] if data else _ATOMS[0]]
    for joint, atom in zip(data[1::2], data[2::2], strict=False):
        parts += [_JOINTS[joint % len(_JOINTS)], _ATOMS[atom % len(_ATOMS)]]
    text = "".join(parts)
    opened = text.count("(") - text.count(")")
    return f"start: A\nA: {'(' * max(0, -opened)}{text}{')' * max(0, opened)}\nB: /b+/ & ~/bb/\n"


def _lark_intersections() -> Callable[[bytes], None]:
    from baton.grammar import Grammar, GrammarKind

    follow = _follower()

    def one(data: bytes) -> None:
        follow(Grammar(GrammarKind.LARK, lark_of(data)), len(data))

    return one


def _tokenizer() -> Callable[[bytes], None]:
    from baton.errors import ConfigError
    from baton.sandbox.sandbox import Bounds, Sandbox
    from router.text import tokenizer_files
    from router.text.tokenizer import Tokenizer
    from tests.support.router.front_fakes import tiny_backend

    # One prepared process serves all inputs: it forks again after each that ends a child.
    bounds = Bounds(2.0, 256 << 20, 10.0, 512 << 20)
    shared = Sandbox("router.text.tokenizer_program", dict, bounds)
    setattr(tokenizer_files, "Sandbox", lambda *args: shared)  # noqa: B010
    whole = tiny_backend().to_str()

    def one(data: bytes) -> None:
        if not data:
            return
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            folder = Path(name)
            (folder / _FILES[0]).write_text(whole)
            number = data[0] % (len(_FILES) + 1)
            if number < len(_FILES):
                (folder / _FILES[number]).write_bytes(data[1:])
            else:
                (folder / _FILES[0]).write_text(json.dumps(edited(json.loads(whole), data[1:])))
            with suppress(ConfigError):
                tokenizer = Tokenizer.load(folder)
                ids = tokenizer.encode("a quick text \u65e5")
                tokenizer.decode(ids)
                tokenizer.detokenizer(ids).step(ids[0] if ids else 0)

    return one


def edited(content: Any, data: bytes) -> Any:
    """Replace parts of JSON as the bytes choose: three of them for each replacement."""
    for high, low, value in zip(data[::3], data[1::3], data[2::3], strict=False):
        places = list(_places(content))
        holder, key = places[(high << 8 | low) % len(places)]
        holder[key] = json.loads(json.dumps(_NASTY[value % len(_NASTY)]))
    return content


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each part of JSON as its holder and key. The outer ones come first, so that a
    vocabulary does not hide them."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        below = []
        for one in level:
            keys = list(one) if isinstance(one, dict) else range(len(one))
            found += [(one, key) for key in keys]
            below += [one[key] for key in keys if isinstance(one[key], dict | list) and one[key]]
        level = below
    return found


def _tokenizer_seeds() -> list[bytes]:
    settings = {"eos_token": {"content": "x"}, "chat_template": [{"name": "a", "template": "b"}]}
    files = (
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 9}, "merges": []}},
        settings,
        {"eos_token_id": [1], "vocab_size": 9},
        {"eos_token_id": 1},
    )
    made = [bytes([number]) + json.dumps(content).encode() for number, content in enumerate(files)]
    edits = [bytes([5, 0, place, value]) for place in range(24) for value in (5, 7, 12, 16)]
    return [bytes([5]), *made, b"\x04{{ messages }}", *edits]


SANDBOXED = (
    Target("chat-template", ("router.text.chat_template",), _chat_template, _chat_template_seeds),
    # What is proven with 4 s and 256 MiB is compiled again in this process.
    *(
        Target(name, ("baton.grammars",), prepare, seeds, max_cpu_s=6.0, max_memory_mib=320)
        for name, prepare, seeds in (
            ("grammar", _grammar, _grammar_seeds),
            (
                "lark-intersections",
                _lark_intersections,
                lambda: [bytes(range(n)) for n in (1, 5, 9, 21, 41)],
            ),
        )
    ),
    Target("tokenizer", ("router.text", "baton.config_fields"), _tokenizer, _tokenizer_seeds),
)
