"""engine/cpu/kv_codes.h against torch, by way of a small library that is made of it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engine.cpu import library
from engine.kv.kv_quantization import quantize_kv

CXX = shutil.which("g++")
SOURCE = """
#include "kv_codes.h"

extern "C" void round_fp8(const float* x, long count, uint8_t* codes) {
  for (long i = 0; i < count; i += 16) store(codes + i, kv::fp8_of(load<f32x16>(x + i)));
}

extern "C" void encode(int fp8, const float* x, long rows, long dim, uint8_t* codes,
                       float* scales) {
  for (long i = 0; i < rows; i++)
    scales[i] = fp8 ? kv::encode<FP8>(x + i * dim, dim, codes + i * dim)
                    : kv::encode<INT8>(x + i * dim, dim, codes + i * dim);
}

extern "C" void decode(int fp8, const uint8_t* codes, long count, bf16* to) {
  for (long i = 0; i < count; i += 16)
    if (fp8) kv::halves<FP8>(codes + i, to + i);
    else kv::halves<INT8>(codes + i, to + i);
}

#ifdef __AVX512F__
extern "C" void decode_wide(int fp8, const uint8_t* codes, long count, bf16* to) {
  for (long i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i, fp8 ? kv::halves<FP8>(codes + i) : kv::halves<INT8>(codes + i));
}
#endif
"""
CODES = [torch.int8, torch.float8_e4m3fn]

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param != "native" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    folder = tmp_path_factory.mktemp("kv_codes")
    (folder / "codes.cpp").write_text(SOURCE)
    include = f"-I{Path(library.__file__).parent}"
    flags = ["-O2", "-std=c++20", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC"]
    command = [str(CXX), *flags, f"-march={request.param}", include]
    output = folder / "codes.so"
    subprocess.run([*command, "-o", str(output), str(folder / "codes.cpp")], check=True, timeout=60)
    found = ctypes.CDLL(str(output))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    found.round_fp8.argtypes = [pointer, number, pointer]
    found.encode.argtypes = [ctypes.c_int, pointer, number, number, pointer, pointer]
    for name in ("decode", "decode_wide"):
        if hasattr(found, name):
            getattr(found, name).argtypes = [ctypes.c_int, pointer, number, pointer]
    return found


def test_fp8_is_rounded_as_torch_rounds_it(built: ctypes.CDLL) -> None:
    """All bf16 values within its range, and what lies between them."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = halves.view(torch.bfloat16).float()
    between = values * (1 + 2.0**-10)
    ties = values * (1 + 2.0**-4)
    values = torch.cat((values, between, ties)).nan_to_num().clamp(-448, 448)
    found = torch.empty(len(values), dtype=torch.uint8)
    built.round_fp8(values.data_ptr(), len(values), found.data_ptr())
    assert torch.equal(found, values.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rows_are_encoded_as_the_definition_says(
    built: ctypes.CDLL, codes: torch.dtype, dim: int
) -> None:
    generator = torch.Generator().manual_seed(dim)
    sizes = 10.0 ** torch.randint(-40, 38, (3000, 1), generator=generator)
    values = torch.randn(3000, dim, generator=generator) * sizes
    values[:10] = 0.0
    values[10:20] = torch.arange(dim) - 7.5  # ties
    found, scales = torch.empty(3000, dim, dtype=torch.uint8), torch.empty(3000)
    pointers = (found.data_ptr(), scales.data_ptr())
    built.encode(codes == torch.float8_e4m3fn, values.data_ptr(), 3000, dim, *pointers)
    expected, expected_scales = quantize_kv(values, codes)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(found, expected.view(torch.uint8))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code_is_its_value(built: ctypes.CDLL, codes: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8)
    expected = every.view(codes).to(torch.bfloat16)
    numbers = ~expected.isnan()
    for name in ("decode", "decode_wide"):
        if not hasattr(built, name):
            continue
        found = torch.empty(256, dtype=torch.bfloat16)
        pointers = (every.data_ptr(), 256, found.data_ptr())
        getattr(built, name)(codes == torch.float8_e4m3fn, *pointers)
        assert torch.equal(found[numbers], expected[numbers])
