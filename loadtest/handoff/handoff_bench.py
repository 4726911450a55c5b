"""`baton bench handoff`: measures the cost of a handoff to a request, in a cluster of real
processes.

Two kinds of requests alternate, one at a time, each with a new prompt: answers of one token, which
end where the prompt was computed, and longer ones, which are handed off. Both should have the same
time to the first token, and the second token should come a decode step after the first.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.client import Client
from baton.errors import Unavailable
from baton.v1.sampling_pb2 import SamplingParameters
from engine.checkpoint.model_config import load_model_config
from engine.kv.kv_cache import block_bytes
from loadtest.common.child_processes import LOOPBACK, free_port
from loadtest.common.peer_servers import SERVED_NAME, Programs, Server, serving
from loadtest.handoff.transfer_bench import TransferSettings, measure_transfers
from planning.common.report import Machine, print_whole, this_machine, whole_table, write_json

Say = Callable[[str], None]

CHUNK_TOKENS = 512
"""Maximum number of prompt tokens in one prefill step on a CPU. Towards the end of a long prompt,
chunks are shorter."""
_BLOCK_TOKENS = 16
_BANDWIDTH_BYTES = 16 << 20
"""Size of the transfers by which bandwidth is measured, in bytes."""
_WARM_UPS = 2
_LOWEST_ID = 100
"""Lowest token id in prompts. Lower ids may be control tokens, which come first in a vocabulary."""


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """Settings of a measurement of handoffs."""

    transports: tuple[str, ...] = ("shm", "grpc")
    prompt_tokens: int = 1024
    answer_tokens: int = 16
    repetitions: int = 15


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Arrival times of one request's tokens, in seconds after it was sent."""

    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """Results of handoffs with one transport. Times are medians over requests, in milliseconds."""

    transport: str
    prompt_tokens: int
    ttft_ms: float
    ttft_alone_ms: float
    """TTFT of answers that end at the prefill worker, without a handoff."""
    ttft_ratio: float
    first_gap_ms: float
    """Gap between the first token and the second. It includes the handoff."""
    step_ms: float
    """Gap between two tokens after the second: the mean of each answer."""
    over_step_ms: float
    """Time that the handoff adds to the gap before the second token: ``first_gap_ms`` minus
    ``step_ms``."""
    last_chunk_ms: float
    """Time to transfer the KV of a prompt's last chunk, computed from the bandwidth that the same
    run measured."""


