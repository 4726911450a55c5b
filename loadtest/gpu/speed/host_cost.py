"""Measures what a decode step costs the host of a GPU worker: CPU time by thread, calls and bytes.

    python -m loadtest.gpu.speed.host_cost

The scheduler, the engine core with its threads, the GPU runner, the decode role and its protobuf
messages are the real ones. The model is replaced: no kernel is launched, and each step samples
token 0. So a step takes no time on a device, and the threads do nothing but a step's host work. Its
tensors are on the CPU. The times are CPU times of the threads, so a thread that waits for the
interpreter's lock costs nothing. Not measured: launches (one graph, two draws) and the write of a
message to its socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Several
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry

from baton.config.advanced import AdvancedConfig
from baton.errors import BatonError
from baton.grammars.compiled_grammars import CompiledGrammars
from baton.hashing import hash_key
from baton.host.process_tuning import spare_the_interpreter
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from baton.v1 import decode_pb2
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeServicer
from engine.checkpoint.model_config import ModelConfig
from engine.engine import Engine
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.graphs import Work
from engine.gpu.runner import GpuRunner
from engine.gpu.step_tensors import StepTensors
from engine.kv.kv_cache import KvCache
from engine.roofline import Storage
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceUpdate
from kvtransfer.memory.memory import BlockMemory
from loadtest.gpu.common.models import random_model
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Fact, Item, Result
from loadtest.gpu.common.shapes import llama_8b, miniature
from worker.core.engine_core import EngineCore
from worker.core.gauges import UtilizationMeter, WorkerGauges
from worker.core.step_planner import PrefillBudget
from worker.costs.step_costs import StepCosts
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.role import WorkerContext
from worker.settings import WorkerSettings

_BATCHES, _CONTEXTS = (64, 256, 512), (1024, 4096, 32768)
_WARM_STEPS, _STEPS = 24, 96
_STOP_S = 10.0
_CPU = torch.device("cpu")
_SMALL = 4, 100, 4
"""Sequences, tokens and steps of a dry run."""
_ROUTER = "router"
_STORAGE = Storage(2.0, 2.0, 131072.0)
_COSTS = StepCosts((1.0, 0.02, 0.0), (4.0, 0.01, 1e-5))


@dataclass(frozen=True, slots=True)
class HostCost:
    """What one decode step costs the host, for a batch of sequences of equal length."""

    batch: int
    context: int
    """Tokens of each sequence."""
    churn: int
    """Number of sequences that end in each step. As many are handed in."""
    engine_ms: float
    """CPU time of the engine thread, which makes a step's inputs and starts it."""
    loop_ms: float
    """CPU time of the event loop: scheduler, results, metrics, role, protobuf."""
    waiter_ms: float
    """CPU time of the thread that waits for a step's end."""
    wall_ms: float
    """Time from one step to the next. The threads share one lock, so it is about the sum."""
    input_bytes: float
    """Bytes that are copied to the device."""
    message_bytes: float
    """Bytes of the messages to the router."""
    messages: float


class NullSteps(GpuStepModel):
    """A step model that launches nothing. Each output samples token 0."""

    def __init__(self, config: ModelConfig, cache: KvCache, max_rows: int) -> None:
        weights = gpu_weights(random_model(config, cache.data.device, torch.bfloat16))
        super().__init__(weights, cache, max_rows, capture=_captured)
        self.sent_until: list[int] = []
        """The value of ``sent_bytes`` at the end of each step."""

    def _draw(self, logits: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        self.sent_until.append(self.sent_bytes)
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)


def _captured(work: Work) -> Work:
    return _nothing


def _nothing() -> None:
    """Stand for the replay of a CUDA graph."""


