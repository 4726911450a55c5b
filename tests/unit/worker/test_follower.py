"""What becomes of another rank than 0 whose step fails."""

from __future__ import annotations

import pytest
import torch

from worker.follower import _ending_at_once


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_failed_step_ends_a_rank_on_a_gpu_before_it_waits_for_anything(device: str) -> None:
    reasons: list[str] = []
    with (
        pytest.raises(RuntimeError),
        _ending_at_once("decode-0: rank 1 of 2", torch.device(device), reasons.append),
    ):
        raise RuntimeError("NCCL error: unhandled cuda error\nAdvice.")
    expected = "decode-0: rank 1 of 2 ends: RuntimeError: NCCL error: unhandled cuda error"
    assert reasons == ([] if device == "cpu" else [expected])
