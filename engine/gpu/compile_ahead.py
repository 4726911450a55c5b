"""Compiles kernels for a GPU that is not present, so that a compile error shows on every
machine."""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.gpu.kernels.launch import Launch


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling one kernel launch."""

    kernel: str
    ptx: str
    """The kernel's PTX; empty if triton keeps only machine code (TRITON_STORE_BINARY_ONLY)."""
    machine_code_bytes: int
    shared_bytes: int


class _AheadDriver:
    """Replaces triton's driver where no GPU is present, as far as compiling needs one.

    It has the methods of triton's ``DriverBase`` that ``JITFunction.run`` calls in a warm-up.
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Kernels store compiled code by device number, so each capability is a device.
        return self._capability

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for GPUs of ``capability``, without a GPU. Raises triton's errors.

    The launch goes through triton's own launcher. So its specialization, and with it the key in
    triton's cache, is the same as on a GPU. Afterwards this process compiles only for that
    capability: it must not launch kernels on a GPU.
    """
    driver.set_active(_AheadDriver(capability))
    kernel = launch.kernel.warmup(
        grid=launch.grid,
        **launch.arguments,
        **launch.constants,
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=launch.fusion,
    )
    return Compiled(
        launch.kernel.__name__,
        kernel.asm.get("ptx", ""),
        len(kernel.asm["cubin"]),
        kernel.metadata.shared,
    )
