"""Conversions between the dataclasses and their protobuf messages, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

from baton.errors import BatonError, HandoffError, NoRoom
from baton.grammar import Grammar, GrammarKind
from baton.logprobs import PackedTop, TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.request import (
    NO_TRACE,
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
from baton.sampling_params import OPTIONAL_FIELDS, SCALAR_FIELDS, SamplingParams
from baton.v1 import (
    decode_pb2,
    inference_pb2,
    prefill_pb2,
    sampling_pb2,
    transfer_pb2,
    worker_pb2,
)

_FINISH_TO_PROTO = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}

_LONGEST_MS = 2**32 - 1


def finish_to_proto(reason: FinishReason | None) -> inference_pb2.FinishReason.ValueType:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(number: inference_pb2.FinishReason.ValueType) -> FinishReason | None:
    # A newer worker may send an unknown reason, which is still an end.
    return _FINISH_FROM_PROTO.get(number, FinishReason.STOP)


def write_sampling(message: sampling_pb2.SamplingParameters, params: SamplingParams) -> None:
    """Write sampling parameters into an empty message."""
    message.stop.extend(params.stop)
    message.stop_token_ids.extend(params.stop_token_ids)
    message.logit_bias.update(params.logit_bias)
    message.allowed_token_ids.extend(params.allowed_token_ids)
    for word in params.bad_words:
        message.bad_words.add(ids=word)
    for name in SCALAR_FIELDS:
        setattr(message, name, getattr(params, name))
    for name in OPTIONAL_FIELDS:
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    if params.grammar is not None:
        write_grammar(message.grammar, params.grammar)


def write_grammar(message: sampling_pb2.Grammar, grammar: Grammar) -> None:
    """Write a grammar into an empty message."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            message.json_object.SetInParent()
        case GrammarKind.JSON_SCHEMA:
            message.json_schema = grammar.text
        case GrammarKind.REGEX:
            message.regex = grammar.text
        case GrammarKind.CHOICE:
            message.choice.texts.extend(json.loads(grammar.text))
        case GrammarKind.LARK:
            message.lark = grammar.text
        case GrammarKind.STRUCTURAL_TAG:
            message.structural_tag = grammar.text


_GRAMMAR_TEXTS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "lark": GrammarKind.LARK,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
"""Kinds of grammar that are sent as text, by the name of the protobuf field."""


def grammar_from_proto(message: sampling_pb2.Grammar) -> Grammar | None:
    """Read a grammar; None for a message in which nothing is set."""
    kind = message.WhichOneof("kind")
    match kind:
        case None:
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts)))
        case _:
            return Grammar(_GRAMMAR_TEXTS[kind], getattr(message, kind))


_OF_MANY: dict[str, Callable[[Any], Any]] = {
    "grammar": grammar_from_proto,
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": lambda biases: tuple(sorted(biases.items())),
    "allowed_token_ids": tuple,
    "bad_words": lambda runs: tuple(tuple(run.ids) for run in runs),
}
"""Functions that convert, by name, those sampling fields that hold more than one value."""


def sampling_from_proto(message: sampling_pb2.SamplingParameters) -> SamplingParams:
    """Read sampling parameters. Absent fields take the dataclass's defaults."""
    given = {field.name: value for field, value in message.ListFields()}
    for name, read in _OF_MANY.items():
        if name in given:
            given[name] = read(given[name])
    return SamplingParams(**given)


def sequence_to_proto(spec: SequenceSpec) -> worker_pb2.SequenceSpec:
    message = worker_pb2.SequenceSpec()
    write_sequence(message, spec)
    return message


