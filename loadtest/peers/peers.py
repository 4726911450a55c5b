"""`baton bench peers`: Baton and other servers, driven by the same client on the same machine.

Figures of different machines or days say little; what counts are the ratios of one run of this.
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
from loadtest.peers.peer_table import Run, draw, summarise, write_runs
from planning.common.report import print_whole, this_machine

Say = Callable[[str], None]
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be measured."""

    peers: tuple[str, ...]
    workloads: tuple[Workload, ...]
    repetitions: int
    alternate: bool = False
    """Start every server afresh for each repetition, one peer after the other."""
    seed: int = 1


def default_peers(programs: Programs) -> tuple[str, ...]:
    """All but a variant; those in 8 bits where there is a peer to compare ours with."""
    left_out = {"vllm-small-steps"}
    if programs.gguf_q8 is None:
        left_out |= {"baton-int8", "llamacpp-q8"}
    return tuple(name for name in PEERS if name not in left_out)


def run_comparison(
    comparison: Comparison, programs: Programs, say: Say, console: Console, output: Path | None
) -> None:
    """Measure, print the table, and write the runs to ``output`` as they come, as JSON.

    A failure or a Ctrl-C leaves the table and the file of what was measured until then. Raises
    ConfigError for what is unknown or missing, Unavailable where a server or the client fails.
    """
    if programs.vllm is None:
        raise ConfigError(
            "`vllm bench serve` drives all servers: install vLLM in a virtual environment of its"
            " own and name its command with --vllm-bin"
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
        # Whether it can be written is better known before than after the first run.
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
    """Those of ``names`` that can be started here; ``say`` is told why another one cannot.

    Raises ConfigError for an unknown name, and where none is left.
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
        raise ConfigError("no server is left to be measured")
    return tuple(chosen)


def compare(
    comparison: Comparison,
    programs: Programs,
    client: BenchClient,
    say: Say,
    keep: Callable[[Run], None],
) -> None:
    """Start one server at a time and drive it; ``keep`` gets each run as it ends.

    Raises Unavailable where a server does not come up or the client fails. All that it started has
    ended when it returns or raises, on SIGINT, SIGTERM and SIGHUP too (as KeyboardInterrupt).
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
            # Another seed each time: a prefix cache shall not remember the last run.
            seed = comparison.seed + _SEED_STEP * repetition + number
            result = client.run(server, workload, seed)
            yield Run(server.name, server.precision, workload.name, repetition, seed, result)


def _progress(run: Run) -> str:
    figures = summarise([run.result])
    return f"workload {run.workload}, repetition {run.repetition + 1}: {figures.text()}"
