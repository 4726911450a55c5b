"""Measures the effect of long prompts on other requests' tokens, in Baton and other servers.

    python -m loadtest.research.peers.long_prompts --model FOLDER --vllm-bin FILE --json FILE

Chats (128 tokens in, 128 out) arrive at random, the same for each server, and a document of one
length at even intervals. Each document length is a separate run, after one run without documents. A
figure is the 99th percentile over all gaps between tokens of all chats (inter-token latency).
Servers alternate, and each is restarted for each repetition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from baton.errors import BatonError
from loadtest.common.peer_servers import SERVED_NAME, Programs, Server, make_server, serving
from loadtest.generator.load_run import Say, run_load
from loadtest.generator.load_settings import (
    LoadSettings,
    PaceSettings,
    RunTraffic,
    ServerSettings,
    TrafficSettings,
    counted,
)
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.workload.arrival_process import ArrivalProcess
from loadtest.generator.workload.prompts import PlannedRequest, PromptMaker
from loadtest.generator.workload.traffic import Source
from planning.common.report import print_whole, this_machine, whole_table

CHAT_TOKENS = 128
DOCUMENT_ANSWER = 16
_TIMEOUT_S = 120.0
_WARM_UP_RATE, _WARM_UP_S = 1.0, 8.0
_SEED = 7


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run: chats and documents, and their rates."""

    chat_rate: float
    """Mean number of chats per second."""
    document_every_s: float
    document_tokens: int
    """Number of tokens in each document's prompt; 0 sends no documents."""
    seconds: float
    """Duration of sending requests, in seconds."""

    def times(self) -> tuple[tuple[float, bool], ...]:
        """Return for each request the time in seconds at which it is due, and whether it is a
        document."""
        process = ArrivalProcess("poisson", self.chat_rate)
        chats = process.times(self.seconds, np.random.default_rng(_SEED)).tolist()
        due = [(time, False) for time in chats]
        if self.document_tokens:
            count = int(self.seconds / self.document_every_s)
            due += [((number + 0.5) * self.document_every_s, True) for number in range(count)]
        return tuple(sorted(due))


class ChatsAndDocuments(Source):
    """Makes the requests of a load: chats and documents. Each ``run`` number gives new texts, so
    that no prompt is cached."""

    def __init__(self, load: Load, run: int) -> None:
        self._load = load
        self._documents = [document for _, document in load.times()]
        self._maker = PromptMaker("tokens", _SEED, run)

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Implement ``Source``."""
        tokens, answer = CHAT_TOKENS, CHAT_TOKENS
        if self._documents[number]:
            tokens, answer = self._load.document_tokens, DOCUMENT_ANSWER
        return PlannedRequest(number, due_s, self._maker.fresh(number, tokens), tokens, answer)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one server under one load. Times are in milliseconds."""

    server: str
    document_tokens: int
    repetition: int
    chats: int
    """Number of chats that count: those due between warm-up and cool-down."""
    documents: int
    failed: int
    """Number of chats and documents without a complete answer."""
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    tpot_p99_ms: float
    chat_ttft_p50_ms: float
    document_ttft_p50_ms: float
    warnings: tuple[str, ...]


def figures_of(
    server: str,
    load: Load,
    repetition: int,
    records: Sequence[RequestRecord],
    warnings: tuple[str, ...],
) -> Figures:
    """Return the figures of one run. ``records`` are those requests of the run that count."""
    documents = {number for number, (_, document) in enumerate(load.times()) if document}
    good = [record for record in records if record.outcome == "ok"]
    chats = [record for record in good if record.number not in documents]
    long = [record for record in good if record.number in documents]
    gaps = [gap for chat in chats for gap in chat.itl_s]
    return Figures(
        server=server,
        document_tokens=load.document_tokens,
        repetition=repetition,
        chats=len(chats),
        documents=len(long),
        failed=len(records) - len(good),
        itl_p50_ms=_percentile_ms(gaps, 50),
        itl_p99_ms=_percentile_ms(gaps, 99),
        itl_max_ms=_percentile_ms(gaps, 100),
        tpot_p99_ms=_percentile_ms([chat.tpot_s for chat in chats], 99),
        chat_ttft_p50_ms=_percentile_ms([chat.ttft_s for chat in chats], 50),
        document_ttft_p50_ms=_percentile_ms([one.ttft_s for one in long], 50),
        warnings=warnings,
    )