def write_sequence(message: worker_pb2.SequenceSpec, spec: SequenceSpec) -> None:
    """Write a sequence's spec into an empty message, so that no part of another message is
    copied."""
    message.request_id = spec.request_id
    message.attempt = spec.attempt
    message.router_id = spec.router_id
    message.token_ids.extend(spec.token_ids)
    message.prompt_length = spec.prompt_length
    write_sampling(message.sampling, spec.sampling)
    message.cache_salt = spec.cache_salt
    message.context_class = spec.context_class
    message.principal.tenant = spec.principal.tenant
    message.principal.key_id = spec.principal.key_id
    message.deadline_ms = int(min(max(0.0, spec.deadline_s * 1000), _LONGEST_MS))
    message.choices = spec.choices
    message.choice = spec.choice
    message.priority = spec.priority
    message.preemptions = spec.preemptions
    message.hand_back = spec.hand_back
    message.embeds = spec.embeds
    message.cache_ttl_ms = round(spec.cache_ttl_s * 1000)
    for wanted in spec.retentions:
        message.retentions.add(
            tokens=wanted.tokens,
            ttl_ms=round(min(wanted.ttl_s * 1000, _LONGEST_MS)),
            name=wanted.name,
            required=wanted.required,
        )
    message.without_speculation = spec.without_speculation
    message.output_number = spec.output_number
    if spec.trace != NO_TRACE:
        message.trace.traceparent = spec.trace.traceparent
        message.trace.tracestate = spec.trace.tracestate
    if spec.reasoning is not None:
        _write_reasoning(message.reasoning, spec.reasoning)


def _write_reasoning(message: worker_pb2.ReasoningSpan, span: ReasoningSpan) -> None:
    for end in span.ends:
        message.ends.add(ids=end)
    message.start.extend(span.start)
    message.forced.extend(span.forced)
    if span.budget is not None:
        message.budget = span.budget


def _reasoning_from_proto(message: worker_pb2.ReasoningSpan) -> ReasoningSpan:
    return ReasoningSpan(
        ends=tuple(tuple(run.ids) for run in message.ends),
        start=tuple(message.start),
        budget=message.budget if message.HasField("budget") else None,
        forced=tuple(message.forced),
    )


def sequence_from_proto(message: worker_pb2.SequenceSpec) -> SequenceSpec:
    return SequenceSpec(
        request_id=message.request_id,
        attempt=message.attempt,
        router_id=message.router_id,
        token_ids=tuple(message.token_ids),
        prompt_length=message.prompt_length,
        sampling=sampling_from_proto(message.sampling),
        cache_salt=message.cache_salt,
        context_class=message.context_class,
        principal=Principal(message.principal.tenant, message.principal.key_id),
        deadline_s=message.deadline_ms / 1000,
        choices=message.choices or 1,
        choice=message.choice,
        priority=message.priority,
        preemptions=message.preemptions,
        hand_back=message.hand_back,
        embeds=message.embeds,
        retentions=tuple(
            Retention(one.tokens, one.ttl_ms / 1000, one.name, one.required)
            for one in message.retentions
        ),
        cache_ttl_s=message.cache_ttl_ms / 1000,
        trace=TraceContext(message.trace.traceparent, message.trace.tracestate)
        if message.HasField("trace")
        else NO_TRACE,
        reasoning=_reasoning_from_proto(message.reasoning)
        if message.HasField("reasoning")
        else None,
        without_speculation=message.without_speculation,
        output_number=message.output_number,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    """Read log probabilities. Raises HandoffError if tokens and probabilities differ in number."""
    if len(message.top_ids) != len(message.top_logprobs):
        raise HandoffError("a worker has sent log probabilities without their tokens")
    top = zip(message.top_ids, message.top_logprobs, strict=True)
    return TokenLogprobs(message.logprob, PackedTop.of(top))


class PromptScores(Sequence[TokenLogprobs]):
    """Log probabilities of a prompt, each read from the message when it is accessed.

    A prompt of 8,000 tokens may have 170,000 log probabilities in one message. Reading them all at
    once would hold the event loop. Access raises HandoffError if tokens and probabilities differ in
    number.
    """

    def __init__(self, messages: Sequence[worker_pb2.TokenLogprobs]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprobs, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(place, slice):
            return tuple(map(logprobs_from_proto, self._messages[place]))
        return logprobs_from_proto(self._messages[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def write_first_tokens(message: decode_pb2.CommitRequest, firsts: Sequence[FirstToken]) -> None:
    """Write the first tokens of a sequence and its siblings, with their log probabilities.

    The message does not include which sequences end with it: both workers apply the same rule.
    """
    first, *others = firsts
    message.first_token = first.token_id
    if first.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(first.logprobs))
    for other in others:
        entry = message.others.add(token_id=other.token_id)
        if other.logprobs is not None:
            entry.logprobs.CopyFrom(logprobs_to_proto(other.logprobs))


def first_tokens_from_proto(message: decode_pb2.CommitRequest) -> list[FirstToken]:
    """Read the first tokens of a sequence and its siblings; see ``write_first_tokens``."""
    first = FirstToken(message.first_token, logprobs=_logprobs_of(message))
    others = (FirstToken(each.token_id, logprobs=_logprobs_of(each)) for each in message.others)
    return [first, *others]


def _logprobs_of(
    message: decode_pb2.CommitRequest | decode_pb2.FirstToken,
) -> TokenLogprobs | None:
    return logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None


def output_to_proto(output: TokenOutput) -> worker_pb2.TokenOutput:
    message = worker_pb2.TokenOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=finish_to_proto(output.finish_reason),
        error=output.error,
        error_code=output.error_code,
    )
    # Most outputs have none of these fields, and each token has an output.
    if output.choice:
        message.choice = output.choice
    if output.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(logprobs_to_proto, output.prompt_logprobs))
    if output.handed_back:
        message.handed_back = True
    if output.embedding:
        message.embedding.extend(output.embedding)
    return message


def output_from_proto(message: worker_pb2.TokenOutput) -> TokenOutput:
    scores, prompt = message.logprobs, message.prompt_logprobs
    return TokenOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        index=message.index,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_proto(message.finish_reason),
        error=message.error,
        error_code=message.error_code,
        choice=message.choice,
        logprobs=tuple(map(logprobs_from_proto, scores)) if scores else (),
        prompt_logprobs=PromptScores(prompt) if prompt else (),
        handed_back=message.handed_back,
        embedding=tuple(message.embedding) if message.embedding else (),
    )


