"""Random requests. A request is a pure function of a seed and a number, except for its id."""

from __future__ import annotations

import json
import random
import secrets
from dataclasses import replace
from typing import Any

from baton.grammar import Grammar, GrammarKind
from baton.reasoning import ReasoningSpan
from baton.request import Principal, Retention
from baton.sampling_params import SamplingParams
from engine.scheduling.sequence import SCORED_TOKENS
from router.core.request import GenerationRequest, ModelBinding, ReasoningMarkers
from router.core.timeline import Timeline

DEADLINE_S = 60.0
"""Deadline of a request whose client sets none, in seconds. A request that reaches it is lost."""
_VOCAB = 300
_PREFIXES = tuple(tuple(3 + (j * 7 + k) % 250 for j in range(96)) for k in range(3))
"""The beginnings that prompts share."""
_END, _END_OF_TWO = (60,), (61, 62)
"""Tokens that end an answer's reasoning; ``_MARKERS`` has their texts."""
_MARKERS = ReasoningMarkers("<", ("]", "^_"))
_REGEXES = ("[a-z ]{5,40}", "(ab|cd){3,20}", "[0-9]{1,30}x", "a{0,3}", "[^a]{1,60}")
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 6},
)
_CHOICES = ('["yes", "no", "yesterday"]', '["a"]')


def make_request(seed: int, number: int) -> GenerationRequest:
    """Make the request ``number`` of a round. Equal arguments make equal requests."""
    source = random.Random(f"request {seed} {number}")
    if source.random() < 0.06:
        return _without_answer(source)
    choices = source.choice((1, 1, 1, 1, 2, 3))
    sampling = _sampling(source)
    prompt = _prompt(source)
    span, markers = None, None
    draw = source.random()
    if draw < 0.18:
        sampling = replace(sampling, grammar=_grammar(source))
    elif draw < 0.28:
        span, markers = _span(source.choice((0, 3, 10))), _MARKERS
    elif draw < 0.36:
        span, markers = _span(source.choice((None, 0, 3, 10))), _MARKERS
        sampling = replace(sampling, grammar=_grammar(source))
    elif draw < 0.48:
        sampling = replace(sampling, prompt_logprobs=source.choice((0, 1, 3)))
        if source.random() < 0.5:
            # A step scores a bounded number of tokens: just above a multiple of it, a prompt's
            # last step scores few, and begins as many choices.
            choices = source.choice((2, 3))
            length = SCORED_TOKENS * source.choice((1, 2)) + source.choice((1, 2, 3))
            prompt = (prompt * length)[:length]
    elif draw < 0.62:
        stop = source.choice((("e",), ("e", "qz"), ("a", "ab", "abc"), ("zz",)))
        sampling = replace(sampling, stop=stop)
    elif draw < 0.67:
        # The router refuses it with a grammar, and with a budget.
        sampling = replace(sampling, allowed_token_ids=tuple(range(40, 120)))
    own_deadline = source.random() < 0.06
    return GenerationRequest(
        f"q{number}",
        prompt,
        sampling,
        Principal(),
        source.uniform(0.05, 3.0) if own_deadline else DEADLINE_S,
        source.choice((b"", b"", b"", b"another tenant")),
        session=source.choice(("", "", "one", "two")),
        cache_key=source.choice(("", "", "", "key")),
        retentions=(Retention(48, 2.0),) if source.random() < 0.05 else (),
        priority=source.choice((0, 0, 0, -3, 5)),
        own_deadline=own_deadline,
        background=not own_deadline and source.random() < 0.1,
        choices=choices,
        shows_stop_string=source.random() < 0.3,
        chat=markers is not None,
        begins_in="start" if markers is None else "reasoning",
        reasoning_markers=markers,
        reasoning_span=span,
        without_speculation=source.random() < 0.1,
        without_prefix_cache=source.random() < 0.1,
    )


def sent_now(request: GenerationRequest) -> GenerationRequest:
    """Return the same request with an id, a timeline and a model of its own."""
    name = f"{request.request_id}-{secrets.token_hex(4)}"
    return replace(request, request_id=name, timeline=Timeline(), binding=ModelBinding())


def _without_answer(source: random.Random) -> GenerationRequest:
    embeds = source.random() < 0.7
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    return GenerationRequest(
        "e",
        _prompt(source),
        sampling,
        Principal(),
        DEADLINE_S,
        embeds=embeds,
        prompt_only=not embeds,
    )


def _prompt(source: random.Random) -> tuple[int, ...]:
    tail = source.choice((1, 5, 20, 70))
    prompt = source.choice(_PREFIXES)[: source.choice((0, 16, 40, 64, 96))]
    prompt += tuple(source.randrange(3, _VOCAB) for _ in range(tail))
    # Copies are what the ngram drafter proposes.
    return prompt + prompt[-20:] * 2 if source.random() < 0.3 else prompt


def _sampling(source: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": source.choice((0.0, 0.7, 1.0)),
        "max_tokens": source.choice((1, 2, 8, 30, 60, 150)),
        "seed": source.getrandbits(60),
    }
    optional: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.2, {"top_k": 20}),
        (0.2, {"top_p": 0.9}),
        (0.1, {"min_p": 0.05}),
        (0.2, {"presence_penalty": 0.7, "frequency_penalty": 0.5}),
        (0.15, {"repetition_penalty": 1.2}),
        (0.15, {"logit_bias": ((40, 3.0), (41, -5.0))}),
        (0.15, {"min_tokens": min(5, fields["max_tokens"])}),
        (0.15, {"stop_token_ids": tuple(source.sample(range(_VOCAB), 8))}),
        (0.1, {"bad_words": ((50,), (51, 52))}),
        (0.3, {"ignore_eos": True}),
        (0.2, {"logprobs": source.choice((0, 2))}),
    )
    for share, more in optional:
        if source.random() < share:
            fields |= more
    return SamplingParams(**fields)


def _grammar(source: random.Random) -> Grammar:
    kind = source.choice((GrammarKind.REGEX, GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE))
    if kind is GrammarKind.REGEX:
        return Grammar(kind, source.choice(_REGEXES))
    if kind is GrammarKind.JSON_SCHEMA:
        return Grammar(kind, json.dumps(source.choice(_SCHEMAS)))
    return Grammar(kind, source.choice(_CHOICES))


def _span(budget: int | None) -> ReasoningSpan:
    forced = () if budget is None else (70, *_END)
    return ReasoningSpan(ends=(_END, _END_OF_TWO), budget=budget, forced=forced)
