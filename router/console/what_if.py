"""What-if questions: the predicted latency of recent traffic with other numbers of workers.

The router builds a question from its recent traffic and its workers. A program, by default
``planning.what_if``, simulates the answer in a process of its own, so that no request waits for it.
It reads a ``WhatIfQuestion`` from standard input, and writes a ``ShapeAnswer`` for each shape of
the question: one line of JSON, as soon as the shape is simulated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import SHARED_FOLDER_VARIABLE
from router.core.recent_requests import RecentRequest
from router.http.client import Int

log = logging.getLogger(__name__)

DEADLINE_S = 20.0
_END_S = 5.0
"""Maximum time that the router waits, after killing the program that answers what-if questions,
until it has ended, in seconds."""
_LAST_LINE = 500
"""Maximum characters of a failed program's last line in an error."""
TRAFFIC_S = 600.0
"""Seconds of recent traffic in a question."""
MIN_REQUESTS, MAX_REQUESTS = 10, 400
MAX_WORKERS = 64
_VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}
_CALL_S = 0.0005
"""One-way time of a message between router and worker, in seconds."""
_MAX_BYTES_PER_S = 1e12
"""Bandwidth, in bytes per second, that stands for a transfer that computing hides entirely."""
_CHUNK_TOKENS = {True: 512, False: 8192}
"""Default ``chunk_tokens`` of a worker on a CPU (True) or on a GPU (False)."""
_CPU_CHUNK_KEYS = 1 << 19
"""Maximum of a chunk's tokens times the tokens that its last one attends to, for workers on a CPU.
It equals the value in ``engine.build``."""


_NOT_ASKED = {
    *("keys", "keys_file", "tenants", "tls", "cluster_secret"),
    *("redis_url", "redis_router_url", "redis_worker_url", "gcs_store", "otlp_endpoint"),
    "autoscaler",
}
"""Configuration fields excluded from a question: secrets, addresses that may contain a password,
and the autoscaler, which would change the numbers of workers in question."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WhatIfRequest(BaseModel):
    """A what-if question as an operator asks it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prefill: Int = Field(ge=0, le=MAX_WORKERS)
    """Number of prefill workers; 0: decode workers also compute the prompts."""
    decode: Int = Field(ge=1, le=MAX_WORKERS)
    rate: float = Field(1.0, ge=0.1, le=20)
    """Multiple of the recent rate of requests."""


class Shape(_Data):
    """Numbers of workers, by role."""

    prefill: int
    decode: int


class PastRequest(_Data):
    """A request of the recent traffic."""

    at_s: float
    """Arrival of the request, in seconds after the first request of the recent traffic."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a cache."""


class WhatIfQuestion(_Data):
    """A question as the simulator reads it."""

    config: dict[str, Any]
    """Fields of ``baton.config.cluster.Config``, without secrets."""
    profiles: dict[str, dict[str, Any]]
    """Profile of a worker of each role, in the format of `baton calibrate`."""
    traffic: tuple[PastRequest, ...]
    shapes: tuple[Shape, ...]
    """Numbers of workers to simulate. The answers have the same order."""
    deadline_s: float = DEADLINE_S
    """Time after which the router ends the program, in seconds."""
    hosts: int = 0
    """Number of machines whose CPU cores the workers share; 0 if each has its own."""


class Percentile(_Data):
    """Percentiles of a latency, in seconds; None if no request has that latency."""

    p50: float | None
    p95: float | None


class ShapeAnswer(_Data):
    """The figures that the recent traffic would have with other numbers of workers."""

    prefill: int
    decode: int
    ttft_s: Percentile
    tpot_s: Percentile
    e2el_s: Percentile
    good_share: float
    """Share of all requests that meet every SLO."""
    shed_share: float
    """Share of all requests that are shed."""
    prefill_busy: float | None
    """Share of the time in which the engines of prefill workers ran a step; None without prefill
    workers."""
    decode_busy: float


class WhatIfAnswer(_Data):
    """The simulator's answer to a question."""

    requests: int
    seconds: float
    """Time from the first simulated request to the last, in seconds."""
    shapes: tuple[ShapeAnswer, ...]


def present_shape(workers: Sequence[WorkerRecord]) -> Shape:
    """Return the present numbers of workers. A cluster has at least one decode worker."""
    return Shape(prefill=_count(workers, "prefill"), decode=max(1, _count(workers, "decode")))


