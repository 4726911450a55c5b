"""Dataclasses and their protobuf twins: what goes in comes out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError
from baton.grammar import Grammar, GrammarKind
from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.request import (
    FinishReason,
    FirstToken,
    Geometry,
    GroupShape,
    LoadSnapshot,
    PackedTokens,
    Principal,
    Retention,
    SequenceSpec,
    TokenOutput,
    TraceContext,
)
from baton.rpc import convert
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2, sampling_pb2, transfer_pb2, worker_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
TEXT = st.text(max_size=12)
IDS = st.lists(U32, max_size=6).map(tuple)
FINISH = st.sampled_from((None, *FinishReason))
quick = settings(max_examples=100, deadline=None, derandomize=True)

GRAMMARS = st.one_of(
    st.just(Grammar(GrammarKind.JSON_OBJECT, "")),
    st.builds(
        Grammar,
        st.sampled_from(
            [
                GrammarKind.JSON_SCHEMA,
                GrammarKind.REGEX,
                GrammarKind.LARK,
                GrammarKind.STRUCTURAL_TAG,
            ]
        ),
        TEXT,
    ),
    st.lists(TEXT, min_size=1, max_size=3).map(
        lambda texts: Grammar(GrammarKind.CHOICE, json.dumps(texts))
    ),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=U32,
    min_p=FLOAT,
    seed=U64,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=IDS,
    max_tokens=U32,
    min_tokens=U32,
    ignore_eos=st.booleans(),
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    logit_bias=st.dictionaries(U32, FLOAT, max_size=4).map(lambda d: tuple(sorted(d.items()))),
    allowed_token_ids=IDS,
    bad_words=st.lists(IDS, max_size=3).map(tuple),
    grammar=st.none() | GRAMMARS,
    logprobs=st.none() | U32,
    prompt_logprobs=st.none() | U32,
)
MILLISECONDS = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1000)
SPECS = st.builds(
    SequenceSpec,
    request_id=TEXT,
    attempt=U32,
    router_id=TEXT,
    token_ids=IDS,
    prompt_length=U32,
    sampling=SAMPLING,
    cache_salt=st.binary(max_size=9),
    context_class=TEXT,
    principal=st.builds(Principal, TEXT, TEXT),
    deadline_s=MILLISECONDS,
    choices=st.integers(1, 2**32 - 1),
    choice=U32,
    priority=st.integers(-(2**31), 2**31 - 1),
    preemptions=U32,
    hand_back=st.booleans(),
    embeds=st.booleans(),
    retentions=st.lists(
        st.builds(Retention, U32, MILLISECONDS, TEXT, st.booleans()), max_size=3
    ).map(tuple),
    cache_ttl_s=MILLISECONDS,
    trace=st.builds(TraceContext, TEXT, TEXT),
    reasoning=st.none()
    | st.builds(ReasoningSpan, st.lists(IDS, max_size=3).map(tuple), IDS, st.none() | U32, IDS),
    without_speculation=st.booleans(),
    output_number=U64,
)
LOGPROBS = st.builds(TokenLogprobs, FLOAT, st.lists(st.tuples(U32, FLOAT), max_size=3).map(tuple))
OUTPUTS = st.builds(
    TokenOutput,
    TEXT,
    U32,
    U32,
    IDS,
    FINISH,
    TEXT,
    TEXT,
    U32,
    st.lists(LOGPROBS, max_size=3).map(tuple),
    st.lists(LOGPROBS, max_size=3).map(tuple),
    st.booleans(),
    st.lists(FLOAT, max_size=3).map(tuple),
)
LOADS = st.builds(
    LoadSnapshot,
    TEXT,
    *[U32] * 7,
    *(U64, U32),
    *[FLOAT] * 3,
    prompt_tokens=U64,
    cached_prompt_tokens=U64,
)
GROUPS = st.none() | st.builds(GroupShape, U32, U32, U32)
GEOMETRIES = st.builds(Geometry, U32, U32, U32, U32, TEXT, U32, GROUPS)


@quick
@given(SAMPLING)
def test_sampling(params: SamplingParams) -> None:
    written = sampling_pb2.SamplingParameters()
    convert.write_sampling(written, params)
    wire = written.SerializeToString()
    message = sampling_pb2.SamplingParameters.FromString(wire)
    assert convert.sampling_from_proto(message) == params


def test_an_absent_field_takes_its_default_and_a_zero_stays_zero() -> None:
    assert convert.sampling_from_proto(sampling_pb2.SamplingParameters()) == SamplingParams()
    message = sampling_pb2.SamplingParameters(temperature=0.0, max_tokens=0, top_p=0.0)
    found = convert.sampling_from_proto(message)
    assert (found.temperature, found.max_tokens, found.top_p) == (0.0, 0, 0.0)
    assert found.greedy


@quick
@given(SPECS)
def test_sequences(spec: SequenceSpec) -> None:
    wire = convert.sequence_to_proto(spec).SerializeToString()
    found = convert.sequence_from_proto(worker_pb2.SequenceSpec.FromString(wire))
    assert abs(found.deadline_s - spec.deadline_s) < 0.002
    assert dataclasses.replace(found, deadline_s=spec.deadline_s) == spec


def test_time_that_is_over_or_has_no_end_fits_the_wire() -> None:
    spec = SequenceSpec("r", 0, "", (1,), 1, SamplingParams(), deadline_s=-1.0)
    assert convert.sequence_to_proto(spec).deadline_ms == 0
    for endless in (1e9, float("inf")):
        message = convert.sequence_to_proto(dataclasses.replace(spec, deadline_s=endless))
        assert message.deadline_ms == 2**32 - 1


@quick
@given(OUTPUTS)
def test_outputs(output: TokenOutput) -> None:
    wire = convert.output_to_proto(output).SerializeToString()
    assert convert.output_from_proto(worker_pb2.TokenOutput.FromString(wire)) == output


RUNS = st.lists(st.tuples(U64, U32, st.lists(U32, max_size=4).map(tuple)))


def packed(runs: Iterable[tuple[int, int, tuple[int, ...]]]) -> decode_pb2.PackedTokens:
    tokens = PackedTokens()
    for run in runs:
        tokens.add(*run)
    return convert.tokens_to_proto(tokens)


@quick
@given(RUNS)
def test_packed_tokens(runs: list[tuple[int, int, tuple[int, ...]]]) -> None:
    wire = packed(runs).SerializeToString()
    assert list(convert.token_runs(decode_pb2.PackedTokens.FromString(wire))) == runs


def test_a_packed_token_has_few_bytes() -> None:
    """An output of its own has more than 40: a request's id alone has 32."""
    step = packed((number, 500, (40_000,)) for number in range(100_000, 100_032))
    assert not step.counts
    assert step.ByteSize() <= 32 * 8 + 9


