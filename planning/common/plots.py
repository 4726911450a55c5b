"""Plots as SVG for HTML pages: text stays text, and nothing is loaded from elsewhere.

matplotlib draws them without its state machine: no display, no window, and no font in the file.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np

from baton.extras import needs_extra

_MAX_POINTS = 400
_SIZE = (6.4, 3.2)
_PIXELS_PER_INCH = 72


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a plot: its points, in the order in which they are joined."""

    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False
    """Whether each point is drawn as a dot, which is legible only for few points."""
    joined: bool = True
    """Whether a line runs through the points."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A value of an axis at which the plot draws a line across, such as a bound."""

    at: float
    text: str
    vertical: bool = True


def cdf(values: Sequence[float]) -> Line:
    """Return the cumulative distribution of ``values``: for each x, the share of the values that
    are at most x.
    """
    ranked = np.sort(np.asarray(values, np.float64))
    shares = np.arange(1, len(ranked) + 1) / max(1, len(ranked))
    return Line(ranked.tolist(), shares.tolist())


def _shown(line: Line) -> Line:
    """Reduce the line's points to a number that a reader can distinguish: keep the first, the last
    and some between."""
    if len(line.x) <= _MAX_POINTS:
        return line
    keep = np.linspace(0, len(line.x) - 1, _MAX_POINTS).astype(int)
    x, y = ([values[one] for one in keep] for values in (line.x, line.y))
    return replace(line, x=x, y=y)


def check_plots() -> None:
    """Raises ConfigError where the extra ``bench``, which draws plots, is not installed."""
    with needs_extra("bench", "a report with plots (--html)"):
        import_module("matplotlib")


def draw_lines(
    lines: Mapping[str, Line],
    *,
    title: str,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    logarithmic_x: bool = False,
) -> str:
    """An <svg> element with a line for each series; ``x`` and ``y`` name the axes.

    Raises ConfigError as ``check_plots``.
    """
    check_plots()
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # The salt makes ids the same each time; without fonts text is drawn by the reader's own.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}):
        figure = Figure(figsize=_SIZE, layout="constrained", dpi=_PIXELS_PER_INCH)
        axes = figure.add_subplot()
        for name, line in ((name, _shown(line)) for name, line in lines.items()):
            marker, width = "o" if line.marked else "", 1.2 if line.joined else 0.0
            axes.plot(line.x, line.y, label=name, marker=marker, linewidth=width)
        for mark in marks:
            draw = axes.axvline if mark.vertical else axes.axhline
            draw(mark.at, color="gray", linestyle="--", linewidth=0.8, label=mark.text)
        if logarithmic_x:
            axes.set_xscale("log")
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if lines:
            axes.legend(fontsize=7)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    # The XML declaration is not allowed inside a page.
    return text[text.index("<svg") :]
