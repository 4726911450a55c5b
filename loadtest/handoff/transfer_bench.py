"""`baton bench transfer`: measures how fast each transport moves blocks, compared with a limit
measured in the same run.

A second process receives. Transport and limit alternate, so that other load of the machine affects
both equally.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from baton.config.choices import TransportName
from baton.errors import BatonError, ConfigError
from baton.host.host_memory import available_bytes
from kvtransfer.pairs.outbound import Outbound
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from loadtest.common.json_worker import Helper, helper
from loadtest.handoff.empty_handoff import EmptySettings, measure_empty_handoffs
from loadtest.handoff.transfer_end import BenchPool, bench_pool, identity_of, transfer_end
from loadtest.handoff.transfer_limits import LIMITS, Limit, grpc_limit, memcpy_limit, socket_limit
from loadtest.handoff.transfer_receiver import RECEIVER
from loadtest.handoff.transfer_rows import (
    TransferReport,
    TransferRow,
    as_json,
    draw,
    lines_of,
    pairs_of,
    row_of,
    sizes_of,
)
from planning.common.report import print_whole, this_machine, write_json

Say = Callable[[str], None]

SENDER = "sender"
_POOLS = 3
"""Number of block pools in memory: the sender's, the receiver's, and the target of memcpy."""
_SHARE = 0.8
"""Maximum share of the free memory that the block pools together may use."""
_READY_S = 60.0
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of a measurement of transports."""

    transports: tuple[str, ...] = tuple(LIMITS)
    block_bytes: int = 360 << 10
    """Size of a block in bytes. The default is the block size of the demo model in bfloat16."""
    max_bytes: int = 1 << 30
    repetitions: int = 5
    """Number of transfers of each of the largest sizes. Transfers of smaller sizes are repeated
    more often."""
    certs: str = ""
    """Folder that `baton certs init` has made, for mutual TLS; empty means no TLS. Limits are
    always measured without TLS."""


def bench_transfers(
    settings: TransferSettings,
    empty: EmptySettings | None,
    say: Say,
    console: Console,
    output: Path | None,
) -> None:
    """Measure transfers, print the table, and write all results to ``output`` as JSON. Raises
    BatonError.

    If ``empty`` is None, empty handoffs are not measured. Raises ConfigError before the measurement
    if ``output`` cannot be written.
    """
    if output is not None:
        write_json(output, "{}\n")
    rows = asyncio.run(measure_transfers(settings, say))
    print_whole(console, draw(rows))
    cost = None
    if empty is not None:
        say("measuring empty handoffs")
        cost = asyncio.run(measure_empty_handoffs(empty))
    report = TransferReport(this_machine(), settings.block_bytes, rows, cost)
    for line in lines_of(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        write_json(output, as_json(report))


async def measure_transfers(settings: TransferSettings, say: Say) -> tuple[TransferRow, ...]:
    """Measure each transport that works on this machine, at each transfer size. Return a row for
    each.

    Raises ConfigError for impossible sizes, or if no transport works. Raises BatonError if a
    transport fails during the measurement.
    """
    identity = identity_of(SENDER, settings.block_bytes)
    settings = _within_memory(settings, say)
    sizes = sizes_of(settings.block_bytes, settings.max_bytes)
    blocks = sizes[-1] // settings.block_bytes
    rows: list[TransferRow] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        bench_pool(blocks, settings.block_bytes) as source,
        bench_pool(blocks, settings.block_bytes) as other,
    ):
        for name in dict.fromkeys(settings.transports):
            transport = _known(name)
            log = Path(folder) / f"{transport}.log"
            try:
                bench = _Bench(identity, transport, source, other, settings, log)
                found = await bench.measure(sizes, say)
            except ConfigError as error:
                say(f"{name} is left out: {error.message}")
            else:
                rows += found
    if not rows:
        raise ConfigError("no transport is left to measure")
    return tuple(rows)


def _known(name: str) -> TransportName:
    for known in get_args(TransportName):
        if name == known and name in LIMITS:
            found: TransportName = known
            return found
    raise ConfigError(f"unknown transport {name!r}; known: {', '.join(LIMITS)}")


def _within_memory(settings: TransferSettings, say: Say) -> TransferSettings:
    room = int(available_bytes() * _SHARE) // _POOLS
    if settings.max_bytes <= room:
        return settings
    say(f"sizes end at {room >> 20} MiB: there is not enough memory for three larger pools")
    return replace(settings, max_bytes=room)