def bench_handoffs(
    settings: HandoffSettings, programs: Programs, say: Say, console: Console, output: Path | None
) -> None:
    """Measure handoffs, print the table, and write all results to ``output`` as JSON. Raises
    BatonError.

    Raises ConfigError before the measurement if ``output`` cannot be written.
    """
    if output is not None:
        write_json(output, "{}\n")
    rows = measure_handoffs(settings, programs, say)
    machine = this_machine()
    print_whole(console, draw(rows))
    line = f"Medians of {settings.repetitions}, prompts of {settings.prompt_tokens} tokens."
    console.print(f"{line} {machine.line()}.", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        write_json(output, as_json(machine, rows))


def measure_handoffs(
    settings: HandoffSettings, programs: Programs, say: Say
) -> tuple[HandoffRow, ...]:
    """Measure each transport in a separate cluster, and return a row for each.

    Raises ConfigError if Baton is not installed, Unavailable if a cluster does not start, and
    BatonError if a request fails.
    """
    vocabulary = load_model_config(programs.model).vocab_size
    rows = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for name in dict.fromkeys(settings.transports):
            server, grpc = _cluster(name, programs)
            with serving(server, Path(folder) / f"{name}.log") as seconds:
                say(f"{name}: ready after {seconds:.1f} s")
                with Client(grpc) as client:
                    turns = []
                    for turn in _turns(client, settings, vocabulary):
                        turns.append(turn)
                        alone_ms, handed_ms = (answer.times[0] * 1e3 for answer in turn)
                        say(f"{name}: {alone_ms:.0f} ms alone, {handed_ms:.0f} ms handed off")
            alone, handed = zip(*turns, strict=True)
            last_chunk_s = _last_chunk_s(settings, programs, name)
            rows.append(row_of(name, settings.prompt_tokens, alone, handed, last_chunk_s))
    return tuple(rows)


def _last_chunk_s(settings: HandoffSettings, programs: Programs, transport: str) -> float:
    tokens = settings.prompt_tokens % CHUNK_TOKENS or CHUNK_TOKENS
    blocks = -(-tokens // _BLOCK_TOKENS)
    size = block_bytes(load_model_config(programs.model), _BLOCK_TOKENS, torch.bfloat16)
    measured = TransferSettings((transport,), size, _BANDWIDTH_BYTES + size)
    rows = asyncio.run(measure_transfers(measured, lambda _: None))
    return blocks * size / rows[-1].gb_per_s / 1e9


def row_of(
    transport: str,
    prompt_tokens: int,
    alone: Sequence[TimedAnswer],
    handed: Sequence[TimedAnswer],
    last_chunk_s: float,
) -> HandoffRow:
    """Return the row of a transport. ``alone`` are answers of one token, without a handoff.
    ``handed`` are answers of at least 3 tokens, with a handoff.
    """
    ttft = statistics.median(answer.times[0] for answer in handed)
    ttft_alone = statistics.median(answer.times[0] for answer in alone)
    gap = statistics.median(answer.times[1] - answer.times[0] for answer in handed)
    # Not the median of the gaps: tokens that arrive together have no gap between them.
    step = statistics.median(
        (answer.times[-1] - answer.times[1]) / (len(answer.times) - 2) for answer in handed
    )
    return HandoffRow(
        transport=transport,
        prompt_tokens=prompt_tokens,
        ttft_ms=ttft * 1e3,
        ttft_alone_ms=ttft_alone * 1e3,
        ttft_ratio=ttft / ttft_alone,
        first_gap_ms=gap * 1e3,
        step_ms=step * 1e3,
        over_step_ms=(gap - step) * 1e3,
        last_chunk_ms=last_chunk_s * 1e3,
    )


def draw(rows: Sequence[HandoffRow]) -> Table:
    """Return a table with one line for each transport."""
    table = whole_table(
        *("transport", "TTFT, ms", "without handoff", "ratio"),
        *("first gap, ms", "decode step", "over it", "last chunk's bytes, ms"),
        title="The first tokens of requests that are handed off",
    )
    for row in rows:
        table.add_row(
            row.transport,
            f"{row.ttft_ms:.1f}",
            f"{row.ttft_alone_ms:.1f}",
            f"{row.ttft_ratio:.3f}",
            f"{row.first_gap_ms:.1f}",
            f"{row.step_ms:.1f}",
            f"{row.over_step_ms:.1f}",
            f"{row.last_chunk_ms:.1f}",
        )
    return table


def as_json(machine: Machine, rows: Sequence[HandoffRow]) -> str:
    """Return the rows and the machine as JSON."""
    fields = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    return json.dumps(fields, indent=1) + "\n"


def _cluster(transport: str, programs: Programs) -> tuple[Server, str]:
    """Return the server whose command starts a cluster with this transport. Also return the address
    of the router's gRPC listener.
    """
    port, grpc = free_port(), f"{LOOPBACK}:{free_port()}"
    command = (
        *(str(programs.baton), "serve", "--model", str(programs.model)),
        *("--served-model-name", SERVED_NAME),
        *("--http", f"{LOOPBACK}:{port}", "--grpc", grpc),
    )
    # Every request is handed off, even if that does not pay.
    environment = {
        "BATON_TRANSPORT": transport,
        "BATON_LOCAL_PREFILL": "never",
        # Steps that bring several tokens would not show the time of a step.
        "BATON_DRAFTER": "none",
    }
    return Server("baton", "bf16", command, port, environment), grpc


def _turns(
    client: Client, settings: HandoffSettings, vocabulary: int
) -> Iterator[tuple[TimedAnswer, TimedAnswer]]:
    """Send requests one at a time. Yield pairs of answers: one of a single token, and one of
    ``settings.answer_tokens`` tokens."""
    dice = random.Random(0)  # noqa: S311 - prompts, no secret
    for number in range(-_WARM_UPS, settings.repetitions):
        lengths = (1, settings.answer_tokens)
        # The second request finds the machine in another state, so the order alternates.
        order = lengths if number % 2 else lengths[::-1]
        answers = {
            tokens: _ask(client, random_prompt(dice, settings.prompt_tokens, vocabulary), tokens)
            for tokens in order
        }
        if number >= 0:
            yield answers[1], answers[settings.answer_tokens]


def random_prompt(dice: random.Random, tokens: int, vocabulary: int) -> list[int]:
    """Return a random prompt of this length. No two prompts share a prefix, so that no prompt is
    cached."""
    return [dice.randrange(min(_LOWEST_ID, vocabulary - 1), vocabulary) for _ in range(tokens)]


def _ask(client: Client, prompt: Sequence[int], tokens: int) -> TimedAnswer:
    sampling = SamplingParameters(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    began = time.perf_counter()
    for piece in client.generate(token_ids=prompt, sampling=sampling):
        times += [time.perf_counter() - began] * len(piece.token_ids)
    if len(times) != tokens:
        raise Unavailable(f"only {len(times)} of {tokens} tokens arrived")
    return TimedAnswer(tuple(times))
