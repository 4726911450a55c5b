"""Measures copies with checksums and with MACs, on one core.

    python -m loadtest.research.timings.mac_bench

Parts of a block are copied from one buffer to another, as a receiver stores them. The same bytes
are copied by numpy in turn, and the table shows medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from kvtransfer.memory import copying
from kvtransfer.memory.mac import SECRET_BYTES, BatchKey
from planning.common.report import print_whole, this_machine, whole_table

PARTS_KIB = (8, 32, 128, 384, 2048)
_ALIGNED = 64


def measure(part: int, size: int, rounds: int) -> dict[str, float]:
    """Copy ``size`` bytes in parts of ``part`` bytes. Return the median rate of each way to do it,
    in GB/s."""
    source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    target = _aligned(size)
    starts = np.arange(size // part, dtype=np.int64) * part
    key = BatchKey.of(os.urandom(SECRET_BYTES), 0)
    ways: dict[str, Callable[[], object]] = {
        "numpy copy": lambda: np.copyto(target, source),
        "copy + checksum": lambda: copying.copy_many(target, starts, source, starts, part),
        "copy + MAC": lambda: copying.copy_many(target, starts, source, starts, part, key),
        "MAC alone": lambda: copying.checksum_many(source, starts, part, key),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            rates[name].append(size / (time.perf_counter() - began) / 1e9)
    return {name: statistics.median(found) for name, found in rates.items()}


def _aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros at an address where copies may bypass the caches."""
    raw = np.zeros(size + _ALIGNED, dtype=np.uint8)
    first = -int(raw.__array_interface__["data"][0]) % _ALIGNED
    return raw[first : first + size]


def main(
    mib: Annotated[int, typer.Option(min=2, help="MiB to copy.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all ways in turn.")] = 9,
) -> None:
    """Measure each size of part, and print a table of GB/s."""
    table = None
    for kib in PARTS_KIB:
        part = kib << 10
        found = measure(part, (mib << 20) // part * part, rounds)
        table = table or whole_table("KiB of a part", *found, title="")
        table.add_row(str(kib), *(f"{rate:.1f}" for rate in found.values()))
    assert table is not None, "there are sizes"
    Console().print(this_machine().line())
    print_whole(Console(), table)


if __name__ == "__main__":
    typer.run(main)