def tokens_to_proto(tokens: PackedTokens) -> decode_pb2.PackedTokens:
    return decode_pb2.PackedTokens(
        numbers=tokens.numbers,
        indexes=tokens.indexes,
        # Without counts, each run has one token.
        counts=() if set(tokens.counts) == {1} else tokens.counts,
        token_ids=tokens.token_ids,
    )


def token_runs(message: decode_pb2.PackedTokens) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Return the number of the choice, the output index of the first token, and the tokens of each
    run. Raises HandoffError if the lists differ in length."""
    numbers, indexes, counts = message.numbers, message.indexes, message.counts
    token_ids = message.token_ids
    expected = sum(counts) if counts else len(numbers)
    if not len(numbers) == len(indexes) == (len(counts) or len(numbers)):
        raise HandoffError("a worker has sent tokens without their numbers")
    if len(token_ids) != expected:
        raise HandoffError("a worker has sent another number of tokens than it says")
    runs = _split(token_ids, counts) if counts else zip(token_ids, strict=True)
    return zip(numbers, indexes, runs, strict=True)


def _split(token_ids: Sequence[int], counts: Iterable[int]) -> Iterator[tuple[int, ...]]:
    items = iter(token_ids)
    return (tuple(islice(items, count)) for count in counts)


_LOAD_FIELDS = tuple(LoadSnapshot.__dataclass_fields__)


def load_to_proto(load: LoadSnapshot) -> worker_pb2.LoadSnapshot:
    return worker_pb2.LoadSnapshot(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: worker_pb2.LoadSnapshot) -> LoadSnapshot:
    return LoadSnapshot(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def with_load(
    error: BatonError, message: decode_pb2.CallError | prefill_pb2.PrefillEnd
) -> BatonError:
    """Add to a NoRoom the load of the worker that has no room, if ``message`` has it. Returns the
    error."""
    if isinstance(error, NoRoom) and message.HasField("load"):
        error.load = load_from_proto(message.load)
    return error


def geometry_to_proto(geometry: Geometry) -> transfer_pb2.Geometry:
    message = transfer_pb2.Geometry(
        block_size=geometry.block_size,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        kv_dtype=geometry.kv_dtype,
        tensor_parallel=geometry.tensor_parallel,
    )
    if (drafter := geometry.drafter) is not None:
        message.drafter.layers = drafter.layers
        message.drafter.kv_heads = drafter.kv_heads
        message.drafter.head_dim = drafter.head_dim
    return message


def geometry_from_proto(message: transfer_pb2.Geometry) -> Geometry:
    group = message.drafter
    return Geometry(
        block_size=message.block_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        kv_dtype=message.kv_dtype,
        tensor_parallel=message.tensor_parallel,
        drafter=GroupShape(group.layers, group.kv_heads, group.head_dim)
        if message.HasField("drafter")
        else None,
    )
