"""Between the dataclasses and their protobuf twins, in both directions."""

from __future__ import annotations

from baton.request import (
    FinishReason,
    Geometry,
    LoadSnapshot,
    Principal,
    SequenceSpec,
    TokenOutput,
)
from baton.sampling_params import SCALAR_FIELDS, SamplingParams
from baton.v1 import inference_pb2, sampling_pb2, transfer_pb2, worker_pb2

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
    # A reason that this version does not know, from a newer worker, is an end all the same.
    return _FINISH_FROM_PROTO.get(number, FinishReason.STOP)


def sampling_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParameters:
    message = sampling_pb2.SamplingParameters(
        stop=params.stop, stop_token_ids=params.stop_token_ids, logit_bias=dict(params.logit_bias)
    )
    for name in SCALAR_FIELDS:
        setattr(message, name, getattr(params, name))
    return message


def sampling_from_proto(message: sampling_pb2.SamplingParameters) -> SamplingParams:
    """Absent fields take the dataclass's defaults."""
    present = {field.name for field, _ in message.ListFields()}
    given = {name: getattr(message, name) for name in SCALAR_FIELDS if name in present}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        **given,
    )


def sequence_to_proto(spec: SequenceSpec) -> worker_pb2.SequenceSpec:
    return worker_pb2.SequenceSpec(
        request_id=spec.request_id,
        attempt=spec.attempt,
        router_id=spec.router_id,
        token_ids=spec.token_ids,
        prompt_length=spec.prompt_length,
        sampling=sampling_to_proto(spec.sampling),
        cache_salt=spec.cache_salt,
        context_class=spec.context_class,
        principal=worker_pb2.Principal(tenant=spec.principal.tenant, key_id=spec.principal.key_id),
        deadline_ms=int(min(max(0.0, spec.deadline_s * 1000), _LONGEST_MS)),
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
    )


def output_to_proto(output: TokenOutput) -> worker_pb2.TokenOutput:
    return worker_pb2.TokenOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=finish_to_proto(output.finish_reason),
        error=output.error,
        error_code=output.error_code,
    )


def output_from_proto(message: worker_pb2.TokenOutput) -> TokenOutput:
    return TokenOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        index=message.index,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_proto(message.finish_reason),
        error=message.error,
        error_code=message.error_code,
    )


_LOAD_FIELDS = tuple(LoadSnapshot.__dataclass_fields__)


def load_to_proto(load: LoadSnapshot) -> worker_pb2.LoadSnapshot:
    return worker_pb2.LoadSnapshot(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: worker_pb2.LoadSnapshot) -> LoadSnapshot:
    return LoadSnapshot(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def geometry_to_proto(geometry: Geometry) -> transfer_pb2.Geometry:
    return transfer_pb2.Geometry(
        block_size=geometry.block_size,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        kv_dtype=geometry.kv_dtype,
        tensor_parallel=geometry.tensor_parallel,
    )


def geometry_from_proto(message: transfer_pb2.Geometry) -> Geometry:
    return Geometry(
        block_size=message.block_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        kv_dtype=message.kv_dtype,
        tensor_parallel=message.tensor_parallel,
    )
