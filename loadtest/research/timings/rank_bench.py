"""Measures handoffs between workers of several ranks, compared with workers of one rank.

    python -m loadtest.research.timings.rank_bench

Every rank of both workers is a process. A run hands over 32 tickets at once, of the demo model's
blocks, and is timed from the first sent block until the receiver has committed the last ticket.
Each case alternates with one rank each, so that other load of the machine affects both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from baton.config.choices import TransportName
from baton.errors import ConfigError
from baton.request import Geometry
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import plan
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from loadtest.common.json_worker import Helper, helper
from loadtest.handoff.transfer_end import bench_pool, transfer_end
from loadtest.research.timings.rank_bench_receiver import RECEIVER
from planning.common.report import this_machine
from worker.exchange.exchange import Exchange

SENDER = "sender"
CASES = ((1, 2), (2, 1), (2, 2), (2, 4), (4, 2))
"""Measured cases: number of ranks of the sender, and of the receiver."""
DEMO = Geometry(16, 30, 3, 64, "bfloat16")
TICKETS = 32
_READY_S, _DEADLINE_S = 60.0, 120.0
_LINE = "{:<10} {:<7} {:>9} {:>9} {:>7} {:>14}"


@dataclass(frozen=True, slots=True)
class RankCase:
    """One case: geometries of the sender and the receiver, transport, and number of blocks."""

    source: Geometry
    target: Geometry
    transport: TransportName
    blocks: int
    """Number of blocks of each ticket."""

    @property
    def floor(self) -> int:
        """Return the minimum number of bytes that a run must send. Each rank of the receiver gets
        its own heads once."""
        layouts = KvLayout.of(self.source), KvLayout.of(self.target)
        slices = plan(*layouts, 0, self.blocks * self.source.block_size)
        return TICKETS * sum(each.length for each in slices)


@dataclass(frozen=True, slots=True)
class RankRow:
    """Results of one case."""

    case: RankCase
    bytes: int
    """Number of bytes that one run transferred."""
    seconds: float
    """Median time of the runs."""
    beside: float
    """Throughput divided by the throughput of workers with one rank each, which runs in alternation
    with it."""


def main(
    transport: Annotated[list[str], typer.Option(help="shm, grpc; repeatable")] = [  # noqa: B006
        "shm",
        "grpc",
    ],
    blocks: Annotated[int, typer.Option(help="blocks per ticket", min=1)] = 8,
    repetitions: Annotated[int, typer.Option(min=1)] = 7,
) -> None:
    """Print the bytes and the throughput of each case as soon as it is measured."""
    for name in transport:
        if name not in get_args(TransportName):
            raise ConfigError(f"transport {name} is unknown")
    console = Console(width=100)
    console.print(_LINE.format("transport", "ranks", "MB moved", "of floor", "GB/s", "vs. 1 to 1"))
    asyncio.run(
        _measure_all(transport, blocks, repetitions, lambda row: console.print(_drawn(row)))
    )
    console.print(this_machine().line())


async def _measure_all(
    names: list[str], blocks: int, repetitions: int, tell: Callable[[RankRow], None]
) -> None:
    for name in names:
        alone = _case((1, 1), name, blocks)
        for number, ranks in enumerate(CASES):
            first, row = await measure(alone, _case(ranks, name, blocks), repetitions)
            # Some cases take half a minute, most of it for the start of processes.
            for found in (row,) if number else (first, row):
                tell(found)


def _case(ranks: tuple[int, int], transport: str, blocks: int) -> RankCase:
    source, target = (replace(DEMO, tensor_parallel=each) for each in ranks)
    return RankCase(source, target, transport, blocks)  # type: ignore[arg-type]


async def measure(alone: RankCase, case: RankCase, repetitions: int) -> tuple[RankRow, RankRow]:
    """Measure both cases alternately, and return a row for each. Raises BatonError if one fails."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        benches = [
            await stack.enter_async_context(_bench(each, folder / f"{number}.log"))
            for number, each in enumerate((alone, case))
        ]
        moved = [await bench.run() for bench in benches]
        seconds: list[list[float]] = [[] for _ in benches]
        for _ in range(repetitions):
            for bench, found in zip(benches, seconds, strict=True):
                began = time.perf_counter()
                await bench.run()
                found.append(time.perf_counter() - began - bench.idle_s)
    first, other = (statistics.median(found) for found in seconds)
    beside = (moved[1] / other) / (moved[0] / first)
    return RankRow(alone, moved[0], first, 1.0), RankRow(case, moved[1], other, beside)


@contextlib.asynccontextmanager
async def _bench(case: RankCase, log: Path) -> AsyncIterator[_Bench]:
    blocks = TICKETS * case.blocks
    async with AsyncExitStack() as stack:

        async def ranks(geometry: Geometry) -> list[str]:
            addresses = []
            for rank in range(1, geometry.tensor_parallel):
                start = {
                    "geometry": asdict(geometry),
                    "rank": rank,
                    "blocks": blocks,
                    "transport": case.transport,
                }
                found = helper(
                    "loadtest.research.timings.rank_bench_rank", start, log, ready_s=_READY_S
                )
                addresses.append((await stack.enter_async_context(found)).hello["address"])
            return addresses

        start = {
            "geometry": asdict(case.target),
            "writer": asdict(case.source),
            "blocks": blocks,
            "transport": case.transport,
            "ranks": await ranks(case.target),
        }
        receiver = await stack.enter_async_context(
            helper("loadtest.research.timings.rank_bench_receiver", start, log, ready_s=_READY_S)
        )
        layout = KvLayout.of(case.source).of_rank(0)
        pool = stack.enter_context(bench_pool(blocks, layout.block_bytes))
        identity = Identity(SENDER, "bench", case.source)
        own = transfer_end(identity, pool.memory, case.transport, await ranks(case.source))
        yield _Bench(case, receiver, await stack.enter_async_context(own))


class _Bench:
    """A sending and a receiving worker that are ready for a run."""

    def __init__(self, case: RankCase, receiver: Helper, exchange: Exchange) -> None:
        self._case = case
        self._receiver = receiver
        self._exchange = exchange
        self.idle_s = 0.0
        """Seconds from the start of the last run until the first block was sent."""

    async def run(self) -> int:
        """Hand over all tickets at once. Return the number of bytes sent."""
        began = time.perf_counter()
        pair = await self._exchange.outbound(Peer(RECEIVER, self._receiver.hello["address"]))
        question = {"promise": [self._case.blocks] * TICKETS, "writer": SENDER}
        tickets = (await self._receiver.ask(question, _DEADLINE_S))["tickets"]
        pushes = [self._exchange.push(pair, ticket_id) for ticket_id in tickets]
        self.idle_s = time.perf_counter() - began
        layers = self._case.source.layers
        for number, push in enumerate(pushes):
            for target in range(self._case.blocks):
                push.put_layers(target, number * self._case.blocks + target, 0, layers)
            push.end()
        sent = sum(await asyncio.gather(*(push.done for push in pushes)))
        answer = await self._receiver.ask({"commit": tickets, "writer": SENDER}, _DEADLINE_S)
        assert answer["bytes"] == sent, "the received data differs from the sent data"
        return sent


def _drawn(row: RankRow) -> str:
    return _LINE.format(
        row.case.transport,
        f"{row.case.source.tensor_parallel} to {row.case.target.tensor_parallel}",
        f"{row.bytes / 1e6:.1f}",
        f"{row.bytes / row.case.floor:.3f}",
        f"{row.bytes / row.seconds / 1e9:.2f}",
        f"{row.beside:.2f}",
    )


if __name__ == "__main__":
    typer.run(main)
