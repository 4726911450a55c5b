"""The ceilings are measured, whatever they are."""

from __future__ import annotations

import pytest
import torch

from engine.roofline import ceilings


def test_ceilings_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_MEMORY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "_PRODUCTS", {"cpu": ((8, 16, 32),)})
    found = ceilings.measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert found.bytes_per_s > 0
    assert found.operations_per_s > 0


def test_the_shortest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 8.0, 3.0, 1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(ceilings, "elapsed", lambda _device, _work: next(times))
    runs: list[int] = []
    assert ceilings.best_elapsed(torch.device("cpu"), lambda: runs.append(1)) == 1.0
    assert len(runs) == 2
