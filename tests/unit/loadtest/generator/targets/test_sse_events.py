"""Events, however they are cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadtest.generator.targets.sse_events import EventSplitter


def test_forms() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata:b\r\n\r\n: ping\n\nevent: x\ndata: c") == [b"a", b"b"]
    assert splitter.feed(b"d\n") == [b"cd"]


@given(
    st.lists(st.text("abc{}:", min_size=1)), st.lists(st.integers(0, 200)), st.sampled_from("\n\r")
)
def test_pieces_make_no_difference(texts: list[str], cuts: list[int], end: str) -> None:
    line_end = "\r\n" if end == "\r" else "\n"
    stream = "".join(f"data: {text}{line_end}{line_end}" for text in texts).encode()
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    splitter = EventSplitter()
    found = [
        event
        for start, stop in itertools.pairwise(places)
        for event in splitter.feed(stream[start:stop])
    ]
    assert found == [text.encode() for text in texts]
