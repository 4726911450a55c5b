"""`baton bench peers`: compares Baton with other servers, by the same client on the same machine.

Figures of different machines or days are not comparable; only the ratios within one run are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from baton.errors import ConfigError
from loadtest.common.peer_servers import (
    PEERS,
    Programs,
    Server,
    make_server,
    program_version,
    serving,
)
from loadtest.common.workload import Workload
from loadtest.peers.bench_client import BenchClient
from loadtest.peers.peer_table import Run, draw, summarize, write_runs
from planning.common.report import print_whole, this_machine

Say = Callable[[str], None]
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Settings of a comparison between servers."""

    peers: tuple[str, ...]
    workloads: tuple[Workload, ...]
    repetitions: int
    alternate: bool = False
    """Whether each repetition measures all servers in turn, which restarts each server for every
    repetition. If false, all repetitions of a server come one after another."""
    seed: int = 1


def default_peers(programs: Programs) -> tuple[str, ...]:
    """Return the names of the servers that are compared by default. vLLM with small steps is left
    out. So are the 8-bit servers if there is no 8-bit model file for llama.cpp.
    """
    left_out = {"vllm-small-steps"}
    if programs.gguf_q8 is None:
        left_out |= {"baton-int8", "llamacpp-q8"}
    return tuple(name for name in PEERS if name not in left_out)


def run_comparison(
    comparison: Comparison, programs: Programs, say: Say, console: Console, output: Path | None
) -> None:
    """Measure all servers, and print the table. Whenever a run ends, write all runs so far to
    ``output`` as JSON.

    After a failure or a Ctrl-C, the table and the file have the measurements so far. Raises
    ConfigError for unknown or missing parts, Unavailable if a server or the client fails.
    """
    if programs.vllm is None:
        raise ConfigError(
            "`vllm bench serve` drives all servers: install vLLM in a separate virtual "
            "environment and name its command with --vllm-bin"
        )
    comparison = replace(comparison, peers=choose_peers(comparison.peers, programs, say))
    machine, versions = this_machine(), _versions(programs, comparison.peers)
    measured: list[Run] = []

    def keep(run: Run) -> None:
        measured.append(run)
        if output is not None:
            write_runs(output, machine, versions, measured)

    client = BenchClient(programs.vllm, programs.model)
    if output is not None:
        # This checks before the first run that the file can be written.
        write_runs(output, machine, versions, ())
    try:
        compare(comparison, programs, client, say, keep)
    finally:
        if measured:
            print_whole(console, draw(measured, comparison.workloads))
            said = ", ".join(f"{name} {text}" for name, text in versions.items())
            line = f"Medians of {comparison.repetitions}. {machine.line()}. {said}."
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _versions(programs: Programs, peers: Sequence[str]) -> dict[str, str]:
    found = {"vLLM": program_version(programs.vllm)}
    if any(name.startswith("llamacpp") for name in peers):
        found["llama.cpp"] = program_version(programs.llama_server)
    return found


def choose_peers(names: Sequence[str], programs: Programs, say: Say) -> tuple[str, ...]:
    """Return the servers of ``names`` that can be started here. For each other server, ``say``
    receives the reason.

    Raises ConfigError for an unknown name, or if none is left.
    """
    chosen = []
    for name in dict.fromkeys(names):
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
        try:
            make_server(name, programs)
        except ConfigError as error:
            say(f"{PEERS[name]} is left out: {error.message}")
        else:
            chosen.append(name)
    if not chosen:
        raise ConfigError("no server is left to measure")
    return tuple(chosen)


def compare(
    comparison: Comparison,
    programs: Programs,
    client: BenchClient,
    say: Say,
    keep: Callable[[Run], None],
) -> None:
    """Start one server at a time and run the workloads against it. ``keep`` is called with each run
    when it has ended.

    Raises Unavailable if a server does not start or the client fails. All processes have ended when
    it returns or raises, even on SIGINT, SIGTERM and SIGHUP (as KeyboardInterrupt).
    """
    everything = range(comparison.repetitions)
    rounds = [(number,) for number in everything] if comparison.alternate else [tuple(everything)]
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for repetitions in rounds:
            for name in comparison.peers:
                server = make_server(name, programs)
                log = Path(folder) / f"{name}.log"
                say(f"{server.title}: starting")
                with serving(server, log) as seconds:
                    say(f"{server.title}: ready after {seconds:.1f} s")
                    for run in _drive(comparison, repetitions, server, client):
                        keep(run)
                        say(f"{server.title}: {_progress(run)}")


def _drive(
    comparison: Comparison, repetitions: Sequence[int], server: Server, client: BenchClient
) -> Iterator[Run]:
    for repetition in repetitions:
        for number, workload in enumerate(comparison.workloads):
            # The seed differs each time, so that no prefix cache has the last run's prompts.
            seed = comparison.seed + _SEED_STEP * repetition + number
            result = client.run(server, workload, seed)
            yield Run(server.name, server.precision, workload.name, repetition, seed, result)


def _progress(run: Run) -> str:
    figures = summarize([run.result])
    return f"workload {run.workload}, repetition {run.repetition + 1}: {figures.text()}"