@pytest.mark.parametrize(
    "message",
    [
        decode_pb2.PackedTokens(numbers=[1, 2], indexes=[0], token_ids=[5, 6]),
        decode_pb2.PackedTokens(numbers=[1, 2], indexes=[0, 0], token_ids=[5]),
        decode_pb2.PackedTokens(numbers=[1], indexes=[0], counts=[1, 1], token_ids=[5, 6]),
        decode_pb2.PackedTokens(numbers=[1, 2], indexes=[0, 0], counts=[1, 3], token_ids=[5, 6]),
    ],
)
def test_packed_tokens_that_do_not_fit_together(message: decode_pb2.PackedTokens) -> None:
    with pytest.raises(HandoffError, match="has sent"):
        convert.token_runs(message)


@quick
@given(LOADS)
def test_loads(load: LoadSnapshot) -> None:
    wire = convert.load_to_proto(load).SerializeToString()
    assert convert.load_from_proto(worker_pb2.LoadSnapshot.FromString(wire)) == load


@quick
@given(GEOMETRIES)
def test_geometries(geometry: Geometry) -> None:
    wire = convert.geometry_to_proto(geometry).SerializeToString()
    assert convert.geometry_from_proto(transfer_pb2.Geometry.FromString(wire)) == geometry


def test_no_field_is_forgotten() -> None:
    """A field that is added to one side alone would silently take its default on the way."""
    twins: list[tuple[type, type[Message]]] = [
        (SamplingParams, sampling_pb2.SamplingParameters),
        (SequenceSpec, worker_pb2.SequenceSpec),
        (TokenOutput, worker_pb2.TokenOutput),
        (LoadSnapshot, worker_pb2.LoadSnapshot),
        (Geometry, transfer_pb2.Geometry),
        (GroupShape, transfer_pb2.GroupShape),
        (Principal, worker_pb2.Principal),
        (Retention, worker_pb2.Retention),
        (TraceContext, worker_pb2.TraceContext),
    ]
    for dataclass, message in twins:
        ours = {field.name for field in dataclasses.fields(dataclass)}
        theirs = set(message.DESCRIPTOR.fields_by_name)
        renamed = {"deadline_s": "deadline_ms", "cache_ttl_s": "cache_ttl_ms", "ttl_s": "ttl_ms"}
        assert {renamed.get(name, name) for name in ours} == theirs


def test_finish_reasons() -> None:
    for reason in (None, *FinishReason):
        assert convert.finish_from_proto(convert.finish_to_proto(reason)) is reason


@quick
@given(
    st.lists(st.builds(FirstToken, U32, st.none(), st.none() | LOGPROBS), min_size=1, max_size=4)
)
def test_first_tokens(firsts: list[FirstToken]) -> None:
    message = decode_pb2.CommitRequest()
    convert.write_first_tokens(message, firsts)
    message = decode_pb2.CommitRequest.FromString(message.SerializeToString())
    assert message.first_token == firsts[0].token_id
    assert convert.first_tokens_from_proto(message) == firsts
