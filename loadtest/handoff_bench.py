"""`baton bench handoff`: what handing over costs a request, in a cluster of real processes.

Two kinds of requests take turns, one at a time, every prompt a new one: answers of one token, which
end where the prompt was computed, and longer ones, which are handed off. The first token of both
should come at the same time; the second one a decode step after the first.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.client import Client
from baton.errors import Unavailable
from baton.v1.sampling_pb2 import SamplingParameters
from loadtest.machine import Machine, this_machine
from loadtest.peer_servers import LOOPBACK, SERVED_NAME, Programs, Server, free_port, serving
from loadtest.transfer_rows import write_json
from loadtest.whole_table import print_whole, whole_table

Say = Callable[[str], None]

_WARM_UPS = 2
_LOWEST_ID = 100
"""Plain tokens: control tokens come first in a vocabulary."""


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """What is to be measured."""

    transports: tuple[str, ...] = ("shm", "grpc")
    prompt_tokens: int = 1024
    answer_tokens: int = 16
    repetitions: int = 15
    highest_id: int = 40_000
    """Prompts are drawn from the token ids up to it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """When the tokens of one request came: seconds after it was sent."""

    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """One transport; milliseconds, medians."""

    transport: str
    prompt_tokens: int
    ttft_ms: float
    ttft_alone_ms: float
    """Of answers that are not handed off."""
    ttft_ratio: float
    first_gap_ms: float
    """Between the first token and the second."""
    step_ms: float
    """Between later ones."""
    over_step_ms: float
    """``first_gap_ms`` less ``step_ms``."""


def bench_handoffs(
    settings: HandoffSettings, programs: Programs, say: Say, console: Console, output: Path | None
) -> None:
    """Measure, print the table, and write all to ``output`` as JSON. Raises BatonError;

    ConfigError, before anything is measured, where ``output`` cannot be written.
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
    """A row for each transport, of a cluster of its own.

    Raises ConfigError where Baton is not installed here, Unavailable where a cluster does not come
    up, and BatonError where a request fails.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for name in dict.fromkeys(settings.transports):
            server, grpc = _cluster(name, programs)
            with serving(server, Path(folder) / f"{name}.log") as seconds:
                say(f"{name}: ready after {seconds:.1f} s")
                with Client(grpc) as client:
                    alone, handed = zip(*_answers(client, settings, say, name), strict=True)
            rows.append(row_of(name, settings.prompt_tokens, alone, handed))
    return tuple(rows)


def row_of(
    transport: str, prompt_tokens: int, alone: Sequence[Answer], handed: Sequence[Answer]
) -> HandoffRow:
    """A row of answers of one token, and of longer ones that were handed off."""
    ttft = statistics.median(answer.times[0] for answer in handed)
    ttft_alone = statistics.median(answer.times[0] for answer in alone)
    gap = statistics.median(answer.times[1] - answer.times[0] for answer in handed)
    step = statistics.median(
        later - earlier
        for answer in handed
        for earlier, later in zip(answer.times[1:], answer.times[2:], strict=False)
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
    )


def draw(rows: Sequence[HandoffRow]) -> Table:
    """A line for each row."""
    table = whole_table(
        *("transport", "TTFT, ms", "without handoff", "ratio"),
        *("first gap, ms", "decode step", "over it"),
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
        )
    return table


def as_json(machine: Machine, rows: Sequence[HandoffRow]) -> str:
    """``rows``, and what they were measured on."""
    fields = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    return json.dumps(fields, indent=1) + "\n"


def _cluster(transport: str, programs: Programs) -> tuple[Server, str]:
    """How it is started, and the address of its gRPC front."""
    port, grpc = free_port(), f"{LOOPBACK}:{free_port()}"
    command = (
        *(str(programs.baton), "up", "--model", str(programs.model)),
        *("--served-model-name", SERVED_NAME),
        *("--http", f"{LOOPBACK}:{port}", "--grpc", grpc),
    )
    return Server("baton", "bf16", command, port, {"BATON_TRANSPORT": transport}), grpc


def _answers(
    client: Client, settings: HandoffSettings, say: Say, name: str
) -> Iterator[tuple[Answer, Answer]]:
    """Of one token, and of more, in turns."""
    dice = random.Random(0)  # noqa: S311 - prompts, no secret
    for number in range(-_WARM_UPS, settings.repetitions):
        alone, handed = (
            _ask(client, _prompt(dice, settings), tokens) for tokens in (1, settings.answer_tokens)
        )
        if number >= 0:
            say(f"{name}: {alone.times[0] * 1e3:.0f} and {handed.times[0] * 1e3:.0f} ms")
            yield alone, handed


def _prompt(dice: random.Random, settings: HandoffSettings) -> list[int]:
    """No two begin alike: so nothing of them is found in a cache."""
    count = settings.prompt_tokens
    return [dice.randint(_LOWEST_ID, settings.highest_id) for _ in range(count)]


def _ask(client: Client, prompt: Sequence[int], tokens: int) -> Answer:
    sampling = SamplingParameters(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    began = time.perf_counter()
    for piece in client.generate(token_ids=prompt, sampling=sampling):
        times += [time.perf_counter() - began] * len(piece.token_ids)
    if len(times) != tokens:
        raise Unavailable(f"{len(times)} tokens came of {tokens}")
    return Answer(tuple(times))