def question(
    shapes: Sequence[Shape],
    recent: Sequence[RecentRequest],
    workers: Sequence[WorkerRecord],
    config: Config,
    *,
    transfer_line: tuple[float, float],
    rate: float = 1.0,
    share: float = 1.0,
    is_cpu: bool,
    deadline_s: float = DEADLINE_S,
) -> WhatIfQuestion:
    """Build a question from the ``recent`` requests (by arrival), the workers and their costs.

    ``rate``: the factor of the recent rate. ``transfer_line``: a and b of the milliseconds
    a + b*blocks of a handoff that computing does not hide. ``share``: the fraction of the cluster's
    requests that ``recent`` contains. ``is_cpu``: whether workers run on CPUs if their pool does
    not set the device. Raises Unavailable if no worker has reported its costs, InvalidRequest if
    there was too little traffic.
    """
    lengths = [one.output_tokens for one in recent if one.output_tokens]
    if len(recent) < MIN_REQUESTS or not lengths:
        raise InvalidRequest(
            f"{len(recent)} requests ended in the last {TRAFFIC_S / 60:.0f} minutes, and what-if"
            f" needs {MIN_REQUESTS}: try again when there is more traffic"
        )
    usual = max(1, round(sum(lengths) / len(lengths)))
    latest = recent[-MAX_REQUESTS:]
    begun, pace = latest[0].received_at, rate / share
    return WhatIfQuestion(
        config=config.model_dump(mode="json", exclude=_NOT_ASKED),
        profiles={
            role: _profile(_one(workers, role), config, transfer_line, is_cpu=is_cpu)
            for role in ("prefill", "decode")
        },
        traffic=tuple(
            PastRequest(
                at_s=(one.received_at - begun) / pace,
                input_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens or usual,
                cached_tokens=min(one.cached_tokens, one.prompt_tokens - 1),
            )
            for one in latest
        ),
        shapes=tuple(shapes),
        deadline_s=deadline_s,
        hosts=len({one.address.rpartition(":")[0] for one in workers if one.shares_cores}),
    )


def _count(workers: Sequence[WorkerRecord], role: str) -> int:
    return sum(one.role == role for one in workers)


def _one(workers: Sequence[WorkerRecord], role: str) -> WorkerRecord:
    """Return a worker of the role, or any other if there is none. Raises Unavailable."""
    known = [one for one in workers if any(one.prefill_cost) and any(one.step_cost)]
    if not known:
        raise Unavailable(
            "no worker has reported the cost of its steps yet: wait until one has calibrated"
        )
    return min(known, key=lambda one: (one.role != role, one.slot))


def _profile(
    record: WorkerRecord, config: Config, transfer_line: tuple[float, float], *, is_cpu: bool
) -> dict[str, Any]:
    """Return a worker's profile, in the format of ``planning.simulator.costs.worker_profile``."""
    shape = record.geometry
    token_bytes = 2.0 * shape.layers * shape.kv_heads * shape.head_dim
    token_bytes *= _VALUE_BYTES.get(shape.kv_dtype, 2.0)
    handoff_ms, block_ms = transfer_line
    block_bytes = token_bytes * config.block_size
    wire = block_bytes / (block_ms / 1e3) if block_ms > 0 else math.inf
    pool = next((one for one in config.pools if one.name == record.pool), None)
    on_cpu = is_cpu if pool is None or pool.device == "auto" else pool.device == "cpu"
    chunk = 0 if pool is None else pool.chunk_tokens
    return {
        "version": 1,
        "name": record.slot,
        "prefill": list(record.prefill_cost),
        "step": list(record.step_cost),
        "kv_tokens": record.total_blocks * shape.block_size,
        "kv_token_bytes": token_bytes,
        "layers": shape.layers,
        "context_length": record.context_length,
        "wire_bytes_per_s": min(wire, _MAX_BYTES_PER_S),
        "max_sequences": record.max_sequences,
        "chunk_tokens": chunk or _CHUNK_TOKENS[on_cpu],
        "chunk_keys": _CPU_CHUNK_KEYS if on_cpu else 0,
        "is_cpu": on_cpu,
        "handoff_s": handoff_ms / 1e3,
        "call_s": _CALL_S,
        "shares_cores": record.shares_cores,
    }


def rate_share(own: float, all_requests: Sequence[float]) -> float:
    """Return this router process's share of the requests of all processes on its port; 1 if there
    were no requests."""
    total = sum(all_requests)
    return min(1.0, own / total) if total and own else 1.0


