from __future__ import annotations

import pytest

from worker.device.placement import Placement, place


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_no_gpu_is_promised_twice(workers: int, gpus: int) -> None:
    shares: dict[str, float] = {}
    for number in range(workers):
        placed = place("auto", 0.9, number=number, workers_here=workers, gpus=gpus)
        shares[placed.device] = shares.get(placed.device, 0.0) + placed.memory_fraction
    assert len(shares) == min(workers, gpus)
    assert all(share == pytest.approx(0.9) for share in shares.values())


def test_without_a_gpu() -> None:
    assert place("auto", 0.9, number=1, workers_here=2, gpus=0).device == "cpu"
    assert place("cpu", 0.9, number=1, workers_here=2, gpus=4).device == "cpu"
    # Left as it is: the engine says that there is none.
    assert place("cuda", 0.9, number=0, workers_here=1, gpus=0) == Placement("cuda", 0.9)
