"""Peak rates of accelerators, from their makers' data sheets.

Peaks are for dense matrices; the sheets' headline figures for sparse ones are twice as high.
Interconnect figures are one way; sheets add up both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Data-sheet rates of one GPU, in FLOP/s, bytes and bytes per second."""

    name: str
    flops: float
    """Peak FLOP/s of dense matrix products with bfloat16 inputs."""
    eight_bit_flops: float
    """Peak FLOP/s of dense matrix products with fp8 inputs, or with int8 if the GPU has no fp8."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of its machine, one way: NVLink, or PCIe without it."""
    network_bytes_per_s: float
    """Bandwidth to other machines, one way: the GPU's share of the network of a typical machine."""
    source: str
    """Source of this accelerator's figures."""


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12
_GBIT = 1e9 / 8

ACCELERATORS: Mapping[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        Accelerator(
            "a100",
            312 * _TFLOPS,
            624 * _TFLOPS,
            80 * _GB,
            2.039 * _TB,
            300 * _GB,
            200 * _GBIT,
            "NVIDIA A100 Tensor Core GPU data sheet (80 GB, SXM): 312 TFLOPS BF16, 2,039 GB/s, "
            "NVLink 600 GB/s; DGX A100: one 200 Gb/s adapter a GPU",
        ),
        Accelerator(
            "h100",
            989.4 * _TFLOPS,
            1978.9 * _TFLOPS,
            80 * _GB,
            3.35 * _TB,
            450 * _GB,
            400 * _GBIT,
            "NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOPS BF16 with sparsity, "
            "3.35 TB/s, NVLink 900 GB/s; DGX H100: one 400 Gb/s adapter a GPU",
        ),
        Accelerator(
            "h200",
            989.4 * _TFLOPS,
            1978.9 * _TFLOPS,
            141 * _GB,
            4.8 * _TB,
            450 * _GB,
            400 * _GBIT,
            "NVIDIA H200 Tensor Core GPU data sheet (SXM): 1,979 TFLOPS BF16 with sparsity, "
            "141 GB, 4.8 TB/s, NVLink 900 GB/s; DGX H200: one 400 Gb/s adapter a GPU",
        ),
        Accelerator(
            "b200",
            2250 * _TFLOPS,
            4500 * _TFLOPS,
            180 * _GB,
            8.0 * _TB,
            900 * _GB,
            400 * _GBIT,
            "NVIDIA DGX B200 data sheet, an eighth of it: 72 PFLOPS FP8 with sparsity, 1,440 GB, "
            "64 TB/s, NVLink 14.4 TB/s; one 400 Gb/s adapter a GPU",
        ),
        Accelerator(
            "l40s",
            362.05 * _TFLOPS,
            733 * _TFLOPS,
            48 * _GB,
            864 * _GB,
            32 * _GB,
            100 * _GBIT,
            "NVIDIA L40S data sheet: 362.05 TFLOPS BF16, 48 GB, 864 GB/s, PCIe Gen4 x16 64 GB/s; "
            "the network is an assumption: 100 Gb/s a GPU",
        ),
    )
}
