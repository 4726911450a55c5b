"""Decode steps of every model hold nothing that a CUDA graph cannot: no GPU is needed to see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.checkpoint.families import FAMILIES
from engine.gpu.kernels.launch import Launch
from engine.gpu.kernels.norm import norm_kernel
from tests.kernels.gpu.fake.device import CUDA, fake_gpu
from tests.kernels.gpu.fake.findings import BUCKETS, WATCHED, Watched, captured
from tests.kernels.gpu.fake.models import MODELS, WEIGHT_TYPES, real_config
from tests.kernels.gpu.fake.steps import steps_of

QUICK = {
    *(Watched(name, WEIGHT_TYPES[n % len(WEIGHT_TYPES)]) for n, name in enumerate(MODELS)),
    *(case for case in WATCHED if case.ranks > 1 or (case.deterministic and case.kind == "int4")),
    Watched("Mixtral 8x7B", "bf16"),
}
"""Every model with one type of weights in turn, fixed orders, ranks, and captured experts."""


def watched(*, waits: bool) -> list[Any]:
    return [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.long, id=str(case))
        for case in WATCHED
        if case.waits is waits
    ]


def test_every_family_is_watched() -> None:
    assert {real_config(name, 8192).architecture for name in MODELS} == set(FAMILIES)


@pytest.mark.parametrize("case", watched(waits=False))
def test_a_captured_step_holds_kernels_alone(case: Watched) -> None:
    found = captured(case)
    assert found.captures == len(BUCKETS)
    assert not found.violations, "\n".join(map(str, found.violations))


@pytest.mark.parametrize("case", watched(waits=True))
def test_experts_one_after_another_wait_for_their_counts(case: Watched) -> None:
    """Quantized experts, and those of fixed order: the engine captures none of their steps.

    The counts of each expert's rows are all that the host asks for.
    """
    found = captured(case)
    assert {violation.op for violation in found.violations} == {"aten::_local_scalar_dense"}
    (where,) = {violation.where for violation in found.violations}
    assert where.startswith("engine/gpu/forward.py")
    assert where.endswith("mix_separate")


def test_a_step_is_known_by_its_kernels_and_shapes() -> None:
    noted = captured(Watched("Llama 3.1 8B", "bf16")).noted
    rows, longest = BUCKETS[-1]
    shapes = {shape for one in noted for shape in one.shapes}
    assert (rows, 4096 + 2 * 1024) in shapes, "queries, keys and values"
    assert (rows, 128256) in shapes, "logits"
    grids = [one.shapes[0] for one in noted if one.name == "decode_kernel"]
    # Two layers, whose rows take turns.
    assert [sum(grid[2] for grid in grids), *{grid[:2] for grid in grids}] == [
        2 * rows,
        (longest // 256, 8),
    ]


def _launch_with(x: torch.Tensor) -> None:
    Launch(norm_kernel, (1,), {"residual": x}, {}).run()


PLANTED: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "a number": ("aten::_local_scalar_dense", lambda x: x.sum().item()),
    "a truth": ("aten::_local_scalar_dense", lambda x: bool(x.any())),
    "a list": ("aten::_local_scalar_dense", lambda x: x[0, :2].tolist()),
    "places": ("aten::nonzero", lambda x: x.nonzero()),
    "distinct values": ("aten::_unique2", torch.unique),
    "chosen values": ("aten::masked_select", lambda x: x.masked_select(x > 0)),
    "a mask as an index": ("aten::index", lambda x: x[x > 0]),
    "counts": ("aten::bincount", lambda x: x[0].long().bincount()),
    "equality": ("aten::equal", lambda x: torch.equal(x, x)),
    "repeats": ("aten::repeat_interleave", lambda x: x[0].repeat_interleave(x[0].long())),
    "a list of the host's": ("aten::_to_copy", lambda x: torch.tensor([1, 2], device=x.device)),
    "a number of the host's": ("aten::mul", lambda x: x * torch.tensor(2.0)),
    "places of the host's": ("aten::index", lambda x: x[torch.tensor([0])]),
    "a list as an index": ("aten::index", lambda x: x[[0]]),
    "a copy to the host": ("aten::_to_copy", lambda x: x.cpu()),
    "a copy from the host": ("aten::copy_", lambda x: x.copy_(torch.empty(x.shape))),
    "pinned memory": ("aten::empty", lambda _: torch.empty(4, pin_memory=True)),
    "pinning": ("aten::pin_memory", lambda _: torch.empty(4).pin_memory()),
    "a wait": ("cuda::synchronize", lambda _: torch.cuda.synchronize()),
    "a wait for an event": ("cuda::synchronize", lambda _: torch.cuda.Event().synchronize()),  # type: ignore[no-untyped-call]
    "a kernel on the host's data": ("norm_kernel", lambda _: _launch_with(torch.empty(4))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the embedding of a captured step."""
    op, plant = PLANTED[name]
    with fake_gpu() as gpu:
        steps = steps_of(gpu, real_config("Llama 3.1 8B", 4096), "bf16", 4)

        def embed(*arguments: torch.Tensor) -> torch.Tensor:
            found = torch.empty((len(arguments[0]), 4096), device=CUDA)
            plant(found)
            return found

        monkeypatch.setattr("engine.gpu.forward.embed", embed)
        try:
            steps.decode(4, 100)
        except Exception:
            # Of some results even the shape is not known without the data.
            assert gpu.violations
    assert [violation.op for violation in gpu.violations[:1]] == [op]
    assert all("_embed" in v.where or "norm.py" in v.where for v in gpu.violations)


def test_what_happens_outside_of_captures_is_allowed() -> None:
    with fake_gpu() as gpu:
        x = torch.empty((2, 2), device=CUDA)
        x.sum().item()
        x.copy_(torch.empty(2, 2))
        with gpu.capturing():
            x.sum()
        torch.cuda.synchronize()
    assert not gpu.violations
