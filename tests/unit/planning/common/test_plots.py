"""Plots."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from planning.common.plots import Line, Mark, cdf, draw_lines


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=2000))
def test_a_cdf_rises_to_one(values: list[float]) -> None:
    line = cdf(values)
    assert len(line.x) == len(line.y) == len(values)
    assert list(line.x) == sorted(line.x)
    assert list(line.y) == sorted(line.y)
    assert line.y[-1] == 1.0
    assert line.x[-1] == max(values)


def test_a_plot_is_an_element_with_its_text() -> None:
    lines = {"one": Line([1.0, 2.0], [0.5, 1.0], marked=True), "two": cdf([3.0, 4.0])}
    marks = [Mark(1.5, "SLO"), Mark(0.9, "asked for", vertical=False)]
    plot = draw_lines(lines, title="A & B", x="ms", y="share", marks=marks, logarithmic_x=True)
    words = "".join(ElementTree.fromstring(plot).itertext())
    assert all(word in words for word in ("A & B", "ms", "share", "one", "two", "SLO", "asked for"))
    again = draw_lines(lines, title="A & B", x="ms", y="share", marks=marks, logarithmic_x=True)
    assert again == plot


def test_a_long_line_is_thinned() -> None:
    few, many = (Line(range(count), range(count)) for count in (400, 40_000))
    sizes = [len(draw_lines({"one": line}, title="t", x="x", y="y")) for line in (few, many)]
    assert sizes[1] < 1.5 * sizes[0]


def test_a_plot_of_nothing() -> None:
    assert draw_lines({}, title="t", x="x", y="y").startswith("<svg")
