"""Reads sampling parameters from the messages of the gRPC API."""

from __future__ import annotations

from typing import Any

from baton.errors import InvalidRequest
from baton.grammar import Grammar
from baton.rpc.convert import grammar_from_proto
from baton.sampling_params import OPTIONAL_FIELDS, SCALAR_FIELDS
from baton.v1 import sampling_pb2
from router.inference.sampling_input import (
    MAX_ALLOWED,
    MAX_BAD_RUNS,
    MAX_BIASES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    SamplingInput,
)
from router.openai.structured_output import choice

_MAX_COUNTS = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKENS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED,
    "bad_words": MAX_BAD_RUNS,
}
_MAX_TEXTS = 32_768
"""Maximum number of texts among which a structured choice selects. Their total length is limited,
too."""


def grpc_sampling(message: sampling_pb2.SamplingParameters) -> SamplingInput:
    """Convert the sampling parameters of a message. Raises InvalidRequest."""
    for name, limit in _MAX_COUNTS.items():
        # Check lengths before the entries become tuples: a message may have millions.
        if len(getattr(message, name)) > limit:
            raise InvalidRequest(f"{name} has at most {limit} entries", param=name)
    names: tuple[Any, ...] = (*SCALAR_FIELDS, *OPTIONAL_FIELDS)
    given = {name: getattr(message, name) for name in names if message.HasField(name)}
    return SamplingInput(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        bad_words=tuple(tuple(run.ids) for run in message.bad_words),
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
        **given,
    )


def _grammar(message: sampling_pb2.Grammar) -> Grammar:
    if len(message.choice.texts) > _MAX_TEXTS:
        raise InvalidRequest(
            f"grammar.choice.texts has at most {_MAX_TEXTS} texts", param="grammar.choice.texts"
        )
    grammar = grammar_from_proto(message)
    if grammar is None:
        raise InvalidRequest("grammar: one of its kinds is required", param="grammar")
    if message.HasField("choice"):
        choice(tuple(message.choice.texts), "grammar.choice.texts")
    return grammar
