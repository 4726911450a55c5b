"""The CPU kernel of linear layers against plain torch in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu_library import cpu_library
from engine.cpu_linear import MOST_ROWS, LinearKernel, linear_kernel
from engine.linear import Linear


@pytest.fixture
def kernel() -> LinearKernel:
    found = linear_kernel()
    if found is None:
        pytest.skip("no AVX512-BF16, or no C++ compiler here")
    return found


@pytest.fixture
def fresh() -> Iterator[None]:
    """The kernel is looked for anew, and once more when the test is over."""
    cpu_library.cache_clear()
    yield
    cpu_library.cache_clear()


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    rows=st.integers(1, MOST_ROWS),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 200),
    biased=st.booleans(),
)
def test_equals_torch_in_fp32(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    kernel = linear_kernel()
    if kernel is None:
        pytest.skip("no AVX512-BF16, or no C++ compiler here")
    x, weight = random(rows, inputs, seed=1), random(outputs, inputs, seed=2)
    bias = random(outputs, seed=3) if biased else None
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    found = kernel(x, weight, bias, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4)
    # Rounded once, at the end.
    assert torch.equal(kernel(x, weight, bias, torch.bfloat16), found.bfloat16())


def test_a_row_is_the_same_in_every_batch(kernel: LinearKernel) -> None:
    x, weight = random(MOST_ROWS, 576, seed=1), random(192, 576, seed=2)
    alone = torch.cat([kernel(row[None], weight, None, torch.float32) for row in x])
    for start, end in itertools.combinations(range(0, MOST_ROWS + 1, 3), 2):
        assert torch.equal(kernel(x[start:end], weight, None, torch.float32), alone[start:end])


def test_threads_share_the_outputs(kernel: LinearKernel) -> None:
    x, weight = random(3, 64, seed=1), random(100, 64, seed=2)
    one = kernel(x, weight, None, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernel(x, weight, None, torch.float32), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_takes_what_fits(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 80, seed=1).to(dtype), random(48, 80, seed=2).to(dtype)
    layer = Linear(weight)
    expected = x.float() @ weight.float().T
    assert layer(x).dtype == dtype
    assert layer.to_float(x).dtype == torch.float32
    torch.testing.assert_close(layer(x).float(), expected, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(layer.to_float(x), expected, rtol=2e-2, atol=2e-1)


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert linear_kernel() is None
    assert Linear(random(3, 4, seed=1))(random(2, 4, seed=2)).shape == (2, 3)


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    assert linear_kernel() is None


@pytest.mark.usefixtures("fresh")
def test_it_is_built_once(
    kernel: LinearKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    cpu_library.cache_clear()
    assert linear_kernel() is not None
    built = list((tmp_path / "kernels").iterdir())
    assert [path.suffix for path in built] == [".so"]
    cpu_library.cache_clear()
    assert linear_kernel() is not None
    assert list((tmp_path / "kernels").iterdir()) == built
