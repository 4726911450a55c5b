"""What a worker's settings make of its engine's place on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from worker import engine_start
from worker.costs.step_costs import StepCosts
from worker.engine_start import Placement, core_board, engine_settings, measure, place
from worker.settings import WorkerSettings


def settings_for(device: str, board: Path | None) -> WorkerSettings:
    pool = PoolConfig(name="decode", role="decode", device=device)
    other = PoolConfig(name="prefill", role="prefill", device=device)
    return WorkerSettings(
        config=Config(pools=(other, pool)),
        pool=pool,
        slot="decode-0",
        model_path="nowhere",
        model_name="none",
        redis_url="redis://127.0.0.1:1/0",
        cluster_id="none",
        threads=1,
        core_board="" if board is None else str(board),
    )


def test_the_configurations_bound_is_the_engines() -> None:
    settings = settings_for("cpu", None)
    bounded = replace(settings, config=Config(max_model_len=512))
    assert engine_settings(settings).max_model_len == 0
    assert engine_settings(bounded).max_model_len == 512


@pytest.mark.parametrize("shares", [True, False])
def test_workers_of_like_engines_that_share_cores_measure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    measured: list[object] = []

    def calibrate(engine: object, run: object) -> StepCosts:
        measured.append(engine)
        return StepCosts((1.0, 2.0, 0.0), (3.0, float(len(measured)), 0.0))

    monkeypatch.setattr(engine_start, "calibrate", calibrate)
    runner = SimpleNamespace(device=torch.device("cpu"))
    engine: Any = SimpleNamespace(fingerprint="f", runner=runner)
    decode = replace(settings_for("cpu", tmp_path / "cores"), costs_folder=str(tmp_path / "costs"))
    prefill = replace(decode, pool=decode.config.pools[0], slot="prefill-0")
    found = [
        measure(settings, engine, core_board(settings) if shares else None)
        for settings in (decode, prefill, decode)
    ]
    assert len(measured) == (1 if shares else 2)
    assert found[2] == found[0]
    assert (found[1] == found[0]) == shares
    other: Any = SimpleNamespace(fingerprint="g", runner=runner)
    assert measure(decode, other, core_board(decode) if shares else None) != found[0]


def test_a_cpus_worker_shares_its_cores(tmp_path: Path) -> None:
    assert core_board(settings_for("cpu", tmp_path / "cores")) is not None
    assert core_board(settings_for("cpu", None)) is None
    # On a full disk the worker starts, and its share of the cores is fixed.
    assert core_board(settings_for("cpu", Path("/dev/full"))) is None


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpus_worker_shares_none(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine thread feeds the GPU, and keeps its priority."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert core_board(settings_for(device, tmp_path / "cores")) is None
    assert not (tmp_path / "cores").exists()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_no_gpu_is_promised_twice(workers: int, gpus: int) -> None:
    shares: dict[str, float] = {}
    for number in range(workers):
        placed = place("auto", 0.9, number=number, workers_here=workers, gpus=gpus)
        shares[placed.device] = shares.get(placed.device, 0.0) + placed.memory_fraction
    assert len(shares) == min(workers, gpus)
    assert all(share == pytest.approx(0.9) for share in shares.values())


def test_workers_without_a_gpu_are_placed_on_the_cpu() -> None:
    assert place("auto", 0.9, number=1, workers_here=2, gpus=0).device == "cpu"
    assert place("cpu", 0.9, number=1, workers_here=2, gpus=4).device == "cpu"
    # Left as it is: the engine says that there is none.
    assert place("cuda", 0.9, number=0, workers_here=1, gpus=0) == Placement("cuda", 0.9)
