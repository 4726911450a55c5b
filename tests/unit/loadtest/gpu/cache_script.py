"""Fills a folder with a kernel, or says whether one that was unpacked is found again.

``python -m tests.unit.loadtest.gpu.cache_script fill|unpack FOLDER [TARGET]``: ``unpack`` is done
by another build of triton, as far as its key says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.gpu.kernels.activation import gated
from loadtest.gpu import triton_cache
from loadtest.gpu.common.results import Item, Result


def _gate() -> Iterator[Result]:
    gate, up = torch.empty(4, 128, dtype=torch.bfloat16, device="meta").chunk(2, dim=1)
    gated(gate, up, "silu")
    yield from ()


def main() -> None:
    """See the module's text. Prints how many kernels the folder has after all."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "unpack":
        for module in ("triton.runtime.cache", "loadtest.gpu.triton_cache"):
            setattr(sys.modules[module], "triton_key", lambda: "another build")  # noqa: B010
        target = triton_cache.unpack(folder, Path(sys.argv[3]))
        folder = target
    sys.stdout.write(f"{triton_cache.fill(folder, 90, [Item('gate', _gate)])}\n")


if __name__ == "__main__":
    main()
