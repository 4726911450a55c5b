"""A large cluster's figures, at a small size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadtest.research.scaling.large_cluster import (
    HERD_S,
    LargeCluster,
    herded_shares,
    simulate_large,
)
from planning.simulator.results import RequestResult


def placed(number: int, sent_s: float, worker: str) -> RequestResult:
    return RequestResult(
        number=number,
        input_tokens=1,
        output_tokens=1,
        arrival_s=sent_s,
        sent_s=sent_s,
        first_token_s=sent_s,
        ended_s=sent_s,
        code="",
        prefill=worker,
        decode=worker,
        cached_tokens=0,
        preemptions=0,
        token_times_s=np.empty(0),
    )


def test_herding_counts_what_another_router_has_just_sent_to_the_same_worker() -> None:
    requests = [
        placed(0, 1.0, "a"),
        placed(1, 1.0 + HERD_S / 2, "a"),  # herded
        placed(3, 1.0 + HERD_S / 2, "b"),
        placed(5, 1.0 + HERD_S, "b"),  # the same router
        placed(2, 2.0, "a"),  # too late
    ]
    herded, at_random = herded_shares(requests, 2)
    assert herded == pytest.approx(1 / 5)
    assert 0 < at_random < herded


def test_a_request_that_was_never_sent_is_no_prompt() -> None:
    requests = [placed(0, 1.0, "a"), replace(placed(1, 1.0, ""), sent_s=None)]
    assert herded_shares(requests, 2)[0] == 0


def test_the_figures_of_a_small_cluster() -> None:
    found = simulate_large(LargeCluster(workers=20, routers=2, requests=100))
    assert (found.ok, found.refused) == (100, 0)
    assert found.streams == 40
    assert 0 < found.herded_share < 1
    assert found.prefill_spread >= 1
    assert found.decode_spread >= 1
    # Each of 100 prompts of some 1000 tokens is in blocks of 64 at one worker at least.
    assert found.index_pairs > 100 * 5
    assert found.snapshots_read_per_s > 0
    assert found.cpu_s > 0
