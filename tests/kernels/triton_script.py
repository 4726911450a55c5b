"""Run in a process of its own: ``python -m tests.kernels.triton_script interpret|compile``.

Whether triton interprets its kernels is decided when it is imported. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtransfer.memory import checksum_triton
from kvtransfer.memory.checksum import KEY_SEED, checksum

BLOCK = checksum_triton.BLOCK
SIZES = (0, 8, 16, 8 * (BLOCK - 1), 8 * BLOCK, 8 * (BLOCK + 1), 8 * (3 * BLOCK + 7))
LARGE = (16 << 20) + 8
"""Bytes: more than the largest segment."""


def interpret() -> dict[str, Any]:
    """For each case, what the kernel says and what numpy says."""
    torch.manual_seed(0)
    cases = {f"random {n}": torch.randint(0, 256, (n,), dtype=torch.uint8) for n in SIZES}
    cases |= {f"ones {n}": torch.full((n,), 255, dtype=torch.uint8) for n in SIZES}
    cases["zeros"] = torch.zeros(8 * BLOCK + 8, dtype=torch.uint8)
    cases["two dimensions"] = torch.randint(0, 256, (8, 3), dtype=torch.uint8)
    cases["part of a tensor"] = torch.randint(0, 256, (256,), dtype=torch.uint8)[64:128]
    found = {name: (_kernel(data), _numpy(data)) for name, data in cases.items()}
    # Larger blocks: the interpreter takes a millisecond for each.
    checksum_triton.BLOCK = 1 << 16
    large = torch.randint(0, 256, (LARGE,), dtype=torch.uint8)
    found["large"] = (_kernel(large), _numpy(large))
    return {
        "found": found,
        "refused": [_refused(data) for data in _unfit()],
        "copies": {name: _copies(data) for name, data in cases.items()},
        "copies_refused": _copies_refused(),
    }


def _copies(data: torch.Tensor) -> bool:
    """Whether a copy is the data, has its checksum, and leaves what lies around it."""
    room = torch.full((data.numel() + 128,), 165, dtype=torch.uint8)
    to = room[64:-64]
    same = f"{_copied(to, data):016x}" == _numpy(data)
    around = torch.cat((room[:64], room[-64:]))
    return same and torch.equal(to, data.flatten()) and bool((around == 165).all())


def _copied(to: torch.Tensor, data: torch.Tensor) -> int:
    return checksum_triton.copy_words(to.data_ptr(), data.data_ptr(), data.numel(), data.device)


def _copies_refused() -> list[bool]:
    """Of a size that is no whole number of words, and of either address within 16 bytes."""
    to, data = torch.full((64,), 165, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    refused = []
    for target, source in ((to[:12], data[:12]), (to[8:24], data[:16]), (to[:16], data[4:20])):
        try:
            _copied(target, source)
        except ValueError:
            refused.append(bool((to == 165).all()))
    return refused


def _kernel(data: torch.Tensor) -> str:
    return f"{checksum_triton.checksum_tensor(data):016x}"


def _numpy(data: torch.Tensor) -> str:
    return f"{checksum(data.numpy().tobytes()):016x}"


def _unfit() -> list[torch.Tensor]:
    return [
        torch.zeros(12, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(32, dtype=torch.uint8)[::2],
        torch.zeros(32, dtype=torch.uint8)[1:9],
    ]


def _refused(data: torch.Tensor) -> bool:
    try:
        checksum_triton.checksum_tensor(data)
    except ValueError:
        return True
    return False


def compile_ahead() -> dict[str, Any]:
    """By kernel and GPU generation: its target line, and the size of its machine code."""
    words = {"words": "*i32", "sums": "*i64", "pairs": "i32"}
    addresses = {"target": "i64", "source": "i64", "sums": "*i64", "pairs": "i32"}
    copy = checksum_triton.copy_kernel
    return {
        "checksum": _compiled(checksum_triton.checksum_kernel, words, ("words", "sums", "pairs")),
        "copy": _compiled(copy, addresses, ("sums", "pairs")),
        "unspecialized": [each.name for each in copy.params if each.do_not_specialize],
    }


def _compiled(
    kernel: Any,
    signature: dict[str, str],
    aligned: tuple[str, ...],
    constants: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Made without a GPU, for ``aligned`` arguments that are multiples of 16."""
    constants = constants or {"seed": KEY_SEED, "block": BLOCK}
    names = list(signature)
    compiled = {}
    for capability in (80, 90, 100):
        source = ASTSource(
            kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        ptx = made.asm["ptx"]
        target = next(line for line in ptx.splitlines() if ".target" in line)
        compiled[str(capability)] = {
            "target": target,
            "bytes": len(made.asm["cubin"]),
            "wide": [ptx.count(f"{access}.global.v4") for access in ("ld", "st")],
            "narrow": ptx.count("ld.global.b32"),
        }
    return compiled


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"interpret": interpret, "compile": compile_ahead}[sys.argv[1]]()))  # noqa: T201
