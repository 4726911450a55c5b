"""What the simulator says of a load, in the words of the load generator. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from baton.config import Config
from loadtest.generator.request_record import Outcome, RequestRecord
from loadtest.simulator.cluster_shape import ClusterShape
from loadtest.simulator.results import RequestResult
from loadtest.simulator.simulation import simulate
from loadtest.validation.offered_load import OfferedLoad

_TRIAL_CALL_S = 1e-3


def predicted(load: OfferedLoad, shape: ClusterShape, config: Config) -> list[RequestRecord]:
    """A record of each request, in their order."""
    found = simulate(load.traced(), shape, config, block_tokens=config.block_size)
    return [_record(result) for result in found.requests]


def with_call_time(
    shape: ClusterShape, config: Config, probe: OfferedLoad, measured: Sequence[RequestRecord]
) -> ClusterShape:
    """The shape with that time of a message at which the median TTFT of ``probe`` is as measured.

    The probe is to be so light that no request meets another: then all but messages is computing.
    """
    none = _median_ttft(predicted(probe, _with_call(shape, 0.0), config))
    trial = _median_ttft(predicted(probe, _with_call(shape, _TRIAL_CALL_S), config))
    messages = (trial - none) / _TRIAL_CALL_S
    return _with_call(shape, max(0.0, (_median_ttft(measured) - none) / messages))


def _with_call(shape: ClusterShape, call_s: float) -> ClusterShape:
    return replace(
        shape,
        prefill_profile=replace(shape.prefill_profile, call_s=call_s),
        decode_profile=replace(shape.decode_profile, call_s=call_s),
    )


def _median_ttft(records: Sequence[RequestRecord]) -> float:
    return float(np.median([record.ttft_s for record in records if record.outcome == "ok"]))


def _record(result: RequestResult) -> RequestRecord:
    return RequestRecord(
        number=result.number,
        due_s=result.arrival_s,
        sent_s=result.arrival_s,
        ended_s=result.ended_s,
        outcome=_outcome(result),
        code=result.code,
        input_tokens=result.input_tokens,
        output_tokens=result.output_tokens,
        cached_tokens=result.cached_tokens,
        token_times_s=array("d", result.token_times_s),
    )


def _outcome(result: RequestResult) -> Outcome:
    if result.ok:
        return "ok"
    return "shed" if result.was_shed else "error"