def _percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e3, 1) if seconds else 0.0


def drive(server: Server, load: Load, repetition: int, run: int) -> Figures:
    """Send the requests of a load to a ready server, and return the figures. Raises BatonError."""
    pace = PaceSettings(rate=load.chat_rate, seconds=load.seconds)
    settings = LoadSettings(
        ServerSettings(url=server.base_url, model=SERVED_NAME, timeout_s=_TIMEOUT_S),
        TrafficSettings(seed=_SEED),
        pace,
    )
    times = tuple(due for due, _ in load.times())
    traffic = RunTraffic(ChatsAndDocuments(load, run), times, load.seconds)
    console = Console(stderr=True)
    done = uvloop.run(run_load(settings, traffic, console, console.print))
    window = counted(pace, load.seconds)
    records = [record for record in done.records if window.holds(record)]
    return figures_of(server.name, load, repetition, records, done.warnings)


def compare(
    names: Sequence[str],
    programs: Programs,
    loads: Sequence[Load],
    repetitions: int,
    say: Say,
) -> list[Figures]:
    """Run all loads on each server, ``repetitions`` times, and return the figures. Raises
    BatonError.
    """
    found: list[Figures] = []
    warm_up = Load(_WARM_UP_RATE, 1.0, 0, _WARM_UP_S)
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(repetitions):
            for name in names:
                server = make_server(name, programs)
                with serving(server, Path(folder) / f"{name}-{repetition}.log"):
                    drive(server, warm_up, repetition, 0)
                    for run, load in enumerate(loads, start=1):
                        figures = drive(server, load, repetition, 100 * repetition + run)
                        say(str(figures))
                        found.append(figures)
    return found


def show(found: Sequence[Figures], console: Console) -> None:
    """Print the medians over the repetitions: a row for each document length, a column for each
    server.
    """
    servers = list(dict.fromkeys(one.server for one in found))
    table = whole_table(
        "document tokens",
        *servers,
        title="Chats' inter-token latency p99 · TTFT p50 · documents' TTFT p50, ms",
    )
    for tokens in sorted({one.document_tokens for one in found}):
        row = []
        for server in servers:
            runs = [one for one in found if (one.server, one.document_tokens) == (server, tokens)]
            cells = [
                statistics.median(getattr(one, name) for one in runs)
                for name in ("itl_p99_ms", "chat_ttft_p50_ms", "document_ttft_p50_ms")
            ]
            failed = sum(one.failed for one in runs)
            row.append(
                " · ".join(f"{cell:.0f}" for cell in cells) + (f" ({failed} failed)" * bool(failed))
            )
        table.add_row(str(tokens or "none"), *row)
    print_whole(console, table)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.research.peers.long_prompts", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--vllm-bin", type=Path, help="vLLM's command")
    parser.add_argument(
        "--peers", default="baton,vllm,vllm-small-steps", help="servers, with commas between"
    )
    parser.add_argument("--baton-args", default="", help="more options of `baton serve`")
    parser.add_argument("--lengths", default="0,500,1000,2000,3500", help="tokens of documents")
    parser.add_argument("--chat-rate", type=float, default=0.5, help="chats per second")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between documents")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of each run")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each length")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    asked = parser.parse_args(arguments)
    programs = Programs(asked.model, vllm=asked.vllm_bin, baton_arguments=asked.baton_args)
    loads = [
        Load(asked.chat_rate, asked.every, int(tokens), asked.seconds)
        for tokens in asked.lengths.split(",")
    ]
    console = Console()
    try:
        found = compare(asked.peers.split(","), programs, loads, asked.repetitions, console.print)
    except BatonError as error:
        console.print(f"error: {error.message}", style="red")
        return 1
    settings = {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in vars(asked).items()
        if name not in ("model", "vllm_bin", "json")
    }
    content = {
        "machine": asdict(this_machine()),
        "settings": settings,
        "runs": [asdict(one) for one in found],
    }
    asked.json.write_text(json.dumps(content, indent=1) + "\n")
    show(found, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
