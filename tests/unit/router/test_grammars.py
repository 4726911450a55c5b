"""Grammars at the router's edge: what is asked for, by which name, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind
from baton.grammars import grammar_prover
from baton.v1 import inference_pb2, sampling_pb2
from router.inference.sampling_input import SamplingInput, final_sampling
from router.openai.structural_tag import structural_tag
from tests.support.router.front_fakes import make_front
from tests.support.router.grpc_inference import generate, refused, serve
from tests.support.router.http_app import CHAT, HELLO, PLAIN, PROMPT, check_error, post

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
SCHEMA_GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
OBJECT = Grammar(GrammarKind.JSON_OBJECT, "")
NAMED = {"name": "answer", "schema": SCHEMA}
NODE = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/N"}},
    "required": ["n"],
    "additionalProperties": False,
}
ENDLESS = {"$ref": "#/$defs/N", "$defs": {"N": NODE}}
"""Its texts are all longer than any: each has another one of the same kind."""
LARK = 'start: "a" | "b"'
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG_GRAMMAR = structural_tag(TAG, "tag")


def regex_of(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema_format(**changes: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": NAMED | changes}}


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        (schema_format(), SCHEMA_GRAMMAR),
        (schema_format(strict=True, description="an answer"), SCHEMA_GRAMMAR),
        (schema_format(strict=False), SCHEMA_GRAMMAR),
        ({"guided_json": SCHEMA}, SCHEMA_GRAMMAR),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA_GRAMMAR),
        ({"guided_regex": "a+"}, regex_of("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"guided_grammar": LARK}, Grammar(GrammarKind.LARK, LARK)),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_GRAMMAR),
        ({"structured_outputs": {"regex": "a+"}}, regex_of("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.CHOICE, '["a"]')),
        ({"structured_outputs": {"grammar": LARK}}, Grammar(GrammarKind.LARK, LARK)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, OBJECT),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": False}}, regex_of("a+")),
        ({"structured_outputs": {"structural_tag": TAG}}, TAG_GRAMMAR),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, TAG_GRAMMAR),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            SCHEMA_GRAMMAR,
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, TAG_GRAMMAR),
        ({"structural_tag": TAG}, TAG_GRAMMAR),
        ({"regex": "a+"}, regex_of("a+")),
        ({"ebnf": LARK}, Grammar(GrammarKind.LARK, LARK)),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA_GRAMMAR),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, regex_of("a+")),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, regex_of("a+")),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
async def test_what_is_asked_for_reaches_the_workers(
    path: str, asked: dict[str, Any], grammar: Grammar | None
) -> None:
    front = make_front()
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), **asked})
    assert response.status_code == 200, response.text
    (request,) = front.dispatcher.requests
    assert request.sampling.grammar == grammar


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (schema_format(name=None), "response_format.json_schema.name"),
    (schema_format(name="two words"), "response_format.json_schema.name"),
    (schema_format(name="x" * 65), "response_format.json_schema.name"),
    (schema_format(strict="yes"), "response_format.json_schema.strict"),
    (schema_format(schema=None), "response_format.json_schema.schema"),
    (schema_format(schema="{}"), "response_format.json_schema.schema"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": ["a"]}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": "x"}, "structured_outputs"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "structured_outputs"),
    ({"regex": "a", "guided_regex": "a"}, "regex"),
    ({"ebnf": 5}, "ebnf"),
    ({"json_schema": 5}, "json_schema"),
    ({"structural_tag": 5}, "structural_tag"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("asked", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
async def test_what_is_asked_badly_is_named(asked: dict[str, Any], param: str) -> None:
    front = make_front()
    for path in (CHAT, PLAIN):
        response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), **asked})
        error = check_error(response, 400)
        assert error["param"].startswith(param)
        assert len(error["message"]) < 300
    assert not front.dispatcher.requests


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        (schema_format(schema={"type": "strin"}), "response_format", "Invalid type"),
        (schema_format(schema={"not": {}}), "response_format", "Unimplemented"),
        (schema_format(schema=ENDLESS), "response_format", "no text matches it"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "no text matches it"),
        ({"guided_json": "{"}, "guided_json", "EOF"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "no rule `start`"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "the limit is 131072"),
        ({"guided_choice": ["a" * 200_000]}, "guided_choice", "the limit is 131072"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
async def test_what_does_not_compile_is_refused_with_the_reason(
    asked: dict[str, Any], param: str, why: str
) -> None:
    front = make_front()
    response = await post(front, CHAT, {**HELLO, **asked})
    error = check_error(response, 400, param)
    assert error["code"] == InvalidGrammar.code
    assert error["message"].startswith(f"{param} cannot be used: ")
    assert why in error["message"]
    assert not front.dispatcher.requests
    assert front.requests() == {("unknown", "error", InvalidGrammar.code): 1}


INTERSECTION = "start: A\nA: " + " & ".join(f"/.*w{n}.*/" for n in range(24))
"""287 bytes. Without bounds, they take more than 40 s of CPU time and 6 GiB."""


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds with which tests take a second each."""
    monkeypatch.setattr(grammar_prover, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(grammar_prover, "MAX_MEMORY_BYTES", 128 << 20)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_grammar": INTERSECTION}, "guided_grammar"),
        ({"structured_outputs": {"grammar": INTERSECTION}}, "structured_outputs.grammar"),
    ],
)
async def test_a_grammar_that_costs_too_much_is_one_clients_400(
    asked: dict[str, Any], param: str, tight: None
) -> None:
    front = make_front()
    app = front.app()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        warm = await client.post(CHAT, json={**HELLO, "guided_regex": "a"})
        assert warm.status_code == 200
        cpu = time.process_time()
        response = await client.post(CHAT, json={**HELLO, **asked})
        assert time.process_time() - cpu < 0.5
        error = check_error(response, 400, param)
        assert error["code"] == InvalidGrammar.code
        assert "to compile; simplify it" in error["message"]
        again = await client.post(CHAT, json={**HELLO, "guided_regex": "b"})
        assert again.status_code == 200


