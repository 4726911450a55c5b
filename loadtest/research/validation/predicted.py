"""Simulates a load, and returns the prediction as the load generator's records. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from baton.config.cluster import Config
from loadtest.generator.results.request_record import Outcome, RequestRecord
from loadtest.research.validation.offered_load import OfferedLoad
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.results import RequestResult
from planning.simulator.simulation import simulate

_TRIAL_CALL_S = 1e-3


def predicted(
    loads: Sequence[tuple[float, OfferedLoad]], shape: ClusterShape, config: Config
) -> list[list[RequestRecord]]:
    """Simulate the loads on one cluster. Return the records of each load's requests in order, in
    seconds from that load's beginning.

    Each entry of ``loads`` is the time in seconds at which a load begins, and the load. The
    simulated cluster serves all loads in turn, as a live cluster does, because router and workers
    learn from earlier requests.
    """
    requests = [
        replace(request, arrival_s=begin_s + request.arrival_s)
        for begin_s, load in loads
        for request in load.traced()
    ]
    results = iter(simulate(requests, shape, config, block_tokens=config.block_size).requests)
    return [
        [record_of(result, begin_s) for result in islice(results, len(load.traced()))]
        for begin_s, load in loads
    ]


def with_call_time(
    shape: ClusterShape, config: Config, probe: OfferedLoad, measured: Sequence[RequestRecord]
) -> ClusterShape:
    """Return ``shape`` with a fitted time per message. With that time, the simulated median TTFT of
    ``probe`` equals the measured median.

    The probe must be so light that requests do not overlap. Each request's time then consists of
    messages and computation only.
    """
    none, trial = (
        _median_ttft(predicted([(0.0, probe)], _with_call(shape, call_s), config)[0])
        for call_s in (0.0, _TRIAL_CALL_S)
    )
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


def record_of(result: RequestResult, begin_s: float) -> RequestRecord:
    """Return a simulated request as the load generator would record it, in a load that began at
    ``begin_s``.
    """
    return RequestRecord(
        number=result.number,
        due_s=result.arrival_s - begin_s,
        sent_s=result.arrival_s - begin_s,
        ended_s=result.ended_s - begin_s,
        outcome=_outcome(result),
        code=result.code,
        input_tokens=result.input_tokens,
        output_tokens=result.output_tokens,
        cached_tokens=result.cached_tokens,
        token_times_s=array("d", result.token_times_s - begin_s),
    )


def _outcome(result: RequestResult) -> Outcome:
    if result.ok:
        return "ok"
    return "shed" if result.was_shed else "error"
