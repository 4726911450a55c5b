"""The floors of a step, against sums made by hand; the ceilings are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import roofline
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig, load_model_config
from engine.roofline import Ceilings, Roof, Storage, Work, step_work, total
from engine.scheduling.plan import PlanRow
from tests.support.models import make_tiny_model

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 48, 96, 6, 2, 8, 2, 320
ATTENTION = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * DIM
MLP = 3 * HIDDEN * INNER
KV_TOKEN = 2 * LAYERS * KV_HEADS * DIM * 2
STORAGE = Storage(weight_bytes=2.0, head_weight_bytes=2.0, kv_token_bytes=KV_TOKEN)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_model_config(make_tiny_model(folder, layers=LAYERS))


def _row(start: int, count: int, *, sample: bool = True) -> PlanRow:
    return PlanRow(0, start, count, (), sample)


def test_decoding_reads_every_weight_once_and_every_key(config: ModelConfig) -> None:
    work = step_work(config, STORAGE, [_row(99, 1), _row(9, 1)])
    weights = (ATTENTION + MLP) * LAYERS + VOCAB * HIDDEN
    assert work.weight_bytes == 2 * weights
    assert work.kv_bytes == KV_TOKEN * (100 + 10)
    assert work.operations == 2 * 2 * weights + 4 * HEADS * DIM * LAYERS * (100 + 10)


def test_the_head_may_be_held_in_another_way(config: ModelConfig) -> None:
    storage = replace(STORAGE, weight_bytes=0.5)
    work = step_work(config, storage, [_row(0, 1)])
    assert work.weight_bytes == 0.5 * (ATTENTION + MLP) * LAYERS + 2 * VOCAB * HIDDEN
    unsampled = step_work(config, storage, [_row(0, 1, sample=False)])
    assert unsampled.weight_bytes == 0.5 * (ATTENTION + MLP) * LAYERS


def test_a_prompt_computes_its_logits_once(config: ModelConfig) -> None:
    matrices = (ATTENTION + MLP) * LAYERS
    work = step_work(config, STORAGE, [_row(0, 10)])
    assert work.weight_bytes == 2 * (matrices + VOCAB * HIDDEN)
    assert work.kv_bytes == KV_TOKEN * 10
    triangle = 4 * HEADS * DIM * LAYERS * 55
    assert work.operations == 2 * 10 * matrices + 2 * VOCAB * HIDDEN + triangle


def test_chunks_do_the_same_arithmetic_and_read_more(config: ModelConfig) -> None:
    whole = step_work(config, STORAGE, [_row(0, 10)])
    chunks = total(
        step_work(config, STORAGE, [row]) for row in (_row(0, 6, sample=False), _row(6, 4))
    )
    assert chunks.operations == whole.operations
    assert chunks.weight_bytes == whole.weight_bytes + 2 * (ATTENTION + MLP) * LAYERS
    assert chunks.kv_bytes == KV_TOKEN * (6 + 10)


def test_a_window_bounds_keys_and_pairs(config: ModelConfig) -> None:
    windowed = replace(config, windows=(4, 0))
    full = step_work(config, STORAGE, [_row(9, 3)])
    found = step_work(windowed, STORAGE, [_row(9, 3)])
    # Three queries see 4 keys each, of 6 tokens together; without a window 10, 11 and 12 of 12.
    assert full.kv_bytes - found.kv_bytes == KV_TOKEN / LAYERS * (12 - 6)
    assert full.operations - found.operations == 4 * HEADS * DIM * (33 - 12)


def test_a_token_meets_its_experts_and_many_tokens_meet_all(config: ModelConfig) -> None:
    experts = ExpertsConfig(8, 2, 32, normalized=True, layers=frozenset({0, 1}))
    mixed = replace(config, experts=experts)
    expert = 3 * HIDDEN * 32
    shared = (ATTENTION + HIDDEN * 8) * LAYERS + VOCAB * HIDDEN
    one = step_work(mixed, STORAGE, [_row(0, 1)])
    assert one.weight_bytes == pytest.approx(2 * (shared + 2 * expert * LAYERS))
    many = step_work(mixed, STORAGE, [_row(0, 500)])
    assert many.weight_bytes == pytest.approx(2 * (shared + 8 * expert * LAYERS))
    assert one.operations == pytest.approx(
        2 * (shared + 2 * expert * LAYERS) + 4 * HEADS * DIM * LAYERS
    )


def test_the_higher_floor_binds() -> None:
    ceilings = Ceilings(bytes_per_s=100.0, operations_per_s=1000.0)
    roof = Roof(Work(30.0, 20.0, 100.0), ceilings, seconds=1.0)
    assert (roof.memory_s, roof.arithmetic_s, roof.bound) == (0.5, 0.1, "memory")
    assert (roof.mbu, roof.mfu, roof.over_floor) == (0.5, 0.1, 2.0)
    busy = Roof(Work(1.0, 1.0, 900.0), ceilings, seconds=1.0)
    assert (busy.bound, busy.mfu) == ("arithmetic", 0.9)


def test_ceilings_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_MEMORY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "_PRODUCTS", {"cpu": ((8, 16, 32),)})
    found = roofline.measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert found.bytes_per_s > 0
    assert found.operations_per_s > 0


def test_the_shortest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 8.0, 3.0, 1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(roofline, "elapsed", lambda _device, _work: next(times))
    runs: list[int] = []
    assert roofline.best_elapsed(torch.device("cpu"), lambda: runs.append(1)) == 1.0
    assert len(runs) == 2