class _Bench:
    """Measures one transport. Each transfer sends the blocks that follow those of the previous
    transfer, and starts again at block 0 at the pool's end.

    So the blocks of small transfers are in a CPU cache no more often than the blocks of large
    transfers.
    """

    def __init__(
        self,
        identity: Identity,
        transport: TransportName,
        source: BenchPool,
        other: BenchPool,
        settings: TransferSettings,
        log: Path,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._source = source
        self._other = other
        self._repetitions = settings.repetitions
        self._certs = settings.certs
        self._log = log
        self._first = 0

    async def measure(self, sizes: tuple[int, ...], say: Say) -> list[TransferRow]:
        """Measure the transport at each size, and return the rows.

        Raises ConfigError if the transport does not work here, and BatonError if it fails.
        """
        blocks, block_bytes = self._source.data.shape
        start = {"transport": self._transport, "blocks": blocks, "block_bytes": block_bytes}
        start["certs"] = self._certs
        module = "loadtest.handoff.transfer_receiver"
        async with (
            helper(module, start, self._log, ready_s=_READY_S) as receiver,
            transfer_end(
                self._identity, self._source.memory, self._transport, certs=self._certs
            ) as exchange,
        ):
            pair = await exchange.outbound(Peer(RECEIVER, receiver.hello["address"]))
            with self._limit(receiver) as limit:
                # The first use of a page, or of a connection, has additional cost.
                await self._pair_of(pair, receiver, limit, blocks)
                rows = []
                for size in sizes:
                    rows.append(await self._row(pair, receiver, limit, size))
                    say(_progress(rows[-1]))
                return rows

    @contextlib.contextmanager
    def _limit(self, receiver: Helper) -> Iterator[Limit]:
        name = LIMITS[self._transport]
        if name == "memcpy":
            yield memcpy_limit(self._source.data, self._other.data)
        elif name == "grpcio":
            with grpc_limit(receiver.hello["grpc"], self._source.data) as limit:
                yield limit
        else:
            with socket_limit(receiver.hello["socket"], self._source.data) as limit:
                yield limit

    async def _row(self, pair: Outbound, receiver: Helper, limit: Limit, size: int) -> TransferRow:
        blocks = size // self._source.memory.block_bytes
        pairs = [
            await self._pair_of(pair, receiver, limit, blocks)
            for _ in range(pairs_of(size, self._repetitions))
        ]
        seconds, limit_seconds = zip(*pairs, strict=True)
        return row_of(self._transport, size, LIMITS[self._transport], seconds, limit_seconds)

    async def _pair_of(
        self, pair: Outbound, receiver: Helper, limit: Limit, blocks: int
    ) -> tuple[float, float]:
        """Transfer the same blocks by the transport, and then by the method of its limit. Return
        the seconds of each.
        """
        if self._first + blocks > self._source.memory.blocks:
            self._first = 0
        first, self._first = self._first, self._first + blocks
        took = await _push(pair, receiver, range(first, first + blocks), self._block_bytes)
        return took, await asyncio.to_thread(limit, first, blocks)

    @property
    def _block_bytes(self) -> int:
        return self._source.memory.block_bytes


async def _push(pair: Outbound, receiver: Helper, blocks: range, block_bytes: int) -> float:
    """Send ``blocks`` to the receiver. Return the seconds from the start of the push until the
    receiver has confirmed all blocks.
    """
    promised = await receiver.ask({"promise": len(blocks), "writer": SENDER}, _DEADLINE_S)
    began = time.perf_counter()
    push = pair.push(promised["ticket"])
    for target, block in enumerate(blocks):
        push.put(target, block, 0, block_bytes)
    push.end()
    async with asyncio.timeout(_DEADLINE_S):
        landed = await push.done
    took = time.perf_counter() - began
    if landed != len(blocks) * block_bytes:
        raise BatonError(f"only {landed} of {len(blocks) * block_bytes} bytes arrived")
    await receiver.ask({"commit": promised["ticket"], "writer": SENDER}, _DEADLINE_S)
    return took


def _progress(row: TransferRow) -> str:
    return (
        f"{row.transport}, {row.bytes:,} bytes: {row.gb_per_s:.2f} GB/s in {row.ms_p50:.2f} ms,"
        f" {row.ratio:.0%} of {row.limit}"
    )
