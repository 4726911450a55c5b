"""The plan of a GPU's memory against the steps themselves, on a pretended GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.gpu.memory_plan import CUBLAS_BYTES, NCCL_BYTES, StepLimits, memory_plan
from tests.kernels.gpu.fake.device import CUDA, fake_gpu
from tests.kernels.gpu.fake.findings import CONTEXT, SIZED, Sized, proven
from tests.kernels.gpu.fake.models import real_config

MAX_RATIO = 1.5
"""Of what is planned to what is needed."""
LIMITS = StepLimits(
    chunk_tokens=8192,
    decode_rows=112,
    scored_tokens=128,
    block_size=16,
    context=131072,
    itemsize=2,
)


def _case(case: Sized) -> Any:
    """The long run has the other models and contexts."""
    usual = case.context == CONTEXT and case.name in ("Llama 3.1 8B", "Mixtral 8x7B")
    return pytest.param(case, marks=() if usual else pytest.mark.long, id=str(case))


@pytest.mark.parametrize("case", [_case(case) for case in SIZED])
def test_the_plan_covers_every_step(case: Sized) -> None:
    found = proven(case)
    plan = found.plan
    assert plan.step >= found.step
    assert plan.captured >= found.captured
    assert plan.fixed >= found.fixed
    assert plan.step + plan.captured <= MAX_RATIO * (found.step + found.captured)
    assert plan.fixed <= MAX_RATIO * found.fixed + 8192


def test_layers_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what two layers take is what all take."""
    case = Sized("Llama 3.1 8B", "bf16", 8192, 8)
    two = proven(case)
    config = real_config(case.name, case.context)
    more = replace(config, layers=4, windows=config.windows * 2, layer_ropes=config.layer_ropes * 2)
    monkeypatch.setattr("tests.kernels.gpu.fake.findings.real_config", lambda *_: more)
    four = proven(case)
    assert (four.step, four.captured) == (two.step, two.captured)


def test_a_planted_tensor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the context for each token, which no kernel needs."""
    case = Sized("Llama 3.1 8B", "bf16", 131072, 64)

    def embed(*arguments: torch.Tensor) -> torch.Tensor:
        tokens = len(arguments[0])
        mask = torch.empty((tokens, case.context), dtype=torch.bool, device=CUDA)
        return mask[:, :1].float().expand(tokens, 4096).contiguous()

    plain = proven(case)
    monkeypatch.setattr("engine.gpu.forward.embed", embed)
    planted = proven(case)
    assert planted.step > 8192 * case.context > planted.plan.step > plain.step


def test_memory_is_counted_until_its_last_tensor_is_gone() -> None:
    with fake_gpu() as gpu, gpu.ledger.section() as section:
        x = torch.empty(1000, dtype=torch.uint8, device=CUDA)
        assert gpu.ledger.live == 1024
        part = x[10:20]
        del x
        y = torch.empty(1, device=CUDA)
        assert gpu.ledger.live == 1024 + 512
        del part
        assert gpu.ledger.live == 512
        z = y + y
        del y, z
        assert gpu.ledger.live == 0
        assert section.peak == 1024 + 512


def test_no_context_costs_a_mask() -> None:
    """What grows with the context is the block tables, and the splits of a few rows."""
    config = real_config("Llama 3.1 8B", 1 << 20)
    short = memory_plan(config, LIMITS)
    long = memory_plan(config, replace(LIMITS, context=1 << 20))
    assert long.step - short.step < 64 << 20
    assert long.captured - short.captured < 64 << 20
    assert long.total - short.total < 256 << 20


def test_what_each_limit_costs() -> None:
    config = real_config("Llama 3.1 8B", 131072)
    plan = memory_plan(config, LIMITS)
    assert memory_plan(config, replace(LIMITS, chunk_tokens=4096)).step < plan.step
    more = memory_plan(config, replace(LIMITS, decode_rows=304))
    assert more.fixed > plan.fixed
    assert more.nodes > plan.nodes
    waiting = memory_plan(config, replace(LIMITS, separate_experts=True))
    assert (waiting.captured, waiting.nodes) == (0, 0)
    # The block tables are left.
    assert waiting.fixed < 4 * 256 * 8192 + 8192
    assert plan.libraries == CUBLAS_BYTES
    assert memory_plan(config, replace(LIMITS, ranks=2)).libraries == CUBLAS_BYTES + NCCL_BYTES
    parts = plan.fixed + plan.nodes + plan.libraries
    assert plan.total >= plan.step + plan.captured + parts
