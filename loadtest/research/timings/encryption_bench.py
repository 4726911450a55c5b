"""Measures copies with checksums, and parts that are encrypted and decrypted, on one core.

    python -m loadtest.research.timings.encryption_bench

Parts of a block go from one buffer to another, as a writer encrypts them and as a receiver decrypts
them. The same bytes are copied by numpy in turn, and the table shows medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from kvtransfer.memory import copying
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.encryption import Decryptor, Encryptor, new_key, wire_bytes
from kvtransfer.transports.transport import AnnouncedBatch, Parts
from planning.common.report import print_whole, this_machine, whole_table

PARTS_KIB = (8, 32, 128, 384, 2048)
_ALIGNED = 64


def measure(part: int, size: int, rounds: int) -> dict[str, float]:
    """Bring ``size`` bytes over in parts of ``part`` bytes. Return the median rate of each way, in
    GB/s."""
    blocks = size // part
    source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    target = _aligned(size)
    starts = np.arange(blocks, dtype=np.int64) * part
    memories = [HostMemory(data.reshape(blocks, part)) for data in (source, target)]
    batch, step = _batch(blocks, part), wire_bytes(part)
    wire = memoryview(bytearray(blocks * step))
    parts = [wire[at : at + step] for at in range(0, len(wire), step)]
    key = new_key()
    encryptor, decryptor = Encryptor(key), Decryptor(key)

    def encrypt() -> None:
        encryptor.encrypt(memories[0], batch.number, batch.source, 0, parts)

    def decrypt() -> None:
        for index, data in enumerate(parts):
            decryptor.decrypt(memories[1], batch, index, data)

    ways: dict[str, Callable[[], object]] = {
        "numpy copy": lambda: np.copyto(target, source),
        "copy + checksum": lambda: copying.copy_many(target, starts, source, starts, part),
        "encrypt": encrypt,
        "decrypt": decrypt,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            rates[name].append(size / (time.perf_counter() - began) / 1e9)
    return {name: statistics.median(found) for name, found in rates.items()}


def _batch(blocks: int, part: int) -> AnnouncedBatch:
    """Return a batch of whole blocks."""
    parts = Parts(tuple(range(blocks)), 0, part)
    return AnnouncedBatch(0, parts, parts, ())


def _aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros at an address where copies may bypass the caches."""
    raw = np.zeros(size + _ALIGNED, dtype=np.uint8)
    first = -int(raw.__array_interface__["data"][0]) % _ALIGNED
    return raw[first : first + size]


def main(
    mib: Annotated[int, typer.Option(min=2, help="MiB to bring over.")] = 96,
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
