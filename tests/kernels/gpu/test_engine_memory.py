"""An engine on a pretended GPU: what is left for KV blocks when everything else has its room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.build import build_engine
from engine.checkpoint.model_config import ModelConfig
from engine.engine import EngineSettings
from engine.gpu.memory_plan import MemoryPlan, StepLimits, memory_plan
from engine.model.weights import load_weights
from engine.quantization.formats import NATIVE_CONFIG, native_tensors
from engine.quantization.weight import quantize
from engine.scheduling.sequence import SCORED_TOKENS
from tests.kernels.gpu.fake.device import CUDA, FakeGpu, fake_gpu
from tests.support.models import make_tiny_model

MEMORY = 4 << 30
FRACTION = 0.9


LIMITS = StepLimits(
    chunk_tokens=8192,
    decode_rows=64,
    scored_tokens=SCORED_TOKENS,
    block_size=16,
    context=512,
    itemsize=2,
    quantized=True,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """Of a model whose weights have fp16 scales, which are fp32 when they lie on the GPU."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored |= native_tensors(name, quantize(weight, "int4"))
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = NATIVE_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return EngineSettings(folder, device="cuda:0", gpu_memory_fraction=FRACTION)


@contextmanager
def gpu_of(
    total: int, settings: EngineSettings, others: int = 0
) -> Iterator[tuple[FakeGpu, list[int]]]:
    """A GPU of ``total`` bytes with memory used by other processes; and what the engine held
    when it asked for its size.
    """
    asked: list[int] = []
    weights = load_weights(settings.model_path, torch.device("cpu"), torch.bfloat16)
    with fake_gpu() as gpu, ExitStack() as stack:

        def free(_: object) -> tuple[int, int]:
            asked.append(gpu.ledger.live)
            return total - others - gpu.ledger.live, total

        doubles = {
            # Files cannot be read into tensors without contents.
            "engine.load.load_weights": lambda *_: {
                name: weight.to(CUDA) for name, weight in weights.items()
            },
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.empty_cache": lambda: None,
            "torch.cuda.memory_reserved": lambda _: gpu.ledger.live,
            "torch.cuda.mem_get_info": free,
            "torch.cuda.graph_pool_handle": lambda: (0, 0),
        }
        for name, double in doubles.items():
            stack.enter_context(mock.patch(name, double))
        yield gpu, asked


def test_the_pool_is_what_weights_and_steps_leave(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[MemoryPlan] = []

    def planned(config: ModelConfig, limits: StepLimits) -> MemoryPlan:
        plans.append(memory_plan(config, limits))
        return plans[-1]

    monkeypatch.setattr("engine.gpu.memory_plan.memory_plan", planned)
    with gpu_of(MEMORY, settings) as (gpu, asked):
        engine = build_engine(settings)
        (held,), (plan,) = asked, plans
        pool = engine.cache.bytes.nbytes
        room = int(FRACTION * MEMORY) - held - plan.total
        assert room - engine.cache.block_bytes < pool <= room
        # Weights had their last form when the engine asked: what came since is planned.
        assert pool < gpu.ledger.live - held <= pool + plan.fixed


def test_the_pool_leaves_a_step_its_room_where_others_hold_much(settings: EngineSettings) -> None:
    with gpu_of(MEMORY, settings, others=MEMORY // 2) as (gpu, asked):
        engine = build_engine(settings)
        free = MEMORY // 2 - asked[0]
        plan = memory_plan(engine.config, LIMITS)
        assert engine.cache.bytes.nbytes <= 0.95 * free - plan.total
        assert gpu.ledger.live < MEMORY // 2


def test_a_gpu_without_room_says_what_to_change(settings: EngineSettings) -> None:
    with (
        gpu_of(1 << 27, settings),
        pytest.raises(
            ConfigError, match=r"has room for 0 blocks.*lower chunk_tokens or max_sequences"
        ),
    ):
        build_engine(settings)
