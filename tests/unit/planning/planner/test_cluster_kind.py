"""Bandwidths of transports."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from baton.config.choices import TransportName
from planning.planner.cluster_kind import AS_MEASURED, DEFAULT_TRANSPORTS, TRANSPORTS, Counts
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.simulation import simulate
from tests.support.loadtest.clusters import config, profile
from tests.support.loadtest.plans import KIND, trace


def test_they_are_those_of_the_configuration() -> None:
    known = get_args(TransportName)
    assert set(TRANSPORTS) < set(known)
    assert AS_MEASURED.name in known
    assert set(DEFAULT_TRANSPORTS) <= set(TRANSPORTS)


def test_the_network_is_a_share_of_the_data_sheet() -> None:
    # 400 Gb/s; 0.8 of it are reached.
    assert TRANSPORTS["nixl"].bytes_per_s(ACCELERATORS["h200"], 1) == pytest.approx(40e9)
    assert TRANSPORTS["nccl"].bytes_per_s(ACCELERATORS["h200"], 2) == pytest.approx(80e9)
    assert TRANSPORTS["cuda_ipc"].bytes_per_s(ACCELERATORS["h200"], 1) == pytest.approx(360e9)


def test_grpc_has_an_end_however_many_gpus_a_worker_has() -> None:
    for gpus in (1, 8):
        assert TRANSPORTS["grpc"].bytes_per_s(ACCELERATORS["h200"], gpus) == 1.6e9


@pytest.mark.parametrize("gpu", sorted(ACCELERATORS))
def test_what_asks_for_more_is_no_slower(gpu: str) -> None:
    rates = [TRANSPORTS[name].bytes_per_s(ACCELERATORS[gpu], 1) for name in DEFAULT_TRANSPORTS]
    assert rates == sorted(rates)


@pytest.mark.parametrize("shares_cores", [False, True])
def test_a_plan_keeps_the_prompts_where_the_measured_machine_does(*, shares_cores: bool) -> None:
    worker = replace(KIND.decode, profile=replace(profile(), shares_cores=shares_cores))
    shape = replace(KIND, prefill=worker, decode=worker).shape(Counts(1, 1))
    result = simulate(trace(40).requests, shape, config(local_prefill="auto"), trace_block=32)
    prefill, decode = (one.work.prompt_tokens for one in result.workers)
    assert (prefill == 0) == shares_cores
    assert decode > 0 or not shares_cores