async def test_a_grammar_that_costs_too_much_over_grpc(tight: None) -> None:
    front = make_front()
    error = await refused(front, asking(sampling_pb2.Grammar(lark=INTERSECTION)))
    assert error.code().name == "INVALID_ARGUMENT"
    assert "simplify it" in (error.details() or "")


async def test_each_is_compiled_once_and_counted() -> None:
    front = make_front()
    app = front.app()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        for _ in range(3):
            body = {**HELLO, "guided_regex": "(yes|no) it is"}
            assert (await client.post(CHAT, json=body)).status_code == 200
    assert front.count("grammar_compile_seconds_count", role="router") == 1


KINDS = [
    (sampling_pb2.Grammar(json_object=sampling_pb2.JsonObject()), OBJECT),
    (sampling_pb2.Grammar(json_schema=json.dumps(SCHEMA)), SCHEMA_GRAMMAR),
    (sampling_pb2.Grammar(regex="a+"), regex_of("a+")),
    (
        sampling_pb2.Grammar(choice=sampling_pb2.Choice(texts=["é", "b"])),
        Grammar(GrammarKind.CHOICE, json.dumps(["é", "b"])),
    ),
    (sampling_pb2.Grammar(lark=LARK), Grammar(GrammarKind.LARK, LARK)),
    (
        sampling_pb2.Grammar(structural_tag=json.dumps(TAG)),
        Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
    ),
]


def asking(grammar: sampling_pb2.Grammar) -> inference_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParameters(grammar=grammar)
    return inference_pb2.GenerateRequest(prompt="Hello", sampling=sampling)


@pytest.mark.parametrize(("message", "grammar"), KINDS)
async def test_over_grpc(message: sampling_pb2.Grammar, grammar: Grammar) -> None:
    front = make_front()
    async with serve(front) as channel:
        await generate(channel, asking(message))
    (request,) = front.dispatcher.requests
    assert request.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (sampling_pb2.Grammar(), "one of its kinds"),
        (sampling_pb2.Grammar(choice=sampling_pb2.Choice()), "at least one string"),
        (sampling_pb2.Grammar(regex="a("), "unclosed group"),
        (sampling_pb2.Grammar(json_schema="5"), "grammar cannot be used"),
        (sampling_pb2.Grammar(structural_tag="{}"), "not a structural tag"),
        (sampling_pb2.Grammar(structural_tag="{"), "grammar cannot be used"),
    ],
)
async def test_bad_ones_over_grpc(message: sampling_pb2.Grammar, why: str) -> None:
    front = make_front()
    error = await refused(front, asking(message))
    assert error.code().name == "INVALID_ARGUMENT"
    assert why in (error.details() or "")
    assert not front.dispatcher.requests


def test_a_grammar_is_final_as_it_is() -> None:
    plain = final_sampling(
        SamplingInput(), prompt_tokens=1, context_length=9, vocab_size=9, default_max_tokens=None
    )
    assert plain.grammar is None
    assert plain.ends_at_eos
