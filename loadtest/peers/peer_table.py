"""Shows the runs of a comparison, with medians and ratios in a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from baton.errors import ConfigError
from loadtest.common.peer_servers import PEERS, Precision
from loadtest.common.workload import Workload
from loadtest.peers.bench_client import ClientResult
from planning.common.report import Machine, whole_table


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the client against one server."""

    peer: str
    precision: Precision
    workload: str
    repetition: int
    seed: int
    result: ClientResult


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the repetitions of one workload against one server."""

    tokens_per_s: float
    """Output tokens per second, summed over all requests of a run."""
    ttft_ms: float
    """Median TTFT of a run's requests, in milliseconds."""
    tpot_ms: float
    """p99 of TPOT over a run's requests, in milliseconds."""
    completed: int
    sent: int
    """Number of requests that were sent in all repetitions together."""

    def text(self) -> str:
        """Return the figures as text, such as ``69.7 · 52 · 16.0``. If some requests failed, add
        the number of completed requests.
        """
        text = f"{self.tokens_per_s:.1f} · {self.ttft_ms:.0f} · {self.tpot_ms:.1f}"
        return text if self.completed == self.sent else f"{text} ({self.completed}/{self.sent})"


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of Baton's figures to those of the best other server, one for each figure."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float

    def text(self) -> str:
        """Return the ratios as text, such as ``1.02× · 0.90× · 0.48×``."""
        return f"{self.tokens_per_s:.2f}× · {self.ttft_ms:.2f}× · {self.tpot_ms:.2f}×"


def summarize(results: Sequence[ClientResult]) -> Figures:
    """Return the medians over the repetitions of one workload against one server."""
    return Figures(
        statistics.median(result.output_throughput for result in results),
        statistics.median(result.p50_ttft_ms for result in results),
        statistics.median(result.p99_tpot_ms for result in results),
        sum(result.completed for result in results),
        sum(result.num_prompts for result in results),
    )


def tabulate(runs: Sequence[Run]) -> dict[str, dict[str, Figures]]:
    """Return the figures of each server and workload, as nested mappings: first by server, then by
    workload. Both are in the order of the first runs."""
    results: dict[str, dict[str, list[ClientResult]]] = {}
    for run in runs:
        results.setdefault(run.peer, {}).setdefault(run.workload, []).append(run.result)
    return {
        peer: {workload: summarize(found) for workload, found in by_workload.items()}
        for peer, by_workload in results.items()
    }


def ratios(ours: Figures, others: Sequence[Figures]) -> Ratios | None:
    """Return Baton's figures divided by the best of ``others``, separately for each figure. Return
    None if ``others`` is empty."""
    if not others:
        return None
    return Ratios(
        _ratio(ours.tokens_per_s, max(other.tokens_per_s for other in others)),
        _ratio(ours.ttft_ms, min(other.ttft_ms for other in others)),
        _ratio(ours.tpot_ms, min(other.tpot_ms for other in others)),
    )


def _ratio(ours: float, best: float) -> float:
    return ours / best if best else float("inf")


def draw(runs: Sequence[Run], workloads: Sequence[Workload]) -> Table:
    """Return a table with a row for each server, and Baton's ratios to the best peer of the same
    precision.

    It is a Markdown table, to be pasted into a document.
    """
    table = whole_table(
        "server",
        *(workload.title for workload in workloads),
        title="output tokens/s · TTFT p50 ms · TPOT p99 ms",
    )
    figures = tabulate(runs)
    for peer, row in figures.items():
        cells = [row[w.name].text() if w.name in row else "" for w in workloads]
        table.add_row(PEERS[peer], *cells)
    precisions = {run.peer: run.precision for run in runs}
    for peer in figures:
        if peer.startswith("baton"):
            cells = _ratio_cells(peer, figures, precisions, workloads)
            if any(cells):
                table.add_row(f"{PEERS[peer]}: over the best peer", *cells)
    return table


def _ratio_cells(
    peer: str,
    figures: Mapping[str, Mapping[str, Figures]],
    precisions: Mapping[str, Precision],
    workloads: Sequence[Workload],
) -> list[str]:
    others = [
        row
        for other, row in figures.items()
        if not other.startswith("baton") and precisions[other] == precisions[peer]
    ]
    cells = []
    for workload in workloads:
        ours = figures[peer].get(workload.name)
        theirs = [row[workload.name] for row in others if workload.name in row]
        found = ratios(ours, theirs) if ours is not None else None
        cells.append("" if found is None else found.text())
    return cells


def write_runs(
    path: Path, machine: Machine, versions: Mapping[str, str], runs: Sequence[Run]
) -> None:
    """Write all runs as JSON. Readers see the old file or the new one, never a part.

    Raises ConfigError if that fails.
    """
    rows = [
        {
            "peer": run.peer,
            "precision": run.precision,
            "workload": run.workload,
            "repetition": run.repetition,
            "seed": run.seed,
            **run.result.model_dump(),
        }
        for run in runs
    ]
    document = {"machine": asdict(machine), "versions": dict(versions), "runs": rows}
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(json.dumps(document, indent=2) + "\n")
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