class HostBench:
    """A decode worker whose model computes nothing, and its sequences."""

    def __init__(
        self,
        batch: int,
        context: int,
        churn: int,
        block_size: int,
        steps: int,
        device: torch.device = _CPU,
    ) -> None:
        """Each sequence has ``context`` tokens after half of ``steps`` steps. ``churn`` sequences
        end in each step. Call it on the event loop."""
        self.config = replace(
            miniature(llama_8b()), heads=1, kv_heads=1, head_dim=8, context_length=2 * context
        )
        self.config = replace(
            self.config, ropes=tuple(replace(rope, rotary_dim=8) for rope in self.config.ropes)
        )
        self.batch = batch
        self._context, self._steps, self._churn = context, steps, churn
        self._added = 0
        width = -(-(context + steps) // block_size) + 1
        self.cache = KvCache(self.config, batch * width, block_size, torch.bfloat16, device)
        self.model = NullSteps(self.config, self.cache, batch)
        runner = GpuRunner(self.model, self.cache, device)
        self.pool = BlockPool(batch * width)
        limits = SchedulerLimits(block_size, 8192, batch, 2 * context)
        self.scheduler = Scheduler(self.pool, limits)
        self.metrics = WorkerMetrics(CollectorRegistry())
        engine = Engine(
            self.config, runner, self.pool, self.scheduler, "", CompiledGrammars(_no_grammar, 0)
        )
        meter = UtilizationMeter(self.config, _STORAGE, None)
        gauges = WorkerGauges(self.metrics, "decode-0", "decode", meter=meter)
        budget = PrefillBudget(_COSTS, 0.1)
        self.core = EngineCore(engine, gauges, "decode-0:1", budget=budget, fail=sys.exit)
        receiver = BlockReceiver(
            self.pool, self.metrics, block_bytes=self.cache.block_bytes, lease_s=3.0
        )
        settings: Any = SimpleNamespace(
            config=SimpleNamespace(advanced=AdvancedConfig()),
            pool=SimpleNamespace(max_sequences=batch, cp=1, role="decode"),
            slot="decode-0",
        )
        exchange: Any = SimpleNamespace(receiver=receiver)
        self.role = DecodeRole(
            WorkerContext(
                cast(WorkerSettings, settings),
                engine,
                self.core,
                cast(BlockMemory, None),
                cast(Exchange, exchange),
                self.metrics,
                "decode-0:1",
            )
        )
        self.core.subscribe(self.role)
        self._prompt = [7 * place % 300 for place in range(context + 293)]

    def add_sequences(self, count: int) -> None:
        """Hand sequences in, as if their KV had arrived. Their lengths differ by up to a block, so
        that each step allocates and registers about as many blocks as the next."""
        size = self.cache.block_size
        first = self._context - self._steps // 2
        for number in range(self._added, self._added + count):
            length = first - number % size
            steps = min(number, self.batch) // self._churn + 1 if self._churn else self._context
            sampling = SamplingParams(
                temperature=0.7, seed=number << 33 | 5, max_tokens=steps + 1, ignore_eos=True
            )
            prompt = tuple(self._prompt[number % 293 : number % 293 + length])
            spec = SequenceSpec(f"request-{number:032x}", 0, _ROUTER, prompt, length, sampling)
            sequence = Sequence(
                self.core.next_sequence_id(), spec, stop_ids=(), hash_key=hash_key("", b"")
            )
            # Hashing millions of tokens takes longer than the measurement.
            sequence.hashes = [
                number.to_bytes(8, "big") + place.to_bytes(8, "big")
                for place in range(length // size)
            ]
            sequence.token_ids.append(0)
            self.role.sequences.keep(sequence)
            blocks = self.pool.allocate(-(-length // size))
            self.scheduler.add_computed(sequence, blocks, length)
        self._added += count


class RouterStream:
    """The router's end of the token stream: it serializes each message and counts."""

    def __init__(self, bench: HostBench) -> None:
        self.messages = 0
        self.bytes = 0
        self._bench = bench

    async def run(self) -> None:
        request = decode_pb2.StreamTokensRequest(router_id=_ROUTER)
        servicer: Any = DecodeServicer(self._bench.role)
        async for message in servicer.StreamTokens(request, None):
            self.messages += 1
            self.bytes += len(message.SerializeToString())


class StepCounter:
    """Counts steps, and wakes the task that waits for one of them."""

    def __init__(self, bench: HostBench) -> None:
        self._bench = bench
        self._closed = False
        self._left = 0
        self._reached = asyncio.Event()

    async def wait(self, count: int) -> None:
        """Wait for the end of ``count`` more steps."""
        self._left = count
        self._reached.clear()
        await self._reached.wait()

    def close(self) -> None:
        """Replace no more sequences."""
        self._closed = True

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Count a step, and replace the sequences that have ended."""
        if self._closed:
            return
        self._bench.add_sequences(sum(1 for u in updates if u.sequence.finish_reason))
        self._left -= 1
        if not self._left:
            self._reached.set()

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """Raise the error of a failed step: it ends the measurement."""
        raise error

    def on_expire(self, sequences: list[Sequence]) -> None:
        """Do nothing: no sequence has a deadline."""


@dataclass(frozen=True, slots=True)
class _Reading:
    engine_s: float
    loop_s: float
    waiter_s: float
    wall_s: float
    input_bytes: int
    message_bytes: int
    messages: int


def _read(bench: HostBench, stream: RouterStream) -> _Reading:
    seconds = {thread.name: _cpu_s(thread) for thread in threading.enumerate()}
    return _Reading(
        seconds["engine"],
        time.thread_time(),
        seconds["step-waiter"],
        time.perf_counter(),
        bench.model.sent_bytes,
        stream.bytes,
        stream.messages,
    )


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None, "threads that are listed have begun"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@asynccontextmanager
async def running(bench: HostBench) -> AsyncIterator[tuple[StepCounter, RouterStream]]:
    """Run steps of all of a bench's sequences, until the context ends."""
    counter, stream = StepCounter(bench), RouterStream(bench)
    bench.core.subscribe(counter)
    bench.core.start()
    reading = asyncio.create_task(stream.run())
    bench.add_sequences(bench.batch)
    bench.core.schedule_steps()
    try:
        yield counter, stream
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        counter.close()
        for sequence in tuple(bench.scheduler.running):
            bench.scheduler.remove(sequence)
        await asyncio.to_thread(bench.core.stop, _STOP_S)


async def _measure(
    batch: int, context: int, churn: int, block_size: int, steps: int, device: torch.device
) -> HostCost:
    bench = HostBench(batch, context, churn, block_size, _WARM_STEPS + steps, device)
    async with running(bench) as (counter, stream):
        await counter.wait(_WARM_STEPS)
        before = _read(bench, stream)
        await counter.wait(steps)
        after = _read(bench, stream)
    return HostCost(
        batch,
        context,
        churn,
        (after.engine_s - before.engine_s) / steps * 1e3,
        (after.loop_s - before.loop_s) / steps * 1e3,
        (after.waiter_s - before.waiter_s) / steps * 1e3,
        (after.wall_s - before.wall_s) / steps * 1e3,
        (after.input_bytes - before.input_bytes) / steps,
        (after.message_bytes - before.message_bytes) / steps,
        (after.messages - before.messages) / steps,
    )


def measure(
    batch: int,
    context: int,
    churn: int = 0,
    block_size: int = 16,
    steps: int = _STEPS,
    device: torch.device = _CPU,
) -> HostCost:
    """Measure one batch. No other worker's threads may run in this process."""
    return asyncio.run(_measure(batch, context, churn, block_size, steps, device))


def host_cost_items(place: Place) -> Iterator[Item]:
    """Yield an item for each batch. On a GPU, a step's time includes the launch of the copies of
    its inputs."""
    for batch in _BATCHES:
        yield Item(f"host, {batch} × 4k", partial(_measure_at, place, batch))


def _measure_at(place: Place, batch: int) -> Iterator[Result]:
    count, context, steps = _SMALL if place.small else (batch, 4096, _STEPS)
    cost = measure(count, context, steps=steps, device=place.device)
    yield Fact(f"host, {batch} × 4k", asdict(cost))


def _no_grammar() -> Any:
    raise AssertionError("no sequence has a grammar")


def _table(costs: Several[HostCost]) -> str:
    head = (
        "| batch | context | churn | engine thread | event loop | waiter | bytes in | bytes out |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {c.batch} | {c.context} | {c.churn} | {c.engine_ms:.2f} | {c.loop_ms:.2f} "
        f"| {c.waiter_ms:.2f} | {c.input_bytes:.0f} | {c.message_bytes:.0f} |"
        for c in costs
    ]
    return "\n".join(lines)


def main(arguments: Several[str] | None = None) -> int:
    """Measure each batch in turn; print a table, and write JSON on request. Times are
    milliseconds of CPU per step."""
    assert __doc__ is not None, "it is above"
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu.speed.host_cost", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--batch", type=int, action="append", help="sequences (repeatable)")
    parser.add_argument("--context", type=int, action="append", help="tokens (repeatable)")
    parser.add_argument(
        "--churn", type=int, default=0, help="sequences that end in each step; default: 0"
    )
    parser.add_argument("--block-size", type=int, default=16, help="default: 16")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"default: {_STEPS}")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    costs = [
        measure(batch, context, options.churn, options.block_size, options.steps)
        for batch in options.batch or _BATCHES
        for context in options.context or _CONTEXTS
    ]
    sys.stdout.write(_table(costs) + "\n")
    if options.json is not None:
        names = ("engine_ms", "loop_ms", "waiter_ms", "wall_ms", "input_bytes", "message_bytes")
        found = {
            f"{cost.batch}x{cost.context}_churn{cost.churn}_{name}": asdict(cost)[name]
            for cost in costs
            for name in names
        }
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    spare_the_interpreter()
    sys.exit(main())
