"""Costs from data sheets, against the engine's own account of a step's work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint.model_config import load_model_config
from engine.roofline import Storage, step_work
from engine.scheduling.plan import PlanRow
from planning.simulator.costs.analytical_costs import AnalyticalCosts, Efficiency
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.costs.model_shape import MODELS, ModelShape, model_shape
from planning.simulator.costs.step_model import Peak, StepLoad, shape_of_rows
from worker.costs.step_costs import StepCosts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
H100 = ACCELERATORS["h100"]
PERFECT = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def work_s(folder: Path, rows: list[PlanRow]) -> tuple[float, float, float]:
    """Seconds of weights and of KV at an H100's bandwidth, of the arithmetic at its peak."""
    storage = Storage(2.0, 2.0, MODELS["llama-3.1-8b"].kv_token_bytes(2.0))
    work = step_work(load_model_config(folder), storage, rows)
    rate = H100.memory_bytes_per_s
    return work.weight_bytes / rate, work.kv_bytes / rate, work.operations / H100.flops


def test_a_decode_step_reads_what_the_roofline_says(llama: Path) -> None:
    rows = [PlanRow(n, 999, 1, (), True) for n in range(8)]
    weights_s, kv_s, _ = work_s(llama, rows)
    costs = AnalyticalCosts(H100, model_shape(str(llama)), PERFECT)
    assert costs.seconds(StepLoad(8, 8 * 1000)) == pytest.approx(weights_s + kv_s, rel=1e-3)


def test_a_long_chunk_computes_what_the_roofline_says(llama: Path) -> None:
    _, _, arithmetic_s = work_s(llama, [PlanRow(0, 4096, 8192, (), True)])
    costs = AnalyticalCosts(H100, model_shape(str(llama)), PERFECT)
    assert costs.seconds(StepLoad(0, 0, ((8192, 4096),))) == pytest.approx(arithmetic_s, rel=1e-3)


def test_a_steps_work_is_what_the_roofline_counts(llama: Path) -> None:
    """Chunks, one of them after others, with rows that decode."""
    rows = [PlanRow(n, 999, 1, (), True) for n in range(8)]
    rows += [PlanRow(8, 0, 300, (), True), PlanRow(9, 4096, 1000, (), True)]
    storage = Storage(2.0, 2.0, MODELS["llama-3.1-8b"].kv_token_bytes(2.0))
    counted = step_work(load_model_config(llama), storage, rows)
    done = AnalyticalCosts(H100, model_shape(str(llama))).work(shape_of_rows(rows))
    assert done.flops == pytest.approx(counted.operations, rel=1e-3)
    assert done.memory_bytes == pytest.approx(counted.bytes, rel=1e-3)


def test_the_peak_is_that_of_all_gpus() -> None:
    model = MODELS["llama-3.1-70b"]
    eight = AnalyticalCosts(H100, model, weight_bytes=1.0, tensor_parallel=8).peak
    assert eight == Peak(8 * H100.eight_bit_flops, 8 * H100.memory_bytes_per_s)


def test_the_config_of_the_default_model_is_its_entry(llama: Path) -> None:
    own = MODELS["llama-3.1-8b"]
    read = model_shape(str(llama / "config.json"))
    assert ModelShape(own.name, *(getattr(read, f) for f in own.__slots__[1:])) == own
    assert own.all_weights == pytest.approx(8.03e9, rel=0.01)


def test_decode_steps_are_a_line_in_their_tokens() -> None:
    costs = AnalyticalCosts(H100, MODELS["llama-2-13b"])
    for batch in (1, 64, 400):
        line = costs.decode_line(batch)
        for context in (batch, 10_000, 1_000_000):
            assert costs.seconds(StepLoad(batch, context)) == line.seconds(context)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_more_work_takes_longer_and_more_gpus_less(name: str) -> None:
    model = MODELS["llama-2-13b"]
    one = AnalyticalCosts(ACCELERATORS[name], model)
    four = AnalyticalCosts(ACCELERATORS[name], model, tensor_parallel=4)
    chunk, longer = StepLoad(0, 0, ((2048, 0),)), StepLoad(3, 3000, ((2048, 2048),))
    assert 0 < one.seconds(chunk) < one.seconds(longer)
    assert one.seconds(chunk) / 4 < four.seconds(chunk) < one.seconds(chunk)


def test_the_fit_predicts_decode_steps() -> None:
    costs = AnalyticalCosts(H100, MODELS["llama-3.1-8b"])
    fitted: StepCosts = costs.step_costs()
    exact_ms = costs.seconds(StepLoad(32, 32 * 700)) * 1e3
    assert fitted.step_ms(32, 32 * 700) == pytest.approx(exact_ms, rel=0.05)


def test_eight_bit_weights_halve_a_small_step() -> None:
    model = MODELS["llama-3.1-70b"]
    whole = AnalyticalCosts(H100, model, PERFECT)
    half = AnalyticalCosts(H100, model, PERFECT, weight_bytes=1.0)
    assert half.decode_line(1).base_s == pytest.approx(whole.decode_line(1).base_s / 2)


def test_experts_are_read_as_they_are_met() -> None:
    mixed = ModelShape("moe", 2, 64, 4, 4, 16, 128, 1000, 4096, experts=8, experts_met=2)
    dense = ModelShape("dense", 2, 64, 4, 4, 16, 128, 1000, 4096)
    one, many = mixed.read_weights(1), mixed.read_weights(1000)
    assert dense.read_weights(1) < one < many
    assert one == pytest.approx(mixed.used_weights)
