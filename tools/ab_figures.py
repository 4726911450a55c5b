"""Matches the numbers of a benchmark's JSON at two commits, and compares them pair by pair.

A number is matched by its path, a row of a list by its strings and by the settings in ``ROW_KEYS``.
Pure except for ``show``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from planning.common.report import print_whole, this_machine, whole_table

ROW_KEYS = ("rate", "concurrency", "batch", "temperature", "bytes", "prompt_tokens")
"""Names of numeric fields that are settings of a row, not results."""
_REPETITION = "repetition"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the benchmark, with its values: one for each pair of runs, on each side."""

    path: str
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def constant(self) -> bool:
        """Whether all runs of both sides gave the same value."""
        return len({*self.a, *self.b}) == 1

    def ratio(self) -> float | None:
        """Return the median of side B divided by the median of side A; None if the median of side A
        is 0."""
        return _ratio(statistics.median(self.a), statistics.median(self.b))

    def spread(self) -> tuple[float, float] | None:
        """Return the smallest and the largest ratio of side B to side A in a single pair of runs.
        None if a value of side A is 0."""
        ratios = [_ratio(a, b) for a, b in zip(self.a, self.b, strict=True)]
        found = [ratio for ratio in ratios if ratio is not None]
        return (min(found), max(found)) if len(found) == len(ratios) else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of both sides: every number of the benchmark, over all pairs of runs."""

    figures: tuple[Figure, ...]
    constant: int
    """Number of values that are left out of the comparison because they are the same in all
    runs."""
    unmatched: tuple[str, ...]
    """Paths of numbers that no pair of runs has on both sides of the comparison."""


def numbers(document: object) -> dict[str, list[float]]:
    """Return all finite numbers of a benchmark's JSON, by path.

    A list of numbers has one path with several values. Rows that differ only in their
    ``repetition`` also share one path. Other rows with equal settings are distinguished by
    position.
    """
    found: dict[str, list[float]] = {}
    for path, number in _walk("", document):
        found.setdefault(path, []).append(number)
    return found


def _walk(path: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list):
        seen: dict[str, int] = {}
        for item in value:
            if not isinstance(item, dict):
                yield from _walk(path, item)
                continue
            name = _row_name(item)
            if _REPETITION not in item:
                seen[name] = seen.get(name, 0) + 1
                if not name or seen[name] > 1:
                    name = f"{name} #{seen[name]}".strip()
            yield from _walk(f"{path}[{name}]", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield path, float(value)


def _row_name(row: Mapping[str, Any]) -> str:
    strings = [value for value in row.values() if isinstance(value, str) and value]
    settings = [f"{key}={row[key]:g}" for key in ROW_KEYS if isinstance(row.get(key), (int, float))]
    return ", ".join(strings + settings)


def compare_runs(
    pairs: Sequence[tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]]],
    metrics: re.Pattern[str] | None = None,
) -> Comparison:
    """Match the numbers of both sides; a run's value is the median of those with the same path.

    ``metrics`` chooses paths; without it, numbers that no run changed are left out.
    """
    figures, unmatched, constant = [], [], 0
    for path in dict.fromkeys(path for pair in pairs for run in pair for path in run):
        if metrics is not None and not metrics.search(path):
            continue
        both = [(a[path], b[path]) for a, b in pairs if path in a and path in b]
        if not both:
            unmatched.append(path)
            continue
        a, b = (tuple(statistics.median(run) for run in side) for side in zip(*both, strict=True))
        figure = Figure(path, a, b)
        if metrics is None and figure.constant:
            constant += 1
        else:
            figures.append(figure)
    return Comparison(tuple(figures), constant, tuple(unmatched))


def _ratio(a: float, b: float) -> float | None:
    return b / a if a else None


def show(console: Console, comparison: Comparison, pairs: int, title: str) -> None:
    """Print the comparison as a table under ``title``, and say how many numbers it leaves out."""
    table = whole_table("number", "A", "B", "B/A", "smallest", "largest", title=title)
    for figure in comparison.figures:
        ratio, spread = figure.ratio(), figure.spread()
        table.add_row(
            # A row's name has brackets, which rich reads as markup.
            figure.path.replace("[", r"\["),
            *(f"{statistics.median(side):.4g}" for side in (figure.a, figure.b)),
            "" if ratio is None else f"{ratio:.3f}",
            *(("", "") if spread is None else (f"{end:.3f}" for end in spread)),
        )
    print_whole(console, table)
    lines = [
        f"Medians of {pairs} runs of each side; smallest and largest B/A of a pair."
        f" {this_machine().line()}."
    ]
    if comparison.constant:
        lines.append(f"{comparison.constant} numbers are the same in all runs and left out.")
    if comparison.unmatched:
        some = ", ".join(comparison.unmatched[:_SHOWN])
        more = ", ..." if len(comparison.unmatched) > _SHOWN else ""
        lines.append(f"{len(comparison.unmatched)} numbers have no match: {some}{more}.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