class WhatIfProgram:
    """Runs the program that answers what-if questions, for one question at a time. Owned by the
    router's event loop."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a question is being answered."""
        return self._turn.locked()

    @classmethod
    def of(cls, command: Sequence[str]) -> WhatIfProgram | None:
        """Create a WhatIfProgram that runs ``command``; None if ``command`` is empty."""
        return cls(command) if command else None

    async def ask(self, question: WhatIfQuestion) -> WhatIfAnswer:
        """Return the program's answer to a question. Raises the same exceptions as ``shapes``."""
        async with aclosing(self.shapes(question)) as simulated:
            shapes = tuple([one async for one in simulated])
        return WhatIfAnswer(
            requests=len(question.traffic), seconds=question.traffic[-1].at_s, shapes=shapes
        )

    async def shapes(self, question: WhatIfQuestion) -> AsyncGenerator[ShapeAnswer, None]:
        """Run the program on a question, and yield the answer for each shape once it is simulated.
        Closing the iterator ends the program.

        Raises Overloaded while the program runs for another question, DeadlineExceeded, BatonError.
        """
        if self.is_busy:
            raise Overloaded(
                "another what-if question is running; try again when it has ended", retry_after=2.0
            )
        count = 0
        async with self._turn, aclosing(self._lines(question)) as lines:
            async for line in lines:
                count += 1
                yield _answer_of(line)
        if count != len(question.shapes):
            raise BatonError(
                f"the simulator has answered for {count} of {len(question.shapes)} clusters"
            )

    async def _lines(self, question: WhatIfQuestion) -> AsyncGenerator[bytes, None]:
        """Yield the lines that the program writes. Raises DeadlineExceeded, and BatonError if the
        program fails."""
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + question.deadline_s

        def put(line: bytes | None) -> None:
            # The loop is closed if this process ends first.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lines.put_nowait, line)

        with tempfile.TemporaryFile() as complaints:
            process = self._start(complaints)
            asked = question.model_dump_json().encode()
            talk = asyncio.create_task(asyncio.to_thread(_talk, process, asked, put))
            try:
                while (line := await _before(deadline, lines, question.deadline_s)) is not None:
                    yield line
            finally:
                process.kill()
                # Children of the program may hold its output open; they end by themselves.
                await asyncio.wait([talk], timeout=_END_S)
            if process.returncode:
                complaints.seek(0)
                text = complaints.read().decode(errors="replace").strip()
                log.error("the simulator failed (%d): %s", process.returncode, text)
                last = text.splitlines()[-1] if text else f"exit code {process.returncode}"
                raise BatonError(f"the simulator failed: {last[:_LAST_LINE]}")

    def _start(self, complaints: IO[bytes]) -> subprocess.Popen[bytes]:
        # Do not use asyncio: uvloop forks, and gRPC's fork handlers end one child in thirty with
        # SIGSEGV. subprocess uses vfork(2), which runs no fork handlers. The variable is removed
        # because it would add the program's metrics to the router's.
        variables = {k: v for k, v in os.environ.items() if k != SHARED_FOLDER_VARIABLE}
        pipe = subprocess.PIPE
        return subprocess.Popen(  # noqa: S603 - the router's own program, without a shell
            self._command, stdin=pipe, stdout=pipe, stderr=complaints, env=variables
        )


async def _before(
    deadline: float, lines: asyncio.Queue[bytes | None], deadline_s: float
) -> bytes | None:
    """Return the next of ``lines``. Raises DeadlineExceeded at ``deadline`` of the loop's clock."""
    try:
        async with asyncio.timeout_at(deadline):
            return await lines.get()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the simulation did not end within {deadline_s:g} s: use fewer workers, or a lower"
            " rate"
        ) from None


def _talk(
    process: subprocess.Popen[bytes], question: bytes, put: Callable[[bytes | None], None]
) -> None:
    """Write the question to the program. Pass each line of its answer to ``put``, and None after
    its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # A program that has ended reads no question.
        with suppress(BrokenPipeError), process.stdin as writing:
            writing.write(question)
        with process.stdout as reading:
            for line in reading:
                put(line)
    finally:
        process.wait()
        put(None)


def _answer_of(line: bytes) -> ShapeAnswer:
    try:
        return ShapeAnswer.model_validate_json(line)
    except ValidationError as error:
        raise BatonError(f"the simulator's answer cannot be read: {error}") from error
