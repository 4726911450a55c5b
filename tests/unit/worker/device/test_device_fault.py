"""Which errors tell of a lost device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from baton.errors import GrammarFailed, WorkerFailed
from worker.device import device_fault
from worker.device.device_fault import described, is_device_fault, is_out_of_memory, without_frames

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."
TEXTS = (
    "CUDA error: an illegal memory access was encountered" + ADVICE,
    "CUDA error: unspecified launch failure" + ADVICE,
    "CUDA error: device-side assert triggered" + ADVICE,
    "CUDA error: uncorrectable ECC error encountered" + ADVICE,
    "CUDA driver error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:121, unhandled cuda error",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "cuEventRecord: CUDA_ERROR_ILLEGAL_ADDRESS",
    "Xid 79: the GPU has fallen off the bus",
)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


@pytest.mark.parametrize("text", TEXTS)
def test_by_text_as_torch_before_2_8_raises_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_fault, "_ACCELERATOR_ERROR", None)
    assert is_device_fault(RuntimeError(text))


def test_by_type_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class AcceleratorError(RuntimeError):
        """As torch has it since 2.8."""

    assert not is_device_fault(AcceleratorError("something else"))
    monkeypatch.setattr(device_fault, "_ACCELERATOR_ERROR", AcceleratorError)
    assert is_device_fault(AcceleratorError("something else"))


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch has it since 2.8")
def test_torchs_own_type_is_known() -> None:
    assert is_device_fault(getattr(torch, "AcceleratorError")("something else"))  # noqa: B009


@pytest.mark.parametrize(
    "error",
    [
        OUT_OF_MEMORY,
        RuntimeError("the step before this one failed"),
        RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"),
        MemoryError(),
        KeyError(7),
        # What a user wrote may be in these.
        ValueError("no such rule: CUDA error"),
        GrammarFailed("no such rule: cublas nccl"),
    ],
)
def test_others_do_not(error: Exception) -> None:
    assert not is_device_fault(error)


def test_an_error_that_was_raised_for_another_one() -> None:
    error = WorkerFailed("the other ranks cannot be reached")
    assert not is_device_fault(error)
    error.__cause__ = RuntimeError(TEXTS[7])
    assert is_device_fault(error)


def test_an_error_of_handling_another_one() -> None:
    """A lack of memory that was met during a fault is no reason to continue."""
    error = torch.OutOfMemoryError("CUDA out of memory.")
    error.__context__ = RuntimeError(TEXTS[0])
    assert is_device_fault(error)


def test_errors_that_lead_to_each_other() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not is_device_fault(one)


def test_a_lack_of_memory() -> None:
    assert is_out_of_memory(OUT_OF_MEMORY)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_device_fault(RuntimeError("CUDA error: out of memory")), "no allocator of torch's"


def test_what_is_said_of_an_error_is_one_line() -> None:
    assert described(RuntimeError(TEXTS[1])) == (
        "RuntimeError: CUDA error: unspecified launch failure"
    )
    assert described(MemoryError()) == "MemoryError"


def test_an_error_that_is_kept_keeps_no_tensors() -> None:
    def step() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        try:
            raise KeyError(1)
        except KeyError as error:
            raise OUT_OF_MEMORY from error

    held: list[weakref.ref[torch.Tensor]] = []
    kept: Exception
    try:
        step()
    except torch.OutOfMemoryError as error:
        kept = error
    gc.collect()
    assert held[0]() is not None
    assert without_frames(kept) is OUT_OF_MEMORY
    gc.collect()
    assert held[0]() is None
    OUT_OF_MEMORY.__cause__ = None
